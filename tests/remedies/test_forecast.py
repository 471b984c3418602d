from __future__ import annotations

from typing import Any

import pytest

from oomwatch.records import EngineFacts, Finding, Remedy
from oomwatch.remedies.catalog import prescribe
from oomwatch.remedies.context import Context, context_of
from oomwatch.remedies.effects import effect_of, would_not_start
from oomwatch.remedies.forecast import model_source

GIB = 2**30
LLAMA: dict[str, Any] = {
    "engine": "vllm",
    "version": "0.11.0",
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "generation": "V1",
    "gpu_name": "NVIDIA H100 80GB HBM3",
    "total_bytes": int(79.18 * GIB),
    "max_model_len": 16384,
    "weights_bytes": int(14.99 * GIB),
    "kv_bytes": int(51.5 * GIB),
    "kv_tokens": 421_888,
    "max_concurrency": 25.75,
}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def context(cause: str = "kv_saturation", *, values: Any = (), **changes: Any) -> Context:
    finding = Finding("long_context", cause, 0.9, "x", values=dict(values))
    return context_of(finding, EngineFacts(id="e", **{**LLAMA, **changes}))


def remedies(cause: str, *, values: Any = (), **changes: Any) -> dict[str, Remedy]:
    finding = Finding("startup", cause, 0.9, "x", values=dict(values))
    facts = EngineFacts(id="e", **{**LLAMA, **changes})
    return {remedy.id: remedy for remedy in prescribe(finding, facts)}


def test_what_proportions_cannot_tell_the_model_does() -> None:
    effect = effect_of({"--max-num-seqs": 64}, context())
    assert effect is not None
    assert effect.kv_tokens_before == 421_888
    assert effect.kv_tokens_after is not None
    assert effect.kv_tokens_after > 440_000
    assert effect.freed_bytes is not None
    assert effect.freed_bytes > GIB
    low, high = effect.kv_tokens_after_low, effect.kv_tokens_after_high
    assert low is not None
    assert high is not None
    assert low < effect.kv_tokens_after < high


def test_the_log_s_own_figures_stand_before() -> None:
    effect = effect_of(
        {"--kv-cache-dtype": "fp8"}, context(kv_tokens=421_000, max_concurrency=25.7)
    )
    assert effect is not None
    assert (effect.kv_tokens_before, effect.max_concurrency_before) == (421_000, 25.7)
    assert effect.kv_tokens_after == pytest.approx(842_000, rel=1e-3)
    assert effect.max_concurrency_after == pytest.approx(51.4, rel=1e-3)


@pytest.mark.parametrize(
    "facts",
    [
        {"kv_tokens": 100_000, "max_concurrency": 6.1},  # another cache than this model has
        {"weights_bytes": 5 * GIB},  # a quantized copy under the same name
        {"model": "acme/unheard-of"},
        {"version": None},
        {"engine": "vllm-ascend"},
    ],
)
def test_figures_that_contradict_the_model_leave_proportions(facts: dict[str, Any]) -> None:
    here = context(**facts)
    assert here.forecast is None
    assert effect_of({"--max-num-seqs": 64}, here) is None


def test_needed_memory_that_another_model_would_need_is_a_contradiction() -> None:
    values = {"needed_kv_bytes": 9 * GIB, "available_kv_bytes": GIB}
    assert context(values=values, kv_bytes=None, kv_tokens=None).forecast is None
    values["needed_kv_bytes"] = 2 * GIB
    assert context(values=values, kv_bytes=None, kv_tokens=None).forecast is not None


UNSTARTED: dict[str, Any] = {"kv_bytes": None, "kv_tokens": None, "max_concurrency": None}
BIG: dict[str, Any] = {
    **UNSTARTED,
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "weights_bytes": None,
}


