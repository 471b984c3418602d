"""Silences and acknowledgements: what people say about incidents, for the agents to obey."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Final

from sqlalchemy import Connection, delete, func, select, update

from oomwatch.records import Silence
from oomwatch.store import schema
from oomwatch.store.control import changed
from oomwatch.store.dictionary import plain
from oomwatch.store.inserts import upsert
from oomwatch.store.rows import to_json, to_ms

MATCHERS: Final = ("engine", "host", "incident_class", "cause", "labels")
_KEPT_SECONDS: Final = 7 * 86_400
"""How long a silence that is over can still be looked up."""


def save_silence(connection: Connection, silence: Silence) -> None:
    """Begin a silence, within the transaction that is open."""
    given = {name: value for name in MATCHERS if (value := getattr(silence, name))}
    connection.execute(
        upsert(connection, schema.silence).values(
            id=plain(silence.id),
            starts_ms=to_ms(silence.starts_at),
            ends_ms=to_ms(silence.ends_at),
            reason=plain(silence.reason),
            author=plain(silence.author),
            matchers=to_json(given),
        )
    )
    changed(connection)


def end_silence(connection: Connection, identity: str, now: float) -> bool:
    """End a silence now; False if there is none of this id that is not over."""
    table = schema.silence
    ends = to_ms(now)
    done = connection.execute(
        update(table).where(table.c.id == identity, table.c.ends_ms > ends).values(ends_ms=ends)
    )
    changed(connection)
    return done.rowcount > 0


def read_silences(connection: Connection, since: float = 0.0) -> tuple[Silence, ...]:
    """Silences that end after a time, the first to end first."""
    table = schema.silence
    query = select(table).where(table.c.ends_ms > to_ms(since)).order_by(table.c.ends_ms)
    return tuple(
        Silence(
            id=row.id,
            starts_at=row.starts_ms / 1000,
            ends_at=row.ends_ms / 1000,
            reason=row.reason,
            author=row.author,
            **matchers,
        )
        for row in connection.execute(query)
        if (matchers := _matchers(row.matchers)) is not None
    )


def _matchers(text: str) -> dict[str, Any] | None:
    """What a silence is about; None if that cannot be told: then it silences nothing."""
    try:
        stored: dict[str, Any] = json.loads(text)
        given = {**stored, "labels": tuple(stored.get("labels", ()))}
    except (ValueError, TypeError, AttributeError):
        return None
    return given if given.keys() <= set(MATCHERS) else None


@dataclasses.dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Somebody looks after an incident."""

    incident_id: str
    at: float
    author: str | None = None


def acknowledge(connection: Connection, given: Acknowledgement) -> None:
    """Note it, within the transaction that is open; the incident must be stored."""
    connection.execute(
        upsert(connection, schema.acknowledgement).values(
            incident_id=given.incident_id, at_ms=to_ms(given.at), author=plain(given.author)
        )
    )
    changed(connection)


def read_acknowledged(connection: Connection) -> frozenset[str]:
    """Ids of the open incidents that somebody looks after."""
    given, incident = schema.acknowledgement.c, schema.incident.c
    query = (
        select(given.incident_id)
        .join(schema.incident, incident.id == given.incident_id)
        .where(incident.state == "open")
    )
    return frozenset(connection.scalars(query))


def prune_silences(connection: Connection, now_ms: int) -> int:
    """Forget silences that were over long ago, within the transaction that is open."""
    table = schema.silence
    until = now_ms - _KEPT_SECONDS * 1000
    return connection.execute(delete(table).where(table.c.ends_ms < until)).rowcount


def count_old_silences(connection: Connection, now_ms: int) -> int:
    """How many `prune_silences` would forget."""
    until = now_ms - _KEPT_SECONDS * 1000
    query = select(func.count()).select_from(schema.silence)
    return connection.scalar(query.where(schema.silence.c.ends_ms < until)) or 0
