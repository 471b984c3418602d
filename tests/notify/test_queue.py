"""The order in which messages go to one receiver."""

from __future__ import annotations

import dataclasses

import pytest
from example_notices import NOW, SETTINGS
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.notify.backoff import MOST_ASKED_SECONDS, pause_seconds
from oomwatch.notify.queue import GROUP_MOST, SinkQueue
from oomwatch.records import OutboxRow


def row(name, incident="inc-1", kind="opened", **changes):
    return OutboxRow(name, "oncall", kind, "waiting", NOW, NOW, incident_id=incident, **changes)


class Queue(SinkQueue):
    """One whose messages are all on disk, and that is as fast as it can be."""

    def __init__(self, *rows, groups=False, per_second=float("inf"), **changes):
        super().__init__(
            dataclasses.replace(SETTINGS, **changes), groups=groups, per_second=per_second
        )
        for each in rows:
            self.put(each)

    def put(self, each, now=0.0, **options):
        self.add(each, now, **options)
        self.mark_stored([each.id])

    def ids(self, now):
        return [each.id for each in self.take(now)]

    def send(self, now, *, well=True, asked=None):
        """One attempt; the id of what was sent."""
        (each,) = self.take(now)
        if well:
            self.went_well(now)
            self.settle([each.id])
        else:
            self.went_wrong(dataclasses.replace(each, attempts=each.attempts + 1), now, asked)
        return each.id


# ---------------------------------------------------------------- order
def test_one_goes_at_a_time_in_order():
    queue = Queue(row("a"), row("b", "inc-2"))
    assert queue.ids(0) == ["a"]
    assert queue.ids(0) == []  # it is being sent
    queue.went_well(0)
    queue.settle(["a"])
    assert queue.send(0) == "b"
    assert queue.ids(0) == []
    assert queue.wait_seconds(0) is None


def test_the_messages_of_an_incident_wait_for_each_other_and_others_do_not():
    queue = Queue(row("a1"), row("a2", kind="resolved"), row("b", "inc-2"))
    assert queue.send(0, well=False) == "a1"
    assert queue.send(0) == "b"
    assert queue.ids(1) == []
    assert 3 < queue.wait_seconds(1) < 6
    assert queue.send(7) == "a1"
    assert queue.send(7) == "a2"


def test_what_somebody_asks_for_goes_first_whatever_pause_is_kept():
    queue = Queue(*(row(f"m{n}", f"inc-{n}") for n in range(6)))
    for _ in range(3):
        queue.send(0, well=False)
    assert queue.ids(0.1) == []
    queue.ask_again(row("m5", "inc-5"), 0.1)
    assert queue.send(0.1, well=False) == "m5"
    assert queue.ids(0.2) == []  # it is still in trouble


def test_what_somebody_asks_for_while_it_hangs_is_tried_anew():
    queue = Queue(row("a"))
    (sent,) = queue.take(0)
    queue.ask_again(row("a"), 5)
    assert queue.went_wrong(dataclasses.replace(sent, attempts=1), 10, 600.0) == 0
    assert queue.send(10, well=False, asked=600.0) == "a"
    assert queue.ids(20) == []


def test_what_others_wait_for_is_tried_again_when_the_receiver_is():
    """So that the time is right that people are told."""
    queue = Queue(row("a"), row("b", "inc-2"))
    (first,) = queue.take(0)
    pause = queue.went_wrong(dataclasses.replace(first, attempts=1), 0, 600.0)
    assert pause == 600
    queue, now = Queue(*(row(f"m{n}", f"inc-{n}") for n in range(4))), 0.0
    for _ in range(5):
        while not (taken := queue.take(now)):
            now += queue.wait_seconds(now)
        (first,) = taken
        pause = queue.went_wrong(dataclasses.replace(first, attempts=1), now, None)
    assert pause > 60  # its own would be 5 s


def test_the_end_of_an_alert_goes_before_the_next_one_that_a_receiver_takes_for_the_same():
    queue = Queue()
    queue.put(row("end", "inc-1", "resolved"), subjects=["gpu-1/chat/failure"])
    queue.put(row("next", "inc-2"), subjects=["gpu-1/chat/failure"])
    queue.put(row("other", "inc-3"), subjects=["gpu-1/chat/kv_pressure"])
    assert queue.send(0, well=False) == "end"
    assert queue.send(0) == "other"
    assert queue.ids(0) == []
    assert [queue.send(10), queue.send(10)] == ["end", "next"]


def test_what_is_not_about_an_incident_waits_for_nothing():
    queue = Queue(row("a"), row("x", None, "undelivered"))
    queue.send(0, well=False)
    assert queue.send(0) == "x"


