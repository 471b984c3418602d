"""The policy applied over time and restarts: what is told, held, renewed and let go."""

from __future__ import annotations

import dataclasses

import pytest
from example_notices import NOW, SETTINGS, a_sink, an_incident
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.notify.changes import change_note, change_of
from oomwatch.notify.grouping import grouped_message
from oomwatch.notify.ledger import Ledger
from oomwatch.notify.notice import RemedyNotice, notice_from_json
from oomwatch.notify.outbox import Outbox
from oomwatch.notify.text import subject, text_body
from oomwatch.records import Silence


class Told:
    """A ledger with one receiver that takes everything at once, unless `down`."""

    def __init__(self, sink=None, rows=()):
        self.sink = sink or a_sink()
        self.down = False
        self.sent = []
        self.stored = {row.id: row for row in rows}
        self.ledger = Ledger(SETTINGS, self._replace)
        self.ledger.outbox = Outbox(rows)

    def _replace(self, _sink, old_id, _row):
        return self.down and old_id not in self.tried()

    def tried(self):
        return {row.id for row in self.stored.values() if row.attempts}

    def at(self, minutes, incident):
        """How it stands, so many minutes after the beginning."""
        now = NOW + minutes * 60
        self.ledger.history.take(incident)
        changes = self.ledger.reconcile(incident, self.sink, now)
        for change in changes:
            self.stored[change.row.id] = change.row
            if change.to_send and not self.down:
                self.deliver(change.row)
        return [(c.row.kind, c.row.state) for c in changes]

    def deliver(self, row):
        notice = notice_from_json(row.notice)
        self.sent.append((row.kind, notice.note))
        done = dataclasses.replace(row, state="delivered", notice=None, attempts=1)
        self.stored[row.id] = done
        self.ledger.outbox.put(done)

    def restarted(self):
        """The same after the agent was killed: only what is in the store is known."""
        again = Told(self.sink, self.stored.values())
        again.sent = self.sent
        again.ledger.history = self.ledger.history
        return again

    @property
    def kinds(self):
        return [kind for kind, _ in self.sent]


def over(incident, minutes):
    return dataclasses.replace(incident, closed_at=NOW + minutes * 60)


def test_an_incident_is_told_changed_and_over_and_each_but_once():
    told, incident = Told(), an_incident()
    for restart in (False, True):
        told = told.restarted() if restart else told
        told.at(0, incident)
    changed = dataclasses.replace(incident, cause="shm_too_small")
    told.at(1, changed)
    told = told.restarted()
    told.at(2, changed)
    told.at(3, over(changed, 3))
    told = told.restarted()
    told.at(4, over(changed, 3))
    assert told.kinds == ["opened", "updated", "resolved"]


def test_what_goes_there_and_back_is_told_each_time_under_another_id():
    told, incident = Told(), an_incident()
    other = dataclasses.replace(incident, cause="shm_too_small")
    for minute, each in enumerate((incident, other, incident, other)):
        told.at(minute, each)
    assert told.kinds == ["opened", "updated", "updated", "updated"]
    assert len(told.stored) == 4


def test_what_nobody_has_seen_yet_is_renewed_rather_than_followed():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    newer = dataclasses.replace(incident, cause="shm_too_small", headline="newer")
    assert told.at(1, newer) == [("opened", "waiting")]
    (row,) = told.stored.values()
    assert notice_from_json(row.notice).incidents == (newer,)
    assert notice_from_json(row.notice).id == row.id


def test_what_may_have_arrived_is_followed_and_only_the_newest_update_waits():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    (row,) = told.stored.values()
    tried = dataclasses.replace(row, attempts=1)
    told.stored[row.id] = tried
    told.ledger.outbox.put(tried)
    assert told.at(1, dataclasses.replace(incident, cause="a_b")) == [("updated", "waiting")]
    changed = told.at(2, dataclasses.replace(incident, cause="c_d"))
    assert changed == [("updated", "dropped"), ("updated", "waiting")]
    assert told.at(3, over(dataclasses.replace(incident, cause="c_d"), 3)) == [
        ("updated", "dropped"),
        ("resolved", "waiting"),
    ]


