"""From incidents to messages within one process: real stores, receivers that are told by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time

import pytest

from oomwatch.agent.notifying import Notifier
from oomwatch.config import load_config
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.records import OutboxRow, Silence, StoredIncident, Trigger
from oomwatch.store.control import changed
from oomwatch.store.database import open_reader, open_writer
from oomwatch.store.incidents import get_incident, list_incidents
from oomwatch.store.location import parse_store
from oomwatch.store.outbox import ask_again, read_outbox
from oomwatch.store.silences import Acknowledgement, acknowledge, save_silence
from oomwatch.store.writer import StoreWriter

AT = time.time()
INCIDENT = StoredIncident(
    "inc-1", "chat/kv_pressure", "open", AT, engine_id="chat", host="gpu-1",
    triggers=(Trigger("kv_saturation", AT, "chat", text="the pool is full"),),
)  # fmt: skip


class Receiver:
    """A sink that answers what it is told to, and keeps what it was sent."""

    kind, lang, groups, per_second = "test", "en", False, 1000.0

    def __init__(self, config, refresh_seconds=None):
        self.name = config.name
        self.answer = Delivered("thread-1")
        self.sent, self.reminders = [], []
        self.refresh_seconds = refresh_seconds

    def send(self, notice, thread):
        self.sent.append((notice, thread))
        return self.answer

    def refresh(self, notices):
        self.reminders.append([notice.incidents[0].id for notice in notices])
        return Delivered()

    @property
    def kinds(self):
        return [notice.kind for notice, _ in self.sent]


class Running:
    """A notifier at work on a store; `again` is the next one, after a kill."""

    def __init__(self, path, config, *, known=(), refresh_seconds=None):
        self.path, self.receivers = path, {}
        self.writer = StoreWriter(str(path), "gpu-1", interval_seconds=0.05)
        self.writer.start()
        self.stop = threading.Event()
        self.refresh_seconds = refresh_seconds
        self.ahead_seconds = 0.0
        self.notifier = Notifier(config, "gpu-1", self.writer, make=self.make, wall=self.wall)
        with open_reader(parse_store(str(path))) as connection:
            incidents = known or list_incidents(connection)
            self.notifier.read(connection, incidents)
        self.notifier.start()
        self.thread = threading.Thread(target=self.notifier.run, args=(self.stop,), daemon=True)
        self.thread.start()

    def wall(self):
        return time.time() + self.ahead_seconds

    def pass_time(self, seconds):
        """Some time goes by; it looks at the clock twice a minute, or at once."""
        self.ahead_seconds += seconds
        self.notifier._wake.set()

    def make(self, config):
        made = self.receivers[config.name] = Receiver(config, self.refresh_seconds)
        return made

    def close(self):
        self.stop.set()
        self.notifier.stop()
        self.thread.join(5)
        assert not self.thread.is_alive()
        self.writer.stop(5)

    def rows(self):
        with open_reader(parse_store(str(self.path))) as connection:
            return read_outbox(connection)

    def write(self, work):
        connection = open_writer(parse_store(str(self.path)))
        with connection.begin():
            work(connection)
        connection.close()

    def wait_for(self, answer, seconds=20):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(KeyError):
                if found := answer():
                    return found
            time.sleep(0.01)
        raise AssertionError([(row.sink, row.kind, row.state, row.reason) for row in self.rows()])

    def told(self, name, *kinds):
        self.wait_for(lambda: self.receivers[name].kinds == list(kinds))
        self.wait_for(
            lambda: not [row for row in self.rows() if row.sink == name and row.state == "waiting"]
        )


@pytest.fixture
def configured(tmp_path):
    """A configuration of webhooks with these keys each, by name."""

    def load(more="", **sinks):
        path = tmp_path / "own.toml"
        tables = (
            f'[[notify.webhook]]\nname = "{name}"\nurl = "http://h.example/"\n{keys}\n'
            for name, keys in sinks.items()
        )
        path.write_text(more + "".join(tables))
        return load_config(path, environ={}).config

    return load


@pytest.fixture
def running(tmp_path):
    """Starts notifiers on one store; each ends with the test."""
    with contextlib.ExitStack() as stack:

        def start(config, **options):
            made = Running(tmp_path / "store.db", config, **options)
            stack.callback(made.close)
            return made

        yield start


def over(incident=INCIDENT):
    return dataclasses.replace(incident, state="closed", closed_at=time.time())


def test_an_incident_is_stored_with_its_messages_and_told_with_its_labels(running, configured):
    labels = (
        '[notify]\nlabels = { site = "fra1", team = "x" }\n'
        '[[engine]]\nname = "chat"\nport = 1\nlabels = { team = "chat" }\n'
    )
    here = running(configured(labels, a=""))
    here.notifier.save_incident(INCIDENT)
    here.told("a", "opened")
    notice, thread = here.receivers["a"].sent[0]
    assert notice.incidents[0].labels == {"site": "fra1", "team": "chat"}
    assert thread is None
    (row,) = here.rows()
    assert (row.state, row.reference, row.incident_id) == ("delivered", "thread-1", "inc-1")
    here.notifier.save_incident(INCIDENT)  # a second look
    here.notifier.save_incident(over())
    here.told("a", "opened", "resolved")
    assert here.receivers["a"].sent[1][1] == "thread-1"


def test_what_was_told_is_known_after_a_restart_and_what_waits_goes_out(running, configured):
    config = configured(a="", b="")
    first = running(config)
    first.wait_for(lambda: first.receivers["a"] and first.receivers["b"])
    first.receivers["b"].answer = Later("not now")
    first.notifier.save_incident(INCIDENT)
    first.told("a", "opened")
    first.wait_for(lambda: any(row.attempts for row in first.rows() if row.sink == "b"))
    first.close()
    again = running(config)
    again.write(lambda connection: ask_again(connection, None, time.time()))
    again.notifier.save_incident(INCIDENT)
    again.told("b", "opened")
    again.notifier.save_incident(over())
    again.told("a", "resolved")
    assert first.receivers["b"].sent[0][0].id == again.receivers["b"].sent[0][0].id


def test_what_was_held_is_told_after_a_restart_also_if_it_is_over(running, configured):
    first = running(configured(a='quiet_hours = "00:00-23:59"'))
    first.notifier.save_incident(INCIDENT)
    first.notifier.save_incident(over())
    first.wait_for(lambda: [row.state for row in first.rows()] == ["held"])
    first.close()
    # The detector does not know it any more, and the quiet hours were given up.
    again = running(configured(a=""), known=(dataclasses.replace(INCIDENT, id="inc-9"),))
    again.wait_for(lambda: len(again.receivers["a"].sent) == 3)
    told = [(notice.kind, notice.incidents[0].id) for notice, _ in again.receivers["a"].sent]
    assert [kind for kind, incident in told if incident == "inc-1"] == ["opened", "resolved"]


def test_a_receiver_that_is_not_configured_any_more_is_not_waited_for(running, configured):
    first = running(configured(a="", b=""))
    first.wait_for(lambda: first.receivers["b"])
    first.receivers["b"].answer = Later("not now")
    first.notifier.save_incident(INCIDENT)
    first.told("a", "opened")
    first.notifier.reconfigure(configured(a=""))
    first.wait_for(lambda: {row.state for row in first.rows()} == {"delivered", "dropped"})
    (dropped,) = (row for row in first.rows() if row.state == "dropped")
    assert "not configured any more" in dropped.reason


@pytest.mark.parametrize("others", ["", "b"])
def test_a_receiver_that_is_back_is_told_the_end_of_what_it_knows(running, configured, others):
    """Also if it was the only one, and over a restart."""
    without, both = configured(**dict.fromkeys(others, "")), configured(a="", b="")
    here = running(both)
    here.notifier.save_incident(INCIDENT)
    here.told("a", "opened")
    here.notifier.reconfigure(without)
    here.notifier.save_incident(over())
    here.notifier.reconfigure(both)
    here.told("a", "resolved")
    here.notifier.save_incident(dataclasses.replace(INCIDENT, id="inc-2", fingerprint="x/failure"))
    here.told("a", "resolved", "opened")
    here.close()
    between = running(without)
    between.notifier.save_incident(
        over(dataclasses.replace(INCIDENT, id="inc-2", fingerprint="x/failure"))
    )
    between.close()
    again = running(both)
    again.told("a", "resolved")


def test_a_receiver_that_is_back_is_sent_what_waited_for_it(running, configured):
    first = running(configured(a=""))
    first.wait_for(lambda: first.receivers["a"])
    first.receivers["a"].answer = Later("not now")
    first.notifier.save_incident(INCIDENT)
    first.wait_for(lambda: any(row.attempts for row in first.rows()))
    first.notifier.save_incident(over())
    first.notifier.reconfigure(configured())
    first.wait_for(lambda: {row.state for row in first.rows()} == {"dropped"})
    first.close()
    again = running(configured(a=""))
    again.told("a", "opened", "resolved")


def test_all_that_waits_is_taken_up_after_a_restart(running, configured):
    first = running(configured())
    rows = [
        OutboxRow(f"m{n}", "a", "opened", "waiting", AT, AT, incident_id=f"inc-{n}", notice={})
        for n in range(5100)
    ]
    first.writer.save_outbox(rows)
    first.close()
    again = running(configured(a=""))
    (status,) = again.notifier.statuses()
    assert status.waiting + status.delivered_total + status.failed_total == 5100


def test_what_is_asked_for_again_goes_in_its_order(running, configured):
    here = running(configured(a=""))
    here.wait_for(lambda: here.receivers["a"])
    here.receivers["a"].answer = Later("not now")
    for number in range(4):
        one = dataclasses.replace(INCIDENT, id=f"inc-{number}", fingerprint=f"e{number}/failure")
        here.notifier.save_incident(one)
        here.wait_for(lambda: any(row.attempts for row in here.rows()))
        here.notifier.save_incident(over(one))
    here.wait_for(lambda: len(here.rows()) == 8)
    made = {row.id: row.created_at for row in here.rows()}
    here.close()
    again = running(configured(a=""))
    again.write(lambda connection: ask_again(connection, None, time.time()))
    again.wait_for(lambda: len(again.receivers["a"].sent) == 8)
    for number in range(4):
        told = [
            n.kind for n, _ in again.receivers["a"].sent if n.incidents[0].id == f"inc-{number}"
        ]
        assert told == ["opened", "resolved"]
    assert {row.id: row.created_at for row in again.rows()} == made


def test_a_clock_that_is_set_back_holds_nothing_for_a_day(running, configured):
    here = running(configured(a='escalate_after = "1h"', b='quiet_hours = "00:00-23:59"'))
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: [row.state for row in here.rows()] == ["held", "held"])
    here.pass_time(-86_400)
    here.told("a", "escalated")


def test_open_incidents_are_called_to_mind_until_they_are_over(running, configured):
    here = running(configured(a=""), refresh_seconds=0.05)
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: here.receivers["a"].reminders)
    assert here.receivers["a"].reminders[-1] == ["inc-1"]
    here.notifier.save_incident(over())
    here.told("a", "opened", "resolved")
    count = len(here.receivers["a"].reminders)
    time.sleep(0.2)
    assert len(here.receivers["a"].reminders) <= count + 1  # one was on its way


def test_a_lost_message_is_told_to_the_others_once_an_hour(running, configured):
    here = running(configured(a="", b="", c="enabled = false"))
    here.wait_for(lambda: here.receivers["a"] and here.receivers["b"])
    here.receivers["a"].answer = Refused("403")
    for number in range(3):
        incident = dataclasses.replace(
            INCIDENT, id=f"inc-{number}", fingerprint=f"e{number}/failure", engine_id=f"e{number}"
        )
        here.notifier.save_incident(incident)
    here.wait_for(lambda: len(here.receivers["b"].sent) == 4)
    here.wait_for(lambda: len(here.receivers["a"].sent) == 3)
    assert here.receivers["b"].kinds.count("undelivered") == 1
    assert set(here.receivers) == {"a", "b"}
    (trouble,) = here.notifier.troubles()
    assert trouble == "RECEIVER a FAILS, 0 waiting: 403"
    status = {each.name: each for each in here.notifier.statuses()}
    assert (status["a"].failed_total, status["b"].delivered_total) == (3, 4)


def test_a_lost_message_is_told_in_the_language_of_who_is_told_also_once_it_is_over(
    running, configured
):
    chinese = '[[notify.slack]]\nname = "zh"\nlang = "zh"\nurl_file = "/none"\n'
    here = running(configured(chinese, a=""))
    here.wait_for(lambda: here.receivers["a"] and here.receivers["zh"])
    here.receivers["a"].answer = Later("not now")
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: any(row.attempts for row in here.rows() if row.sink == "a"))
    here.notifier.save_incident(over())
    here.told("zh", "opened", "resolved")
    here.receivers["a"].answer = Refused("403")
    here.write(lambda connection: ask_again(connection, None, time.time()))
    here.wait_for(lambda: here.receivers["zh"].kinds[-1] == "undelivered")
    notice, _ = here.receivers["zh"].sent[-1]
    assert notice.incidents[0].headline == "KV 缓存持续占满"
    assert "接收方 a 未收到此消息" in notice.note
    here.wait_for(lambda: not here.notifier._views)


def test_that_a_message_was_lost_is_not_told_once_it_has_arrived(running, configured):
    here = running(configured(a="", b=""))
    here.wait_for(lambda: here.receivers["a"] and here.receivers["b"])
    here.receivers["a"].answer, here.receivers["b"].answer = Refused("403"), Later("not now", 900)
    others = [
        dataclasses.replace(INCIDENT, id=f"inc-{n}", fingerprint=f"e{n}/failure") for n in (1, 2)
    ]
    for incident in others:
        here.notifier.save_incident(incident)

    def failed():
        return [row for row in here.rows() if row.state == "failed"]

    def waits():
        return [row for row in here.rows() if row.kind == "undelivered" and row.sink == "b"]

    here.wait_for(lambda: len(failed()) == 2 and waits())
    (undelivered,) = waits()
    here.receivers["a"].answer = Delivered()
    here.write(lambda connection: ask_again(connection, [undelivered.change], time.time()))
    # The other one is lost still: that is told instead, under the same id.
    here.wait_for(lambda: waits()[0].change != undelivered.change)
    (instead,) = waits()
    assert (instead.id, instead.state) == (undelivered.id, "waiting")
    assert instead.change == failed()[0].id
    here.write(lambda connection: ask_again(connection, [instead.change], time.time()))
    here.wait_for(lambda: waits()[0].state == "dropped")
    assert "undelivered" not in here.receivers["b"].kinds


def test_what_follows_a_first_message_that_was_refused_is_not_sent(running, configured):
    here = running(configured(a=""))
    here.wait_for(lambda: here.receivers["a"])
    here.receivers["a"].answer = Refused("400")
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: [row.state for row in here.rows()] == ["failed"])
    here.receivers["a"].answer = Delivered()
    here.notifier.save_incident(over())
    time.sleep(0.2)
    assert here.receivers["a"].kinds == ["opened"]


def test_what_is_sent_again_is_followed_by_what_was_left_out(running, configured):
    """Else the receiver would have an incident for open that is over."""
    here = running(configured(a=""))
    here.wait_for(lambda: here.receivers["a"])
    here.receivers["a"].answer = Refused("400")
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: [row.state for row in here.rows()] == ["failed"])
    here.notifier.save_incident(over())
    here.receivers["a"].answer = Delivered()
    assert here.writer.flush(10)
    here.write(lambda connection: ask_again(connection, None, time.time()))
    here.told("a", "opened", "opened", "resolved")
    assert len({notice.id for notice, _ in here.receivers["a"].sent}) == 2


def test_an_incident_is_escalated_unless_somebody_looks_after_it(running, configured):
    here = running(configured(first="", second='escalate_after = "1h"'))
    incident = dataclasses.replace(INCIDENT, opened_at=time.time())  # not when tests were collected
    cared_for = dataclasses.replace(incident, id="inc-2", fingerprint="embed/failure")
    here.notifier.save_incident(incident)
    here.notifier.save_incident(cared_for)
    here.wait_for(
        lambda: [row.sink for row in here.rows() if row.state == "held"] == ["second"] * 2
    )
    assert {each.name: each.held for each in here.notifier.statuses()} == {"first": 0, "second": 2}
    here.pass_time(3500)
    ack = Acknowledgement("inc-2", time.time())
    here.write(lambda connection: acknowledge(connection, ack))
    here.wait_for(lambda: [row.reason for row in here.rows() if row.state == "dropped"])
    assert "second" not in here.receivers or here.receivers["second"].sent == []
    here.pass_time(200)
    here.told("second", "escalated")
    assert here.receivers["second"].sent[0][0].incidents[0].id == "inc-1"
    here.notifier.save_incident(over(incident))
    here.notifier.save_incident(over(cared_for))
    here.told("second", "escalated", "resolved")
    here.wait_for(lambda: here.receivers["first"].kinds.count("resolved") == 2)


def test_a_silence_that_ends_by_itself_lets_go_what_is_open(running, configured):
    here = running(configured(a=""))
    silence = Silence("sil-1", time.time(), time.time() + 600, "work", engine="ch*")
    here.write(lambda connection: save_silence(connection, silence))
    here.wait_for(lambda: here.notifier._ledger.silences)
    here.notifier.save_incident(INCIDENT)
    here.wait_for(lambda: [row.state for row in here.rows()] == ["held"])
    here.pass_time(300)
    here.pass_time(301)
    here.told("a", "opened")


def test_an_incident_is_stored_whatever_becomes_of_its_messages(running, configured, caplog):
    here = running(configured(a=""))
    here.notifier._look_at = None
    here.notifier.save_incident(INCIDENT)
    assert here.writer.flush(10)
    with open_reader(parse_store(str(here.path))) as connection:
        assert get_incident(connection, "inc-1") is not None
    assert "the messages about inc-1 could not be made" in caplog.text


def test_without_receivers_nothing_is_made_and_nothing_looked_at(running, configured):
    here = running(configured())
    here.notifier.save_incident(INCIDENT)
    here.write(changed)
    assert here.writer.flush(10)
    assert here.rows() == ()
    assert here.writer._watcher is None
    assert not [each for each in threading.enumerate() if each.name.startswith("to ")]


def test_other_hosts_of_a_fleet_are_left_alone(running, configured):
    here = running(configured(a=""))
    other = StoreWriter(str(here.path), "gpu-2", interval_seconds=0.05)
    other.start()
    here.notifier.save_incident(INCIDENT)
    here.told("a", "opened")
    (row,) = here.rows()
    foreign = dataclasses.replace(row, id="msg-other", state="failed", notice={"id": "x"})
    other.save_outbox([foreign])
    assert other.flush(10)
    other.stop(5)
    here.write(lambda connection: ask_again(connection, None, time.time()))
    time.sleep(0.3)
    assert here.receivers["a"].kinds == ["opened"]
    assert {row.id: row.state for row in here.rows()}["msg-other"] == "retry"