def test_a_message_is_sent_once_it_is_on_disk_or_a_moment_later():
    queue = Queue()
    queue.add(row("a"), 0.0)
    assert queue.ids(0.1) == []
    assert queue.wait_seconds(0.1) == pytest.approx(0.4)
    queue.mark_stored(["a", "unknown"])
    assert queue.send(0.1) == "a"
    queue.add(row("b"), 1.0)
    assert queue.send(1.5) == "b"
    # What stands for others is waited for longer: they would be told again without it.
    queue.add(row("c", None, "grouped"), 2.0)
    assert queue.ids(6.9) == []
    assert queue.send(7.0) == "c"


def test_no_more_go_than_the_receiver_takes():
    queue = Queue(row("a"), row("b", "inc-2"), per_second=2)
    assert queue.send(0) == "a"
    assert queue.ids(0.4) == []
    assert queue.wait_seconds(0.4) == pytest.approx(0.1)
    assert queue.send(0.5) == "b"


# ---------------------------------------------------------------- trouble
def test_a_receiver_that_asks_for_a_pause_gets_it_for_all():
    queue = Queue(row("a"), row("b", "inc-2"))
    queue.send(0, well=False, asked=60)
    assert queue.ids(59) == []
    assert queue.wait_seconds(59) == pytest.approx(1)
    assert queue.send(60) == "a"


def test_no_receiver_is_given_a_day():
    queue = Queue(row("a"))
    queue.send(0, well=False, asked=86_400)
    assert queue.wait_seconds(0) <= MOST_ASKED_SECONDS


def test_after_three_failures_in_a_row_all_wait_and_after_a_success_none():
    queue = Queue(*(row(name, f"inc-{name}") for name in "abcde"))
    for name in "abc":
        assert queue.send(0, well=False) == name
    assert queue.ids(3.9) == []  # also d, which was never tried
    now = queue.wait_seconds(0) + 0.01
    first = queue.send(now, well=False)
    assert queue.wait_seconds(now) > 20  # the pause has grown
    now += queue.wait_seconds(now) + 0.01
    sent = [queue.send(now)]
    while len(queue):
        sent.append(queue.send(now))
    assert sorted(sent) == list("abcde")
    assert first in sent


@pytest.mark.parametrize(
    ("attempts", "usual"), [(1, 5), (2, 30), (3, 120), (4, 300), (5, 900), (99, 900)]
)
def test_pauses_grow_and_differ(attempts, usual):
    pauses = [pause_seconds(attempts, 5.0) for _ in range(50)]
    assert usual * 0.8 <= min(pauses) < max(pauses) <= usual * 1.2


def test_what_has_waited_for_a_day_is_given_up_also_over_a_restart():
    queue = Queue(row("a"))
    queue.put(row("b", "inc-2"), age_seconds=86_000)
    queue.put(row("c", "inc-3"), age_seconds=-50)  # the clock was set back
    assert queue.send(400, well=False) == "a"
    assert queue.send(400, well=False) == "b"
    assert [each.id for each in queue.expired(401)] == ["b"]
    queue.take(86_399)
    assert {each.id for each in queue.expired(86_401)} == {"b", "c"}  # a is being sent


def test_nothing_is_given_up_because_of_its_age_before_it_was_tried():
    """The clock may have been set while the agent was away."""
    queue = Queue()
    queue.put(row("a"), age_seconds=400 * 86_400)
    queue.put(row("b"), age_seconds=400 * 86_400)
    assert not queue.expired(1)
    assert queue.send(1, well=False) == "a"
    assert [each.id for each in queue.expired(1)] == ["a"]
    queue.settle(["a"])
    assert not queue.expired(2)
    assert queue.send(2) == "b"


# ---------------------------------------------------------------- new forms
def test_what_nobody_has_seen_may_change_and_what_was_tried_may_not():
    queue = Queue(row("a"), row("b", "inc-2"))
    assert queue.replace("a", row("a", change="newer"), 0)
    assert queue.ids(0.2) == ["b"]  # the new form of a is not on disk yet
    assert not queue.replace("b", None, 0)
    queue.went_wrong(row("b", "inc-2", attempts=1), 0.2, None)
    assert not queue.replace("b", None, 0)
    assert queue.replace("a", None, 0)
    assert [each.id for each in queue.rows] == ["b"]
    queue.put(row("c", "inc-3"), sealed=True)
    assert not queue.replace("c", None, 0)


# ---------------------------------------------------------------- groups
def many(count, start=0):
    return [row(f"m{n}", f"inc-{n}") for n in range(start, start + count)]