def test_what_is_held_is_stored_once_and_let_go():
    told = Told(a_sink(quiet_hours="00:00-23:59"))
    incident = an_incident(severity="warning")
    assert told.at(0, incident) == [("opened", "held")]
    assert told.at(1, incident) == []
    told = told.restarted()
    assert told.at(2, incident) == []
    assert not told.ledger.is_told("inc-1", NOW, {"oncall"}, NOW)
    (row,) = told.stored.values()
    assert row.reason == "quiet_hours"
    assert told.ledger.wait_seconds(row.due_at) == 0
    assert told.ledger.due(row.due_at) == {"inc-1"}
    assert told.ledger.due(row.due_at - 1) == set()
    told.sink = a_sink()
    told.at(60, over(incident, 30))
    assert told.kinds == ["opened", "resolved"]
    assert told.ledger.is_told("inc-1", NOW, {"oncall"}, NOW)


def test_a_silence_that_ends_tells_what_is_still_open():
    told, incident = Told(), an_incident()
    told.ledger.silences = (Silence("sil-1", NOW, NOW + 600, "work", engine="chat"),)
    assert told.at(0, incident) == [("opened", "held")]
    assert told.at(9.9, incident) == []
    told.at(10, incident)
    assert told.kinds == ["opened"]
    told = Told()
    told.ledger.silences = (Silence("sil-1", NOW, NOW + 600, "work", engine="chat"),)
    told.at(0, incident)
    assert told.at(5, over(incident, 5)) == [("opened", "dropped")]
    told.at(20, over(incident, 5))
    assert told.kinds == []


def test_an_update_that_was_held_and_is_not_true_any_more_is_dropped():
    told, incident = Told(), an_incident()
    told.at(0, incident)
    told.ledger.silences = (Silence("sil-1", NOW, NOW + 600, "work"),)
    assert told.at(1, dataclasses.replace(incident, cause="a_b")) == [("updated", "held")]
    assert told.at(2, incident) == [("updated", "dropped")]
    assert told.kinds == ["opened"]


def test_flapping_is_told_once_and_when_it_is_over():
    told = Told()
    pressure = an_incident(severity="warning")
    spans = [(0, 2), (4, 6), (8, 10), (12, 14), (16, 18), (20, 22)]
    for number, (begin, end) in enumerate(spans):
        incident = dataclasses.replace(pressure, id=f"inc-{number}", opened_at=NOW + begin * 60)
        told.at(begin, incident)
        told.at(end, over(incident, end))
        for earlier in told.ledger.held_for_others():
            place = int(earlier.removeprefix("inc-"))
            first = dataclasses.replace(pressure, id=earlier, opened_at=NOW + spans[place][0] * 60)
            told.at(end, over(first, spans[place][1]))
    # The first as ever; two within the cooldown; the fourth makes it flapping.
    assert told.kinds == ["opened", "resolved", "opened"]
    assert told.sent[-1][1].startswith("It comes and goes, 4 times in 12 min")
    fourth = over(dataclasses.replace(pressure, id="inc-3", opened_at=NOW + 12 * 60), 14)
    told.at(36, fourth)
    assert told.kinds[-1] == "opened"
    told.at(22 + 15, fourth)
    assert told.kinds == ["opened", "resolved", "opened", "resolved"]


def test_what_is_back_and_stays_is_told_after_the_cooldown():
    told = Told()
    first = an_incident(severity="warning")
    told.at(0, first)
    told.at(1, over(first, 1))
    back = dataclasses.replace(first, id="inc-2", opened_at=NOW + 120)
    assert told.at(2, back) == [("opened", "held")]
    told = told.restarted()
    told.at(6, back)
    assert told.sent[-1] == ("opened", "It is back: 2 times in 2 min.")


def test_an_engine_that_is_down_again_is_told_at_once_and_the_last_word_is_true():
    """Whatever comes, the channel does not end with an end while the engine is down."""
    told = Told()
    for number in range(12):
        incident = an_incident(id=f"inc-{number}", opened_at=NOW + number * 120)
        told.at(number * 2, incident)
        for earlier in told.ledger.held_for_others():
            place = int(earlier.removeprefix("inc-"))
            first = an_incident(id=earlier, opened_at=NOW + place * 120)
            told.at(number * 2, over(first, place * 2 + 1))
        assert told.kinds[-1] != "resolved"
        told.at(number * 2 + 1, over(incident, number * 2 + 1))
    assert told.kinds == [*["opened", "resolved"] * 3, "opened"]
    assert told.sent[2] == ("opened", "It is back: 2 times in 2 min.")


