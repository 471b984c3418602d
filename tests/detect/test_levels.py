from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.config.detection import DetectConfig
from oomwatch.detect.levels import Level, Switch, held_families


def fed(switch: Switch, readings):
    """The changes, as (time, change)."""
    return [(at, change) for at, value in readings if (change := switch.feed(at, value))]


def steady(value: float | None, begin: int, end: int):
    return [(float(at), value) for at in range(begin, end)]


def test_it_counts_once_it_has_held():
    switch = Switch(Level("warn", 0.9, 0.8, 30))
    assert fed(switch, steady(0.95, 0, 30)) == []
    assert fed(switch, steady(0.95, 30, 60)) == [(30.0, "entered")]
    assert switch.on
    assert switch.since == 0.0


def test_between_the_two_thresholds_nothing_changes():
    switch = Switch(Level("warn", 0.9, 0.8, 10))
    assert fed(switch, steady(0.85, 0, 100)) == []
    fed(switch, steady(0.95, 100, 120))
    assert fed(switch, steady(0.85, 120, 300)) == []
    assert switch.on


def test_a_dip_starts_the_hold_over():
    switch = Switch(Level("warn", 0.9, 0.8, 10))
    readings = [*steady(0.95, 0, 9), (9.0, 0.5), *steady(0.95, 10, 30)]
    assert fed(switch, readings) == [(20.0, "entered")]


def test_what_is_not_known_neither_enters_nor_leaves_and_ends_a_hold():
    switch = Switch(Level("warn", 0.9, 0.8, 10))
    readings = [*steady(0.95, 0, 9), *steady(None, 9, 20), *steady(0.95, 20, 40)]
    assert fed(switch, readings) == [(30.0, "entered")]
    assert fed(switch, steady(None, 40, 400)) == []
    assert switch.on
    assert fed(switch, steady(0.1, 400, 420)) == [(410.0, "left")]


def test_silence_between_two_readings_is_no_hold():
    switch = Switch(Level("warn", 0.9, 0.8, 30))
    assert fed(switch, [(0.0, 0.95), (300.0, 0.95)]) == []
    assert fed(switch, [(301.0, 0.95)]) == [(301.0, "entered")]


def test_slow_readings_enter_too():
    switch = Switch(Level("warn", 0.9, 0.8, 30))
    assert fed(switch, [(0.0, 0.95), (60.0, 0.95), (120.0, 0.95)]) == [(120.0, "entered")]


def test_without_a_hold_one_reading_is_enough():
    switch = Switch(Level("warn", 1, 1, 0))
    assert fed(switch, [(5.0, 1.0), (6.0, 0.0)]) == [(5.0, "entered"), (6.0, "left")]


def test_flaps_are_counted_within_their_window():
    switch = Switch(Level("warn", 0.9, 0.8, 0))
    for minute in range(6):
        switch.feed(minute * 60.0, 0.95)
        switch.feed(minute * 60.0 + 30, 0.1)
    assert switch.flaps(330.0, 600) == 6
    assert switch.flaps(330.0, 100) == 2
    assert switch.flaps(5000.0, 600) == 0


def test_a_condition_that_flaps_is_held_while_it_is_off():
    rules = DetectConfig()
    switch = Switch(Level("warn", 0.9, 0.8, 0))
    held = []
    for minute in range(4):
        switch.feed(minute * 60.0, 0.95)
        switch.feed(minute * 60.0 + 30, 0.1)
        held.append(held_families({"kv": [switch]}, minute * 60.0 + 40, rules))
    assert held == [set(), set(), {"kv"}, {"kv"}]
    assert held_families({"kv": [switch]}, 3000.0, rules) == set()


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), max_size=200), st.integers(0, 20))
def test_changes_alternate_and_stay_bounded(values, hold):
    switch = Switch(Level("warn", 0.9, 0.8, hold))
    changes = [change for _, change in fed(switch, list(enumerate(values)))]
    assert changes[::2] == ["entered"] * len(changes[::2])
    assert changes[1::2] == ["left"] * len(changes[1::2])
    assert switch.on == (len(changes) % 2 == 1)
    assert len(switch._entries) <= 64