def test_after_three_messages_the_rest_of_the_window_is_one():
    queue = Queue(*many(10), groups=True)
    assert [queue.send(0) for _ in range(3)] == ["m0", "m1", "m2"]
    assert queue.ids(0) == []
    assert queue.wait_seconds(1) == pytest.approx(29)
    queue.put(row("m10", "inc-10"), 5)
    assert queue.ids(30) == [f"m{n}" for n in range(3, 11)]


def test_one_that_was_held_is_told_as_itself():
    queue = Queue(*many(4), groups=True)
    for _ in range(3):
        queue.send(0)
    assert queue.ids(0) == []
    assert queue.ids(30) == ["m3"]


def test_a_quiet_window_holds_nothing():
    queue = Queue(*many(3), groups=True)
    for _ in range(3):
        queue.send(0)
    for each in many(3, start=3):
        queue.put(each, 40)
    assert [queue.send(40) for _ in range(3)] == ["m3", "m4", "m5"]


def test_what_was_tried_goes_alone_and_what_follows_it_waits():
    queue = Queue(*many(6), groups=True)
    queue.put(row("m0b", "inc-0", "resolved"))
    assert queue.send(0, well=False) == "m0"
    for _ in range(2):
        queue.send(0)
    assert queue.ids(1) == []
    assert queue.send(7) == "m0"  # a message that may have arrived is never part of another
    assert queue.ids(30) == ["m3", "m4", "m5", "m0b"]


def test_several_messages_of_one_incident_go_together_in_order():
    queue = Queue(*many(3), groups=True)
    for _ in range(3):
        queue.send(0)
    for kind in ("opened", "updated", "resolved"):
        queue.put(row(kind, "inc-9", kind), 1)
    queue.put(row("x", None, "undelivered"), 1)
    assert queue.send(1) == "x"
    assert queue.ids(30) == ["opened", "updated", "resolved"]


def test_what_is_asked_for_may_have_arrived_and_so_stays_as_it_is():
    queue = Queue(groups=True)
    for each in many(6):
        queue.ask_again(each, 0)
        queue.mark_stored([each.id])
    assert [queue.send(0) for _ in range(6)] == [f"m{n}" for n in range(6)]
    queue.ask_again(row("m9"), 0)
    assert not queue.replace("m9", None, 0)


def test_a_window_is_no_shorter_than_what_the_receiver_needs():
    queue = Queue(*many(8), groups=True, per_second=1, group_window_seconds=1.0)
    assert [queue.send(now) for now in range(3)] == ["m0", "m1", "m2"]
    assert queue.ids(3) == []
    assert queue.ids(4) == [f"m{n}" for n in range(3, 8)]


def test_a_large_backlog_is_several_messages():
    queue = Queue(*many(GROUP_MOST + 10), groups=True)
    for _ in range(3):
        queue.send(0)
    assert queue.ids(0) == []
    first = queue.take(30)
    assert len(first) == GROUP_MOST
    queue.settle(each.id for each in first)
    queue.let_go()
    assert queue.ids(30) == []
    assert len(queue.take(60)) == 7


# ---------------------------------------------------------------- whatever happens
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["well", "wrong", "asked", "nothing"]),
            st.floats(0, 40),
        ),
        max_size=60,
    ),
    st.booleans(),
)
def test_every_message_goes_and_those_of_an_incident_in_order(steps, groups):
    queue, now, sent = Queue(groups=groups), 0.0, []

    def attempt(outcome):
        rows = queue.take(now)
        if len(rows) > 1:
            queue.settle(each.id for each in rows)
            queue.let_go()
            sent.extend(rows)
        elif rows and outcome == "well":
            queue.went_well(now)
            queue.settle([rows[0].id])
            sent.extend(rows)
        elif rows:
            tried = dataclasses.replace(rows[0], attempts=rows[0].attempts + 1)
            queue.went_wrong(tried, now, 7.0 if outcome == "asked" else None)
        return bool(rows)

    for number, (incident, outcome, passed) in enumerate(steps):
        queue.put(row(f"m{number:03}", f"inc-{incident}"), now)
        if outcome != "nothing":
            attempt(outcome)
        now += passed
    for _ in range(4 * len(steps) + 10):
        if not len(queue):
            break
        if not attempt("well"):
            wait = queue.wait_seconds(now)
            assert wait is not None
            now += wait + 0.001
    assert not len(queue)
    assert len({each.id for each in sent}) == len(sent) == len(steps)
    for incident in range(4):
        own = [each.id for each in sent if each.incident_id == f"inc-{incident}"]
        assert own == sorted(own)
