"""What is forgotten when: limits by age and by size, in small steps between writes.

Raw samples and log lines go first, then the tiers from the finest to the coarsest; the windows of
incidents and the incidents themselves go last. Free pages are given back a megabyte at a time:
a VACUUM would hold up the writer and need the space twice. How large a PostgreSQL database may
grow is its server's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Final

from sqlalchemy import Connection, Table, delete, func, select

from oomwatch.store import schema
from oomwatch.store.database import data_limit, raw_connection
from oomwatch.store.dictionary import SEEN_EVERY_MS
from oomwatch.store.inserts import upsert
from oomwatch.store.outbox import count_old_messages, prune_outbox
from oomwatch.store.silences import count_old_silences, prune_silences

HOUR_MS: Final = 3_600_000
DAY_SECONDS: Final = 86_400
_SLICE_MS: Final = 120_000  # of raw samples in one transaction: some 10 000 rows on a large host
_SLICE_STEPS: Final = 100  # of a tier in one transaction
_VACUUM_PAGES: Final = 256
_FULL: Final = 0.95  # of the limit: from here on room is made
_ROOMY: Final = 0.85  # of the limit: until here


@dataclasses.dataclass(frozen=True, slots=True)
class Retention:
    """How long what is kept, in seconds, and how large the file may grow.

    The defaults make 40 MB for each GPU with four processes.
    """

    raw_seconds: int = DAY_SECONDS
    tier_seconds: Mapping[int, int] = dataclasses.field(
        default_factory=lambda: {
            10: 3 * DAY_SECONDS,
            60: 30 * DAY_SECONDS,
            3600: 400 * DAY_SECONDS,
        }
    )
    log_seconds: int = 7 * DAY_SECONDS
    incident_seconds: int = 400 * DAY_SECONDS
    max_bytes: int | None = 1024**3


# ---------------------------------------------------------------- by age
def prune_by_age(
    connection: Connection, retention: Retention, now_ms: int, host_id: int | None = None
) -> Iterator[int]:
    """Delete what is too old; yields the rows of each small transaction.

    With `host_id` nothing goes in the hour
    after that host's clock was set: a wrong clock must not empty the store.
    """
    with connection.begin():
        if host_id is not None and _clock_is_new(connection, host_id, now_ms):
            return
        raw_until = _raw_until(connection, retention, now_ms)
    yield from _prune_raw(connection, raw_until)
    yield from _prune_logs(connection, now_ms - retention.log_seconds * 1000)
    for step, seconds in retention.tier_seconds.items():
        yield from _prune_tier(connection, step, now_ms - seconds * 1000)
    yield from _prune_incidents(connection, now_ms - retention.incident_seconds * 1000)
    with connection.begin():
        told = prune_outbox(connection, now_ms) + prune_silences(connection, now_ms)
    yield told
    yield _prune_dictionaries(connection)


def _raw_until(connection: Connection, retention: Retention, now_ms: int) -> int:
    """Raw samples before this may go: every tier has counted them, and whole hours are left."""
    counted = connection.scalar(select(func.min(schema.rollup_mark.c.until_ms)))
    until = now_ms - retention.raw_seconds * 1000
    return min(until, until if counted is None else int(counted)) // HOUR_MS * HOUR_MS


def _clock_is_new(connection: Connection, host_id: int, now_ms: int) -> bool:
    clock = schema.clock.c
    newest = select(clock.from_ms).where(clock.host_id == host_id).order_by(clock.id.desc())
    began = connection.scalar(newest.limit(1))
    return began is not None and not began <= now_ms - HOUR_MS


def _prune_raw(connection: Connection, until_ms: int) -> Iterator[int]:
    for table in schema.SAMPLES:
        yield from _delete_unpinned(connection, table.raw, until_ms)
    with connection.begin():
        _mark(connection, 0, until_ms)


def _prune_logs(connection: Connection, until_ms: int) -> Iterator[int]:
    yield from _delete_unpinned(connection, schema.log_event, until_ms)


def _delete_unpinned(connection: Connection, table: Table, until_ms: int) -> Iterator[int]:
    """Delete rows before `until_ms` outside of pinned windows, a slice a transaction."""
    with connection.begin():
        windows = _pinned(connection, until_ms)
    start = 0
    for low, high in [*windows, (until_ms, until_ms)]:
        yield from _delete_range(connection, table, start, min(low, until_ms))
        start = max(start, high)


def _pinned(connection: Connection, until_ms: int) -> list[tuple[int, int]]:
    """Pinned windows that begin before `until_ms`: first ms, and first ms after; in order."""
    table = schema.pinned_window
    rows = connection.execute(
        select(table.c.from_ms, table.c.to_ms)
        .where(table.c.from_ms < until_ms)
        .order_by(table.c.from_ms)
    )
    return [(row.from_ms, row.to_ms + 1) for row in rows]


def _delete_range(
    connection: Connection, table: Table, start_ms: int, end_ms: int
) -> Iterator[int]:
    time = table.c.ts_ms
    while True:
        with connection.begin():
            first = connection.scalar(select(func.min(time)).where(time >= start_ms, time < end_ms))
            if first is None:
                return
            start_ms = min(first + _SLICE_MS, end_ms)
            done = connection.execute(delete(table).where(time >= first, time < start_ms))
        yield done.rowcount


def _prune_tier(connection: Connection, step: int, until_ms: int) -> Iterator[int]:
    for table in schema.SAMPLES:
        if step in table.tier_steps:
            yield from _delete_tier(connection, table.tier, step, until_ms)
    with connection.begin():
        _mark(connection, step, until_ms)


def _delete_tier(connection: Connection, tier: Table, step: int, until_ms: int) -> Iterator[int]:
    rows, time = tier.c.step == step, tier.c.ts_ms
    while True:
        with connection.begin():
            first = connection.scalar(select(func.min(time)).where(rows, time < until_ms))
            if first is None:
                return
            end = min(first + step * 1000 * _SLICE_STEPS, until_ms)
            done = connection.execute(delete(tier).where(rows, time >= first, time < end))
        yield done.rowcount


def _mark(connection: Connection, step: int, from_ms: int) -> None:
    """Note from when on a step is complete; the mark never goes back."""
    table = schema.retention_mark
    known = connection.scalar(select(table.c.from_ms).where(table.c.step == step))
    if known is None or known < from_ms:
        connection.execute(upsert(connection, table).values(step=step, from_ms=from_ms))


def _prune_incidents(connection: Connection, until_ms: int) -> Iterator[int]:
    table = schema.incident
    with connection.begin():
        done = connection.execute(
            delete(table).where(table.c.state == "closed", table.c.opened_ms < until_ms)
        )
    yield done.rowcount


def _prune_dictionaries(connection: Connection) -> int:
    """Forget processes that no sample and no tier can name any more."""
    deleted = 0
    with connection.begin():
        for table, names in ((schema.PROCESS, schema.process), (schema.GPU_PROCESS, schema.holder)):
            firsts = [connection.scalar(select(func.min(table.raw.c.ts_ms)))]
            for step in table.tier_steps:
                tier = table.tier.c
                firsts.append(
                    connection.scalar(select(func.min(tier.ts_ms)).where(tier.step == step))
                )
            known = [first for first in firsts if first is not None]
            if known:
                seen_until = min(known) - SEEN_EVERY_MS
                done = connection.execute(delete(names).where(names.c.seen_ms < seen_until))
                deleted += done.rowcount
    return deleted


def count_too_old(connection: Connection, retention: Retention, now_ms: int) -> int:
    """How many rows `prune_by_age` would delete, within the transaction that is open."""
    raw_until = _raw_until(connection, retention, now_ms)
    found = sum(_count_unpinned(connection, table.raw, raw_until) for table in schema.SAMPLES)
    log_until = now_ms - retention.log_seconds * 1000
    found += _count_unpinned(connection, schema.log_event, log_until)
    for table in schema.SAMPLES:
        tier = table.tier.c
        for step in table.tier_steps:
            until = now_ms - retention.tier_seconds[step] * 1000
            old = select(func.count()).where(tier.step == step, tier.ts_ms < until)
            found += connection.scalar(old) or 0
    incident, until = schema.incident.c, now_ms - retention.incident_seconds * 1000
    closed = select(func.count()).where(incident.state == "closed", incident.opened_ms < until)
    found += count_old_messages(connection, now_ms) + count_old_silences(connection, now_ms)
    return found + (connection.scalar(closed) or 0)


def _count_unpinned(connection: Connection, table: Table, until_ms: int) -> int:
    found, start, time = 0, 0, table.c.ts_ms
    for low, high in [*_pinned(connection, until_ms), (until_ms, until_ms)]:
        inside = select(func.count()).where(time >= start, time < min(low, until_ms))
        found += connection.scalar(inside) or 0
        start = max(start, high)
    return found


# ---------------------------------------------------------------- by size
def size_of(connection: Connection) -> tuple[int, int] | None:
    """Bytes of the file, and bytes of it that hold data; None for a server."""
    if connection.dialect.name != "sqlite":
        return None
    with _transaction(connection):
        page, pages, free = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_size", "page_count", "freelist_count")
        )
    return page * pages, page * (pages - free)


def _transaction(connection: Connection) -> Any:
    """The transaction that is open, or a new one."""
    return contextlib.nullcontext() if connection.in_transaction() else connection.begin()


def prune_by_size(connection: Connection, max_bytes: int, now_ms: int) -> Iterator[int]:
    """Delete, oldest and least dear first, until the data fits; yields rows per transaction."""
    size, limit = size_of(connection), data_limit(max_bytes)
    if size is None or size[1] <= limit * _FULL:
        return
    for deleted in _dispensable(connection, now_ms):
        yield deleted
        size = size_of(connection)
        if size is None or size[1] <= limit * _ROOMY:
            return


def _dispensable(connection: Connection, now_ms: int) -> Iterator[int]:
    """Everything that can go, in the order in which it goes."""
    yield from _oldest_first(connection, now_ms - HOUR_MS)
    for step, keep_hours in ((10, 6), (60, 24)):
        yield from _prune_tier(connection, step, now_ms - keep_hours * HOUR_MS)
    yield from _unpin(connection, now_ms)
    yield from _oldest_first(connection, now_ms - HOUR_MS // 12)
    for step in schema.TIER_STEPS:
        yield from _prune_tier(connection, step, now_ms)
    yield _prune_dictionaries(connection)
    yield from _prune_incidents(connection, now_ms)


def _oldest_first(connection: Connection, until_ms: int) -> Iterator[int]:
    """Raw samples and log lines, half an hour of all tables at a time."""
    tables = [*(table.raw for table in schema.SAMPLES), schema.log_event]
    while True:
        with connection.begin():
            pins = _pinned(connection, until_ms)
            firsts = [
                first
                for table in tables
                if (first := _first_unpinned(connection, table, pins, until_ms)) is not None
            ]
        if not firsts:
            return
        end = min(min(firsts) + HOUR_MS // 2, until_ms)
        for table in tables:
            yield from _delete_unpinned(connection, table, end)
        with connection.begin():
            _mark(connection, 0, end)


def _first_unpinned(
    connection: Connection, table: Table, pins: list[tuple[int, int]], until_ms: int
) -> int | None:
    time, start = table.c.ts_ms, 0
    for low, high in [*pins, (until_ms, until_ms)]:
        first = connection.scalar(
            select(func.min(time)).where(time >= start, time < min(low, until_ms))
        )
        if first is not None:
            return int(first)
        start = max(start, high)
    return None


def _unpin(connection: Connection, now_ms: int) -> Iterator[int]:
    """The windows of closed incidents, the oldest first, with the samples in them."""
    pins, incidents = schema.pinned_window, schema.incident
    while True:
        with connection.begin():
            oldest = connection.scalar(
                select(pins.c.incident_id)
                .join(incidents, incidents.c.id == pins.c.incident_id)
                .where(incidents.c.state == "closed")
                .order_by(pins.c.from_ms)
                .limit(1)
            )
            if oldest is None:
                return
            connection.execute(delete(pins).where(pins.c.incident_id == oldest))
        yield from _oldest_first(connection, now_ms - HOUR_MS)


def vacuum(connection: Connection) -> Iterator[int]:
    """Give free pages back to the filesystem, a megabyte a step; yields 0 after each."""
    if connection.dialect.name != "sqlite":
        return
    raw, left = raw_connection(connection), 1
    while left:
        (before,) = raw.execute("PRAGMA freelist_count").fetchone()
        # Each row that is fetched is a page that was given back.
        raw.execute(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})").fetchall()
        (left,) = raw.execute("PRAGMA freelist_count").fetchone()
        if left >= before:
            return
        yield 0
