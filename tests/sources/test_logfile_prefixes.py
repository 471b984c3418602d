"""Engine prefixes: every entry of the table on its own sample, and text that only looks like one."""

from __future__ import annotations

import datetime

import pytest

from oomwatch.engines.prefixes import PROCESS_PREFIXES, RECORD_PREFIXES
from oomwatch.sources.logformat_prefix import take_prefix
from oomwatch.sources.logformat_time import Clock

ENTRIES = {entry.id: entry for entry in (*PROCESS_PREFIXES, *RECORD_PREFIXES)}


def take(text: str):
    return take_prefix(text, Clock(datetime.UTC, 1764500000.0))  # 2025-11-30


def test_ids_are_unique():
    assert len(ENTRIES) == len(PROCESS_PREFIXES) + len(RECORD_PREFIXES)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_sample_is_found_under_its_first_character(entry):
    assert entry.pattern.match(entry.sample)
    assert not entry.starts or entry.sample[0] in entry.starts
    _, header = take(entry.sample)
    assert header.prefixed


@pytest.mark.parametrize(
    ("entry", "text", "fields"),
    [
        ("vllm_worker_rank", "Found nccl", ("INFO", "VllmWorker", 120, "1", "utils.py:1055")),
        ("named_process", "Traceback (most", (None, "EngineCore_DP0", 171, "DP0", None)),
        ("ray_pid", "Found nccl", ("INFO", None, 811, None, "utils.py:981")),
        ("process_number", "Resolved", ("INFO", "Process-215", None, None, "model.py:568")),
        ("torch_rank", "Traceback (most", (None, None, None, "0", None)),
        ("vllm_bracket", "Available KV", ("INFO", None, None, None, "gpu_worker.py:298")),
        ("vllm_old", "text", ("INFO", None, None, None, "scheduler.py:1057")),
        ("vllm_logging_prefix", "Initializing a V1", ("INFO", None, None, None, "core.py:133")),
        ("sglang_bracket", "Decode batch,", (None, None, None, "DP0 TP3", None)),
        ("sglang_gpu_id", "Load weight begin", (None, None, None, "0", None)),
        ("uvicorn", '192.0.2.7:40112 - "POST', ("INFO", None, None, None, None)),
        ("tgi", "Args {", ("INFO", None, None, None, "text_generation_launcher")),
        ("lmdeploy", "text", ("ERROR", None, None, None, "async_engine.py:123")),
        ("turbomind", "[LlamaTritonModel] `max", ("WARNING", None, None, None, None)),
        ("ollama", 'msg="requested', ("WARNING", None, None, None, "server.go:171")),
        ("ascend", "1290 MallocDevice", ("ERROR", "RUNTIME", 1234, None, "npu_driver.cc:1280")),
        ("torch_cpp", "Warning: NUMA", ("WARNING", None, None, None, "utils.cpp:68")),
        ("torch_glog", "Triton not", ("WARNING", None, 3490, None, "torch/_library/triton.py:53")),
        ("nccl", "NCCL WARN Error:", ("WARNING", None, 4121, None, "misc/shmutils.cc:72")),
        ("llama_cpp", "ggml_backend_cuda", (None, None, None, None, None)),
        ("python_logging", "CUDA out of memory", ("ERROR", None, None, None, "train")),
        ("loguru", "CUDA out of memory", ("ERROR", None, None, None, "app.server:run:88")),
        (
            "plain_level",
            "Engine background",
            ("ERROR", None, None, None, "vllm.engine.async_llm_engine"),
        ),
    ],
)
def test_fields_of_the_sample(entry, text, fields):
    """Fields are level, process, pid, rank, origin."""
    rest, header = take(ENTRIES[entry].sample)
    assert rest.startswith(text)
    found = (header.level, header.process, header.pid, header.rank, header.origin)
    assert found == fields


@pytest.mark.parametrize(
    ("process", "rank"),
    [
        ("Worker_PP0_TP1", "PP0 TP1"),
        ("Worker_TP3_EP3", "TP3 EP3"),
        ("VllmWorker-2", "2"),
        ("EngineCore_DP1", "DP1"),
        ("EngineCore_0", None),
        ("Process-215", None),
        ("APIServer", None),
    ],
)
def test_rank_in_a_process_name(process, rank):
    assert take(f"({process} pid=7) text")[1].rank == rank


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("INFO 11-29 12:00:00 [core.py:1] a", 1764417600.0),
        ("[2025-11-29 12:00:00 TP0] a", 1764417600.0),
        ("[2025-11-29 12:00:00.250 TP0] a", 1764417600.25),
        ("[W1129 12:00:00.500000000 utils.cpp:68] a", 1764417600.5),
        ("[E716 12:00:00.500000000 utils.cpp:68] a", 1752667200.5),
        ("2025-11-29T12:00:00.250000Z  INFO text_generation_router: a", 1764417600.25),
        ("time=2025-11-29T14:00:00.250+02:00 level=WARN source=a.go:1 a", 1764417600.25),
        ("INFO 13-45 12:00:00 [core.py:1] a", None),
        ("INFO 02-30 12:00:00 [core.py:1] a", None),
    ],
)
def test_time_of_a_record(text, seconds):
    assert take(text)[1].at == seconds


def test_stacked_prefixes():
    rest, header = take(
        "(RayWorkerWrapper pid=210, ip=192.0.2.10) (Worker_TP1 pid=9) [rank1]: ERROR 11-29 12:00:00 [a.py:1] x"
    )
    assert (rest, header.process, header.pid, header.rank) == ("x", "Worker_TP1", 9, "1")


def test_sglang_bracket_may_hold_a_uvicorn_line():
    rest, header = take('[2025-11-29 12:00:00] INFO:     192.0.2.7:1 - "POST /v1"')
    assert (rest, header.level) == ('192.0.2.7:1 - "POST /v1"', "INFO")


@pytest.mark.parametrize(
    "quoted",
    [
        "ERROR 11-29 12:00:00 [core.py:1] CUDA out of memory",
        "[2025-11-29 12:00:00 TP0] CUDA out of memory",
        "(EngineCore pid=1) CUDA out of memory",
    ],
)
def test_a_record_quoted_in_a_record_stays_text(quoted):
    rest, header = take("INFO 11-29 12:00:00 [logger.py:40] " + quoted)
    assert (rest, header.level, header.process) == (quoted, "INFO", None)


@pytest.mark.parametrize(
    "text",
    [
        "    logger.error('ERROR 11-29 12:00:00 [core.py:1] CUDA out of memory')",
        '{"content": "INFO 11-29 12:00:00 [core.py:1] x"}',
        "prompt: 'ERROR 11-29 12:00:00 [core.py:1] x'",
        "The INFO level",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "Killed",
    ],
)
def test_what_only_looks_like_a_prefix(text):
    assert take(text)[0] == text
    assert not take(text)[1].prefixed


def test_blanks_of_a_traceback_stay():
    assert (
        take('(EngineCore pid=7)   File "a.py", line 1, in f')[0] == '  File "a.py", line 1, in f'
    )
    assert take("[rank0]:     raise ValueError")[0] == "    raise ValueError"
