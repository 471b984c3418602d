from __future__ import annotations

import dataclasses

import pytest
from readings import page, still

from oomwatch.config import Config
from oomwatch.detect.engine import EngineWatch

CONFIG = Config()


def watch() -> EngineWatch:
    return EngineWatch("vllm-8000", CONFIG.detect, CONFIG.forecast)


def feed(engine: EngineWatch, samples, begin: int = 0):
    """What was set off, as (second, kind, level)."""
    return [
        (begin + second, trigger.kind, trigger.values.get("level"))
        for second, sample in enumerate(samples)
        for trigger in engine.feed(sample, float(begin + second))
    ]


# ------------------------------------------------------------------------------- a full pool
def test_a_full_pool_that_requests_wait_for_is_saturated():
    engine = watch()
    found = feed(engine, [page(s, kv_usage_ratio=0.95, waiting=4.0) for s in range(120)])
    assert found == [(30, "kv_saturation", "warn")]
    assert engine.held(120.0) == {"kv_pressure"}


def test_the_critical_level_is_told_once_more():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=0.95, waiting=4.0) for s in range(60)])
    found = feed(engine, [page(s, kv_usage_ratio=0.99, waiting=9.0) for s in range(60, 120)], 60)
    assert found == [(90, "kv_saturation", "critical")]


def test_a_full_pool_that_nobody_waits_for_is_good_use_of_memory():
    engine = watch()
    assert feed(engine, [page(s, kv_usage_ratio=0.995) for s in range(900)]) == []
    assert engine.held(900.0) == set()


def test_a_queue_alone_is_no_saturation():
    engine = watch()
    assert feed(engine, [page(s, kv_usage_ratio=0.4, waiting=50.0) for s in range(300)]) == []


def test_a_queue_that_empties_for_a_moment_changes_nothing():
    engine = watch()
    samples = [
        page(s, kv_usage_ratio=0.95, waiting=0.0 if s % 20 < 15 else 3.0) for s in range(15, 120)
    ]
    assert [kind for _, kind, _ in feed(engine, samples, 15)] == ["kv_saturation"]


def refilled(begin: int, end: int, *, every: int = 12, **figures):
    """A pool of few requests: full again a while after each preemption, then down by a third."""
    return [
        page(s, kv_usage_ratio=0.65 + 0.35 * (s % every) / (every - 1), **figures)
        for s in range(begin, end)
    ]


def test_a_pool_that_is_full_again_and_again_is_saturated():
    engine = watch()
    found = feed(engine, refilled(0, 120, waiting=4.0))
    assert [(kind, level) for _, kind, level in found] == [("kv_saturation", "warn")]
    assert 30 <= found[0][0] <= 45
    assert engine.held(120.0) == {"kv_pressure"}
    feed(engine, [page(s, kv_usage_ratio=0.6) for s in range(120, 180)], 120)
    assert engine.held(180.0) == set()


def test_so_is_one_whose_requests_are_preempted_but_never_wait_long():
    engine = watch()
    samples = [
        dataclasses.replace(sample, preemptions_total=float(second // 12))
        for second, sample in enumerate(refilled(0, 240))
    ]
    assert [kind for _, kind, _ in feed(engine, samples)] == ["kv_saturation"]


def test_one_that_nobody_waits_for_is_good_use_of_memory():
    engine = watch()
    assert feed(engine, refilled(0, 600)) == []


def test_a_burst_that_fills_the_pool_once_in_a_while_is_none():
    engine = watch()
    samples = [
        page(s, kv_usage_ratio=0.97 if s % 60 < 10 else 0.2, waiting=3.0 if s % 60 < 10 else 0.0)
        for s in range(900)
    ]
    assert feed(engine, samples) == []


def test_it_is_over_once_the_pool_has_room():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=0.95, waiting=4.0) for s in range(60)])
    feed(engine, [page(s, kv_usage_ratio=0.6) for s in range(60, 120)], 60)
    assert engine.held(120.0) == set()


def test_a_page_without_the_figure_is_not_an_empty_pool():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=0.95, waiting=4.0) for s in range(60)])
    feed(engine, [page(s, kv_usage_ratio=None, waiting=None) for s in range(60, 600)], 60)
    assert engine.held(600.0) == {"kv_pressure"}
    assert engine.kv_usage_ratio == 0.95


def test_an_engine_without_the_figure_has_no_known_use():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=None) for s in range(60)])
    assert engine.kv_usage_ratio is None


