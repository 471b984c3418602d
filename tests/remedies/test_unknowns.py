"""No number in a direction that nobody can know: the whole way, from a log to the remedies."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.gather import Options
from oomwatch.records import Remedy

CASES = Path(__file__).parents[1] / "cases"
SLOTS = (
    "[2026-01-09 10:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/managers/schedule_batch.py", line 640, in alloc_req_slots\n'
    "    raise RuntimeError(\n"
    "RuntimeError: alloc_req_slots runs out of memory. Please set a smaller number for "
    "`--max-running-requests`. req_to_token_pool.available_size()=1, num_reqs=2, \n"
)
CAPTURE = (
    '  File "/opt/sglang/srt/model_executor/cuda_graph_runner.py", line 628, in __init__\n'
    "    raise Exception(\n"
    "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 "
    "has a total capacity of 139.80 GiB of which 488.19 MiB is free. Including non-PyTorch memory, "
    "this process has 139.20 GiB memory in use. Of the allocated memory 134.73 GiB is allocated by "
    "PyTorch, and 297.40 MiB is reserved by PyTorch but unallocated.\n"
)
CAPACITY = (
    "[2026-01-09 09:59:00 TP0] max_total_num_tokens=412233, chunked_prefill_size=8192, "
    "max_prefill_tokens=16384, max_running_requests={count}, context_len=32768, "
    "available_gpu_mem=6.91 GB\n"
)
ARGUMENTS = (
    "[2026-01-09 09:58:00] server_args=ServerArgs(model_path='/m', mem_fraction_static={share}, "
    "max_running_requests=None, chunked_prefill_size=8192, tp_size=4)\n"
)
WEIGHTS = (
    "[2026-01-09 09:58:20 TP0] Load weight begin. avail mem=176.25 GB\n"
    "[2026-01-09 09:58:50 TP0] Load weight end. type=DeepseekV3ForCausalLM, dtype=torch.bfloat16, "
    "avail mem={left} GB, mem usage={weights} GB.\n"
    "[2026-01-09 09:58:51 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sglang/srt/model_executor/model_runner.py", line 1665, in init_memory_pool\n'
    "    raise RuntimeError(\n"
    "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. "
    "Current value: self.server_args.mem_fraction_static=0.9\n"
)


def remedies(tmp_path: Path, log: str, command: str | None = None) -> dict[str, Remedy]:
    path = tmp_path / "server.log"
    path.write_text(log, encoding="utf-8")
    diagnosis = run_diagnosis(Options(logs=(str(path),), command=command))
    return {remedy.id: remedy for remedy in diagnosis.incidents[0].remedies}


def test_a_limit_that_nobody_saw_is_lowered_in_words(tmp_path: Path) -> None:
    step = remedies(tmp_path, SLOTS)["fewer-sequences"]
    assert not step.set
    assert step.action == "Lower --max-running-requests below the value in force."
    assert "--command" in step.why


@pytest.mark.parametrize(("count", "new"), [(4, "2"), (2048, "1024")])
def test_the_limit_that_the_server_printed_is_halved(tmp_path: Path, count: int, new: str) -> None:
    log = ARGUMENTS.format(share=0.87) + CAPACITY.format(count=count) + SLOTS
    assert remedies(tmp_path, log)["fewer-sequences"].set == {"--max-running-requests": new}


def test_a_default_that_follows_from_other_settings_is_no_bound(tmp_path: Path) -> None:
    """With a hybrid model SGLang may allow a handful of requests without being asked."""
    found = remedies(tmp_path, ARGUMENTS.format(share=0.87) + CAPTURE)
    assert found["fewer-sequences"].set == {}
    assert found["lower-memory-share"].set == {"--mem-fraction-static": "0.84"}


def test_a_share_that_nobody_saw_is_lowered_in_words(tmp_path: Path) -> None:
    step = remedies(tmp_path, CAPTURE)["lower-memory-share"]
    assert not step.set
    assert step.title == "Lower --mem-fraction-static"


def test_a_command_makes_the_number_known(tmp_path: Path) -> None:
    command = "python -m sglang.launch_server --model-path /m --mem-fraction-static 0.86"
    step = remedies(tmp_path, CAPTURE, command)["lower-memory-share"]
    assert step.set == {"--mem-fraction-static": "0.83"}


def test_the_likely_number_is_said_where_the_default_is_one(tmp_path: Path) -> None:
    log = (CASES / "cuda-graph-capture-cut-above" / "server.log").read_text(encoding="utf-8")
    step = remedies(tmp_path, log)["lower-memory-share"]
    assert not step.set
    assert step.action is not None
    assert "0.85 if that is the default, 0.9" in step.action


def test_fewer_requests_than_ran_are_surely_fewer(tmp_path: Path) -> None:
    log = (
        "[2026-01-09 09:59:58 TP0] Decode batch. #running-req: 96, #token: 88000, token usage: "
        "0.99, cuda graph: True, gen throughput (token/s): 900.10, #queue-req: 40, \n"
        "[2026-01-09 10:00:01 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "RuntimeError: Decode out of memory. Try to lower your batch size.\n"
        "Try to allocate 96 tokens.\nAvaliable tokens: 12\n"
    )
    step = remedies(tmp_path, log)["fewer-sequences"]
    assert step.set == {"--max-running-requests": "72"}


def test_a_share_is_raised_above_what_the_weights_take(tmp_path: Path) -> None:
    log = ARGUMENTS.format(share=0.9) + WEIGHTS.format(left="14.10", weights="162.15")
    assert remedies(tmp_path, log)["raise-memory-share"].set == {"--mem-fraction-static": "0.94"}


def test_no_share_is_offered_that_the_weights_alone_exceed(tmp_path: Path) -> None:
    found = remedies(
        tmp_path, ARGUMENTS.format(share=0.9) + WEIGHTS.format(left="6.32", weights="169.93")
    )
    assert "raise-memory-share" not in found
    assert found["more-ranks"].set == {"--tp-size": "8"}
    # SGLang measures no step of work: a smaller one gives its pool nothing.
    assert found.keys().isdisjoint({"smaller-batch", "fewer-sequences", "no-cuda-graphs"})


def test_ranks_that_the_engine_names_are_doubled(tmp_path: Path) -> None:
    log = (
        "INFO 01-09 10:00:00 llm_engine.py:234] Initializing an LLM engine (v0.7.3) with config: "
        "model='/m', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=2, "
        "pipeline_parallel_size=1, quantization=None, enforce_eager=False\n"
        "ERROR 01-09 10:00:20 engine.py:400] No available memory for the cache blocks. Try "
        "increasing `gpu_memory_utilization` when initializing the engine.\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/vllm/worker/worker.py", line 340, in raise_if_cache_size_invalid\n'
        "ValueError: No available memory for the cache blocks. Try increasing "
        "`gpu_memory_utilization` when initializing the engine.\n"
    )
    found = remedies(tmp_path, log)
    assert found["more-ranks"].set == {"--tensor-parallel-size": "4"}
    assert found["raise-memory-share"].set == {"--gpu-memory-utilization": "0.95"}


def test_swap_space_beyond_what_the_blocks_allow_is_surely_more(tmp_path: Path) -> None:
    log = (
        "INFO 01-09 10:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: "
        "model='/m', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size=1\n"
        "INFO 01-09 10:00:20 gpu_executor.py:76] # GPU blocks: {gpu}, # CPU blocks: 2048\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/vllm/core/scheduler.py", line 1268, in _swap_out\n'
        "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space "
        "to avoid this error.\n"
    )
    surely = remedies(tmp_path, log.format(gpu=22774))["more-swap-space"]
    assert surely.set == {"--swap-space": "32"}
    # With so few blocks on the GPU the 2048 on the host may well be 32 GiB already.
    assert not remedies(tmp_path, log.format(gpu=2774))["more-swap-space"].set
