from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.causes import CAUSES, class_of
from oomwatch.records import EngineFacts, Finding
from oomwatch.remedies.catalog import prescribe
from oomwatch.remedies.context import Context, context_of
from oomwatch.remedies.effects import effect_of, kv_change_bytes, would_not_start

GIB = 2**30


def context(engine: str = "vllm", version: str = "0.10.2", **facts: Any) -> Context:
    finding = Finding("long_context", "kv_saturation", 0.9, "x")
    return context_of(finding, EngineFacts(id="e", engine=engine, version=version, **facts))


MEASURED = {
    "total_bytes": 80 * GIB,
    "kv_bytes": 20 * GIB,
    "kv_tokens": 100_000,
    "max_model_len": 50_000,
    "weights_bytes": 40 * GIB,
}


def test_share_moves_the_cache_in_proportion() -> None:
    here = context(**MEASURED)
    assert kv_change_bytes({"--gpu-memory-utilization": "0.95"}, here) == pytest.approx(4 * GIB)
    effect = effect_of({"--gpu-memory-utilization": "0.95"}, here)
    assert effect is not None
    assert (effect.kv_tokens_before, effect.kv_tokens_after) == (100_000, 120_000)
    assert (effect.max_concurrency_before, effect.max_concurrency_after) == (2.0, 2.4)
    assert effect.freed_bytes is None
    lowered = effect_of({"--gpu-memory-utilization": "0.85"}, here)
    assert lowered is not None
    assert lowered.freed_bytes == pytest.approx(4 * GIB, abs=2)
    assert lowered.kv_tokens_after == 80_000


def test_sglang_counts_from_what_was_free_before_weights() -> None:
    here = context(
        "sglang",
        "0.5.10",
        total_bytes=80 * GIB,
        free_at_start_bytes=70 * GIB,
        arguments={"--mem-fraction-static": "0.8"},
    )
    assert kv_change_bytes({"--mem-fraction-static": "0.9"}, here) == pytest.approx(7 * GIB)


def test_length_changes_concurrency_and_not_tokens() -> None:
    effect = effect_of({"--max-model-len": "25000"}, context(**MEASURED))
    assert effect is not None
    assert effect.kv_tokens_after == effect.kv_tokens_before == 100_000
    assert effect.max_concurrency_after == 4.0


def test_fp8_doubles_tokens() -> None:
    effect = effect_of({"--kv-cache-dtype": "fp8"}, context(**MEASURED))
    assert effect is not None
    assert effect.kv_tokens_after == 200_000


def test_ranks_free_weights() -> None:
    effect = effect_of({"--tensor-parallel-size": 2}, context(**MEASURED))
    assert effect is not None
    assert effect.freed_bytes == 20 * GIB
    assert effect.kv_tokens_after is None


def test_nothing_known_is_none() -> None:
    assert effect_of({"--gpu-memory-utilization": "0.95"}, context()) is None
    assert effect_of({"--max-num-seqs": "4"}, context(**MEASURED)) is None
    assert effect_of({"--enforce-eager": True}, context(**MEASURED)) is None


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({"--gpu-memory-utilization": "0.5"}, True),  # weights alone take half
        ({"--gpu-memory-utilization": "0.85"}, False),
        ({"--gpu-memory-utilization": "0.76"}, True),  # 8.8 GiB hold less than one request
        ({"--gpu-memory-utilization": "0.76", "--max-model-len": "8000"}, False),
        ({"--kv-cache-memory-bytes": 9 * GIB}, True),
        ({"--kv-cache-memory-bytes": 12 * GIB}, False),
        ({"--kv-cache-memory-bytes": 45 * GIB}, True),  # more than the card has beside the weights
        ({"--max-num-seqs": 1}, False),
    ],
)
def test_what_would_not_start(changes: dict[str, Any], fails: bool) -> None:
    assert would_not_start(changes, context(**MEASURED)) is fails


NAMES = [
    "tried_bytes",
    "free_bytes",
    "total_bytes",
    "reserved_unallocated_bytes",
    "needed_kv_bytes",
    "available_kv_bytes",
    "estimated_max_len",
    "max_model_len",
    "kv_tokens",
    "utilization",
    "seqs",
    "blocks",
    "suggested_fraction",
    "asked_tokens",
    "available_tokens",
    "pool",
    "host_free_bytes",
    "running",
    "multimodal",
    "other_pids",
    "process_name",
    "slope_bytes_per_second",
    "limit_bytes",
    "constraint",
    "other_process_bytes",
]
VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=3),
)
FLAGS = [
    "--gpu-memory-utilization",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--max-model-len",
    "--swap-space",
    "--mem-fraction-static",
    "--page-size",
    "--chunked-prefill-size",
    "--tensor-parallel-size",
    "--tp-size",
    "--kv-cache-memory-bytes",
    "--limit-mm-per-prompt",
    "--compilation-config",
    "--speculative-config",
    "--max-loras",
    "--mm-processor-kwargs",
    "--num-scheduler-steps",
    "--cpu-offload-gb",
    "--swa-full-tokens-ratio",
]
SIZE = st.one_of(st.none(), st.integers(0, 2**45))


@settings(max_examples=150, deadline=None)
@given(
    cause=st.sampled_from([cause for causes in CAUSES.values() for cause in causes]),
    values=st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=8),
    arguments=st.dictionaries(st.sampled_from(FLAGS), VALUE, max_size=6),
    engine=st.sampled_from(["vllm", "sglang", "tgi", "lmdeploy", "llama.cpp", None]),
    version=st.sampled_from(["0.6.3", "0.9.2", "0.33.0", "0.5.20", "", None, "x"]),
    sizes=st.fixed_dictionaries(
        dict.fromkeys(
            (
                "total_bytes",
                "weights_bytes",
                "kv_bytes",
                "kv_tokens",
                "max_model_len",
                "free_at_start_bytes",
                "available_gpu_bytes",
            ),
            SIZE,
        )
    ),
)
def test_no_numbers_make_it_fail(
    *, cause: str, values: Any, arguments: Any, engine: Any, version: Any, sizes: Any
) -> None:
    cls = class_of(cause)
    assert cls is not None
    facts = EngineFacts(id="e", engine=engine, version=version, arguments=arguments, **sizes)
    for remedy in prescribe(Finding(cls, cause, 0.5, "x", values=values), facts):
        for flag, value in remedy.set.items():
            assert value is True or not str(value).startswith("-"), (flag, value)
            if "utilization" in flag or "fraction" in flag:
                assert 0 < float(value) < 1
