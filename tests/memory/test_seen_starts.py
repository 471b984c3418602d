"""Starts of public logs that the constants were not fitted to: kinds of models, cards, releases.

Each row of data/seen_starts.json restates what one server printed, as numbers. Sizes that a log
rounds to two decimals may be off by half of the last one, and a count of blocks by as much.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from oomwatch.engines.commandline import parse_command
from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import Device, find_device
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.planner import PlanInput, plan
from oomwatch.units import GIB

DATA = json.loads((Path(__file__).parent / "data" / "seen_starts.json").read_text())
STARTS = {start["name"]: start for start in DATA["starts"]}


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def given(start, available_gib=None):
    """The row's command as it was typed, planned with the pool that the log printed, or without."""
    words = f"env {start['env']} {start['command']}" if "env" in start else start["command"]
    parsed = parse_command(words, version=start["version"])
    if "config" in start:
        model = parse_config(DATA["configs"][start["config"]])
    else:
        model = load_model(None, parsed.model).model
    device = find_device(start["gpu"]) if "gpu" in start else Device("card", 0, (8, 9))
    if "total_gib" in start:
        device = dataclasses.replace(device, total_bytes=round(start["total_gib"] * GIB))
    found = PlanInput(
        model, device, "vllm", start["version"], parsed.arguments, env=dict(parsed.env)
    )
    if available_gib is None:
        return found
    known = dataclasses.replace(found.known, kv_available_bytes=round(available_gib * GIB))
    return dataclasses.replace(found, known=known)


def with_key(key):
    return sorted(name for name, start in STARTS.items() if key in start)


@pytest.mark.parametrize("name", with_key("weights_gib"))
def test_weights(name):
    start = STARTS[name]
    weights = plan(given(start)).budget.weights.bytes / GIB
    assert weights == pytest.approx(start["weights_gib"], rel=0.01)


@pytest.mark.parametrize("name", with_key("scratch_gib"))
def test_kv_memory_of_a_start_that_nothing_is_known_of(name):
    start = STARTS[name]
    found = plan(given(start))
    assert found.kv_available_bytes / GIB == pytest.approx(start["scratch_gib"], abs=0.15)
    assert found.refusal == start.get("scratch_refused")


@pytest.mark.parametrize(
    ("key", "attribute"),
    [
        ("tokens", "tokens"),
        ("line_tokens", "line_tokens"),
        ("blocks", "blocks"),
        ("concurrency", "max_concurrency"),
    ],
)
def test_counts_of_a_pool_that_was_printed(key, attribute):
    wrong = []
    for name in with_key(key):
        start = STARTS[name]
        sizes = (start["available_gib"] - 0.005, start["available_gib"] + 0.005)
        low, high = (getattr(plan(given(start, size)), attribute) for size in sizes)
        rounding = 0.005 if key == "concurrency" else 0
        if not low - rounding <= start[key] <= high + rounding:
            wrong.append(f"{name}: {start[key]} is not within {low} and {high}")
    assert wrong == []


@pytest.mark.parametrize("name", with_key("needed_gib"))
def test_what_one_request_needs_and_how_long_it_may_be(name):
    start = STARTS[name]
    found = plan(given(start, start["available_gib"]))
    assert found.refusal == "kv_lt_max_len"
    assert f"needs {start['needed_gib']:.2f} GiB" in found.refusal_text
    if "estimated_length" in start:
        rounding = start["estimated_length"] * 0.005 / start["available_gib"] + 64
        assert abs(found.max_model_len_that_fits - start["estimated_length"]) <= rounding


@pytest.mark.parametrize("name", with_key("refused"))
def test_a_start_that_was_refused_is_refused(name):
    start = STARTS[name]
    assert plan(given(start, start["available_gib"])).refusal == start["refused"]


@pytest.mark.parametrize("name", with_key("concurrency"))
def test_a_start_that_served_is_not_refused(name):
    start = STARTS[name]
    assert plan(given(start, start["available_gib"])).fits


def test_hybrid_blocks_are_as_long_as_a_state():
    start = STARTS["qwen3.8-27b fp8 tp2"]
    assert plan(given(start)).layout.block_tokens == start["block_tokens"]
