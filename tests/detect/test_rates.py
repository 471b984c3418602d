from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.detect.rates import WindowedPeak, WindowedRate


def test_it_is_not_known_before_half_of_the_window():
    rate = WindowedRate(60)
    assert [rate.feed(float(at), at * 2) for at in range(30)] == [None] * 30
    assert rate.feed(30.0, 60) == 2.0


def test_only_the_window_counts():
    rate = WindowedRate(60)
    for at in range(300):
        rate.feed(float(at), 100)
    for at in range(300, 330):
        rate.feed(float(at), 100 + (at - 299))
    assert rate.feed(330.0, 130) == pytest.approx(30 / 60, rel=0.05)
    for at in range(331, 500):
        last = rate.feed(float(at), 130)
    assert last == 0.0


def test_the_count_of_a_lifetime_is_no_rate():
    rate = WindowedRate(60)
    for at in range(120):
        last = rate.feed(float(at), 1_000_000)
    assert last == 0.0


def test_a_counter_that_was_restarted_goes_on_from_zero():
    rate = WindowedRate(60)
    for at in range(60):
        rate.feed(float(at), 5000 + at)
    for at in range(60, 120):
        last = rate.feed(float(at), at - 60)
    assert last == pytest.approx(1.0, rel=0.05)


def test_absent_is_not_zero():
    rate = WindowedRate(60)
    for at in range(60):
        rate.feed(float(at), 10 * at)
    assert rate.feed(60.0, None) is None
    # A page without the counter in between is neither a reset nor a rise from nothing.
    assert rate.feed(61.0, 610) == pytest.approx(10.0)


def test_after_a_long_gap_it_is_the_mean_over_it():
    rate = WindowedRate(60)
    rate.feed(0.0, 0)
    assert rate.feed(600.0, 600) == 1.0


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.integers(0, 10**9)), max_size=300), st.floats(0.05, 30))
def test_never_negative_and_bounded(values, step):
    rate = WindowedRate(60)
    for index, value in enumerate(values):
        found = rate.feed(index * step, value)
        assert found is None or found >= 0
    assert len(rate._points) <= 60 / step + 3


@given(st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 9)), min_size=1, max_size=60))
def test_the_peak_is_the_highest_of_the_window(readings):
    peak, now, seen = WindowedPeak(15), 0.0, []
    for step, value in readings:
        now += step
        seen.append((now, value))
        assert peak.feed(now, value) == max(v for at, v in seen if now - at <= 15)
