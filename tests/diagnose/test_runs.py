from __future__ import annotations

import pytest
from logtext import OOM, READY, SERVED, START, inputs_of, lines_of, raised

from oomwatch.diagnose.logs import read_runs
from oomwatch.diagnose.runs import STAGES, Run, RunBuilder, build_runs


def runs_of(text: str) -> list[Run]:
    return build_runs(lines_of(text))


@pytest.mark.parametrize(
    ("lines", "stage"),
    [(1, "init"), (3, "load"), (4, "loaded"), (5, "kv")],
)
def test_the_stage_is_the_last_one_that_was_reached(lines: int, stage: str) -> None:
    (run,) = runs_of("".join(START.splitlines(keepends=True)[:lines]))
    assert run.stage == stage
    assert run.engine == "vllm"
    assert run.version == "0.11.0"


def test_ready_and_served_are_told_apart() -> None:
    assert (runs_of(START + READY)[0].stage, runs_of(START + READY)[0].served) == ("ready", False)
    assert (runs_of(START + READY + SERVED)[0].stage, runs_of(START + SERVED)[0].served) == (
        "serving",
        True,
    )
    assert STAGES.index("serving") == len(STAGES) - 1


def test_a_banner_after_a_failure_begins_a_new_run() -> None:
    second = START.replace("pid=1)", "pid=2)").replace("pid=171", "pid=400").replace(" 09:", " 10:")
    runs = runs_of(START + raised("ValueError: x", "a.py:f") + second)
    assert [len(run.failures) for run in runs] == [1, 0]
    assert [sorted(run.pids) for run in runs] == [[1, 171], [2, 400]]


def test_several_api_servers_of_one_start_are_one_run() -> None:
    banner = START.splitlines(keepends=True)[0]
    servers = "".join(
        banner.replace("(APIServer pid=1)", f"(ApiServer_{i} pid={10 + i})") for i in range(4)
    )
    assert len(runs_of(servers + START.split("\n", 1)[1])) == 1


FAILED = raised("ValueError: x", "a.py:f")
LATER = START.replace(" 09:", " 10:")


@pytest.mark.parametrize(
    "first",
    [START, START + FAILED, START + READY + SERVED, START.split("\n", 1)[0] + "\n" + FAILED],
)
def test_a_banner_of_the_same_process_begins_a_new_run(first: str) -> None:
    runs = runs_of(first + LATER)
    assert len(runs) == 2
    assert "kv_bytes" in runs[1].numbers
    assert runs[1].failures == []


def test_a_start_of_an_engine_without_a_server_is_told_by_its_own_banner() -> None:
    alone, later = (text.split("\n", 1)[1] for text in (START, LATER))
    assert len(runs_of(alone + FAILED + later)) == 2


def test_an_ollama_server_starts_many_runners_and_listens_once() -> None:
    listens = 'time=2025-11-20T0{h}:14:02.000Z level=INFO source=routes.go:1238 msg="Listening on [::]:11434 (version 0.5.8)"\n'
    runner = 'time=2025-11-20T0{h}:{m}:02.000Z level=INFO source=server.go:381 msg="starting llama server" cmd="ollama runner"\n'
    ready = 'time=2025-11-20T0{h}:{m}:09.000Z level=INFO source=server.go:600 msg="llama runner started in 4.13 seconds"\n'
    start = listens + (runner + ready).replace("{m}", "20") + (runner + ready).replace("{m}", "40")
    text = start.replace("{h}", "7")
    assert [run.engine for run in runs_of(text)] == ["ollama"]
    assert len(runs_of(text + start.replace("{h}", "8"))) == 2


@pytest.mark.parametrize("again", [1, 2])
def test_a_line_that_is_written_twice_begins_nothing(again: int) -> None:
    lines = START.splitlines(keepends=True)
    assert len(runs_of("".join(line * 2 for line in lines[:again]) + "".join(lines[again:]))) == 1