# ------------------------------------------------------------------------------- preemptions
def test_preemptions_count_by_their_rate():
    engine = watch()
    found = feed(engine, [page(s, preemptions_total=s * 0.5) for s in range(120)])
    assert [(kind, level) for _, kind, level in found] == [("preemption_storm", "warn")]
    assert engine.preemptions_per_minute == pytest.approx(30)


def test_the_counter_of_a_lifetime_is_no_storm():
    engine = watch()
    assert feed(engine, [page(s, preemptions_total=123_456.0) for s in range(600)]) == []
    assert engine.preemptions_per_minute == 0


def test_a_few_preemptions_a_minute_are_none():
    engine = watch()
    assert feed(engine, [page(s, preemptions_total=s // 15) for s in range(600)]) == []


def test_many_are_critical_at_once():
    engine = watch()
    found = feed(engine, [page(s, preemptions_total=s * 3.0) for s in range(120)])
    assert [(kind, level) for _, kind, level in found] == [("preemption_storm", "critical")]


# ------------------------------------------------------------------------------- what hangs
def test_a_request_that_never_fits():
    engine = watch()
    stuck = {"running": 0.0, "waiting": 1.0, "kv_usage_ratio": 0.0}
    found = feed(engine, [still(s, **stuck) for s in range(120)])
    assert [kind for _, kind, _ in found] == ["never_fits"]
    assert engine.held(120.0) == {"stuck_request"}


@pytest.mark.parametrize(
    "figures",
    [
        {"running": 1.0, "waiting": 1.0, "kv_usage_ratio": 0.0},
        {"running": 0.0, "waiting": 0.0, "kv_usage_ratio": 0.0},
        {"running": 0.0, "waiting": 1.0, "kv_usage_ratio": 0.7},
        {"running": 0.0, "waiting": 1.0, "kv_usage_ratio": None},
        {"running": None, "waiting": 1.0, "kv_usage_ratio": 0.0},
    ],
)
def test_others_are_not_stuck(figures):
    engine = watch()
    assert feed(engine, [still(s, **figures) for s in range(120)]) == []


def test_a_queue_that_moves_is_not_stuck():
    engine = watch()
    moving = {"running": 0.0, "waiting": 1.0, "kv_usage_ratio": 0.0}
    assert feed(engine, [page(s, **moving) for s in range(600)]) == []


def test_an_engine_that_shows_running_requests_and_stands_still_is_a_zombie():
    engine = watch()
    found = feed(engine, [still(s) for s in range(300)])
    assert [kind for _, kind, _ in found] == ["zombie_engine"]
    assert found[0][0] >= CONFIG.detect.zombie_engine.hold_seconds
    assert engine.held(300.0) == {"zombie"}
    feed(engine, [page(s) for s in range(300, 600)], 300)
    assert engine.held(600.0) == set()


def test_a_long_prefill_is_none():
    """No token comes for five minutes, but each chunk takes blocks of the pool."""
    engine = watch()
    samples = [still(s, running=1.0, kv_usage_ratio=0.1 + (s // 20) * 0.01) for s in range(300)]
    assert feed(engine, samples) == []


def test_nor_one_whose_counters_cannot_be_read():
    engine = watch()
    samples = [still(s, generation_tokens_total=None) for s in range(600)]
    assert feed(engine, samples) == []


def test_nor_one_that_is_idle():
    engine = watch()
    assert feed(engine, [still(s, running=0.0) for s in range(600)]) == []


# ------------------------------------------------------------------------------- forecasts
def test_a_pool_that_fills_is_forecast():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=s / 600) for s in range(300)])
    trigger = engine.predict(300.0)
    assert trigger is not None
    assert trigger.kind == "forecast_kv"
    assert trigger.values["eta_seconds"] == pytest.approx(300, abs=5)
    assert trigger.at == page(299).at
    assert "full in" in trigger.text


def test_a_far_off_end_is_not_forecast():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=0.1 + s / 6000) for s in range(600)])
    assert engine.predict(600.0) is None


def test_nor_one_that_is_there():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=s / 600) for s in range(600)])
    assert engine.predict(599.0) is not None
    assert engine.predict(599.9) is None


def test_nor_from_readings_that_have_stopped():
    engine = watch()
    feed(engine, [page(s, kv_usage_ratio=s / 600) for s in range(300)])
    assert engine.predict(600.0) is None


def test_memory_is_bounded():
    engine = watch()
    for tick in range(30_000):
        engine.feed(dataclasses.replace(page(0), preemptions_total=float(tick)), tick / 10)
    assert len(engine._usage) <= 4096
    assert len(engine._rate._points) < 700
