"""Every query walks an index: SQLite says so itself."""

from __future__ import annotations

import contextlib
import re

import pytest
from fresh_store import CLOCK, NOW
from sqlalchemy import event
from test_store_round_trip import INCIDENT, LINE

from oomwatch.records import EngineSample, GpuProcessSample, GpuSample, HostSample, ProcessSample
from oomwatch.store import queries, retention, rollup
from oomwatch.store.excerpts import read_excerpt
from oomwatch.store.lanes import PendingEvent
from oomwatch.store.retention import Retention

# These have a row for each host, clock, step or pinned incident, and are read whole.
SMALL = {"host", "clock", "rollup_mark", "retention_mark", "pinned_window"}


@pytest.fixture
def plans(sqlite_store):
    """The plan of every SELECT, DELETE and INSERT ... SELECT that runs, by its text."""
    found: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def watch(connection):
        def note(_connection, cursor, statement, parameters, _context, _many):
            if re.match(r"\s*(SELECT|DELETE|UPDATE|INSERT.*SELECT)", statement, re.DOTALL):
                rows = cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
                found[statement] = [row[3] for row in rows]

        event.listen(connection, "before_cursor_execute", note)
        try:
            yield
        finally:
            event.remove(connection, "before_cursor_execute", note)

    for second in range(200):
        at = NOW + second
        sqlite_store.write(
            GpuSample(at, 0, used_bytes=second),
            GpuProcessSample(at, 0, 7, used_bytes=second),
            ProcessSample(at, 7, rss_bytes=second),
            HostSample(at, second),
            EngineSample(at, "e", running=second),
        )
    sqlite_store.write(events=[PendingEvent(LINE, "e", CLOCK, 0)], incidents=[INCIDENT])
    sqlite_store.write(*[GpuSample(NOW - 3600, 0)], clock=type(CLOCK)("b", 5, 5))
    return found, watch


def scans(plans: dict[str, list[str]]) -> list[str]:
    """Lines that read a large table from end to end."""
    bad = []
    for statement, lines in plans.items():
        derived = set(re.findall(r"\) AS (\w+)", statement))
        for line in lines:
            match = re.match(r"SCAN (\w+)(.*)", line)
            if match is None or match.group(1) in SMALL | derived:
                continue
            if "INDEX" in match.group(2) and "LIMIT" in statement:
                continue  # in the order of an index, and only its first rows
            bad.append(f"{line}\n{statement}")
    return bad


def test_reading_scans_no_table(sqlite_store, plans):
    found, watch = plans
    with sqlite_store.read() as connection, watch(connection):
        for step in (0, 10, 60, 3600):
            queries.read_window(connection, NOW, NOW + 100, step=step)
            queries.read_window(connection, NOW, NOW + 100, step=step, host="host-a")
        queries.read_window(connection, NOW, NOW + 100)
        queries.read_window(connection, NOW - 7200, NOW + 100)
        queries.read_last(connection, NOW + 200)
        list(queries.read_events(connection, NOW, NOW + 9, host="host-a", engine_id="e"))
        queries.read_engines(connection, since=NOW)
        queries.read_positions(connection, "host-a")
        queries.list_incidents(connection)
        queries.list_incidents(connection, state="open", since=NOW, until=NOW + 1)
        queries.list_incidents(connection, engine_id="e")
        queries.get_incident(connection, "inc-1")
        list(queries.read_events(connection, NOW, NOW + 9))
        queries.list_incidents(connection, since=NOW, until=NOW + 1, limit=20)
        read_excerpt(connection, "inc-1")
    assert len(found) > 25
    assert scans(found) == []


def test_housekeeping_scans_no_table(sqlite_store, plans):
    found, watch = plans
    now_ms = round(NOW * 1000) + 7_200_000
    host_id = sqlite_store.host_id()
    with watch(sqlite_store.writer):
        assert sum(rollup.roll_up(sqlite_store.writer, host_id, now_ms)) > 0
        assert (
            sum(retention.prune_by_age(sqlite_store.writer, Retention(raw_seconds=0), now_ms)) > 0
        )
    assert len(found) > 20
    assert not scans(found)


def test_a_scan_would_be_seen():
    assert scans({"SELECT x FROM gpu_sample WHERE used_bytes = 1": ["SCAN gpu_sample"]})
    assert not scans({"SELECT min(ts_ms)": ["SEARCH gpu_sample USING PRIMARY KEY (ts_ms>?)"]})