def test_servers_that_say_their_arguments_once_the_core_loads_are_of_one_start() -> None:
    said = "INFO 11-20 09:15:20 [utils.py:233] non-default args: {'model': '/models/m'}\n"
    servers = "".join(f"(ApiServer_{i} pid={10 + i}) {said}" for i in range(3))
    assert len(runs_of(START + servers + READY)) == 1


def test_cores_of_one_data_parallel_start_are_one_run() -> None:
    banner, core = START.splitlines(keepends=True)[:2]
    second = core.replace("DP0 pid=171", "DP1 pid=172").replace("09:14:18", "09:14:26")
    assert len(runs_of(banner + core + "".join(START.splitlines(True)[2:4]) + second)) == 1


def test_starts_of_one_process_number_in_two_files_are_two_runs() -> None:
    inputs = inputs_of(START + FAILED, LATER + READY)
    assert [len(run.failures) for run in read_runs(inputs)[None]] == [1, 0]


def test_both_outputs_of_one_start_are_one_run() -> None:
    inputs = inputs_of(START + READY, START.splitlines(keepends=True)[0] + FAILED)
    assert [len(run.failures) for run in read_runs(inputs)[None]] == [1]


def test_figures_of_ranks_are_kept_apart() -> None:
    lines = "".join(
        f"(Worker_TP{rank} pid={30 + rank}) INFO 11-20 09:15:10 [gpu_worker.py:298] Available KV cache memory: {gib} GiB\n"
        for rank, gib in enumerate((54.5, 3.25))
    )
    (run,) = runs_of(START + lines)
    assert min(run.by_rank["kv_bytes"].values()) == round(3.25 * 2**30)
    assert len(run.by_rank["kv_bytes"]) == 3


PRINTED = f'look:\nTraceback (most recent call last):\n  File "/a/m.py", line 1, in f\ntorch.OutOfMemoryError: {OOM}\nKilled\n'


def test_a_printed_prompt_is_forgotten_when_the_server_goes_on() -> None:
    (run,) = runs_of(START + READY + SERVED + PRINTED + SERVED)
    assert run.failures == []
    assert run.find("exit.killed") is None
    assert run.ended is None


def test_the_same_lines_count_when_nothing_follows() -> None:
    (run,) = runs_of(START + READY + SERVED + PRINTED)
    assert [f.name for f in run.failures] == ["torch.OutOfMemoryError"]
    assert run.ended is not None


def test_what_a_program_introduces_is_kept_although_it_goes_on() -> None:
    text = PRINTED.replace("look:", "ERROR:    Exception in ASGI application")
    (run,) = runs_of(START + READY + SERVED + text + SERVED)
    assert [f.name for f in run.failures] == ["torch.OutOfMemoryError"]


def test_an_interrupt_is_a_request_to_stop() -> None:
    (run,) = runs_of(
        START
        + 'Traceback (most recent call last):\n  File "/a/m.py", line 1, in f\nKeyboardInterrupt: terminated\n'
    )
    assert run.failures == []
    assert run.find("shutdown.requested") is not None


def test_life_between_two_lines_is_seen() -> None:
    (run,) = runs_of(START + READY + SERVED + "x\n" + SERVED)
    assert run.lives_between(7, 10)
    assert not run.lives_between(9, float("inf"))
    assert run.last_alive == 9


@pytest.mark.parametrize(
    "text",
    [
        f"# Title\n\n```\n{START}```\n\n## More\n",
        f"<!DOCTYPE html>\n<html>\n<p>see</p>\n<pre>\n{START}</pre>\n</html>\n",
        f"Title\n=====\n\n.. code-block:: text\n\n    {OOM}\n",
        "The card may be full at times.\n\nKilled\n\nThis word means that memory ran out.\n\nNow look at the kernel log.\n",
        "* `Killed` means\n* `exit code 137` means\n",
    ],
)
def test_nothing_in_a_document_has_happened(text: str) -> None:
    (run,) = runs_of(text)
    assert run.is_document
    assert run.is_empty


