from __future__ import annotations

import dataclasses
import itertools

import pytest
from logtext import OOM, READY, SERVED, START, inputs_of, lines_of, raised

from oomwatch.diagnose.judge import diagnose
from oomwatch.records import Diagnosis

FORWARD = (
    "core.py:run_busy_loop",
    "gpu_model_runner.py:execute_model",
    "activation.py:forward_cuda",
)
PEAK = f"torch.OutOfMemoryError: {OOM}"
ILLEGAL = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
WATCHDOG = (
    "(Worker_TP0 pid=300) [rank0]:[E1120 09:45:12.120 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE) ran for 600021 milliseconds before timing out.\n"
)
NO_BLOCKS = (
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
    "initializing the engine."
)


def judged(*texts: str) -> Diagnosis:
    return diagnose(inputs_of(*texts))


def causes(diagnosis: Diagnosis) -> list[str]:
    return [incident.finding.cause for incident in diagnosis.incidents]


@pytest.mark.parametrize(
    ("failures", "cause"),
    [
        ((PEAK, ILLEGAL), "prefill_activation_peak"),
        ((ILLEGAL, PEAK), "illegal_memory_access"),
    ],
)
def test_the_earliest_fatal_line_of_all_ranks_decides(
    failures: tuple[str, str], cause: str
) -> None:
    text = START + READY + SERVED
    for rank, exception in enumerate(failures):
        text += raised(
            exception, *FORWARD, at=f"09:30:1{rank}", who=f"Worker_TP{rank} pid=30{rank}"
        )
    found = judged(text + WATCHDOG)
    assert causes(found) == [cause]
    assert found.verdict == ("oom" if cause == "prefill_activation_peak" else "not_oom")
    (incident,) = found.incidents
    assert {a.cause for a in incident.alternatives} & {
        "illegal_memory_access",
        "prefill_activation_peak",
    }
    assert all(a.confidence < incident.finding.confidence for a in incident.alternatives)


def test_the_order_of_files_does_not_matter() -> None:
    parts = [
        START + READY + SERVED + WATCHDOG,
        raised(PEAK, *FORWARD, who="Worker_TP3 pid=303"),
        "(Worker_TP1 pid=301) INFO 11-20 09:15:00 [gpu_worker.py:298] Available KV cache memory: 54.6 GiB\n",
    ]
    for order in itertools.permutations(parts):
        assert causes(judged(*order)) == ["prefill_activation_peak"]


def again(text: str, hour: int) -> str:
    return (
        text.replace(" 09:", f" {hour:02d}:")
        .replace("pid=1)", f"pid={hour})")
        .replace("171", f"{hour}71")
    )


def test_a_restart_loop_is_one_incident_with_a_count() -> None:
    once = START + raised(NO_BLOCKS, "kv_cache_utils.py:check_enough_kv_cache_memory")
    (incident,) = judged("".join(again(once, hour) for hour in (9, 10, 11, 12))).incidents
    assert (incident.finding.cause, incident.count) == ("kv_no_blocks", 4)


def test_a_loop_of_a_container_counts_starts_of_equal_pids_and_shows_the_last() -> None:
    start = START.replace("54.81 GiB", "-2.50 GiB") + raised(NO_BLOCKS, at="09:15:11")
    (incident,) = judged(
        "".join(start.replace(" 09:", f" {hour}:") for hour in (10, 11, 12))
    ).incidents
    last = next(line.at for line in lines_of("INFO 11-20 12:15:11 [core.py:708] x\n"))
    assert (incident.count, incident.finding.at) == (3, last)


def test_different_causes_of_restarts_come_newest_first() -> None:
    first = START + READY + SERVED + raised(ILLEGAL, *FORWARD)
    second = START + raised(NO_BLOCKS, "kv_cache_utils.py:check_enough_kv_cache_memory")
    assert causes(judged(first + again(second, 10))) == ["kv_no_blocks", "illegal_memory_access"]
    assert causes(judged(second + again(first, 10))) == ["illegal_memory_access", "kv_no_blocks"]


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("", "unknown"),
        ("nothing that any engine writes\n", "unknown"),
        (START, "unknown"),
        (START + READY, "healthy"),
        (START + READY + SERVED, "healthy"),
        (START + READY + SERVED + "(APIServer pid=1) INFO:     Shutting down\n", "healthy"),
        (START + raised(NO_BLOCKS, "kv_cache_utils.py:f"), "oom"),
        (START + READY + SERVED + raised(ILLEGAL, *FORWARD), "not_oom"),
        (f"# A\n\n```\n{PEAK}\n```\n## B\n", "unknown"),
    ],
)
def test_verdicts(text: str, verdict: str) -> None:
    found = judged(text) if text else judged()
    assert found.verdict == verdict
    if verdict == "unknown":
        assert found.incidents or any(s.status == "warning" for s in found.sources)


