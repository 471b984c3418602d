"""Tiers: for each 10 s, 1 min and 1 h the minimum, mean, maximum and last value of each gauge.

Every tier is counted from raw samples, never from another tier, so its numbers are exact, and
counting again gives the same. A bucket is counted once it is over; `rollup_mark` says how far.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Select,
    Subquery,
    Table,
    case,
    cast,
    func,
    literal,
    select,
    union_all,
)

from oomwatch.store import schema
from oomwatch.store.inserts import upsert, upsert_rows

GRACE_MS: Final = 15_000
"""How late a sample may come without a bucket being counted twice: a scrape may take that long."""

_CHUNK_MS: Final = {10: 600_000, 60: 1_800_000, 3600: 3_600_000}  # raw time in one transaction


def roll_up(connection: Connection, host_id: int, now_ms: int) -> Iterator[int]:
    """Count every bucket that is over; yields the rows of each small transaction."""
    for step in schema.TIER_STEPS:
        width = step * 1000
        end = (now_ms - GRACE_MS) // width * width
        while True:
            with connection.begin():
                start = _next_start(connection, host_id, step, end)
                if start is None:
                    _set_mark(connection, host_id, step, end)
                    break
                until = min(start + max(_CHUNK_MS[step], width), end)
                written = sum(
                    _count(connection, _buckets(table, host_id, step, (start, until)), table.tier)
                    for table in schema.SAMPLES
                    if step in table.tier_steps
                )
                _set_mark(connection, host_id, step, until)
            yield written


def _next_start(connection: Connection, host_id: int, step: int, end: int) -> int | None:
    """Where counting goes on: at the mark, or past a gap at the first sample after it."""
    mark, kept = schema.rollup_mark.c, schema.retention_mark.c
    counted = connection.scalar(
        select(mark.until_ms).where(mark.host_id == host_id, mark.step == step)
    )
    # What is left of samples that were pruned would count as less than they were.
    whole = connection.scalar(select(kept.from_ms).where(kept.step == 0))
    start = max(counted or 0, whole or 0)
    firsts = [
        select(func.min(table.raw.c.ts_ms).label("first")).where(
            table.raw.c.ts_ms >= start, table.raw.c.ts_ms < end
        )
        for table in schema.SAMPLES
    ]
    first = connection.scalar(select(func.min(union_all(*firsts).subquery().c.first)))
    return None if first is None else int(first) // (step * 1000) * (step * 1000)


def _set_mark(connection: Connection, host_id: int, step: int, until: int) -> None:
    """Note how far a tier is counted. A mark ahead of the clock is one from before it was set."""
    connection.execute(
        upsert(connection, schema.rollup_mark).values(host_id=host_id, step=step, until_ms=until)
    )


def _count(connection: Connection, buckets: Select[Any], tier: Table) -> int:
    """Write buckets to their tier, in place of those that were counted before."""
    insert = upsert_rows(connection, tier, buckets)
    options = {"preserve_rowcount": True}  # SQLAlchemy forgets that of an INSERT of a SELECT
    return connection.execute(insert, execution_options=options).rowcount


def _buckets(
    table: schema.SampleTable, host_id: int, step: int, span: tuple[int, int]
) -> Select[Any]:
    """The buckets of a host's samples from the first of `span` to before the second, in ms."""
    raw, names = table.raw.c, table.dictionary
    key, width = raw[table.key], step * 1000
    bucket = raw.ts_ms - raw.ts_ms % width
    own = (
        [key == host_id]
        if names is schema.host
        else [key.in_(select(names.c.id).where(names.c.host_id == host_id))]
    )
    latest = func.row_number().over(
        partition_by=[key, bucket], order_by=[raw.ts_ms.desc(), raw.clock_id.desc()]
    )
    rows = (
        select(*table.raw.columns, bucket.label("bucket"), latest.label("place"))
        .where(raw.ts_ms >= span[0], raw.ts_ms < span[1], *own)
        .subquery()
    )
    columns = [column for metric in table.metrics for column in _summary(rows, metric)]
    grouped = select(literal(step), rows.c.bucket, rows.c[table.key], *columns)
    # "WHERE true" keeps SQLite from reading ON CONFLICT as a join condition of the SELECT.
    return grouped.where(rows.c.place >= 1).group_by(rows.c.bucket, rows.c[table.key])


def _summary(rows: Subquery, metric: schema.Metric) -> list[ColumnElement[Any]]:
    own = rows.c[metric.column]
    last = func.max(case((rows.c.place == 1, own)))
    if not metric.gauge:
        return [last]
    low = own if metric.low is None else func.coalesce(rows.c[metric.low], own)
    high = own if metric.high is None else func.coalesce(rows.c[metric.high], own)
    return [func.min(low), cast(func.round(func.avg(own)), BigInteger), func.max(high), last]
