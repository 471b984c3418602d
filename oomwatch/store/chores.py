"""Housekeeping as one stream of small steps, so that writes go on in between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, func, select

from oomwatch.store.retention import Retention, prune_by_age, prune_by_size, size_of, vacuum
from oomwatch.store.rollup import roll_up

_LOCK: Final = 0x6F6F6D78


def chores(
    connection: Connection, host_id: int | None, retention: Retention, now_ms: int
) -> Iterator[int]:
    """Count tiers, prune by age and by size, give pages back; yields after each transaction.

    Without `host_id` nothing is counted, and a clock that was set lately is no reason to wait.
    """
    if host_id is not None:
        yield from roll_up(connection, host_id, now_ms)
    with _pruning_alone(connection) as alone:
        if not alone:
            return
        yield from prune_by_age(connection, retention, now_ms, host_id)
        if retention.max_bytes is not None:
            yield from prune_by_size(connection, retention.max_bytes, now_ms)
        yield from vacuum(connection)


@contextlib.contextmanager
def _pruning_alone(connection: Connection) -> Iterator[bool]:
    """Whether no other agent of the fleet is pruning now: two would wait for each other's rows."""
    if connection.dialect.name != "postgresql":
        yield True
        return
    with connection.begin():
        alone = bool(connection.scalar(select(func.pg_try_advisory_lock(_LOCK))))
    try:
        yield alone
    finally:
        # A connection that broke has given its lock back by itself.
        if alone and not connection.invalidated and not connection.closed:
            with connection.begin():
                connection.execute(select(func.pg_advisory_unlock(_LOCK)))


def make_room(connection: Connection, max_bytes: int, now_ms: int) -> bool:
    """Prune at once where the file has reached its limit; False if it has not."""
    before = size_of(connection)
    if before is None:
        return False
    for _deleted in prune_by_size(connection, max_bytes, now_ms):
        pass
    after = size_of(connection)
    return after is not None and after[1] < before[1]