def test_what_the_model_refuses_is_not_prescribed() -> None:
    here = context(**BIG)
    assert would_not_start({"--gpu-memory-utilization": "0.95"}, here)
    assert would_not_start({"--tensor-parallel-size": 2, "--gpu-memory-utilization": "0.8"}, here)
    assert not would_not_start({"--tensor-parallel-size": 4}, here)
    found = remedies("kv_no_blocks", **BIG)
    assert "raise-memory-share" not in found
    assert found["more-ranks"].set == {"--tensor-parallel-size": "4"}


def test_length_is_what_fits_by_the_model() -> None:
    share = {"--gpu-memory-utilization": "0.27"}
    found = remedies("kv_lt_max_len", **UNSTARTED, arguments=share, max_model_len=131072)
    length = int(found["shorter-context"].set["--max-model-len"])
    assert 256 <= length < 16384
    effect = found["shorter-context"].effect
    assert effect is not None
    assert effect.max_concurrency_after is not None
    assert effect.max_concurrency_after >= 1


@pytest.mark.parametrize(
    ("gpu", "version", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "0.11.0", "fp8"),
        ("Tesla V100-SXM2-32GB", "0.24.0", "int8_per_token_head"),
    ],
)
def test_the_cache_format_is_one_the_card_has(gpu: str, version: str, expected: str) -> None:
    found = remedies(
        "kv_lt_max_len", gpu_name=gpu, version=version, max_model_len=131072, **UNSTARTED
    )
    assert [r.set["--kv-cache-dtype"] for r in found.values() if "--kv-cache-dtype" in r.set] == [
        expected
    ]


def test_where_sizes_are_from_is_said() -> None:
    assert "built-in table" in (model_source(EngineFacts(id="e", **LLAMA)) or "")
    unnamed = EngineFacts(id="e", **{**LLAMA, "gpu_name": None, "total_bytes": None})
    assert "by the shares" in (model_source(unnamed) or "")
    assert model_source(EngineFacts(id="e", engine="tgi", model=LLAMA["model"])) is None


def test_an_sglang_pool_is_predicted_too() -> None:
    here = context(
        engine="sglang",
        version="0.5.10",
        generation=None,
        kv_bytes=None,
        kv_tokens=None,
        max_concurrency=None,
        weights_bytes=int(15.1 * GIB),
        arguments={"--mem-fraction-static": "0.8"},
    )
    effect = effect_of({"--kv-cache-dtype": "fp8_e4m3"}, here)
    assert effect is not None
    assert effect.kv_tokens_before is not None
    assert effect.kv_tokens_after == pytest.approx(2 * effect.kv_tokens_before, rel=1e-3)


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (16384, "2 GPUs are tight: they start with --gpu-memory-utilization 0.95 too."),
        (131072, "2 GPUs hold the weights, with too little left for the KV cache."),
    ],
)
def test_fewer_gpus_that_hold_the_weights_are_named(length: int, said: str) -> None:
    found = remedies(
        "weights_dont_fit",
        model="meta-llama/Llama-3.3-70B-Instruct",
        arguments={"--max-model-len": str(length)},
        max_model_len=length,
        weights_bytes=None,
        kv_bytes=None,
        kv_tokens=None,
        max_concurrency=None,
    )
    assert found["more-ranks"].set == {"--tensor-parallel-size": "4"}
    assert said in found["more-ranks"].why


def test_a_step_says_one_figure_of_what_it_leaves() -> None:
    found = remedies(
        "prefill_activation_peak",
        values={"tried_bytes": 3 * GIB, "free_bytes": GIB},
        engine="sglang",
        version="0.5.4",
        generation=None,
        arguments={"--mem-fraction-static": "0.93"},
        arguments_seen=True,
        kv_bytes=None,
        kv_tokens=None,
        max_concurrency=None,
    )
    step = found["lower-memory-share"]
    assert step.effect is not None
    assert step.effect.freed_bytes
    assert f"(about {step.effect.freed_bytes / GIB:.1f} GiB" in step.why