def test_an_update_says_what_is_different():
    told, incident = Told(), an_incident()
    told.at(0, incident)
    told = told.restarted()
    changed = dataclasses.replace(
        incident, cause="shm_too_small", remedies=(RemedyNotice("x", ("--shm-size 8g",)),)
    )
    told.at(1, changed)
    assert told.sent[-1] == (
        "updated",
        "Changed: cause: kv_no_blocks → shm_too_small; what to do: "
        "--gpu-memory-utilization 0.94 → --shm-size 8g.",
    )
    told.at(2, dataclasses.replace(changed, restarts=5))
    assert told.sent[-1][1] == "Changed: it fails with each start."
    told.at(3, dataclasses.replace(changed, restarts=9))
    assert len(told.sent) == 3


def test_an_update_says_what_is_different_from_what_was_seen():
    """And nothing, where it is again as people know it."""
    told, incident = Told(), an_incident()
    told.at(0, incident)
    told.down = True
    told.at(1, dataclasses.replace(incident, cause="a_b"))
    told.at(2, dataclasses.replace(incident, cause="c_d"))
    (waiting,) = told.ledger.outbox.in_state("waiting")
    assert waiting.notice["note"] == "Changed: cause: kv_no_blocks → c_d."
    assert told.at(3, incident) == [("updated", "dropped")]


def test_what_an_earlier_version_wrote_of_a_change_is_no_fault():
    assert change_note("00c0ffee00c0ffee", an_incident(), "en") is None
    assert change_note(change_of(an_incident()), an_incident(severity="info"), "zh") == (
        "变化：级别：严重 → 提示。"
    )


def test_an_escalation_says_since_when_and_how_to_acknowledge():
    told = Told(a_sink(escalate_after_seconds=900))
    told.at(0, an_incident())
    told.at(15, an_incident())
    ((kind, note),) = told.sent
    assert kind == "escalated"
    assert note.startswith("Open for 15 min, and nobody has acknowledged it")
    assert "`oomwatch notify ack inc-1`" in note


def test_a_group_says_what_is_down_first_and_what_each_message_would_have_said():
    """Also that something is back, and that something else is over."""
    told = Told(a_sink(min_severity="info"))
    told.down = True
    told.at(0, an_incident(id="inc-w", fingerprint="w/kv_pressure", severity="warning"))
    first = an_incident()
    told.at(0, first)
    told.at(1, over(first, 1))
    told.at(2, an_incident(id="inc-2", opened_at=NOW + 120))
    rows = sorted(told.ledger.outbox.in_state("waiting"), key=lambda row: row.created_at)
    notice = notice_from_json(grouped_message(rows, NOW + 130, "en").notice)
    assert [one.id for one in notice.incidents] == ["inc-2", "inc-w", "inc-1"]
    assert notice.incidents[0].note == "It is back: 2 times in 2 min."
    assert notice.note == "3 incidents of one host at once, 1 of them over."
    body = text_body(notice, "en")
    assert "It is back: 2 times in 2 min." in body
    assert [line.split("]")[0] for line in body.split("\n") if line.startswith("- ")] == [
        "- [CRITICAL", "- [WARNING", "- [RESOLVED",
    ]  # fmt: skip
    assert subject(notice, "en").startswith("[CRITICAL] 3 incidents")


def test_a_first_message_that_failed_takes_its_followers_with_it():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    (first,) = told.stored.values()
    told.ledger.outbox.put(dataclasses.replace(first, attempts=1))
    told.stored[first.id] = dataclasses.replace(first, attempts=1)
    told.at(1, over(incident, 1))
    failed = dataclasses.replace(first, state="failed")
    told.ledger.outbox.put(failed)
    (change,) = told.ledger.drop_followers(failed, NOW)
    assert (change.row.kind, change.row.state) == ("resolved", "dropped")
    assert told.at(2, over(incident, 1)) == []


