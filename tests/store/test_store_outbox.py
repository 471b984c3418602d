"""Messages to receivers, silences and acknowledgements, on both databases."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest
from fresh_store import NOW
from sqlalchemy import update
from test_store_round_trip import INCIDENT

from oomwatch.records import Evidence, OutboxRow, Silence
from oomwatch.store import schema
from oomwatch.store.control import changed, last_change
from oomwatch.store.incidents import list_incidents
from oomwatch.store.lanes import Batch, Lanes
from oomwatch.store.outbox import (
    SETTLED_SECONDS,
    ask_again,
    count_old_messages,
    prune_outbox,
    read_outbox,
)
from oomwatch.store.silences import (
    Acknowledgement,
    acknowledge,
    count_old_silences,
    end_silence,
    prune_silences,
    read_acknowledged,
    read_silences,
    save_silence,
)
from oomwatch.store.writer import StoreWriter

ROW = OutboxRow(
    id="msg-1",
    sink="oncall",
    kind="opened",
    state="waiting",
    created_at=NOW,
    changed_at=NOW,
    incident_id="inc-1",
    change="abc",
    headline="显存不足",
    notice={"id": "msg-1", "incidents": [{"id": "inc-1"}]},
    due_at=NOW + 5,
)
SILENCE = Silence(
    "sil-1", NOW, NOW + 3600, "维护", "ann", engine="chat-*", cause="kv_saturation", labels=("a=b",)
)


def write(store, *rows, incidents=()):
    with store.writer.begin():
        store.recorder.write(store.writer, Batch(outbox=list(rows), incidents=list(incidents)))


def test_a_message_is_read_as_it_was_written_and_replaced_whole(store):
    write(store, ROW)
    with store.read() as connection:
        assert read_outbox(connection) == (dataclasses.replace(ROW, host="host-a"),)
    told = dataclasses.replace(
        ROW, state="delivered", notice=None, attempts=2, due_at=None, reference="1764.2"
    )
    write(store, told)
    with store.read() as connection:
        assert read_outbox(connection) == (dataclasses.replace(told, host="host-a"),)
        assert read_outbox(connection, host="host-b") == ()
        assert read_outbox(connection, states=["waiting"]) == ()


def test_the_newest_come_first_and_no_more_than_asked_for(store):
    rows = [dataclasses.replace(ROW, id=f"msg-{n}", changed_at=NOW + n) for n in range(5)]
    write(store, *rows)
    with store.read() as connection:
        assert [row.id for row in read_outbox(connection, limit=2)] == ["msg-4", "msg-3"]


def test_failed_and_waiting_messages_can_be_asked_for_again(store):
    states = ("failed", "waiting", "delivered", "held")
    write(store, *(dataclasses.replace(ROW, id=state, state=state) for state in states))
    with store.writer.begin():
        before = last_change(store.writer)
        assert ask_again(store.writer, ["failed", "delivered"], NOW) == 1
        assert last_change(store.writer) not in {None, before}
    with store.read() as connection:
        found = {row.id: row.state for row in read_outbox(connection)}
    assert found == dict(zip(states, states, strict=True)) | {"failed": "retry"}
    with store.writer.begin():
        assert ask_again(store.writer, None, NOW) == 1


def test_what_was_settled_long_ago_is_forgotten_but_not_of_an_open_incident(store):
    long_ago = NOW - SETTLED_SECONDS - 1
    closed = dataclasses.replace(INCIDENT, state="closed", closed_at=NOW)
    still_open = dataclasses.replace(INCIDENT, id="inc-2", state="open", closed_at=None)
    write(
        store,
        dataclasses.replace(ROW, id="new", state="delivered"),
        dataclasses.replace(ROW, id="old", state="delivered", changed_at=long_ago),
        dataclasses.replace(ROW, id="alone", state="failed", incident_id=None, changed_at=long_ago),
        dataclasses.replace(ROW, id="waits", changed_at=long_ago),
        dataclasses.replace(
            ROW, id="open", state="delivered", incident_id="inc-2", changed_at=long_ago
        ),
        incidents=[closed, still_open],
    )
    now_ms = round(NOW * 1000)
    with store.writer.begin():
        assert count_old_messages(store.writer, now_ms) == 2
        assert prune_outbox(store.writer, now_ms) == 2
        assert {row.id for row in read_outbox(store.writer)} == {"new", "waits", "open"}
        # A receiver that is gone for a month is not waited for.
        assert prune_outbox(store.writer, now_ms + 31 * 86_400_000) == 3


def test_silences_begin_end_and_are_forgotten(store):
    with store.writer.begin():
        save_silence(store.writer, SILENCE)
        assert read_silences(store.writer, NOW) == (SILENCE,)
        assert read_silences(store.writer, SILENCE.ends_at) == ()
        assert end_silence(store.writer, "sil-1", NOW + 60)
        assert not end_silence(store.writer, "sil-1", NOW + 61)
        assert not end_silence(store.writer, "sil-2", NOW)
        assert read_silences(store.writer)[0].ends_at == NOW + 60
        later_ms = round((NOW + 8 * 86_400) * 1000)
        assert prune_silences(store.writer, round(NOW * 1000)) == 0
        assert count_old_silences(store.writer, later_ms) == 1
        assert prune_silences(store.writer, later_ms) == 1


def test_rows_that_make_no_sense_silence_nothing_and_stop_nobody(store):
    write(store, ROW)
    with store.writer.begin():
        save_silence(store.writer, SILENCE)
        for text in ("{", "[1]", '{"engine": "a", "moon": "full"}', '{"labels": 1}'):
            store.writer.execute(update(schema.silence).values(matchers=text))
            assert read_silences(store.writer) == ()
        for text in ("{", "[1]"):
            store.writer.execute(update(schema.outbox).values(notice=text))
            assert read_outbox(store.writer)[0].notice is None


def test_an_acknowledgement_holds_while_its_incident_is_open(store):
    still_open = dataclasses.replace(INCIDENT, state="open", closed_at=None)
    write(store, incidents=[still_open])
    with store.writer.begin():
        assert read_acknowledged(store.writer) == frozenset()
        acknowledge(store.writer, Acknowledgement("inc-1", NOW, "ann"))
        acknowledge(store.writer, Acknowledgement("inc-1", NOW + 1, "bob"))
        assert read_acknowledged(store.writer) == {"inc-1"}
    write(store, incidents=[dataclasses.replace(INCIDENT, state="closed", closed_at=NOW)])
    with store.writer.begin():
        assert read_acknowledged(store.writer) == frozenset()


# ---------------------------------------------------------------- before the writer
def test_an_incident_and_its_messages_go_into_one_batch_and_only_the_newest_form():
    lanes = Lanes(capacity=1)
    lanes.add_incident(INCIDENT, [ROW, dataclasses.replace(ROW, id="msg-2")])
    sent = dataclasses.replace(ROW, state="delivered")
    lanes.add_outbox([sent])
    assert len(lanes) == 3
    batch = lanes.take(10)
    assert batch.incidents == [INCIDENT]
    assert batch.outbox == [sent, dataclasses.replace(ROW, id="msg-2")]
    newer = dataclasses.replace(ROW, id="msg-2", attempts=1)
    lanes.add_outbox([newer])
    lanes.put_back(batch)
    assert lanes.take(10).outbox == [newer, sent]


class Notes:
    def __init__(self):
        self.stored_ids, self.looks = [], []
        self.event = threading.Event()

    def stored(self, outbox_ids):
        self.stored_ids += outbox_ids
        self.event.set()

    def look(self, connection):
        self.looks.append(last_change(connection))


def test_the_writer_says_what_is_on_disk_and_looks_at_what_others_wrote(store):
    writer = StoreWriter(store.text, "host-a", interval_seconds=0.02)
    writer.start()
    notes = Notes()
    writer.watch(notes)
    try:
        writer.save_incident(INCIDENT, [ROW])
        assert notes.event.wait(10)
        assert notes.stored_ids == ["msg-1"]
        with store.read() as connection:
            assert read_outbox(connection)[0].id == "msg-1"
        with store.writer.begin():
            changed(store.writer)
            value = last_change(store.writer)
        deadline = time.monotonic() + 10
        while value not in notes.looks and time.monotonic() < deadline:
            time.sleep(0.02)
        assert value in notes.looks
    finally:
        assert writer.stop(10)


class Confused(Notes):
    def stored(self, outbox_ids):
        super().stored(outbox_ids)
        raise KeyError("stored")

    def look(self, connection):
        super().look(connection)
        raise AttributeError("look")


def test_the_faults_of_who_looks_on_do_not_end_the_writing(store, caplog):
    writer = StoreWriter(store.text, "host-a", interval_seconds=0.02)
    writer.start()
    notes = Confused()
    writer.watch(notes)
    try:
        for number in range(3):
            writer.save_outbox([dataclasses.replace(ROW, id=f"msg-{number}", incident_id=None)])
            assert writer.flush(10)
        assert notes.stored_ids == ["msg-0", "msg-1", "msg-2"]
        assert writer.status.mode == "ok"
    finally:
        assert writer.stop(10)
    assert {r.exc_info[1].args[0] for r in caplog.records} == {"stored", "look"}


def test_a_record_that_is_none_keeps_no_other_from_being_written(store):
    writer = StoreWriter(store.text, "host-a", interval_seconds=0.02)
    writer.start()
    try:
        writer.save_incident(dataclasses.replace(INCIDENT, id="inc-odd", triggers=(None,)))
        writer.save_incident(INCIDENT)
        assert writer.flush(10)
        assert writer.status.rejected_total == 1
    finally:
        assert writer.stop(10)
    with store.read() as connection:
        assert [incident.id for incident in list_incidents(connection)] == [INCIDENT.id]


@pytest.mark.parametrize(
    "matchers",
    [
        "",
        "{",
        "[]",
        "null",
        '{"team": "x"}',
        '{"engine": 5}',
        '{"labels": "ab"}',
        '{"labels": [1]}',
    ],
)
def test_a_silence_that_is_not_understood_silences_nothing_and_is_named(store, caplog, matchers):
    with store.writer.begin():
        save_silence(store.writer, SILENCE)
        save_silence(store.writer, dataclasses.replace(SILENCE, id="sil-odd"))
        table = schema.silence
        store.writer.execute(update(table).where(table.c.id == "sil-odd").values(matchers=matchers))
    with store.read() as connection:
        assert read_silences(connection) == (SILENCE,)
    assert "sil-odd" in caplog.text


@pytest.mark.parametrize("diagnosis", ["", "garbage{", "[]", "5"])
def test_an_incident_is_read_without_a_diagnosis_that_is_damaged(store, diagnosis):
    write(store, incidents=[INCIDENT, dataclasses.replace(INCIDENT, id="inc-other")])
    change(store, schema.incident, diagnosis=diagnosis)
    with store.read() as connection:
        found = {incident.id: incident for incident in list_incidents(connection)}
    assert found["inc-other"].diagnosis == INCIDENT.diagnosis is not None
    assert found[INCIDENT.id].diagnosis is None
    assert found[INCIDENT.id].triggers == INCIDENT.triggers


@pytest.mark.parametrize(
    "values",
    [{"values": "garbage{"}, {"values": "[]"}, {"evidence": "5"}, {"evidence": '[{"at": 1}]'}],
)
def test_an_incident_is_read_without_a_trigger_that_is_damaged(store, caplog, values):
    write(store, incidents=[INCIDENT])
    change(store, schema.incident_trigger, **values)
    with store.read() as connection:
        (found,) = list_incidents(connection)
    assert found == dataclasses.replace(INCIDENT, triggers=(), host=found.host)
    assert INCIDENT.id in caplog.text


def test_evidence_of_a_newer_version_is_read_as_far_as_it_is_known(store):
    write(store, incidents=[INCIDENT])
    evidence = '[{"source": "log", "where": "server.log:3", "colour": "red"}]'
    change(store, schema.incident_trigger, evidence=evidence)
    with store.read() as connection:
        (found,) = list_incidents(connection)
    assert found.triggers[0].evidence == (Evidence("log", "server.log:3"),)


def test_a_text_that_is_no_utf_8_keeps_no_row_from_being_read(store):
    if store.writer.dialect.name != "sqlite":
        pytest.skip("PostgreSQL takes no such text")
    write(store, ROW, dataclasses.replace(ROW, id="msg-2"), incidents=[INCIDENT])
    with store.writer.begin():
        store.writer.exec_driver_sql(
            "UPDATE outbox SET headline = CAST(x'41ff' AS TEXT) WHERE id = 'msg-2'"
        )
        store.writer.exec_driver_sql("UPDATE incident SET diagnosis = CAST(x'7bff7d' AS TEXT)")
    with store.read() as connection:
        found = {row.id: row.headline for row in read_outbox(connection)}
        assert found == {"msg-1": ROW.headline, "msg-2": "A\N{REPLACEMENT CHARACTER}"}
        assert list_incidents(connection)[0].diagnosis is None


def change(store, table, **values):
    """Damage what is stored of INCIDENT."""
    identity = table.c.id if table is schema.incident else table.c.incident_id
    with store.writer.begin():
        store.writer.execute(update(table).where(identity == INCIDENT.id).values(**values))
