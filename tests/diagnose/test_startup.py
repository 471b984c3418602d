from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logtext import OOM, START, inputs_of, raised

from oomwatch.diagnose.assemble import assemble
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.frames import find_stage
from oomwatch.diagnose.judge import find_all
from oomwatch.diagnose.rules.conversion import converts_to_fit
from oomwatch.diagnose.rules.placing import gpu_failure, is_placed, stage_of
from oomwatch.diagnose.rules.tenants import hidden_bytes
from oomwatch.units import GIB

HEAD = "\n".join(START.splitlines()[:3]) + "\n"
CORE = "(EngineCore_DP0 pid=171) INFO 11-20 09:14:41 [core.py:1] "
GENERIC = ("uniproc_executor.py:collective_rpc", "module.py:_call_impl")


def facts_of(text: str) -> Facts:
    return assemble(inputs_of(text))[0]


def stage(text: str) -> str:
    facts = facts_of(text)
    failure = gpu_failure(facts)
    assert failure is not None
    return stage_of(facts, failure)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), "load"),
        (("Loading weights took 8.19 seconds",), "repack"),
        (("Loading weights took 8.19 seconds", "Loading drafter model..."), "draft"),
        (("Model loading took 14.99 GiB and 3.2 seconds",), "profile"),
        (("Model loading took 14.99 GiB and 3.2 seconds", "Available KV cache memory: 54.81 GiB"), "sampler"),
        (("Model loading took 64.99 GiB and 3.2 seconds", "Available KV cache memory: 54.81 GiB"), "kv"),
        (("Capturing CUDA graphs (decode, FULL):  43%|####  | 9/21",), "capture"),
        (("Graph capturing finished in 12 secs, took 0.55 GiB",), "sampler"),
    ],
)  # fmt: skip
def test_lines_place_a_failure_with_generic_frames(lines: tuple[str, ...], expected: str) -> None:
    said = "".join(f"{CORE}{line}\n" for line in lines)
    assert stage(HEAD + said + raised(f"torch.OutOfMemoryError: {OOM}", *GENERIC)) == expected


def test_frames_outrank_lines() -> None:
    text = HEAD + raised(f"torch.OutOfMemoryError: {OOM}", "gpu_worker.py:profile_run", *GENERIC)
    assert stage(text) == "profile"


def test_a_stage_that_nothing_tells_is_a_guess() -> None:
    text = raised(f"torch.OutOfMemoryError: {OOM}", *GENERIC).replace(
        "fatal error", "failed to start"
    )
    facts = facts_of(text)
    failure = gpu_failure(facts)
    assert failure is not None
    assert not is_placed(facts, failure)
    lead = find_all(facts)[0]
    assert lead.confidence < 0.5
    assert lead.unseen


def oom_line(total: float, free: float, allocated: float, listed: str = "") -> str:
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        f"{total:.2f} GiB of which {free:.2f} GiB is free. {listed}Of the allocated memory {allocated:.2f} GiB is "
        "allocated by PyTorch, and 10.00 MiB is reserved by PyTorch but unallocated."
    )


@given(
    total=st.floats(8, 200),
    free_share=st.floats(0, 0.3),
    own_share=st.floats(0.05, 1),
)
@settings(max_examples=60, deadline=None)
def test_hidden_memory_is_what_neither_free_nor_own_explains(
    total: float, free_share: float, own_share: float
) -> None:
    free = total * free_share
    own = (total - free) * own_share
    facts = facts_of(HEAD + raised(oom_line(total, free, own), *GENERIC))
    failure = gpu_failure(facts)
    assert failure is not None
    hidden = hidden_bytes(failure)
    assert 0 <= hidden <= (total - free - own) * GIB + GIB
    if hidden:
        assert total - free - own > 0.25 * total


def test_a_listed_process_of_this_engine_hides_nothing() -> None:
    line = oom_line(79.15, 0.1, 70.0, "Process 12 has 78.90 GiB memory in use. ")
    failure = gpu_failure(facts_of(HEAD + raised(line, *GENERIC)))
    assert failure is not None
    assert hidden_bytes(failure) == 0


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("Qwen2.5-72B", "fp8", False),
        ("Qwen3-30B-A3B", "fp8", True),
        ("Mixtral-8x7B", "bitsandbytes", True),
        ("Qwen3-30B-A3B-FP8", "fp8", False),
        ("Qwen3-30B-A3B", "None", False),
        ("served-model", "fp8", True),
    ],
)
def test_conversion_explains_only_what_would_fit_converted(
    model: str, method: str, expected: object
) -> None:
    head = HEAD.replace("/models/m", f"/models/{model}")
    given_args = f"(APIServer pid=1) INFO 11-20 09:14:03 [utils.py:1] non-default args: {{'model': '/models/{model}', 'quantization': '{method}'}}\n"
    first, rest = head.split("\n", 1)
    text = f"{first}\n{given_args}{rest}" + raised(oom_line(47.4, 0.2, 46.6), *GENERIC)
    facts = facts_of(text)
    failure = gpu_failure(facts)
    assert failure is not None
    assert converts_to_fit(facts, failure) is expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (("gpu_worker.py:load_model", "__init__.py:set_device"), "init"),
        (("gpu_worker.py:load_model", "worker_manager.py:create_lora_manager"), "slots"),
        (("cache_engine.py:__init__", "cache_engine.py:allocate_cpu_cache"), "pinned"),
        (("flash_causal_lm.py:warmup", "flash_causal_lm.py:generate_token"), "profile"),
        (("gpu_worker.py:compile_or_warm_up_model", "kernel_warmup.py:kernel_warmup"), "compile"),
        (("module.py:_call_impl",), None),
    ],
)
def test_frames_name_stages(frames: tuple[str, ...], expected: str | None) -> None:
    assert find_stage(frames) == expected


def test_an_open_traceback_stays_with_its_start() -> None:
    first = HEAD + raised("ValueError: No available memory for the cache blocks.", "core.py:x")
    again = HEAD.replace("pid=171", "pid=571").replace("pid=1)", "pid=401)")
    text = first.rstrip("\n") + "\n" + again + raised(f"RuntimeError: {OOM}", *GENERIC)
    newest, older = assemble(inputs_of(text))[:2]
    assert all("cache blocks" not in failure.message for failure in newest.failures)
    assert any("cache blocks" in failure.message for failure in older.failures)


def test_a_drawn_traceback_gives_its_frames() -> None:
    text = (
        "╭───────────── Traceback (most recent call last) ─────────────╮\n"
        "│ /opt/conda/lib/python3.10/site-packages/text_generation_serv │\n"
        "│ er/utils/weights.py:223 in get_sharded                       │\n"
        "╰─────────────────────────────────────────────────────────────╯\n"
        f"OutOfMemoryError: {OOM}\n"
    )
    (failure,) = facts_of(text).failures
    assert failure.frames == ("weights.py:get_sharded",)
    assert failure.oom is not None
