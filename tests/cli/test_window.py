"""Lines from a span of time; those without a time go with their neighbours."""

import pytest

from oomwatch.cli.window import Window
from oomwatch.records import LogLine

TIMES = (None, 10, None, 20, None, 30, None)


def lines(times=TIMES):
    return [LogLine("x.log", n, f"line {n}", at) for n, at in enumerate(times)]


@pytest.mark.parametrize(
    ("since", "until", "numbers"),
    [
        (None, 15, [0, 1, 2]),
        (15, None, [3, 4, 5, 6]),
        (15, 25, [3, 4]),
        (10, 30, [0, 1, 2, 3, 4, 5, 6]),
        (31, None, []),
        (None, 9, []),
    ],
)
def test_lines_in_the_window(since, until, numbers):
    assert [line.number for line in Window(lines(), since, until)] == numbers


def test_what_was_missed_is_told():
    window = Window(lines(), 31, None)
    assert not list(window)
    assert "1970-01-01T00:00:10.000Z to 1970-01-01T00:00:30.000Z" in window.missed


def test_a_log_without_times_is_taken_whole():
    window = Window(lines([None] * 20_000), 31, None)
    assert len(list(window)) == 20_000
