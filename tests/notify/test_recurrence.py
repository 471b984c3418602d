"""What comes back, and how often it is worth a word."""

from __future__ import annotations

from example_notices import NOW, SETTINGS, an_incident

from oomwatch.notify.notes import recurrence_note
from oomwatch.notify.recurrence import History, Recurrence


def of(*spans, cause="kv_no_blocks"):
    """The history of incidents of one fingerprint, open and over at these minutes."""
    history = History(SETTINGS)
    incidents = []
    for number, (opened, closed) in enumerate(spans):
        incident = an_incident(
            id=f"inc-{number}",
            opened_at=NOW + opened * 60,
            closed_at=None if closed is None else NOW + closed * 60,
            cause=cause,
        )
        history.take(incident)
        incidents.append(incident)
    return history, incidents


def minutes(at):
    return None if at is None else (at - NOW) / 60


def test_the_first_of_its_kind_is_told_like_any_other():
    history, (incident,) = of((0, None))
    assert history.recurrence(incident) == Recurrence()


def test_what_is_back_within_the_cooldown_waits_until_that_is_over():
    history, (_, again) = of((0, 10), (12, None))
    found = history.recurrence(again)
    assert minutes(found.hold_until) == 15
    assert (found.count, found.flapping) == (2, False)
    assert recurrence_note(found, "en") == "It is back: 2 times in 12 min."
    assert recurrence_note(found, "zh") == "再次出现：12 分钟内第 2 次。"


def test_what_is_back_later_is_told_at_once_and_says_so():
    history, (_, again) = of((0, 10), (17, None))
    found = history.recurrence(again)
    assert found.hold_until is None
    assert recurrence_note(found, "en") == "It is back: 2 times in 17 min."


def test_what_is_back_after_a_long_quiet_is_new():
    # The pace of flapping: an hour by four.
    history, (_, again) = of((0, 10), (26, None))
    assert history.recurrence(again) == Recurrence()


def test_another_cause_or_fingerprint_is_something_else():
    history, (first, _) = of((0, 1), (2, 3))
    for changes in ({"cause": "shm_too_small"}, {"fingerprint": "embed/failure"}):
        other = an_incident(id="inc-9", opened_at=NOW + 240, **changes)
        history.take(other)
        assert history.recurrence(other) == Recurrence()
    assert history.recurrence(first) == Recurrence()


def test_the_one_that_makes_it_flapping_is_told_at_once_and_those_after_it_wait():
    history, incidents = of((0, 2), (4, 6), (8, 10), (11, 12), (13, None))
    fourth, fifth = (history.recurrence(each) for each in incidents[3:])
    assert fourth.flapping
    assert fourth.hold_until is None
    note = recurrence_note(fourth, "en")
    assert note.startswith("It comes and goes, 4 times in 11 min;")
    assert "quiet for 15 min" in note
    assert "平静 15 分钟" in recurrence_note(fourth, "zh")
    assert recurrence_note(Recurrence(), "en") is None
    assert fifth.flapping
    assert minutes(fifth.hold_until) == 13 + 15


def test_the_end_of_flapping_is_told_when_it_has_been_quiet():
    history, incidents = of((0, 2), (4, 6), (8, 10), (11, 12), (13, None))
    assert history.recurrence(incidents[3]).comes_back
    history, incidents = of((0, 2), (4, 6), (8, 10), (11, 12), (13, 14))
    found = history.recurrence(incidents[3])
    assert not found.comes_back
    assert minutes(found.end_hold_until) == 14 + 15
    # What was told before it was flapping ends when it ends.
    assert history.recurrence(incidents[2]).end_hold_until is None


def test_slow_repeats_are_no_flapping():
    """One every 16 minutes is less than four an hour."""
    history, incidents = of(*((n * 17, n * 17 + 1) for n in range(6)))
    assert all(history.recurrence(each) == Recurrence() for each in incidents)


def test_one_that_was_never_taken_is_new():
    assert History(SETTINGS).recurrence(an_incident()) == Recurrence()


def test_it_stays_small():
    history = History(SETTINGS)
    for number in range(5000):
        history.take(an_incident(id=f"inc-{number}", opened_at=NOW + number))
    assert len(history._seen) <= 1024
    assert "inc-4999" in history._seen
