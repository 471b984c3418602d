"""A version that no line names lies where all that was printed was printed."""

from __future__ import annotations

import pytest

from oomwatch.diagnose.judge import diagnose
from oomwatch.engines.versions import common_span
from tests.diagnose.logtext import OOM, inputs_of

BLOCKS = "INFO 05-20 08:01:00 gpu_executor.py:122] # GPU blocks: 9210, # CPU blocks: 2048\n"
PREEMPTED = (
    "WARNING 05-20 08:02:00 scheduler.py:1057] Sequence group cmpl-7 is preempted by PreemptionMode.RECOMPUTE mode"
    " because there is not enough KV cache space. total_num_cumulative_preemption=1\n"
)
ESTIMATE = "(EngineCore_DP0 pid=7) INFO 11-20 09:15:10 [gpu_worker.py:298] Estimated CUDA graph memory: 0.61 GiB total\n"
KV = "(EngineCore_DP0 pid=7) INFO 11-20 09:15:11 [gpu_worker.py:298] Available KV cache memory: 54.81 GiB\n"


def raised(path: str) -> str:
    return (
        "Traceback (most recent call last):\n"
        f'  File "/opt/{path}", line 10, in execute_model\n    return run(x)\n'
        f"torch.OutOfMemoryError: {OOM}\n"
    )


@pytest.mark.parametrize(
    ("log", "span", "generation"),
    [
        (BLOCKS, (None, "0.11.0"), None),
        (BLOCKS + PREEMPTED, ("0.4.3", "0.10.2"), None),
        (KV, ("0.9.1", None), None),
        (KV + ESTIMATE, ("0.18.0", None), None),
        (KV + PREEMPTED, ("0.9.1", "0.10.2"), None),
        (ESTIMATE + PREEMPTED, (None, None), None),  # two logs in one: neither bounds
        (raised("vllm/v1/worker/gpu_model_runner.py"), ("0.6.4", None), "V1"),
        (raised("vllm/worker/model_runner.py"), (None, "0.10.2"), "V0"),
        (raised("vllm/worker/worker_base.py"), (None, "0.11.0"), None),
        (raised("vllm/v1/worker/gpu/model_runner.py"), ("0.12.0", None), "V1"),
    ],
)
def test_what_was_printed_bounds_the_version(log, span, generation):
    facts = diagnose(inputs_of(log)).engines[0]
    assert (facts.version_since, facts.version_until) == span
    assert facts.generation == generation


def test_a_version_that_is_named_needs_no_bounds():
    banner = "INFO 05-20 08:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: model='/models/m', max_seq_len=8192\n"
    facts = diagnose(inputs_of(banner + BLOCKS)).engines[0]
    assert (facts.version, facts.version_since, facts.version_until) == ("0.6.3", None, None)


@pytest.mark.parametrize(
    ("spans", "common"),
    [
        ([], (None, None)),
        (["..", "0.5.17.."], ("0.5.17", None)),
        (["0.6.4..0.6.4", ".."], ("0.6.4", "0.6.4")),
        (["0.9.0..", "..0.10.2", "0.8.5.."], ("0.9.0", "0.10.2")),
        (["0.9.0..", "..0.8.5"], (None, None)),
    ],
)
def test_spans_in_common(spans, common):
    assert common_span(spans) == common
