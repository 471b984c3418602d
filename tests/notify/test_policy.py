"""What is to be told, from how an incident stands and what was told of it."""

from __future__ import annotations

import dataclasses

import pytest
from example_notices import NOW, a_sink, an_incident

from oomwatch.notify.changes import change_of
from oomwatch.notify.notice import RemedyNotice
from oomwatch.notify.policy import (
    Around,
    Drop,
    Hold,
    Tell,
    Told,
    decide,
    message_id,
)
from oomwatch.notify.recurrence import Recurrence
from oomwatch.records import Silence

WARNING = an_incident(severity="warning")
CLOSED = an_incident(closed_at=NOW + 60)
NIGHT = "00:00-23:59"
SILENCE = Silence("sil-1", NOW, NOW + 600, "work")


def known(incident=None, **changes):
    """What a receiver knows that was told of an incident."""
    return Told(opened=True, change=change_of(incident or an_incident()), **changes)


def asked(incident, told=None, sink=None, now=NOW, **around):
    return decide(incident, told or Told(), sink or a_sink(), now, Around(**around))


# ---------------------------------------------------------------- the first message
def test_a_new_incident_is_told():
    assert asked(an_incident()) == Tell("opened")


def test_one_that_is_not_for_the_receiver_is_not():
    sink = a_sink(min_severity="critical")
    assert asked(WARNING, sink=sink) is None
    assert isinstance(asked(WARNING, Told(held="quiet_hours"), sink), Drop)


def test_a_silence_holds_it_and_its_end_lets_it_go():
    assert asked(an_incident(), silence=SILENCE) == Hold("opened", "silenced", NOW + 600)
    assert asked(an_incident(), Told(held="silenced")) == Tell("opened")
    assert isinstance(asked(CLOSED, Told(held="silenced")), Drop)


def test_what_came_back_waits_for_the_cooldown_and_says_so_then():
    again = Recurrence(2, hold_until=NOW + 60, span_seconds=90)
    assert asked(WARNING, recurrence=again) == Hold("opened", "cooldown", NOW + 60)
    assert asked(WARNING, Told(held="cooldown"), now=NOW + 60, recurrence=again) == Tell(
        "opened", again
    )
    # Its end was told: the last word must not be that an engine serves which is down again.
    assert asked(an_incident(), recurrence=again) == Tell("opened", again)
    assert isinstance(asked(CLOSED, Told(held="cooldown"), recurrence=again), Drop)


def test_flapping_is_named_as_such():
    again = Recurrence(5, hold_until=NOW + 60, flapping=True)
    assert asked(an_incident(), recurrence=again) == Hold("opened", "flapping", NOW + 60)


# ---------------------------------------------------------------- escalation
def test_an_escalation_waits_and_only_comes_if_nobody_has_acknowledged():
    sink = a_sink(escalate_after_seconds=900)
    assert asked(an_incident(), sink=sink) == Hold("escalated", "escalation", NOW + 900)
    assert asked(an_incident(), sink=sink, now=NOW + 900) == Tell("escalated")
    assert asked(an_incident(), sink=sink, now=NOW + 900, acknowledged=True) is None
    # The clock was set back a day: it is not waited for.
    assert asked(an_incident(), sink=sink, now=NOW - 86_400) == Tell("escalated")
    held = Told(held="escalation")
    assert isinstance(asked(an_incident(), held, sink, acknowledged=True), Drop)
    assert isinstance(asked(CLOSED, held, sink, NOW + 900), Drop)
    # Whom it was escalated to is told the end of it.
    assert asked(CLOSED, known(), sink, NOW + 999) == Tell("resolved")


# ---------------------------------------------------------------- quiet hours
def test_at_night_only_what_is_critical_is_told():
    sink = a_sink(quiet_hours=NIGHT)
    decision = asked(WARNING, sink=sink)
    assert isinstance(decision, Hold)
    assert decision.reason == "quiet_hours"
    assert decision.until > NOW
    assert asked(an_incident(), sink=sink) == Tell("opened")


