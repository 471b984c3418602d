"""`oomwatch notify` and `oomwatch silence`, against real stores and real receivers."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import time

import pytest
from click.testing import CliRunner
from faulty_receiver import SECRET, FaultyReceiver

from oomwatch.cli.notify import command as notify
from oomwatch.cli.silence import command as silence
from oomwatch.config.sinks import SINKS
from oomwatch.errors import NoInputError, OomwatchError, UsageError
from oomwatch.notify.example import KINDS
from oomwatch.records import OutboxRow, StoredIncident
from oomwatch.report.pages import title
from oomwatch.store.database import open_reader
from oomwatch.store.location import parse_store
from oomwatch.store.outbox import read_outbox
from oomwatch.store.silences import read_acknowledged, read_silences
from oomwatch.store.writer import StoreWriter

NOW = time.time()
INCIDENT = StoredIncident("inc-3fa90c", "chat/failure", "open", NOW - 60, engine_id="chat")
ROW = OutboxRow(
    "msg-aaaa11", "oncall", "opened", "failed", NOW - 60, NOW - 50,
    incident_id="inc-3fa90c", headline="The KV cache is too small", attempts=3,
    reason="hooks.example answered 403",
)  # fmt: skip
ROWS = (
    ROW,
    dataclasses.replace(
        ROW, id="msg-aaaa22", sink="hook", state="waiting", due_at=NOW + 9000, changed_at=NOW - 40,
        attempts=1, reason="it answered 503",
    ),
    dataclasses.replace(
        ROW, id="msg-bb33", sink="people", state="held", due_at=NOW + 9000, changed_at=NOW - 30,
        attempts=0, reason="quiet_hours",
    ),
    dataclasses.replace(
        ROW, id="msg-cc44", sink="hook", state="delivered", changed_at=NOW - 20, reason=None
    ),
)  # fmt: skip


@pytest.fixture
def store(tmp_path):
    """A store with an incident and what was told of it."""
    path = str(tmp_path / "oomwatch.db")
    writer = StoreWriter(path, "gpu-1", interval_seconds=0.05)
    writer.start()
    writer.save_incident(INCIDENT, ROWS)
    assert writer.flush(20)
    assert writer.stop(20)
    return path


@pytest.fixture
def receiver():
    made = FaultyReceiver()
    yield made
    made.close()


@pytest.fixture
def configured(tmp_path, receiver, monkeypatch):
    """A configuration with two receivers, of which one is switched off."""
    path = tmp_path / "own.toml"
    path.write_text(
        f'[[notify.webhook]]\nname = "hook"\nurl = "{receiver.url}"\ntimeout = "5s"\n'
        '[[notify.slack]]\nname = "people"\nenabled = false\nurl_file = "/no/such/file"\n'
    )
    monkeypatch.setenv("OOMWATCH_CONFIG", str(path))
    monkeypatch.setenv("OOMWATCH_NOTIFY_HOOK_SECRET", SECRET)
    return path


def run(group, *words, status=0):
    done = CliRunner().invoke(group, list(words), catch_exceptions=False)
    assert done.exit_code == status, done.output
    return done.stdout


def read(store, query, *arguments):
    with open_reader(parse_store(store)) as connection:
        return query(connection, *arguments)


# ---------------------------------------------------------------- test
@pytest.mark.usefixtures("configured")
def test_a_test_message_arrives_and_what_is_switched_off_is_left_alone(receiver):
    assert run(notify, "test") == "hook (webhook): delivered\n"
    ((identity, body, _),) = receiver.taken
    assert identity.startswith("msg-test-")
    assert body["data"]["kind"] == "test"
    found = json.loads(run(notify, "test", "hook", "--json"))
    assert found["schema"] == "oomwatch.notify/1"
    assert found["receivers"] == [
        {"receiver": "hook", "kind": "webhook", "result": "delivered", "reason": None}
    ]


@pytest.mark.parametrize(("fault", "result"), [(503, "failed"), (403, "refused")])
@pytest.mark.usefixtures("configured")
def test_a_receiver_that_does_not_take_it_is_said_with_its_answer(receiver, fault, result):
    receiver.fault = lambda: fault
    said = run(notify, "test", status=3)
    assert said.startswith(f"hook (webhook): {result}: ")
    assert str(fault) in said
    assert json.loads(run(notify, "test", "--json", status=3))["receivers"][0]["result"] == result


@pytest.mark.usefixtures("configured")
def test_a_secret_that_is_not_there_is_named():
    said = run(notify, "test", "people", status=3)
    assert "people (slack): not sent: " in said
    assert "/no/such/file" in said


@pytest.mark.usefixtures("configured")
def test_a_dry_run_sends_nothing_and_reads_no_secret(receiver):
    assert "--- people (slack)" in run(notify, "test", "people", "--dry-run")
    assert "--- hook (webhook)" in run(notify, "test", "--dry-run")
    assert receiver.attempts == []
    assert SECRET not in run(notify, "test", "--dry-run", "--json")


def test_without_a_receiver_there_is_nothing_to_test(tmp_path, monkeypatch):
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("OOMWATCH_CONFIG", str(tmp_path / "empty.toml"))
    with pytest.raises(UsageError, match=r"no receiver is configured: add .*\[\[notify.slack\]\]"):
        run(notify, "test")


@pytest.mark.usefixtures("configured")
def test_a_receiver_that_is_not_there_is_told_with_those_that_are():
    with pytest.raises(UsageError, match="there is no receiver ops; there are people, hook"):
        run(notify, "test", "ops")


def test_a_preview_of_what_is_neither_receiver_nor_kind_names_both(tmp_path, monkeypatch):
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("OOMWATCH_CONFIG", str(tmp_path / "empty.toml"))
    with pytest.raises(UsageError, match=r"teams is no .*receivers: none; kinds: slack, .*apprise"):
        run(notify, "preview", "teams")


# ---------------------------------------------------------------- list
def test_the_list_says_what_waits_and_what_failed_and_why(store):
    lines = run(notify, "list", "--store", store).splitlines()
    assert [line.split("  ")[0] for line in lines] == [row.id for row in reversed(ROWS)]
    assert re.search(r"held for 2 h \d+ min  quiet hours", lines[1])
    assert re.search(r"waiting for 2 h \d+ min  it answered 503", lines[2])
    assert "oncall  opened  failed  after 3 attempt(s)  hooks.example answered 403" in lines[3]
    assert "inc-3fa90c The KV cache is too small" in lines[3]


def test_the_list_says_until_when_what_waits_for_a_receiver_in_trouble(tmp_path):
    """Not only until when the one waits that is tried."""
    path = str(tmp_path / "trouble.db")
    behind = dataclasses.replace(ROWS[1], id="msg-dd55", due_at=NOW - 5, attempts=0, reason=None)
    elsewhere = dataclasses.replace(behind, id="msg-ee66", sink="oncall")
    writer = StoreWriter(path, "gpu-1", interval_seconds=0.05)
    writer.start()
    writer.save_incident(INCIDENT, (ROWS[1], behind, elsewhere))
    assert writer.flush(20)
    assert writer.stop(20)
    lines = run(notify, "list", "--waiting", "--store", path).splitlines()
    (shown,) = (line for line in lines if "msg-dd55" in line)
    assert re.search(r"waiting for 2 h \d+ min  the receiver is in trouble", shown)
    found = json.loads(run(notify, "list", "--json", "--store", path))["messages"]
    due = {row["id"]: row["due_at"] for row in found}
    assert due["msg-dd55"] == due["msg-aaaa22"] != due["msg-ee66"]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        (["--failed"], ["msg-aaaa11"]),
        (["--waiting"], ["msg-bb33", "msg-aaaa22"]),
        (["--receiver", "hook"], ["msg-cc44", "msg-aaaa22"]),
        (["--limit", "1"], ["msg-cc44"]),
        (["--failed", "--receiver", "hook"], []),
    ],
)
def test_the_list_can_be_narrowed(store, words, ids):
    found = json.loads(run(notify, "list", "--store", store, "--json", *words))
    assert [row["id"] for row in found["messages"]] == ids
    said = run(notify, "list", "--store", store, *words)
    assert [line.split()[0] for line in said.splitlines()] == (ids or ["no"])


# ---------------------------------------------------------------- retry, ack
def test_a_message_is_asked_for_again_by_the_beginning_of_its_id(store):
    assert run(notify, "retry", "aaaa11", "--store", store).startswith("1 message(s)")
    assert {r.id: r.state for r in read(store, read_outbox)}["msg-aaaa11"] == "retry"
    with pytest.raises(NoInputError, match="aaaa11 is none that failed"):
        run(notify, "retry", "aaaa11", "--store", store)


def test_all_are_asked_for_again(store):
    assert json.loads(run(notify, "retry", "--all", "--json", "--store", store))["messages"] == 2
    states = [row.state for row in read(store, read_outbox)]
    assert sorted(states) == ["delivered", "held", "retry", "retry"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ((), "say which message, or --all"),
        (("aaaa11", "--all"), "say which message, or --all"),
        (("aaaa",), "aaaa fits 2 messages"),
        (("aa",), "'aa': write at least 4 characters"),
        (("msg-",), "'msg-': write at least 4 characters"),
        (("",), "'': write at least 4 characters"),
        (("cc44",), "cc44 is none that failed"),
    ],
)
def test_what_cannot_be_asked_for_again_is_said(store, words, error):
    with pytest.raises(OomwatchError, match=error):
        run(notify, "retry", *words, "--store", store)


def test_an_incident_is_acknowledged(store):
    said = run(notify, "ack", "3fa9", "--by", "ann", "--store", store)
    assert said == "inc-3fa90c is acknowledged by ann\n"
    assert read(store, read_acknowledged) == {"inc-3fa90c"}
    with pytest.raises(NoInputError, match="no incident inc-7777"):
        run(notify, "ack", "7777", "--store", store)


@pytest.mark.parametrize("identity", ["", "inc-", "3fa", "inc-3"])
def test_too_little_of_an_id_acknowledges_nothing(store, identity):
    """Even where there is only one incident."""
    with pytest.raises(UsageError, match="write at least 4 characters of the id"):
        run(notify, "ack", identity, "--store", store)
    assert not read(store, read_acknowledged)


def test_a_name_is_not_longer_than_a_name(store):
    found = json.loads(run(notify, "ack", "3fa9", "--by", "a\n" * 500, "--json", "--store", store))
    assert len(found["by"]) <= 100
    assert found["by"].isprintable()


# ---------------------------------------------------------------- preview
@pytest.mark.parametrize("kind", sorted(SINKS))
@pytest.mark.usefixtures("configured")
def test_every_kind_of_message_of_every_kind_of_receiver_can_be_seen(kind):
    shown = run(notify, "preview", kind)
    heads = [line for line in shown.splitlines() if line.startswith("--- ")]
    name = {"webhook": "hook", "slack": "people"}.get(kind, kind)
    kinds = ["opened", *KINDS]  # and one that is back
    assert heads == [f"--- {name} ({kind}): {each}" for each in kinds]
    is_person = kind in {"slack", "email", "apprise"}
    assert ("told of each incident by itself" in shown) != is_person
    assert "It is back: 3 times in 20 min" in shown
    if is_person:
        assert "It serves again, with other flags." in shown
    assert "--max-num-batched-tokens 4096" in shown
    assert "example.com/services" not in shown


@pytest.mark.usefixtures("configured")
def test_a_preview_speaks_chinese_to_people():
    shown = run(notify, "preview", "people", "--lang", "zh", "--kind", "opened")
    assert title("prefill_activation_peak", "zh") in shown
    assert shown.count("再次出现") == 1


def test_a_test_message_carries_the_labels_by_which_it_is_routed(configured, receiver):
    labels = '[notify]\nlabels = { site = "fra1" }\n'
    configured.write_text(labels + configured.read_text(encoding="utf-8"), encoding="utf-8")
    run(notify, "test", "hook")
    ((_, body),) = receiver.attempts
    assert body["data"]["labels"] == {"site": "fra1"}
    shown = run(notify, "test", "hook", "--dry-run")
    assert "webhook-timestamp: " in shown


@pytest.mark.usefixtures("configured")
def test_a_mail_in_a_preview_names_the_one_that_it_answers():
    assert "In-Reply-To: <inc-0123456789ab.oomwatch@" in run(
        notify, "preview", "email", "--kind", "resolved"
    )


@pytest.mark.usefixtures("configured")
def test_a_preview_of_an_incident_of_the_store(store):
    shown = run(
        notify, "preview", "hook", "--incident", "3fa9", "--kind", "resolved", "--store", store
    )
    assert '"inc-3fa90c"' in shown
    with pytest.raises(UsageError, match="--kind nothing: there are opened, updated"):
        run(notify, "preview", "--kind", "nothing")


# ---------------------------------------------------------------- silences
def test_a_silence_begins_is_listed_and_ends(store):
    words = ["--engine", "chat-*", "--label", "team=chat", "--for", "2h", "--reason", "new driver"]
    said = run(silence, "add", *words, "--by", "ann", "--store", store)
    assert "engine=chat-* team=chat" in said
    assert said.rstrip().endswith("(for 2 h)  by ann  new driver")
    (found,) = read(store, read_silences)
    assert (found.engine, found.labels, found.reason) == ("chat-*", ("team=chat",), "new driver")
    assert found.ends_at - found.starts_at == pytest.approx(7200)
    assert run(silence, "list", "--store", store).startswith(found.id)
    assert run(silence, "end", found.id[:8], "--store", store) == f"{found.id} is over\n"
    assert run(silence, "list", "--store", store) == "no silences\n"
    (listed,) = json.loads(run(silence, "list", "--all", "--json", "--store", store))["silences"]
    assert listed["id"] == found.id
    with pytest.raises(NoInputError, match="is none that holds"):
        run(silence, "end", found.id, "--store", store)


@pytest.mark.parametrize("cause", ["kv_saturation", "kv_*", "*"])
def test_a_silence_of_a_cause(store, cause):
    run(silence, "add", "--cause", cause, "--for", "2h", "--store", store)
    assert read(store, read_silences)[0].cause == cause


def test_a_time_of_the_day_is_the_next_one(store):
    before = time.time()
    at = time.localtime(before - 60)  # a minute ago: that of tomorrow
    until = f"{at.tm_hour:02}:{at.tm_min:02}"
    words = ["add", "--all", "--until", until, "--json", "--store", store]
    told = json.loads(run(silence, *words))["silence"]["ends_at"]
    ends_at = datetime.datetime.fromisoformat(told)
    assert ends_at.astimezone().strftime("%H:%M:%S") == f"{until}:00"
    assert before + 22 * 3600 < ends_at.timestamp() < before + 26 * 3600  # clocks may change


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--for", "2h", "--cause", "kv_saturaton"], "no cause kv_saturaton; did you mean kv_sat"),
        (["--for", "2h", "--cause", "zzz"], "no cause zzz; `oomwatch explain` lists them"),
        (["--for", "2h", "--cause", "vk_*"], "no cause that vk_. stands for"),
        (["--for", "2h"], "say which incidents"),
        (["--all", "--engine", "a", "--for", "2h"], "say which incidents"),
        (["--engine", "a"], "say how long"),
        (["--engine", "a", "--for", "2h", "--until", "2099-01-01"], "say how long"),
        (["--engine", "a", "--for", "2"], "--for '2' is no time"),
        (["--engine", "a", "--for", "365d"], "ends within 90 d"),
        (["--engine", "a", "--until", "2020-01-01"], "over already"),
        (["--label", "team", "--for", "2h"], "--label team: write NAME=VALUE"),
        (["--label", "=chat", "--for", "2h"], "--label =chat: write NAME=VALUE"),
    ],
)
def test_a_silence_that_says_too_little_or_too_much_is_refused(store, words, error):
    with pytest.raises(UsageError, match=error):
        run(silence, "add", *words, "--store", store)
    assert read(store, read_silences) == ()


def test_no_store_is_made_by_asking_for_one(tmp_path):
    path = tmp_path / "none.db"
    for group, words in (
        (silence, ("add", "--all", "--for", "1h")),
        (notify, ("list",)),
        (notify, ("retry", "--all")),
    ):
        with pytest.raises(NoInputError, match="no store there"):
            run(group, *words, "--store", str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    ("command", "words", "says"),
    [
        (notify, ["list"], "msg-aaaa11"),
        (notify, ["ack", "3fa9"], "inc-3fa90c is acknowledged"),
        (notify, ["retry", "msg-aaaa11"], "1 message(s)"),
        (notify, ["preview", "webhook", "--incident", "3fa9"], "inc-3fa90c"),
        (silence, ["add", "--engine", "chat", "--for", "1h", "--reason", "work"], "chat"),
        (silence, ["list"], ""),
    ],
)
def test_the_store_may_be_named_by_a_configuration(store, tmp_path, command, words, says):
    other = tmp_path / "other.toml"
    other.write_text(f'[store]\npath = "{store}"\n')
    told = CliRunner().invoke(command, [*words, "--config", str(other)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    assert says in told.output