def test_what_waits_for_a_receiver_that_is_gone_is_put_aside_until_it_is_back():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    assert told.ledger.put_aside({"oncall"}, NOW) == []
    (change,) = told.ledger.put_aside({"other"}, NOW)
    assert change.row.state == "dropped"
    assert "not configured any more" in change.row.reason
    assert not told.ledger.is_told("inc-1", NOW, {"other"}, NOW + 1)
    # A day later nobody waits for it.
    assert told.ledger.is_told("inc-1", NOW, {"other"}, NOW + 86_401)
    assert told.ledger.take_up("oncall", NOW + 86_401) == []
    told.stored[change.row.id] = change.row
    again = told.restarted()
    (change,) = again.ledger.take_up("oncall", NOW + 2)
    assert (change.row.state, change.row.due_at) == ("waiting", NOW + 2)
    again.deliver(change.row)
    assert not again.ledger.is_told("inc-1", NOW, {"other"}, NOW + 1)
    again.at(1, over(incident, 1))
    assert told.kinds == ["opened", "resolved"]
    assert again.ledger.is_told("inc-1", NOW, {"other"}, NOW + 1)


def test_what_waits_for_a_receiver_that_was_gone_for_long_is_told_if_it_is_open():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    told.ledger.put_aside({"other"}, NOW)
    told.down = False
    told.at(1, incident)
    assert told.kinds == ["opened"]


def test_what_was_told_in_a_message_that_failed_was_not_told():
    told, incident = Told(), an_incident()
    told.down = True
    told.at(0, incident)
    (first,) = told.stored.values()
    group = grouped_message([first], NOW, "en")
    for row in (dataclasses.replace(first, state="grouped", reason=group.id), group):
        told.ledger.outbox.put(row)
    assert told.at(1, over(incident, 1)) == [("resolved", "waiting")]
    failed = dataclasses.replace(group, state="failed")
    told.ledger.outbox.put(failed)
    (change,) = told.ledger.drop_followers(failed, NOW)
    assert (change.row.kind, change.row.state) == ("resolved", "dropped")
    assert told.at(2, over(incident, 1)) == []
    # Somebody asks for it once more.
    told.ledger.outbox.put(group)
    assert told.at(3, over(incident, 1)) == [("resolved", "waiting")]


def test_memory_does_not_grow_with_incidents():
    outbox = Told().ledger.outbox
    told = Told()
    told.ledger.outbox = outbox
    for number in range(3000):
        incident = an_incident(
            id=f"inc-{number}", fingerprint=f"e{number}/failure", opened_at=NOW + number
        )
        told.at(number / 60, incident)
        told.at(number / 60, dataclasses.replace(incident, closed_at=NOW + number))
        outbox.forget(keep={"inc-0"})
    assert len(outbox._rows) <= 2 * 1024
    assert outbox.told("inc-0", "oncall").resolved
    assert outbox.told("inc-2999", "oncall").resolved


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["change", "close", "restart", "silence", "speak", "down", "up"]),
            st.integers(0, 30),
        ),
        max_size=25,
    )
)
def test_whatever_happens_it_is_told_in_order_and_at_most_once(steps):
    told, incident, minute = Told(), an_incident(severity="warning"), 0
    told.at(0, incident)
    for number, (step, passed) in enumerate(steps):
        minute += passed
        if step == "change" and incident.closed_at is None:
            incident = dataclasses.replace(incident, cause=f"cause_{number % 3}")
        elif step == "close":
            incident = over(incident, minute) if incident.closed_at is None else incident
        elif step == "restart":
            told = told.restarted()
        elif step == "silence":
            told.ledger.silences = (Silence("s", NOW, NOW + minute * 60 + 900, "x"),)
        elif step == "speak":
            told.ledger.silences = ()
        told.down = step == "down" if step in {"down", "up"} else told.down
        told.at(minute, incident)
        if not told.down:
            waiting = told.ledger.outbox.in_state("waiting")
            for row in sorted(waiting, key=lambda row: row.created_at):
                told.deliver(row)
    kinds = told.kinds
    assert kinds.count("opened") <= 1
    assert kinds.count("resolved") <= 1
    assert not kinds or kinds[0] == "opened"
    assert "resolved" not in kinds or kinds[-1] == "resolved"
    assert all(kind == "updated" for kind in kinds[1:-1])
    delivered = [row for row in told.stored.values() if row.state == "delivered"]
    assert len(delivered) == len(kinds)


@pytest.mark.parametrize("wait", [0, 900])
def test_an_escalation_is_the_first_message_of_its_receiver(wait):
    told = Told(a_sink(escalate_after_seconds=wait))
    incident = an_incident()
    told.at(0, incident)
    told.at(15, incident)
    told.at(16, over(incident, 16))
    assert told.kinds == (["escalated", "resolved"] if wait else ["opened", "resolved"])