def test_what_came_and_went_at_night_is_told_in_the_morning_both():
    held = Told(held="quiet_hours")
    over = an_incident(severity="warning", closed_at=NOW + 60)
    assert isinstance(asked(over, held, a_sink(quiet_hours=NIGHT)), Hold)
    assert asked(over, held) == Tell("opened")
    assert asked(over, known(over)) == Tell("resolved")


# ---------------------------------------------------------------- updates
@pytest.mark.parametrize(
    "change",
    [
        {"severity": "warning"},
        {"incident_class": "irregular"},
        {"cause": "shm_too_small"},
        {"remedies": (RemedyNotice("x", ("--max-num-seqs 64",)),)},
        {"remedies": ()},
        {"restarts": 5},
    ],
)
def test_what_a_reader_would_act_upon_is_told_again(change):
    assert asked(an_incident(**change), known()) == Tell("updated")


@pytest.mark.parametrize(
    "change",
    [
        {"headline": "x"},
        {"confidence": 0.3},
        {"evidence": ("a line",)},
        {"memory": "GPU 0"},
        {"note": "x"},
        {"remedies": (an_incident().remedies[0], RemedyNotice("y"))},
    ],
)
def test_a_second_look_that_finds_the_same_is_not(change):
    assert asked(an_incident(**change), known()) is None


def test_updates_obey_silences_and_the_night():
    changed = an_incident(severity="warning")
    assert asked(changed, known(), silence=SILENCE) == Hold("updated", "silenced", NOW + 600)
    decision = asked(changed, known(), a_sink(quiet_hours=NIGHT))
    assert (decision.kind, decision.reason) == ("updated", "quiet_hours")


def test_who_was_told_of_it_hears_of_its_changes_whatever_the_filters_say_now():
    sink = a_sink(causes=("kv_no_blocks",))
    other = an_incident(cause="shm_too_small")
    assert asked(other, known(), sink) == Tell("updated")
    assert asked(dataclasses.replace(other, closed_at=NOW), known(), sink) == Tell("resolved")


# ---------------------------------------------------------------- the end
def test_the_end_is_told_once_and_only_to_who_knows_of_it():
    assert asked(CLOSED) is None
    assert asked(CLOSED, known()) == Tell("resolved")
    assert asked(CLOSED, known(resolved=True)) is None
    assert asked(CLOSED, known(), a_sink(send_resolved=False)) is None


def test_a_silence_does_not_keep_the_end_from_who_knows_of_it():
    assert asked(CLOSED, known(), silence=SILENCE) == Tell("resolved")


def test_the_end_of_what_comes_and_goes_waits_for_quiet():
    assert asked(CLOSED, known(), recurrence=Recurrence(5, comes_back=True)) == Hold(
        "resolved", "flapping"
    )
    quiet = Recurrence(5, end_hold_until=NOW + 60, flapping=True)
    assert asked(CLOSED, known(), recurrence=quiet) == Hold("resolved", "flapping", NOW + 60)
    assert asked(CLOSED, known(), now=NOW + 60, recurrence=quiet) == Tell("resolved")


def test_after_a_first_message_that_failed_nothing_follows():
    failed = Told(failed=True)
    for incident in (an_incident(), CLOSED, an_incident(cause="x")):
        assert asked(incident, failed) is None


# ---------------------------------------------------------------- ids
def test_the_same_change_has_the_same_id_and_another_one_another():
    parts = ("inc-1", "oncall", "updated", 1, "abc")
    assert message_id(*parts) == message_id(*parts)
    others = [message_id(*parts[:n], "x", *parts[n + 1 :]) for n in range(len(parts))]
    assert len({message_id(*parts), *others}) == len(parts) + 1
    assert message_id("a", "bc") != message_id("ab", "c")
