"""How much pressure on the pool is worth a word: rates, not totals; places, not words."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.diagnose.inputs import Inputs, LogInput
from oomwatch.diagnose.judge import diagnose
from oomwatch.records import EngineSample, RecordedEngine, Series, Trigger
from oomwatch.sources.logfile import read_log

few = settings(max_examples=20, deadline=None)
V0 = [
    "INFO 05-20 08:00:00 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: model='/models/m', max_seq_len=8192",
    "INFO 05-20 08:01:00 gpu_executor.py:122] # GPU blocks: 9210, # CPU blocks: 2048",
    "INFO:     Application startup complete.",
]
SGLANG = [
    "[2025-05-20 08:00:00] server_args=ServerArgs(model_path='/models/m', mem_fraction_static=0.87)",
    "[2025-05-20 08:01:00] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, max_running_requests=2048, context_len=32768",
    "[2025-05-20 08:01:01] The server is fired up and ready to roll!",
]


def top(tmp_path, lines: list[str]) -> str | None:
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines) + "\n")
    read = read_log(str(path), zone=datetime.UTC, written_at=1780000000.0)
    return cause(Inputs(generated_at=0.0, logs=(LogInput("server.log", read),)))


def cause(inputs: Inputs) -> str | None:
    diagnosis = diagnose(inputs)
    if diagnosis.incidents:
        return diagnosis.incidents[0].finding.cause
    return diagnosis.risks[0].finding.cause if diagnosis.risks else None


def preempted(minute: float, total: int, mode: str = "RECOMPUTE") -> str:
    at = datetime.datetime(2026, 5, 20, 9, tzinfo=datetime.UTC) + datetime.timedelta(minutes=minute)
    return (
        f"WARNING {at:%m-%d %H:%M:%S} scheduler.py:1057] Sequence group cmpl-{total} is preempted by PreemptionMode.{mode} mode"
        f" because there is not enough KV cache space. total_num_cumulative_preemption={total}"
    )


@pytest.mark.parametrize(
    ("minutes", "totals", "expected"),
    [
        (5, (1, 51, 101), "kv_preempt_recompute_storm"),
        (60, (1, 51, 101, 151), "kv_preempt_recompute_storm"),  # 2.5 a minute, 150 of them
        (600, (101, 151, 201), None),  # a few an hour: the total says nothing
        (60, (1, 51), None),
    ],
)
def test_the_rate_of_preemptions_counts(tmp_path, minutes, totals, expected):
    step = minutes / (len(totals) - 1)
    lines = [preempted(step * i, total) for i, total in enumerate(totals)]
    assert top(tmp_path, V0 + lines) == expected


def test_swapping_has_its_own_name(tmp_path):
    lines = [preempted(i, 1 + 50 * i, "SWAP") for i in range(4)]
    assert top(tmp_path, V0 + lines) == "kv_preempt_swap_storm"


def retracted(second: float) -> str:
    at = datetime.datetime(2025, 5, 20, 9) + datetime.timedelta(seconds=second)  # noqa: DTZ001 - SGLang prints no zone
    return f"[{at:%Y-%m-%d %H:%M:%S}] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.4 -> 0.6"


@pytest.mark.parametrize(
    ("every", "count", "expected"),
    [(5, 4, "kv_retract_storm"), (30, 5, "kv_retract_storm"), (120, 5, None), (5, 1, None)],
)
def test_the_rate_of_retractions_counts(tmp_path, every, count, expected):
    lines = [retracted(every * i) for i in range(count)]
    assert top(tmp_path, SGLANG + lines) == expected


def recorded(
    rows: list[tuple[float, float, float, float]],
    version: str = "0.12.0",
    noticed: tuple[Trigger, ...] = (),
) -> str | None:
    samples = tuple(
        EngineSample(
            1000.0 + 30 * i, "vllm-0", running=r, waiting=w, kv_usage_ratio=k, preemptions_total=p
        )
        for i, (r, w, k, p) in enumerate(rows)
    )
    engine = RecordedEngine("vllm-0", "vllm", version)
    series = Series(engines=samples)
    return cause(Inputs(generated_at=0.0, series=series, engines=(engine,), noticed=noticed))


@few
@given(kv=st.floats(0, 0.85), running=st.integers(1, 200))
def test_a_pool_with_room_and_no_queue_is_well(kv, running):
    assert recorded([(running, 0, kv, 0)] * 10) is None


@few
@given(waiting=st.integers(2, 500), running=st.integers(9, 200))
def test_a_full_pool_with_a_queue_is_saturated(waiting, running):
    assert recorded([(running, waiting, 0.99, 0)] * 10) == "kv_saturation"


FORECAST = Trigger("forecast_kv", 1200.0, "vllm-0", text="KV cache 71% full and rising")
FILLING = [(20.0, 0.0, 0.5 + 0.02 * i, 0.0) for i in range(10)]


@pytest.mark.parametrize(
    ("noticed", "expected"),
    [
        ((), None),
        ((FORECAST,), "kv_saturation"),
        ((dataclasses.replace(FORECAST, engine_id="vllm-1"),), None),
        ((dataclasses.replace(FORECAST, kind="forecast_gpu"),), None),
    ],
)
def test_a_pool_that_fills_is_at_risk_once_the_agent_has_seen_where_to(noticed, expected):
    assert recorded(FILLING, noticed=noticed) == expected


def test_what_has_come_is_told_rather_than_what_was_forecast():
    rows = [(40.0, 0.0, 0.9, 30.0 * i) for i in range(10)]
    assert recorded(rows, noticed=(FORECAST,)) == "kv_preempt_recompute_storm"


def test_a_counter_that_restarts_is_no_storm_backwards():
    rows = [(40.0, 0.0, 0.5, 900.0)] * 4 + [(40.0, 0.0, 0.5, 0.0)] * 4
    assert recorded(rows, "0.6.3") is None


@pytest.mark.parametrize(("waiting", "expected"), [(1.0, "kv_request_never_fits"), (0.0, None)])
def test_an_empty_pool_that_starts_nothing(waiting, expected):
    rows = [(3.0, 0.0, 0.6, 0.0)] * 3 + [(0.0, waiting, 0.0, 0.0)] * 6
    assert recorded(rows) == expected


@pytest.mark.parametrize(("tokens", "sure"), [(4096, True), (147360, False)])
def test_a_pool_that_holds_every_request_is_less_surely_too_small(tmp_path, tokens, sure):
    path = tmp_path / "server.log"
    start = [
        "INFO 10-20 08:00:00 [api_server.py:1839] vLLM API server version 0.11.0",
        "INFO 10-20 08:00:01 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/m', max_seq_len=8192",
        f"INFO 10-20 08:01:00 [kv_cache_utils.py:1087] GPU KV cache size: {tokens:,} tokens",
        "INFO:     Application startup complete.",
    ]
    load = "INFO 10-20 09:{:02}:00 [loggers.py:123] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs, GPU KV cache usage: 0.0%, Prefix cache hit rate: 0.0%"
    path.write_text("\n".join([*start, *(load.format(minute) for minute in range(6))]) + "\n")
    read = read_log(str(path), zone=datetime.UTC, written_at=1780000000.0)
    diagnosis = diagnose(Inputs(generated_at=0.0, logs=(LogInput("server.log", read),)))
    found = diagnosis.incidents[0].finding
    assert found.cause == "kv_request_never_fits"
    assert found.summary.startswith("A request has waited for 5 min ")
    assert (found.confidence > 0.8) == sure
    assert ("something else may hold it back" in found.summary) == (not sure)


def test_a_full_pool_without_requests_leaks():
    rows = [(30.0, 0.0, 0.6, 0.0)] * 10 + [(0.0, 3.0, 0.97, 0.0)] * 12
    assert recorded(rows) == "kv_pool_leak"


def test_one_long_request_may_fill_the_pool():
    assert recorded([(1.0, 0.0, 0.2 + 0.03 * i, 0.0) for i in range(26)]) is None
