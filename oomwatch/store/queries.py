"""What `diagnose`, `detect` and reports ask of a store. Rows leave as records.

Every query walks an index: a window costs what it holds, not what the store holds. Long windows
come from the tiers; the last value of each bucket stands at its last millisecond, and the true
extremes of a GPU stand beside it in `used_max_bytes` and `free_min_bytes`.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Table, func, null, select, tuple_

from oomwatch.records import Series
from oomwatch.store import schema
from oomwatch.store.batch import EXTRA_EVERY_MS
from oomwatch.store.dictionary import plain
from oomwatch.store.incidents import get_incident, list_incidents
from oomwatch.store.rows import Event, event_of, to_ms
from oomwatch.store.samples import COLUMNS, Values, build

__all__ = [
    "EngineSeen",
    "choose_step",
    "get_incident",
    "list_incidents",
    "read_engines",
    "read_events",
    "read_last",
    "read_positions",
    "read_window",
]

# The longest window, in seconds, that a step is read for: with the processes of eight GPUs at most
# some 28 000 rows. That is a quarter of a second.
_LONGEST: Final = {0: 600, 10: 2 * 3600, 60: 24 * 3600}
_COARSEST: Final = 3600
_MOST_BUCKETS: Final = 180
"""Of a process in a window: there are many of them, and they change slowly."""

_Record = TypeVar("_Record")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSeen:
    """An engine that the store has samples of; `seen_at` lags by up to 15 minutes."""

    host: str
    engine: str
    seen_at: float


# ---------------------------------------------------------------- samples
def read_window(
    connection: Connection,
    from_seconds: float,
    to_seconds: float,
    *,
    host: str | None = None,
    step: int | None = None,
) -> Series:
    """All samples of a window, both ends included, of one host or of all.

    `step` is 0 for raw samples or one of `schema.TIER_STEPS`; without it the span decides.
    Readings of a process that did not change are there once in ten seconds. Where the clock was
    set back, the samples after that stand, and those that they overlap are left out.
    """
    span = (to_ms(max(from_seconds, 0)), to_ms(max(to_seconds, 0)))
    chosen = choose_step(connection, *span) if step is None else step

    def records(table: schema.SampleTable) -> tuple[Any, ...]:
        rows = _rows(connection, table, chosen, span, host)
        found = build(connection, table, rows)
        return tuple(record for record in found if record.at >= span[0] / 1000)

    return Series(
        gpus=records(schema.GPU),
        gpu_processes=records(schema.GPU_PROCESS),
        processes=records(schema.PROCESS),
        hosts=records(schema.HOST),
        engines=records(schema.ENGINE),
    )


def read_last(
    connection: Connection,
    now_seconds: float,
    *,
    within_seconds: float = 120,
    host: str | None = None,
) -> Series:
    """The newest sample of each GPU, process, host and engine that is no older than that."""
    since = now_seconds - within_seconds
    series = read_window(connection, since, now_seconds, host=host, step=0)
    return Series(
        gpus=_newest(series.gpus, lambda sample: (sample.gpu, sample.uuid)),
        gpu_processes=_newest(series.gpu_processes, lambda sample: (sample.gpu, sample.pid)),
        processes=_newest(series.processes, lambda sample: sample.pid),
        hosts=series.hosts[-1:],
        engines=_newest(series.engines, lambda sample: sample.engine),
    )


def choose_step(connection: Connection, from_ms: int, to_ms: int) -> int:
    """The finest step that has few enough points for a span and reaches back to its start."""
    kept, pins = schema.retention_mark.c, schema.pinned_window.c
    marks = _pairs(connection, select(kept.step, kept.from_ms))
    pinned = connection.scalar(
        select(pins.incident_id).where(pins.from_ms <= from_ms, pins.to_ms >= to_ms).limit(1)
    )
    for step, longest in _LONGEST.items():
        whole = marks.get(step, 0) <= from_ms or (step == 0 and pinned is not None)
        if whole and to_ms - from_ms <= longest * 1000:
            return step
    return _COARSEST


def _rows(
    connection: Connection,
    table: schema.SampleTable,
    step: int,
    span: tuple[int, int],
    host: str | None,
) -> list[Values]:
    """Rows of one table: buckets as far as they are counted, then finer ones, then raw samples."""
    start, end = span
    rows: list[Values] = []
    if step:
        mark = schema.rollup_mark.c
        counted = _pairs(connection, select(mark.step, func.min(mark.until_ms)).group_by(mark.step))
        finer = [width for width in table.tier_steps if width <= step] or table.tier_steps[:1]
        for width in sorted(finer, reverse=True):
            width_ms = width * 1000
            until = min(counted.get(width, 0), end // width_ms * width_ms)
            if until > start:
                first = start // width_ms * width_ms
                rows += _fetch(connection, _tier_query(table, width, (first, until), host))
                start = until
    # Numbers beside the fixed ones are whole once a minute, so reading starts one earlier.
    lead = EXTRA_EVERY_MS if table is schema.ENGINE else 0
    raw = _fetch(connection, _raw_query(table, (start - lead, end), host))
    return rows + _of_newest_clock(connection, [row for row in raw if row[0] >= start or not step])


def _pairs(connection: Connection, query: Select[Any]) -> dict[int, int]:
    return {key: value for key, value in connection.execute(query)}  # noqa: C416 - rows, not pairs


def _fetch(connection: Connection, query: Select[Any]) -> list[Values]:
    return list(connection.execute(query).all())  # one call; iterating asks for each row


def _raw_query(table: schema.SampleTable, span: tuple[int, int], host: str | None) -> Select[Any]:
    raw = table.raw.c
    values = [raw[name] for name in COLUMNS[table.name]]
    query = select(raw.ts_ms, raw.clock_id, raw[table.key], *values)
    query = query.where(raw.ts_ms >= span[0], raw.ts_ms <= span[1])
    return _of_host(query, table, raw[table.key], host).order_by(raw.ts_ms, raw[table.key])


def _tier_query(
    table: schema.SampleTable, step: int, span: tuple[int, int], host: str | None
) -> Select[Any]:
    """The last values of each bucket at its last millisecond, as rows of `_raw_query`.

    Of more than `_MOST_BUCKETS` of a process the last one of several in a row stands for them.
    """
    tier = table.tier.c
    values = [_in_tier(table, name) for name in COLUMNS[table.name]]
    query = select(tier.ts_ms + (step * 1000 - 1), null(), tier[table.key], *values)
    within = (tier.step == step, tier.ts_ms >= span[0], tier.ts_ms < span[1])
    query = query.where(*within)
    together = (span[1] - span[0]) // (step * 1000 * _MOST_BUCKETS) + 1
    if together > 1 and table in {schema.PROCESS, schema.GPU_PROCESS}:
        key, width = tier[table.key], step * 1000 * together
        last = select(func.max(tier.ts_ms), key).where(*within).group_by(key, tier.ts_ms // width)
        query = query.where(tuple_(tier.ts_ms, key).in_(last))
    return _of_host(query, table, tier[table.key], host).order_by(tier.ts_ms, tier[table.key])


def _in_tier(table: schema.SampleTable, name: str) -> ColumnElement[Any]:
    """What a tier has for a column of raw samples."""
    for metric in table.metrics:
        if name == metric.column:
            return table.tier.c[f"{name}_last"]
        if name == metric.high:
            return table.tier.c[f"{metric.column}_max"]
        if name == metric.low:
            return table.tier.c[f"{metric.column}_min"]
    return null()


def _of_host(
    query: Select[Any], table: schema.SampleTable, key: ColumnElement[Any], host: str | None
) -> Select[Any]:
    if host is None:
        return query
    own = _host_id(host)
    if table is schema.HOST:
        return query.where(key == own)
    names = table.dictionary.c
    return query.where(key.in_(select(names.id).where(names.host_id == own)))


def _host_id(host: str) -> Any:
    return select(schema.host.c.id).where(schema.host.c.name == plain(host)).scalar_subquery()


def _of_newest_clock(connection: Connection, rows: list[Values]) -> list[Values]:
    """Where rows of several clocks of a host overlap, those of the newest; in order of time."""
    of_clock: dict[int, list[Values]] = collections.defaultdict(list)
    for row in rows:
        of_clock[row[1]].append(row)
    if len(of_clock) <= 1:
        return rows
    clock = schema.clock.c
    hosts = _pairs(connection, select(clock.id, clock.host_id).where(clock.id.in_(of_clock)))
    kept: list[Values] = []
    spans: dict[int | None, list[tuple[int, int]]] = collections.defaultdict(list)
    for identity in sorted(of_clock, reverse=True):
        own, newer = of_clock[identity], spans[hosts.get(identity)]
        kept += [row for row in own if not any(low <= row[0] <= high for low, high in newer)]
        newer.append((own[0][0], own[-1][0]))
    return sorted(kept, key=lambda row: (row[0], row[2]))


def _newest(samples: Sequence[_Record], key: Callable[[_Record], Hashable]) -> tuple[_Record, ...]:
    return tuple({key(sample): sample for sample in samples}.values())


# ---------------------------------------------------------------- events, engines, followers
def read_events(
    connection: Connection,
    from_seconds: float,
    to_seconds: float,
    *,
    host: str | None = None,
    engine_id: str | None = None,
) -> Iterator[tuple[str | None, Event]]:
    """Stored log lines and kernel events in order of time, each with the engine it is of."""
    event, engine = schema.log_event.c, schema.engine.c
    query = (
        select(event.ts_ms, event.kind, event.text, event.fields, engine.name)
        .outerjoin(schema.engine, engine.id == event.engine_id)
        .where(event.ts_ms >= to_ms(max(from_seconds, 0)), event.ts_ms <= to_ms(to_seconds))
        .order_by(event.ts_ms)
    )
    if host is not None:
        query = query.where(event.host_id == _host_id(host))
    if engine_id is not None:
        query = query.where(engine.name == engine_id)
    found = [
        (name, event_of(ts, kind, text, fields))
        for ts, kind, text, fields, name in connection.execute(query)
    ]
    # Lines of one millisecond are told apart by their number in the log.
    return iter(sorted(found, key=lambda item: (item[1].at or 0, item[1].number)))


def read_engines(connection: Connection, *, since: float = 0) -> tuple[EngineSeen, ...]:
    """Engines that were seen since a time, the newest first."""
    engine, host = schema.engine.c, schema.host.c
    rows = connection.execute(
        select(host.name, engine.name.label("engine"), engine.seen_ms)
        .join(schema.host, host.id == engine.host_id)
        .where(engine.seen_ms >= to_ms(since))
        .order_by(engine.seen_ms.desc())
    )
    return tuple(EngineSeen(name, engine_id, seen / 1000) for name, engine_id, seen in rows)


def read_positions(connection: Connection, host: str) -> dict[str, dict[str, Any]]:
    """Where the followers of a host were, by source."""
    place = schema.follower_position.c
    rows = connection.execute(
        select(place.source, place.position).where(place.host_id == _host_id(host))
    )
    found = ((source, _position(text)) for source, text in rows)
    return {source: position for source, position in found if position is not None}


def _position(text: str) -> dict[str, Any] | None:
    """A stored position; None for what is none: its source is then followed from where it is."""
    try:
        position = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    return position if isinstance(position, dict) else None


# ---------------------------------------------------------------- about the store
@dataclasses.dataclass(frozen=True, slots=True)
class TableStats:
    """How many rows a table holds, and of when."""

    table: str
    rows: int
    first_at: float | None = None
    last_at: float | None = None


def read_stats(connection: Connection) -> tuple[TableStats, ...]:
    """Rows of every table. Counting reads the whole store: for people, not for the agent."""
    return tuple(_stats(connection, table) for table in _by_name(schema.metadata.tables.values()))


def _by_name(tables: Iterable[Table]) -> list[Table]:
    return sorted(tables, key=lambda table: table.name)


def _stats(connection: Connection, table: Table) -> TableStats:
    times = [table.c.ts_ms] if "ts_ms" in table.c else []
    rows, *span = connection.execute(
        select(func.count(), *map(func.min, times), *map(func.max, times)).select_from(table)
    ).one()
    first, last = [None if ms is None else ms / 1000 for ms in span] or (None, None)
    return TableStats(table.name, rows, first, last)
