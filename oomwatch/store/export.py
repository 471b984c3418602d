"""Stored samples as rows with the keys of a recording.

``{"t": 1764400000.0, "gpu": 0, "used_bytes": 75161927680, "free_bytes": 9663676416}`` is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import Connection, func, select

from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    LogLine,
    OutboxRow,
    ProcessSample,
    Silence,
    StoredIncident,
)
from oomwatch.store import schema
from oomwatch.store.incidents import list_incidents
from oomwatch.store.outbox import read_outbox
from oomwatch.store.queries import read_events, read_window
from oomwatch.store.rows import to_ms
from oomwatch.store.silences import read_silences

KINDS: Final = (
    "gpu",
    "gpu_process",
    "process",
    "host",
    "engine",
    "event",
    "incident",
    "message",
    "silence",
)

_RECORDS: Final = {
    "gpu": GpuSample,
    "gpu_process": GpuProcessSample,
    "process": ProcessSample,
    "host": HostSample,
    "engine": EngineSample,
}
_ABOUT_INCIDENTS: Final = {"incident": StoredIncident, "message": OutboxRow, "silence": Silence}
_SERIES: Final = {
    "gpu": "gpus",
    "gpu_process": "gpu_processes",
    "process": "processes",
    "host": "hosts",
    "engine": "engines",
}
_PIECE_SECONDS: Final = 900  # read at once, so that memory stays small on a long export
_COARSE_PIECES: Final = 40  # as many times that of a tier


def columns(kind: str) -> tuple[str, ...]:
    """The keys of a kind, for a table with fixed columns."""
    if kind == "event":
        return ("t", "engine", "event", "source", "number", "text")
    if kind in _ABOUT_INCIDENTS:
        return ("t", *_names(_ABOUT_INCIDENTS[kind]))
    return ("t", *_names(_RECORDS[kind]))


def _names(record: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(record) if field.name != "at")


def export_rows(
    connection: Connection,
    kind: str,
    from_seconds: float,
    to_seconds: float,
    *,
    host: str | None = None,
    step: int = 0,
) -> Iterator[dict[str, Any]]:
    """Rows of one of KINDS in order of time; keys that are unknown are absent.

    `step` is 0 for raw samples or a tier's seconds. Incidents are those that opened in the window,
    messages those that something became of.
    """
    if kind == "incident":
        found = list_incidents(connection, since=from_seconds, until=to_seconds, limit=1_000_000)
        yield from ({"t": one.opened_at, **_known(one)} for one in reversed(found))
        return
    if kind == "message":
        rows = read_outbox(connection, host=host, limit=1_000_000)
        kept = [row for row in rows if from_seconds <= row.changed_at <= to_seconds]
        yield from ({"t": row.changed_at, **_known(row)} for row in reversed(kept))
        return
    if kind == "silence":
        for silence in read_silences(connection, from_seconds):
            if silence.starts_at <= to_seconds:
                yield {"t": silence.starts_at, **_known(silence)}
        return
    piece = _PIECE_SECONDS * (_COARSE_PIECES if step else 1)
    for start, end in _pieces(connection, kind, (from_seconds, to_seconds), piece):
        if kind == "event":
            for engine, event in read_events(connection, start, end, host=host):
                yield _event_row(engine, event)
        else:
            series = read_window(connection, start, end, host=host, step=step)
            yield from map(_sample_row, getattr(series, _SERIES[kind]))


def _pieces(
    connection: Connection, kind: str, span: tuple[float, float], piece: float
) -> Iterator[tuple[float, float]]:
    """Short windows that cover what is there; empty stretches are stepped over."""
    tables = [schema.log_event] if kind == "event" else _tables(kind)
    start, end = max(span[0], 0.0), span[1]
    while start <= end:
        firsts = [
            connection.scalar(select(func.min(table.c.ts_ms)).where(table.c.ts_ms >= to_ms(start)))
            for table in tables
        ]
        known = [first / 1000 for first in firsts if first is not None]
        if not known:
            return
        start = max(start, min(known) // piece * piece)
        if start > end:
            return
        stop = start // piece * piece + piece
        yield start, min(stop - 0.001, end)
        start = stop


def _tables(kind: str) -> list[Any]:
    return [table.raw for table in schema.SAMPLES if table.name == kind]


def _sample_row(sample: object) -> dict[str, Any]:
    row = {"t": sample.at, **_known(sample)}  # type: ignore[attr-defined]
    if isinstance(sample, EngineSample):
        row.pop("extra", None)
        row.update(sample.extra)
    return row


def _event_row(engine: str | None, event: LogLine | KernelEvent) -> dict[str, Any]:
    row = {
        "t": event.at,
        "engine": engine,
        "event": "log" if isinstance(event, LogLine) else event.kind,
        **{name: value for name, value in _known(event).items() if name != "kind"},
    }
    return {name: value for name, value in row.items() if value not in (None, False, {})}


def _known(record: object) -> dict[str, Any]:
    """The fields of a record that are known, deep ones as plain values."""
    values: dict[str, Any] = dataclasses.asdict(record)  # type: ignore[call-overload]
    return {name: value for name, value in values.items() if name != "at" and value is not None}