def test_a_messenger_alone_decides_nothing_and_asks_for_more() -> None:
    text = START + READY + SERVED
    text += "(APIServer pid=1) ERROR 11-20 09:31:00 [async_llm.py:480] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.\n"
    found = judged(text)
    assert found.verdict == "unknown"
    assert causes(found) == ["irregular_unknown"]
    assert found.incidents[0].finding.unseen


def test_a_failure_that_was_outlived_gives_way_to_the_fatal_one() -> None:
    transfer = "(Worker_TP0 pid=260) ERROR 11-20 09:25:23 [nixl_connector.py:1290] nixlBackendError: NIXL_ERR_BACKEND\n"
    alone = START + READY + SERVED + transfer + SERVED
    assert causes(judged(alone)) == ["kv_transfer_fail"]
    assert causes(judged(alone + raised(PEAK, *FORWARD)))[0] == "prefill_activation_peak"


def test_after_a_request_to_stop_errors_mean_nothing() -> None:
    stop = "(APIServer pid=1) INFO 11-20 09:29:00 [launcher.py:99] Shutting down FastAPI HTTP server.\n"
    before = judged(START + READY + SERVED + stop + raised(PEAK, *FORWARD))
    after = judged(START + READY + SERVED + raised(PEAK, *FORWARD) + stop)
    assert (before.verdict, after.verdict) == ("healthy", "oom")


def test_the_same_inputs_give_the_same_ids() -> None:
    text = START + READY + SERVED + raised(PEAK, *FORWARD)
    one, two = judged(text), judged(text)
    assert [i.id for i in one.incidents] == [i.id for i in two.incidents]
    assert one == two


@pytest.mark.parametrize(
    ("command", "used"),
    [
        ("vllm serve /models/m --max-num-seqs 64", True),
        ("python -m sglang.launch_server --model-path /models/m --mem-fraction-static 0.5", False),
        ("ollama serve", False),
        ("python app.py", True),
    ],
)
def test_a_command_of_another_engine_than_the_logs_is_not_used(command: str, *, used: bool) -> None:
    given = dataclasses.replace(
        inputs_of(START + READY + SERVED + raised(PEAK, *FORWARD)), command=command
    )
    found = diagnose(given)
    assert found.engines[0].engine == "vllm"
    assert (found.engines[0].command is not None) is used
    assert "--mem-fraction-static" not in found.engines[0].arguments
    assert any(s.name == "command" and s.status == "warning" for s in found.sources) is not used


def test_a_command_tells_the_engine_of_a_log_that_names_none() -> None:
    given = dataclasses.replace(inputs_of("hello\n"), command="sglang serve --model-path /models/m")
    assert diagnose(given).engines[0].engine == "sglang"


def test_sglang_names_its_model_and_the_time_of_the_failure() -> None:
    (incident,) = (told := judged(SGLANG_PEAK)).incidents
    assert told.engines[0].model == "/models/inhouse-7b"
    assert incident.finding.cause == "prefill_activation_peak"
    assert incident.finding.at is not None
    assert incident.finding.at % 60 == 1  # the exception, not the batch before it


SGLANG_PEAK = f"""\
[2025-11-28 10:00:00] server_args=ServerArgs(model_path='/models/inhouse-7b', mem_fraction_static=0.88)
[2025-11-28 10:00:30] The server is fired up and ready to roll!
[2025-11-28 10:05:00] Prefill batch. #new-seq: 1, #new-token: 32768, #cached-token: 0, token usage: 0.10, #running-req: 1, #queue-req: 0,
[2025-11-28 10:05:01] Scheduler hit an exception: Traceback (most recent call last):
  File "/s/python/sglang/srt/managers/scheduler.py", line 2000, in run_scheduler_process
    scheduler.event_loop_overlap()
  File "/s/python/sglang/srt/layers/activation.py", line 60, in forward_cuda
    out = torch.empty(output_shape, dtype=x.dtype, device=x.device)
{PEAK}
"""
