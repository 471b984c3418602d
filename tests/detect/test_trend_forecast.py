# ruff: noqa: S311 - chance is what is tested, not a secret

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.detect.forecast import forecast
from oomwatch.detect.track import Track

WINDOW, LEAST, HORIZON, EVERY = 600.0, 90.0, 600.0, 15


def warnings(values, limit=1.0, *, begin=0.0):
    """Times at which two forecasts in a row say that the limit is near, with the second of them."""
    track, before, found = Track(WINDOW, LEAST, 0.9), False, []
    for second, value in enumerate(values):
        now = begin + second
        track.add(now, value)
        if second % EVERY == 0:
            ahead = track.forecast(now, limit)
            is_near = ahead is not None and ahead.eta_seconds <= HORIZON
            if is_near and before:
                found.append((second, ahead))
            before = is_near
    return found


def clipped(value: float) -> float:
    return min(0.999, max(0.0, value))


# ------------------------------------------------------------------------------- what must warn
@settings(max_examples=25, deadline=None)
@given(
    st.floats(0.0, 0.5),
    st.floats(1 / 3000, 1 / 400),
    st.floats(0.0, 0.004),
    st.integers(120, 590),
    st.integers(0, 10**6),
)
def test_the_band_of_linear_growth_holds_the_truth(level, slope, noise, seen, seed):
    """Against the first reading that really is at the limit, noise and all."""
    chance = random.Random(seed)
    values, second = [], 0
    while not values or values[-1] < 1:
        values.append(level + slope * second + chance.gauss(0, noise))
        second += 1
    points = [(float(at), value) for at, value in enumerate(values[:seen])]
    if len(points) >= len(values) - 1:
        return
    ahead = forecast(points, 1.0, least_seconds=LEAST, confidence=0.9)
    truth = len(values) - len(points)
    if truth > 3 * seen:
        return  # too far off to be told
    if ahead is None:
        assert noise > slope * seen / 40  # only noise may hide it
        return
    room = 0.1 * truth + 4 * noise / slope + 2
    assert ahead.eta_low_seconds - room <= truth <= ahead.eta_high_seconds + room
    assert ahead.eta_low_seconds <= ahead.eta_seconds <= ahead.eta_high_seconds


def test_without_noise_the_time_is_exact():
    points = [(float(second), second / 600) for second in range(300)]
    ahead = forecast(points, 1.0, least_seconds=LEAST)
    assert ahead is not None
    assert ahead.eta_seconds == pytest.approx(301)
    assert ahead.slope_per_second == pytest.approx(1 / 600)
    assert ahead.level == pytest.approx(299 / 600)


def test_a_pool_that_fills_in_ten_minutes_is_told_three_minutes_before():
    first, ahead = warnings([second / 600 for second in range(600)])[0]
    assert first <= 600 - 180
    assert ahead.eta_seconds == pytest.approx(600 - first, abs=5)


@pytest.mark.parametrize("fill", [240, 400, 900])
def test_others_too_with_noise(fill):
    chance = random.Random(fill)
    values = [clipped(second / fill + chance.gauss(0, 0.01)) for second in range(fill)]
    assert warnings(values)[0][0] <= 0.7 * fill


@pytest.mark.parametrize("period", [20, 60, 120])
def test_a_leak_under_a_sawtooth_is_told_before_it_reaches_the_limit(period):
    values = [
        0.2 + 0.65 * second / 1800 + 0.15 * (second % period) / period for second in range(1800)
    ]
    found = [(at, ahead) for at, ahead in warnings(values) if at > 2 * period]
    assert found
    assert found[0][0] < 1800 - 180
    # The teeth reach the limit when the leak has eaten what they leave.
    end = next(at for at in range(100_000) if 0.2 + 0.65 * at / 1800 + 0.15 >= 1)
    assert found[0][1].eta_seconds == pytest.approx(end - found[0][0], rel=0.25)


