"""Trends on generated series: what is a leak, and what only looks like one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.diagnose.series import Trend, fit_trend, has_settled, is_growing, summarise
from oomwatch.records import (
    GpuProcessSample,
    GpuSample,
    HostSample,
    ProcessSample,
    Series,
)
from oomwatch.units import GIB, MIB

HOURS = 3600.0
few = settings(max_examples=25, deadline=None)


def trend(
    shape: Callable[[float], float],
    *,
    hours: float = 4,
    points: int = 120,
    noise: float = 0,
    seed: int = 1,
) -> Trend:
    """The trend of a shape over the share of the window that has passed, 0..1, with noise in bytes."""
    rng = random.Random(seed)  # noqa: S311 - noise for a test
    window = hours * HOURS
    fitted = fit_trend(
        [
            (window * i / (points - 1), shape(i / (points - 1)) + rng.uniform(-noise, noise))
            for i in range(points)
        ]
    )
    assert fitted is not None
    return fitted


@few
@given(
    grown=st.floats(1, 40),
    level=st.floats(0.5, 20),
    noise=st.floats(0, 0.08),
    points=st.integers(12, 400),
    seed=st.integers(0, 99),
)
def test_steady_growth_is_a_leak_under_noise(grown, level, noise, points, seed):
    found = trend(
        lambda x: (level + grown * x) * GIB, noise=noise * grown * GIB, points=points, seed=seed
    )
    assert is_growing(found)
    assert not has_settled(found)
    assert found.slope_per_second == pytest.approx(grown * GIB / found.seconds, rel=0.25)


@few
@given(level=st.floats(0.5, 80), noise=st.floats(0, 0.02), seed=st.integers(0, 99))
def test_a_flat_level_is_neither(level, noise, seed):
    found = trend(lambda _: level * GIB, noise=noise * level * GIB, seed=seed)
    assert not is_growing(found)
    assert not has_settled(found)


@few
@given(grown=st.floats(2, 30), constant=st.floats(0.06, 0.12), seed=st.integers(0, 99))
def test_growth_that_ends_is_a_warm_up(grown, constant, seed):
    found = trend(
        lambda x: (4 + grown * (1 - math.exp(-x / constant))) * GIB, noise=0.01 * GIB, seed=seed
    )
    assert not is_growing(found)
    assert has_settled(found)


@few
@given(grown=st.floats(0.5, 10), full=st.floats(0.15, 0.5))
def test_a_cache_that_fills_and_stays_is_a_warm_up(grown, full):
    found = trend(lambda x: (2 + grown * min(x / full, 1)) * GIB)
    assert not is_growing(found)
    assert has_settled(found)


@few
@given(periods=st.integers(3, 30), height=st.floats(0.5, 8), phase=st.floats(0, 1))
def test_waves_of_the_load_are_no_leak(periods, height, phase):
    assert not is_growing(
        trend(lambda x: (8 + height * math.sin(2 * math.pi * (periods * x + phase))) * GIB)
    )


@few
@given(periods=st.floats(3, 20), height=st.floats(0.5, 8))
def test_a_sawtooth_is_no_leak(periods, height):
    assert not is_growing(trend(lambda x: (60 + height * (periods * x % 1)) * GIB, points=240))


@few
@given(periods=st.integers(8, 30), drift=st.floats(2, 12), seed=st.integers(0, 99))
def test_a_leak_shows_through_the_waves(periods, drift, seed):
    found = trend(
        lambda x: (8 + drift * x + 0.2 * drift * math.sin(2 * math.pi * periods * x)) * GIB,
        points=360,
        seed=seed,
    )
    assert is_growing(found)


@few
@given(at=st.floats(0.05, 0.95), height=st.floats(0.5, 30))
def test_one_step_is_no_leak(at, height):
    assert not is_growing(trend(lambda x: (4 + height * (x > at)) * GIB))


@pytest.mark.parametrize("steps", [6, 8, 12])
def test_even_steps_are_a_leak(steps):
    assert is_growing(trend(lambda x: (4 + 0.8 * math.floor(x * steps)) * GIB, noise=0.01 * GIB))


def test_a_last_peak_is_no_leak():
    assert not is_growing(trend(lambda x: (60 + (12 if x > 0.97 else 0)) * GIB))


def test_growth_too_small_to_matter_is_none():
    assert not is_growing(trend(lambda x: 4 * GIB + 200 * MIB * x))
    assert not is_growing(trend(lambda x: 60 * GIB + 800 * MIB * x))


@few
@given(outliers=st.lists(st.integers(0, 119), max_size=6, unique=True))
def test_single_outliers_do_not_make_a_leak(outliers):
    found = fit_trend([(60.0 * i, (90 if i in outliers else 8) * float(GIB)) for i in range(120)])
    assert found is not None
    assert not is_growing(found)


@few
@given(
    values=st.lists(st.floats(0, 1e14, allow_nan=False), min_size=0, max_size=400),
    step=st.floats(0, 1e6),
)
def test_any_series_can_be_fitted(values, step):
    found = fit_trend([(step * i, value) for i, value in enumerate(values)])
    if found is None:
        assert len(values) < 4 or step == 0
        return
    assert found.low <= found.first <= found.high
    assert found.low <= found.last <= found.high
    assert abs(found.floor_grown) <= found.high - found.low
    assert not (is_growing(found) and has_settled(found))


def test_too_few_points_have_no_trend():
    assert fit_trend([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) is None
    assert fit_trend([(5.0, 1.0)] * 9) is None


def test_summary_keeps_processes_cards_and_holders_apart():
    times = [float(60 * i) for i in range(20)]
    series = Series(
        gpus=tuple(
            GpuSample(at, g, total_bytes=80 * GIB, used_bytes=(10 + g) * GIB, free_bytes=GIB)
            for at in times
            for g in (0, 1)
        ),
        gpu_processes=tuple(
            GpuProcessSample(at, 0, pid, name, used_bytes=size * GIB)
            for at in times
            for pid, name, size in ((7, "VLLM::EngineCor", 8), (9, "python3", 2))
        ),
        processes=tuple(
            ProcessSample(at, pid, name=name, rss_bytes=GIB, ppid=1)
            for at in times
            for pid, name in ((7, "vllm"), (8, "cicc"))
        ),
        hosts=tuple(
            HostSample(
                at, mem_total_bytes=64 * GIB, mem_available_bytes=8 * GIB, cgroup_oom_kills=k
            )
            for at, k in zip(times, [0] * 19 + [2], strict=True)
        ),
    )
    facts = summarise(series)
    assert set(facts.gpus) == {0, 1}
    assert facts.gpus[1].last == 11 * GIB
    assert {holder.pid for holder in facts.holders} == {7, 9}
    assert facts.holder([9, 12]).used.last == 2 * GIB
    assert facts.holder([1]) is None
    assert [p.pid for p in facts.processes] == [7]
    assert [p.pid for p in facts.compilers] == [8]
    assert facts.oom_kills == 2
    assert facts.seconds == times[-1]
    assert facts.host_total_bytes == 64 * GIB


def test_an_empty_series_knows_nothing():
    facts = summarise(Series())
    assert facts.seconds == 0
    assert facts.available is None
    assert facts.holders == ()