@pytest.mark.parametrize(
    "text",
    [
        START,
        f'Traceback (most recent call last):\n  File "/a/m.py", line 1, in f\ntorch.OutOfMemoryError: {OOM}\n',
        "".join(f"2025-11-20T09:14:0{i}.000000000Z stderr F # a comment\n" for i in range(3)),
        "[2025-09-03 14:05:02] # x\n# GPU blocks: 3, # CPU blocks: 3\n## y\n",
    ],
)
def test_a_log_is_no_document(text: str) -> None:
    assert not any(run.is_document for run in runs_of(text))


def test_containers_of_one_file_are_read_apart() -> None:
    def within(name: str, text: str) -> str:
        return "".join(f"{name}  | {line}\n" for line in text.splitlines())

    text = (
        within("chat-1", START)
        + within("db-1", "ERROR:  out of memory\nKilled\n")
        + within("embed-1", START)
    )
    runs = read_runs(inputs_of(text))[None]
    assert [run.container for run in runs] == ["chat-1", "embed-1"]
    assert all(run.find("exit.killed") is None for run in runs)


def test_files_are_ordered_by_time_and_untimed_ones_come_last() -> None:
    late = START + READY + SERVED + raised("RuntimeError: late", "a.py:f", at="09:40:00")
    early = raised("RuntimeError: early", "b.py:g", at="09:30:00", who="Worker_TP1 pid=300")
    bare = 'Traceback (most recent call last):\n  File "/a/m.py", line 1, in f\nValueError: bare\n'
    (run,) = read_runs(inputs_of(late, bare, early))[None]
    assert [f.message for f in run.failures] == ["early", "late", "bare"]
    assert [f.order for f in run.failures] == sorted(f.order for f in run.failures)
    assert run.last_alive < run.failures[0].order


def test_an_empty_log_has_one_empty_run() -> None:
    (run,) = RunBuilder().close()
    assert run.is_empty
    assert not run.is_document


def test_pressure_that_no_engine_wrote_is_a_prompt_that_something_printed() -> None:
    words = "Input prompt (9000 tokens) is too long and exceeds the capacity of block_manager"
    begin = START + READY
    load = SERVED + (
        "(APIServer pid=1) INFO 11-20 09:31:00 [loggers.py:127] Engine 000: Avg prompt throughput: 9.0 "
        "tokens/s, Avg generation throughput: 30.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs, "
        "GPU KV cache usage: 1.0%, Prefix cache hit rate: 0.0%\n"
    )
    printed = runs_of(f"{begin}{words}\n{load}")
    logged = runs_of(
        f"{begin}(EngineCore_DP0 pid=171) WARNING 11-20 09:30:00 [s.py:1] {words}\n{load}"
    )
    assert printed[0].find("vllm.input_over_pool_v0") is None
    assert logged[0].find("vllm.input_over_pool_v0") is not None


def test_the_help_of_a_program_explains_and_does_not_tell() -> None:
    (run,) = runs_of(
        "usage: vllm serve [-h] [--model MODEL]\n\n"
        "options:\n"
        f"  --enforce-eager   Use this when you see {OOM}\n"
        "  --no-shm          for: RPC call to execute_model timed out.\n"
        "\n"
        "CacheConfig:\n"
        "  --block-size N    Engine core initialization failed. See root cause above.\n"
    )
    assert run.is_empty


def test_a_failure_below_the_usage_counts() -> None:
    usage = "usage: vllm serve [-h] [--model MODEL]\n  [--seed N]\n"
    (refused,) = runs_of(usage + "vllm serve: error: unrecognized arguments: --no-such\n")
    assert not refused.is_empty
    (failed,) = runs_of(usage + raised("torch.OutOfMemoryError: " + OOM, "a.py:f"))
    assert failed.failures