@pytest.mark.parametrize("length", [5, 6, 7, 8, 10, 12, 15])
@pytest.mark.parametrize("idle", [0, 4, 8, 11])
def test_load_that_climbs_by_steps_is_told_a_minute_before(length, idle):
    """One request more at once every 20 s, batch after batch."""
    values = [0.0] * idle + [
        0.09 * (1 + second // 20) * (second % length) / (length - 1) for second in range(220)
    ]
    full = next(at for at, value in enumerate(values) if value >= 0.9)
    first, ahead = warnings(values[:full])[0]
    assert first <= full - 60
    assert ahead.eta_seconds == pytest.approx(full - first, abs=45)


# ------------------------------------------------------------------------------- what must not
@pytest.mark.parametrize("period", [7, 20, 60, 120, 300, 600, 900, 1700])
def test_teeth_that_were_seen_once_never_warn(period):
    values = [0.2 + 0.75 * (second % period) / period for second in range(4 * period + 1200)]
    late = [at for at, _ in warnings(values) if at > 1.1 * period]
    assert late == []


@pytest.mark.parametrize("period", [7, 20, 60, 120, 300, 600, 900, 1700])
def test_waves_that_were_seen_once_never_warn(period):
    values = [0.5 + 0.45 * math.sin(2 * math.pi * at / period) for at in range(4 * period + 1200)]
    late = [at for at, _ in warnings(values) if at > 1.3 * period]
    assert late == []


@pytest.mark.parametrize("tau", [5, 30, 60, 120, 300])
@pytest.mark.parametrize("level", [0.5, 0.9])
def test_a_warm_up_that_flattens_never_warns(tau, level):
    assert warnings([level * (1 - math.exp(-at / tau)) for at in range(1800)]) == []


@pytest.mark.parametrize("tau", [30, 120])
def test_nor_with_noise(tau):
    chance = random.Random(7)
    values = [0.7 * (1 - math.exp(-at / tau)) + chance.gauss(0, 0.005) for at in range(1800)]
    assert len(warnings(values)) <= 2


@pytest.mark.parametrize(
    "values", [[0.97] * 1200, [0.0] * 1200, [0.9 - at / 3000 for at in range(1200)]]
)
def test_what_does_not_rise_never_warns(values):
    assert warnings(values) == []


@pytest.mark.parametrize("memory", [0.0, 0.5, 0.9, 0.99])
def test_noise_of_any_colour_hardly_ever_warns(memory):
    wrong = looks = 0
    for seed in range(3):
        chance, level = random.Random(seed), 0.0
        values = []
        for _ in range(1200):
            level = memory * level + chance.gauss(0, 0.1 * math.sqrt(1 - memory**2))
            values.append(clipped(0.6 + level))
        wrong += len(warnings(values))
        looks += len(values) // EVERY
    assert wrong / looks < 0.02


def test_a_short_or_stale_course_says_nothing():
    track = Track(WINDOW, LEAST, 0.9)
    for second in range(80):
        track.add(float(second), second / 200)
    assert track.forecast(79.0, 1.0) is None
    for second in range(80, 150):
        track.add(float(second), second / 200)
    ahead = track.forecast(149.0, 1.0)
    assert ahead is not None
    assert ahead.eta_seconds == pytest.approx(51)
    later = track.forecast(169.0, 1.0)
    assert later is not None
    assert later.eta_seconds == pytest.approx(31)
    assert track.forecast(149.0 + LEAST + 1, 1.0) is None


def test_a_tooth_whose_beginning_was_not_seen_counts_as_one():
    # It ends at 0.95, the next rises to 0.93: no more than the load has done before.
    values = [0.93, 0.95] + [0.2 + 0.73 * at / 600 for at in range(600)]
    points = [(float(at), value) for at, value in enumerate(values)]
    assert forecast(points, 1.0, least_seconds=LEAST) is None


def test_a_time_that_has_passed_is_no_forecast():
    # Peaks that climbed to 0.99, and since then another minute of the same.
    peaks = [0.6 + 0.013 * (at // 10) if at % 10 == 9 else 0.3 for at in range(300)]
    points = [(float(at), value) for at, value in enumerate([*peaks, *[0.3] * 60])]
    assert forecast(points[:300], 1.0, least_seconds=LEAST) is not None
    assert forecast(points, 1.0, least_seconds=LEAST) is None


# ------------------------------------------------------------------------------- invariance
SERIES = st.lists(st.integers(0, 1000), min_size=8, max_size=120)


@settings(max_examples=60, deadline=None)
@given(
    SERIES, st.sampled_from([2.0**-20, 0.5, 8.0, 2.0**30]), st.sampled_from([0.0, 1024.0, -4096.0])
)
def test_units_and_zeros_do_not_matter(values, scale, shift):
    # Powers of two: the arithmetic is then the same to the last bit but for the shift.
    points = [(float(at * 10), value / 1024) for at, value in enumerate(values)]
    other = [(at, (value + shift) * scale) for at, value in points]
    one = forecast(points, 1.0, least_seconds=LEAST)
    two = forecast(other, (1.0 + shift) * scale, least_seconds=LEAST)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert two.eta_seconds == pytest.approx(one.eta_seconds, rel=1e-6, abs=1e-6)
        assert two.slope_per_second == pytest.approx(one.slope_per_second * scale)


@settings(max_examples=25, deadline=None)
@given(SERIES, st.integers(-(2**30), 2**30))
def test_the_beginning_of_time_does_not_matter(values, shift):
    points = [(float(at * 10), value / 1024) for at, value in enumerate(values)]
    other = [(at + shift, value) for at, value in points]
    one = forecast(points, 1.0, least_seconds=LEAST)
    two = forecast(other, 1.0, least_seconds=LEAST)
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert two.eta_seconds == pytest.approx(one.eta_seconds)


# ------------------------------------------------------------------------------- the track
def test_the_track_is_bounded_and_forgets():
    track = Track(WINDOW, LEAST, 0.9)
    for tick in range(60_000):
        track.add(tick / 10, 0.5)
    assert len(track) <= 4096
    assert len(track._peaks) <= 360
    track.clear()
    assert len(track) == 0
    assert track.last is None


def test_the_pace_is_that_of_the_last_readings():
    track = Track(WINDOW, LEAST, 0.9)
    assert track.pace(10) is None
    for second in range(100):
        track.add(float(second), 5.0)
    assert track.pace(10) is None
    for second in range(100, 110):
        track.add(float(second), 5.0 + 2 * (second - 99))
    assert track.pace(10) == pytest.approx(2.0)
    track.add(110.0, 1.0)
    assert track.pace(10) is None
