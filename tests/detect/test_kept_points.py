"""Points kept as numbers behave as a bounded queue of pairs does."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomwatch.detect.points import Points

NUMBERS = st.floats(allow_nan=False)
STEPS = st.lists(st.one_of(st.none(), st.just("clear"), st.tuples(NUMBERS, NUMBERS)), max_size=60)


@given(STEPS, st.integers(1, 40))
def test_as_a_deque(steps, most):
    points, known = Points(most), collections.deque(maxlen=most)
    for step in steps:
        if step is None:
            if known:
                known.popleft()
                points.popleft()
        elif step == "clear":
            known.clear()
            points.clear()
        else:
            known.append(step)
            points.append(*step)
        assert list(points) == list(known)
        assert len(points) == len(known)
        assert bool(points) == bool(known)
        assert [points[n] for n in range(-len(known), len(known))] == list(known) * 2
        assert points[1:-1] == list(known)[1:-1]


def test_a_long_queue_takes_room_for_what_it_holds():
    points = Points(10_000)
    for n in range(100_000):
        points.append(n, -n)
        if len(points) > 600:
            points.popleft()
    assert points[0] == (99_400, -99_400)
    assert points[-1] == (99_999, -99_999)
    assert len(points._times) <= 2 * 600 + 2


def test_the_last_value_is_raised_and_never_lowered():
    points = Points(3)
    points.append(1.0, 5.0)
    points.raise_last(4.0)
    assert points[-1] == (1.0, 5.0)
    points.raise_last(6.0)
    assert points[-1] == (1.0, 6.0)


def test_what_is_not_there_is_an_error():
    points = Points(3)
    for index in (0, -1):
        with pytest.raises(IndexError):
            points[index]
    with pytest.raises(IndexError):
        points.popleft()
