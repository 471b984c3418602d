from __future__ import annotations

from typing import Any

import pytest

from oomwatch.records import EngineFacts, Finding, Remedy
from oomwatch.remedies.catalog import prescribe
from oomwatch.selection import set_together

GIB = 2**30
SHARE = "--gpu-memory-utilization"


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def remedies(
    cause: str, values: dict[str, float], arguments: dict[str, Any], **facts: Any
) -> dict[str, Remedy]:
    cls: Any = "startup" if cause in ("cuda_graph_capture", "sampler_warmup") else "long_context"
    sizes = {name: round(value * GIB) for name, value in values.items()}
    finding = Finding(cls, cause, 0.9, "x", values={"total_bytes": int(79.18 * GIB), **sizes})
    told: dict[str, Any] = {
        "engine": "vllm",
        "version": "0.11.0",
        "generation": "V1",
        "total_bytes": int(79.18 * GIB),
        "arguments": arguments,
        "arguments_seen": True,
    }
    engine = EngineFacts(id="e", **{**told, **facts})
    return {remedy.id: remedy for remedy in prescribe(finding, engine)}


BATCH = {"--max-num-batched-tokens": "8192", SHARE: "0.95"}
PEAK = {"tried_bytes": 3.0, "free_bytes": 1.0}


@pytest.mark.parametrize(
    ("free", "share", "enough"),
    [
        (1.0, "0.95", True),  # 0.75 GiB are asked for then
        (0.6, "0.95", None),  # more than is free is asked for then
        (1.0, "0.995", None),  # the KV cache takes what the smaller step leaves
    ],
)
def test_a_smaller_step_is_enough_where_what_was_refused_then_fits(
    free: float, share: str, enough: bool | None
) -> None:
    found = remedies(
        "prefill_activation_peak", {"tried_bytes": 3.0, "free_bytes": free}, {**BATCH, SHARE: share}
    )
    assert found["smaller-batch"].set["--max-num-batched-tokens"] == "2048"
    assert found["smaller-batch"].enough is enough


@pytest.mark.parametrize(("fraction", "enough"), [("0.93", True), ("0.83", None)])
def test_a_default_fraction_of_sglang_grows_when_the_chunk_shrinks(
    fraction: str, enough: bool | None
) -> None:
    arguments = {"--chunked-prefill-size": "8192", "--mem-fraction-static": fraction}
    found = remedies(
        "prefill_activation_peak",
        {"tried_bytes": 3.0, "free_bytes": 1.6},
        arguments,
        engine="sglang",
        version="0.5.4",
        generation=None,
    )
    assert found["smaller-batch"].set == {"--chunked-prefill-size": "4096"}
    assert found["smaller-batch"].enough is enough


def test_a_lower_share_is_enough_where_it_frees_what_was_missing_and_more() -> None:
    found = remedies("moe_dispatch_peak", PEAK, BATCH)
    share = found["lower-memory-share"]
    assert (0.95 - float(share.set[SHARE])) * 79.18 > 2 + 1.5
    assert share.enough
    huge = remedies("moe_dispatch_peak", {"tried_bytes": 30.0, "free_bytes": 1.0}, BATCH)
    assert huge["lower-memory-share"].enough is None


def test_only_one_step_is_printed_where_it_is_enough() -> None:
    found = remedies("prefill_activation_peak", PEAK, BATCH)
    chosen = set_together(tuple(found.values()))
    assert [remedy.id for remedy in chosen] == ["smaller-batch"]


CAPTURE: dict[str, Any] = {
    "model": "Qwen/Qwen3-32B-FP8",
    "gpu_name": "NVIDIA L40S",
    "total_bytes": int(44.39 * GIB),
    "weights_bytes": int(32.05 * GIB),
    "kv_bytes": int(9.24 * GIB),
    "kv_tokens": 37_840,
    "max_model_len": 32768,
}


@pytest.mark.parametrize(("captured", "enough"), [(0.6, True), (0.05, None)])
def test_graphs_still_to_come_have_to_fit_as_well(captured: float, enough: bool | None) -> None:
    values = {"tried_bytes": 0.0625, "free_bytes": 0.0215, "private_pool_bytes": captured}
    values["total_bytes"] = 44.39
    found = remedies("cuda_graph_capture", values, {SHARE: "0.97"}, **CAPTURE)
    assert found["lower-memory-share"].set == {SHARE: "0.95"}
    assert found["lower-memory-share"].enough is enough
    assert found["fewer-graphs"].enough is enough  # all of them against those captured already
    assert found["no-cuda-graphs"].enough


def test_going_without_graphs_of_unknown_size_does_not_pass_over_a_lower_share() -> None:
    values = {"tried_bytes": 1.0, "free_bytes": 0.5, "total_bytes": 44.39}
    unnamed = {**CAPTURE, "model": None, "version": None}
    found = remedies("cuda_graph_capture", values, {SHARE: "0.97"}, **unnamed)
    assert found["no-cuda-graphs"].set
    assert next(iter(set_together(list(found.values())))).id == "lower-memory-share"
    assert "not surely the graphs" in found["lower-memory-share"].why


@pytest.mark.parametrize(
    ("cause", "left_open"),
    [
        ("sampler_warmup", "not surely what the same step asks for next"),
        ("fragmentation", "pieces too small to use may take it again"),
    ],
)
def test_figures_above_what_was_missing_that_prove_nothing_say_what_they_leave_open(
    cause: str, left_open: str
) -> None:
    values = {"tried_bytes": 6.0, "free_bytes": 4.0, "reserved_unallocated_bytes": 8.0}
    share = remedies(cause, values, {SHARE: "0.95"})["lower-memory-share"]
    assert share.enough is None
    assert left_open in share.why
    proven = remedies("sampler_warmup", {"tried_bytes": 0.5, "free_bytes": 0.3}, {SHARE: "0.95"})
    assert proven["lower-memory-share"].enough
    assert "but not surely" not in proven["lower-memory-share"].why


def test_nothing_is_said_without_the_figures_of_the_message() -> None:
    found = remedies("prefill_activation_peak", {}, BATCH)
    assert {remedy.enough for remedy in found.values()} == {None}


@pytest.mark.parametrize(("weights", "enough"), [(67.97, True), (73.0, None)])
def test_a_share_over_the_weights_is_all_that_sglang_asks_for(
    weights: float, enough: bool | None
) -> None:
    finding = Finding("startup", "kv_no_blocks", 0.9, "x")
    engine = EngineFacts(
        id="e",
        engine="sglang",
        version="0.5.4",
        arguments={"--mem-fraction-static": "0.8", "--tp-size": "2"},
        arguments_seen=True,
        weights_bytes=round(weights * GIB),
        free_at_start_bytes=round(77.65 * GIB),
    )
    found = {remedy.id: remedy for remedy in prescribe(finding, engine)}
    raised = found.get("raise-memory-share")
    assert (raised.enough if raised else None) is enough  # 0.96 would leave no room for a step
    assert found["more-ranks"].enough
