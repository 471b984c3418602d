"""Threads that deliver to real HTTP servers on loopback."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time

import pytest
from example_notices import NOW, SETTINGS, an_incident
from faulty_receiver import SECRET, FaultyReceiver, by_chance

from oomwatch.config import ConfigError
from oomwatch.config.sinks import WebhookConfig
from oomwatch.notify.delivery import Delivery
from oomwatch.notify.notice import Notice, notice_to_json
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink
from oomwatch.records import OutboxRow

QUICK = dataclasses.replace(SETTINGS, retry_interval_seconds=0.01, group_window_seconds=0.3)


def row(name, incident="inc-1", kind="opened", fingerprint=None, **changes):
    fingerprint = fingerprint or f"{incident}/failure"
    notice = Notice(name, kind, NOW, (an_incident(id=incident, fingerprint=fingerprint),))
    return OutboxRow(
        name, "hook", kind, "waiting", time.time(), NOW,
        incident_id=incident, notice=notice_to_json(notice), **changes,
    )  # fmt: skip


class Reports:
    """What became of messages; each is 'stored' at once."""

    def __init__(self):
        self.rows = []
        self.delivery = None
        self._changed = threading.Condition()

    def __call__(self, rows):
        with self._changed:
            self.rows += rows
            self._changed.notify_all()
        self.delivery.mark_stored([each.id for each in rows])

    def states(self):
        return {each.id: each.state for each in self.rows}

    def wait_for(self, answer, seconds=20):
        with self._changed:
            assert self._changed.wait_for(answer, seconds), self.rows

    def wait_until_settled(self, *ids):
        settled = {"delivered", "failed", "grouped"}
        self.wait_for(lambda: all(self.states().get(each) in settled for each in ids))


@pytest.fixture
def receiver():
    made = FaultyReceiver()
    yield made
    made.close()


@pytest.fixture
def deliver(receiver):
    """Makes deliveries, by default to the receiver as a webhook."""
    made = []

    def start(make=None, settings=QUICK, **options):
        config = WebhookConfig(name="hook", url=receiver.url, timeout_seconds=1.0)
        reports = Reports()
        environ = {"OOMWATCH_NOTIFY_HOOK_SECRET": SECRET}
        delivery = Delivery(
            config,
            settings,
            make=make or (lambda config: make_sink(config, environ)),
            report=reports,
            **options,
        )
        reports.delivery = delivery
        made.append(delivery)
        delivery.start()
        return delivery, reports

    yield start
    for delivery in made:
        delivery.stop()


def queue(delivery, *rows):
    delivery.add(rows)
    delivery.mark_stored([each.id for each in rows])


class Scripted:
    """A sink that answers what it is told to."""

    name, kind, lang = "hook", "scripted", "en"
    per_second, refresh_seconds, groups = 1000.0, None, False

    def __init__(self, *outcomes, **settings):
        self.outcomes = list(outcomes)
        self.sent, self.refreshed = [], []
        self.__dict__.update(settings)

    def send(self, notice, thread):
        self.sent.append((notice, thread))
        outcome = self.outcomes.pop(0) if self.outcomes else Delivered()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def refresh(self, notices):
        self.refreshed.append([notice.id for notice in notices])
        return Delivered()


def test_messages_arrive_in_order_under_their_ids(deliver, receiver):
    delivery, reports = deliver()
    queue(delivery, row("a"), row("b", kind="updated"), row("c", kind="resolved"))
    reports.wait_until_settled("a", "b", "c")
    assert receiver.ids() == ["a", "b", "c"]
    assert receiver.of("inc-1") == ["opened", "updated", "resolved"]
    assert {each.attempts for each in reports.rows} == {1}
    assert {each.notice for each in reports.rows} == {None}
    assert delivery.status.delivered_total == 3
    assert delivery.status.waiting == 0


def test_a_receiver_that_fails_half_the_time_gets_all_under_the_same_ids(deliver, receiver):
    receiver.fault = by_chance(7, (500, 429, 503, "lost"))
    delivery, reports = deliver()
    rows = [
        row(f"{n}{kind[0]}", f"inc-{n}", kind) for n in range(6) for kind in ("opened", "resolved")
    ]
    queue(delivery, *rows)
    reports.wait_until_settled(*(each.id for each in rows))
    assert set(reports.states().values()) == {"delivered"}
    assert set(receiver.ids()) == {each.id for each in rows}
    for n in range(6):
        assert receiver.of(f"inc-{n}") == ["opened", "resolved"]
    assert len(receiver.attempts) > len(rows)


def test_what_was_refused_is_told_and_the_others_go_on(deliver, receiver):
    answers = iter([400])
    receiver.fault = lambda: next(answers, None)
    delivery, reports = deliver()
    queue(delivery, row("a"), row("b", "inc-2"))
    reports.wait_until_settled("a", "b")
    assert reports.states() == {"a": "failed", "b": "delivered"}
    (failed,) = (each for each in reports.rows if each.id == "a")
    assert "400" in failed.reason
    assert receiver.url not in failed.reason
    assert failed.notice is not None  # so that it can be asked for again


def test_a_receiver_that_is_gone_is_not_asked_again_until_it_is_enabled(deliver, receiver, caplog):
    receiver.fault = lambda: 410
    delivery, reports = deliver()
    queue(delivery, row("a"), row("b", "inc-2"))
    reports.wait_until_settled("a", "b")
    assert set(reports.states().values()) == {"failed"}
    assert len(receiver.attempts) == 1
    status = delivery.status
    assert status.disabled is not None
    assert (status.attempts_failed_total, status.failed_total) == (1, 2)
    assert "DISABLED" in caplog.text
    queue(delivery, row("c", "inc-3"))
    reports.wait_until_settled("c")
    assert len(receiver.attempts) == 1
    receiver.fault = lambda: None
    delivery.ask_again(row("d", "inc-4"))
    reports.wait_until_settled("d")
    assert receiver.ids() == ["d"]


def test_a_receiver_that_is_back_is_sent_to_also_if_others_waited_when_it_was_gone(deliver):
    back, sent = threading.Event(), []

    def answer(notice, _thread):
        time.sleep(0.02)  # so that another may go at once
        sent.append(notice.id)
        return Delivered() if back.is_set() else Refused("410", disable=True)

    sink = Scripted()
    sink.send = answer
    delivery, reports = deliver(lambda _config: sink)
    queue(delivery, *(row(f"m{n}", f"inc-{n}") for n in range(5)))
    reports.wait_until_settled(*(f"m{n}" for n in range(5)))
    assert sent == ["m0"]
    back.set()
    for n in range(5):
        delivery.ask_again(row(f"m{n}", f"inc-{n}"))
    reports.wait_for(lambda: set(reports.states().values()) == {"delivered"})


def test_what_is_asked_for_is_tried_at_once_whatever_pause_is_kept(deliver, receiver):
    """Not when the hour is over for which the receiver wanted to be left alone."""
    answers = iter([429])
    receiver.fault = lambda: next(answers, None)
    receiver.retry_after = "3600"
    delivery, reports = deliver()
    queue(delivery, row("a"), row("b", "inc-2"))
    reports.wait_for(lambda: reports.rows)
    (waits,) = reports.rows
    assert waits.due_at - time.time() > 3000
    delivery.ask_again(row("b", "inc-2"))
    reports.wait_until_settled("b")
    assert receiver.ids() == ["b"]


def test_a_pause_that_the_receiver_asks_for_holds_all_of_it(deliver, receiver):
    answers = iter([429])
    receiver.fault = lambda: next(answers, None)
    receiver.retry_after = "1"
    delivery, reports = deliver()
    begun = time.monotonic()
    queue(delivery, row("a"), row("b", "inc-2"))
    reports.wait_until_settled("a", "b")
    assert receiver.ids() == ["a", "b"]
    assert time.monotonic() - begun >= 1


def test_a_receiver_that_is_away_is_told_everything_when_it_is_back(deliver, caplog):
    away = threading.Event()
    sink = Scripted()
    plain = sink.send
    sink.send = lambda notice, thread: (
        plain(notice, thread) if away.is_set() else Later("the connection was refused")
    )
    caplog.set_level(logging.INFO)
    delivery, reports = deliver(lambda _config: sink)
    queue(delivery, *(row(f"m{n}", f"inc-{n}") for n in range(5)))
    reports.wait_for(lambda: len(reports.rows) >= 4)
    assert delivery.status.failures_in_row >= 3
    assert "refused" in delivery.status.trouble
    assert "receiver hook FAILS, 5 waiting: the connection was refused" in caplog.text
    away.set()
    reports.wait_until_settled(*(f"m{n}" for n in range(5)))
    assert delivery.status.trouble is None
    assert "takes messages again" in caplog.text
    assert caplog.text.count("FAILS") == 1


def test_a_message_is_given_up_in_time_and_says_why(deliver):
    settings = dataclasses.replace(QUICK, give_up_after_seconds=0.3)
    sink = Scripted(*[Later("no room")] * 1000)
    delivery, reports = deliver(lambda _config: sink, settings)
    queue(delivery, row("a"))
    reports.wait_until_settled("a")
    assert reports.rows[-1].state == "failed"
    assert reports.rows[-1].reason.startswith("given up after")
    assert reports.rows[-1].reason.endswith("no room")


@pytest.mark.parametrize("hours", [-24, 25])
def test_what_waits_in_the_store_is_tried_wherever_the_clock_is_after_a_restart(deliver, hours):
    delivery, reports = deliver(lambda _config: Scripted(), wall=lambda: time.time() + hours * 3600)
    now = time.time()
    waits = dataclasses.replace(row("a", attempts=3), changed_at=now, due_at=now + 0.2)
    delivery.add([waits], from_store=True)
    reports.wait_until_settled("a")
    assert reports.states() == {"a": "delivered"}


def test_the_end_of_an_alert_goes_before_the_next_one_like_it(deliver):
    sink = Scripted(Later("not now"))
    settings = dataclasses.replace(QUICK, retry_interval_seconds=0.3)
    delivery, reports = deliver(lambda _config: sink, settings)
    alike = "chat/failure"
    queue(delivery, row("end", "inc-1", "resolved", alike), row("next", "inc-2", "opened", alike))
    reports.wait_until_settled("end", "next")
    assert [notice.id for notice, _ in sink.sent] == ["end", "end", "next"]


def test_a_fault_of_a_sink_is_a_failed_attempt_without_its_text(deliver, caplog):
    sink = Scripted(ValueError("https://hooks.example/T0/secret"), Refused("no"))
    caplog.set_level(logging.INFO)
    delivery, reports = deliver(lambda _config: sink)
    queue(delivery, row("a"))
    reports.wait_until_settled("a")
    reasons = " ".join(each.reason or "" for each in reports.rows)
    assert "internal fault: ValueError at test_delivery.py:" in reasons
    assert "secret" not in reasons + caplog.text


def test_a_sink_that_cannot_be_made_is_said_and_made_later(deliver, caplog):
    problems = [ConfigError(["secret_file: /run/x cannot be read"])] * 2
    sink = Scripted()

    def make(_config):
        if problems:
            raise problems.pop()
        return sink

    delivery, reports = deliver(make)
    queue(delivery, row("a"))
    reports.wait_until_settled("a")
    assert reports.states() == {"a": "delivered"}
    assert "/run/x cannot be read" in caplog.text


def test_what_cannot_be_read_is_refused(deliver):
    delivery, reports = deliver()
    queue(delivery, dataclasses.replace(row("a"), notice={"nothing": 1}))
    reports.wait_until_settled("a")
    assert reports.states() == {"a": "failed"}


def test_several_become_one_which_is_sent_when_it_is_on_disk(deliver):
    sink = Scripted(groups=True)
    delivery, reports = deliver(lambda _config: sink)
    rows = [row(f"m{n}", f"inc-{n}") for n in range(8)]
    queue(delivery, *rows)
    reports.wait_for(lambda: len(sink.sent) == 4)
    assert [len(notice.incidents) for notice, _ in sink.sent] == [1, 1, 1, 5]
    grouped = sink.sent[-1][0]
    assert grouped.kind == "grouped"
    assert grouped.note == "5 incidents of one host at once."
    reports.wait_until_settled(grouped.id)
    states = reports.states()
    assert [states[f"m{n}"] for n in range(8)] == ["delivered"] * 3 + ["grouped"] * 5
    (member,) = (each for each in reports.rows if each.id == "m7")
    assert member.reason == grouped.id


def test_what_an_earlier_run_has_left_goes_together_but_for_what_it_may_have_sent(deliver):
    settings = dataclasses.replace(QUICK, group_limit=1)
    sink = Scripted(groups=True)
    started = threading.Event()

    def make(_config):
        assert started.wait(10)
        return sink

    delivery, reports = deliver(make, settings)
    rows = [row("tried", "inc-0", attempts=3), *(row(f"m{n}", f"inc-{n}") for n in range(1, 7))]
    delivery.add(rows, from_store=True)
    started.set()
    reports.wait_for(lambda: len(sink.sent) == 4)
    told = [[incident.id for incident in notice.incidents] for notice, _ in sink.sent]
    assert told == [["inc-0"], ["inc-1"], ["inc-2"], [f"inc-{n}" for n in range(3, 7)]]


def test_the_thread_of_an_incident_is_handed_on(deliver):
    sink = Scripted(Delivered("ts-1"))
    threads = {"b": "ts-1"}
    delivery, reports = deliver(lambda _config: sink, thread_of=lambda row: threads.get(row.id))
    queue(delivery, row("a"), row("b", kind="updated"))
    reports.wait_until_settled("a", "b")
    assert reports.rows[0].reference == "ts-1"
    assert [thread for _, thread in sink.sent] == [None, "ts-1"]


def test_open_incidents_are_told_again_in_time(deliver):
    sink = Scripted(refresh_seconds=0.05)
    notices = [Notice("a", "opened", NOW, (an_incident(),))]
    deliver(lambda _config: sink, open_notices=lambda: notices)
    deadline = time.monotonic() + 20
    while len(sink.refreshed) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sink.refreshed[:3] == [["a"]] * 3


def test_a_reminder_that_fails_is_said_until_one_goes_well(deliver, caplog):
    sink = Scripted(refresh_seconds=0.05)
    answers = [Later("no route"), Later("no route")]
    sink.refresh = lambda _notices: answers.pop() if answers else Delivered()
    troubles = []
    delivery, _reports = deliver(
        lambda _config: sink, open_notices=lambda: [Notice("a", "opened", NOW, (an_incident(),))]
    )
    delivery._refresh_at = 0.0
    deadline = time.monotonic() + 20
    while answers and time.monotonic() < deadline:
        troubles.append(delivery.status.trouble)
        time.sleep(0.01)
    while delivery.status.trouble is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "no route" in troubles
    assert delivery.status.trouble is None
    assert caplog.text.count("receiver hook: no route") == 1


def test_an_idle_delivery_does_not_wake(deliver):
    """Nothing waits, so nothing is looked at: no thread runs for nothing."""
    delivery, reports = deliver(lambda _config: Scripted())
    queue(delivery, row("a"))
    reports.wait_until_settled("a")
    looks = []
    plain = delivery._queue.take
    delivery._queue.take = lambda now: looks.append(now) or plain(now)
    time.sleep(0.5)
    assert len(looks) <= 1


def test_one_that_hangs_is_not_waited_for(deliver, receiver):
    receiver.fault = lambda: "hang"
    delivery, _reports = deliver()
    queue(delivery, row("a"))
    deadline = time.monotonic() + 20
    while not receiver.attempts and time.monotonic() < deadline:
        time.sleep(0.01)
    begun = time.monotonic()
    delivery.add([row("b", "inc-2")])
    delivery.mark_stored(["b"])
    assert delivery.status.waiting == 2
    assert not delivery.replace("a", None)
    delivery.stop()
    assert time.monotonic() - begun < 0.9  # less than the time-out of the attempt


def test_another_configuration_makes_another_sink(deliver):
    made = []

    def make(config):
        made.append(config.timeout_seconds)
        return Scripted()

    delivery, reports = deliver(make)
    queue(delivery, row("a"))
    reports.wait_until_settled("a")
    delivery.reconfigure(dataclasses.replace(delivery.config, timeout_seconds=7.0), QUICK)
    queue(delivery, row("b"))
    reports.wait_until_settled("b")
    assert made == [1.0, 7.0]
