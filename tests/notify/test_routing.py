"""Filters, silences and quiet hours."""

from __future__ import annotations

import datetime
import os
import time

import pytest
from example_notices import NOW, a_sink, an_incident

from oomwatch.notify.routing import is_meant, quiet_until, silenced_by
from oomwatch.records import Silence


@pytest.mark.parametrize(
    ("filters", "fits"),
    [
        ({}, True),
        ({"min_severity": "critical"}, True),
        ({"classes": ("startup", "irregular")}, True),
        ({"classes": ("irregular",)}, False),
        ({"causes": ("kv_no_blocks",)}, True),
        ({"causes": ("kv_saturation",)}, False),
        ({"engines": ("ch*",)}, True),
        ({"engines": ("CH*", "x")}, False),
        ({"hosts": ("gpu-?",)}, True),
        ({"hosts": ("cpu-*",)}, False),
        ({"labels": ("team=ch*",)}, True),
        ({"labels": ("team=chat", "site=*")}, False),
        ({"classes": ("startup",), "engines": ("x",)}, False),
    ],
)
def test_all_filters_that_are_given_must_match(filters, fits):
    assert is_meant(a_sink(**filters), an_incident()) is fits


@pytest.mark.parametrize("least", ["critical", "warning", "info"])
@pytest.mark.parametrize("severity", ["critical", "warning", "info"])
def test_the_least_severity_is_told(least, severity):
    order = ["info", "warning", "critical"]
    told = is_meant(a_sink(min_severity=least), an_incident(severity=severity))
    assert told is (order.index(severity) >= order.index(least))


def test_what_is_not_known_matches_no_filter():
    unknown = an_incident(incident_class=None, cause=None, engine_id=None, labels={})
    assert is_meant(a_sink(), unknown)
    for name, value in (
        ("classes", "startup"), ("causes", "x"), ("engines", "*"), ("labels", "a=*"),
    ):  # fmt: skip
        assert not is_meant(a_sink(**{name: (value,)}), unknown)


def silence(**matchers):
    return Silence("sil-1", NOW - 10, NOW + 10, "work", **matchers)


@pytest.mark.parametrize(
    ("matchers", "holds"),
    [
        ({"engine": "chat"}, True),
        ({"engine": "ch*", "cause": "kv_*"}, True),
        ({"engine": "chat", "cause": "host_*"}, False),
        ({"incident_class": "startup"}, True),
        ({"host": "gpu-2"}, False),
        ({"labels": ("team=chat",)}, True),
        ({"labels": ("team=chat", "site=a")}, False),
    ],
)
def test_a_silence_holds_what_all_of_it_matches(matchers, holds):
    assert (silenced_by([silence(**matchers)], an_incident(), NOW) is not None) is holds


def test_a_silence_has_an_end_and_the_longest_counts():
    short, long = silence(), Silence("sil-2", NOW - 10, NOW + 99, "work")
    assert silenced_by([short, long], an_incident(), NOW) is long
    assert silenced_by([short], an_incident(), NOW + 10) is None
    # The clock was set back since it began.
    assert silenced_by([short], an_incident(), NOW - 3600) is short


@pytest.fixture
def berlin(monkeypatch):
    """A place where clocks are set twice a year."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    os.environ.pop("TZ", None)
    monkeypatch.undo()
    time.tzset()


def at(text):
    return datetime.datetime.fromisoformat(text).timestamp()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("span", "now", "until"),
    [
        ("22:00-07:00", "2026-01-10 21:59", None),
        ("22:00-07:00", "2026-01-10 22:00", "2026-01-11 07:00"),
        ("22:00-07:00", "2026-01-11 06:59:59", "2026-01-11 07:00"),
        ("22:00-07:00", "2026-01-11 07:00", None),
        ("22:00-07:00", "2026-12-31 23:00", "2027-01-01 07:00"),
        ("12:00-13:30", "2026-01-10 12:30", "2026-01-10 13:30"),
        ("12:00-13:30", "2026-01-10 13:30", None),
        ("00:00-00:00", "2026-01-10 00:00", None),
        (None, "2026-01-10 00:00", None),
        # A night of 23 hours, and one of 25.
        ("22:00-07:00", "2026-03-28 23:00", "2026-03-29 07:00"),
        ("22:00-07:00", "2026-10-24 23:00", "2026-10-25 07:00"),
    ],
)
def test_quiet_hours_are_those_of_the_clock_on_the_wall(span, now, until):
    assert quiet_until(span, at(now)) == (None if until is None else at(until))


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "until"),
    [
        ("2026-10-25T00:02+00:00", "2026-10-25T01:30+00:00"),  # 02:02, of which there are two
        ("2026-10-25T01:02+00:00", "2026-10-25T01:30+00:00"),
        ("2026-03-29T00:50+00:00", "2026-03-29T01:30+00:00"),  # there is no 02:30 that night
    ],
)
@pytest.mark.parametrize("is_summer", [0, 1])
def test_quiet_hours_do_not_end_before_now(now, until, is_summer):
    time.mktime((2026, 10, 24, 21, 0, 0, 0, 0, is_summer))  # of which some libraries make a guess
    assert quiet_until("22:00-02:30", at(now)) == at(until)
