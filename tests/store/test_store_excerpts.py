"""Excerpts of incidents: written with their incident, read back, gone with it."""

from __future__ import annotations

import dataclasses

from fresh_store import NOW
from sqlalchemy import delete, text

from oomwatch.records import (
    EngineExit,
    Gpu,
    IncidentExcerpt,
    LogLine,
    RecordedEngine,
    StoredIncident,
)
from oomwatch.store import schema
from oomwatch.store.excerpts import read_excerpt
from oomwatch.store.lanes import Batch
from oomwatch.store.migrations import MIGRATIONS, migrate

INCIDENT = StoredIncident("inc-1", "vllm-0/failure", "open", NOW)
EXCERPT = IncidentExcerpt(
    incident_id="inc-1",
    engines=(
        RecordedEngine(
            "vllm-0", "vllm", "0.11.0", ("vllm", "serve", "m"), {"A": "1"}, (4,), (0, 1), ended=True
        ),
        RecordedEngine("other"),
    ),
    exits=(EngineExit("vllm-0", "process 4", NOW, 137, 9, oom_killed=True),),
    gpus=(Gpu(0, "GPU-1", "H100", 80, 70, 10),),
    lines={"vllm-0": (LogLine("a.log", 7, "text", NOW, "ERROR", "Core", 4, prefixed=True),)},
)


def write(store, excerpt, *, incidents=(INCIDENT,)):
    with store.writer.begin():
        store.recorder.write(store.writer, Batch(incidents=list(incidents), excerpts=[excerpt]))


def test_an_excerpt_comes_back(store):
    write(store, EXCERPT)
    with store.read() as connection:
        assert read_excerpt(connection, "inc-1") == EXCERPT
        assert read_excerpt(connection, "inc-2") is None


def test_the_newer_one_stands(store):
    write(store, EXCERPT)
    newer = dataclasses.replace(EXCERPT, lines={})
    write(store, newer, incidents=())
    with store.read() as connection:
        assert read_excerpt(connection, "inc-1") == newer


def test_it_goes_with_its_incident(store):
    write(store, EXCERPT)
    with store.writer.begin():
        store.writer.execute(delete(schema.incident))
    assert store.count("incident_excerpt") == 0


def test_no_secret_is_stored(store):
    secret = "sesame-1234"  # noqa: S105 - the one that is planted
    engine = RecordedEngine(
        "e",
        command=("vllm", "serve", "m", "--api-key", secret),
        env={"VLLM_API_KEY": secret},
        metrics_url=f"http://me:{secret}@127.0.0.1/metrics",
    )
    line = LogLine("a", 1, f"api_key='{secret}'", NOW)
    write(store, IncidentExcerpt("inc-1", (engine,), lines={"e": (line,)}))
    with store.read() as connection:
        assert secret not in connection.scalar(text("SELECT excerpt FROM incident_excerpt"))


def test_a_store_of_before_gets_the_table(store):
    with store.writer.begin():
        store.writer.execute(text("DROP TABLE incident_excerpt"))
        store.writer.execute(text("DELETE FROM migration WHERE number > 1"))
        if store.writer.dialect.name == "sqlite":
            store.writer.exec_driver_sql("PRAGMA user_version = 1")
    assert migrate(store.writer) == [step.number for step in MIGRATIONS[1:]]
    write(store, EXCERPT)
    assert store.count("incident_excerpt") == 1
