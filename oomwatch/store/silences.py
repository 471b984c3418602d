"""Silences and acknowledgements: what people say about incidents, for the agents to obey."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, delete, func, select, update

from oomwatch.records import Silence
from oomwatch.store import schema
from oomwatch.store.control import changed
from oomwatch.store.dictionary import plain
from oomwatch.store.inserts import upsert
from oomwatch.store.rows import to_json, to_ms

_LOG = logging.getLogger(__name__)

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
    return tuple(_readable(connection.execute(query).all()))


def _readable(rows: Sequence[Row[Any]]) -> Iterator[Silence]:
    """Those whose matchers are understood; the others silence nothing rather than too much."""
    for row in rows:
        matchers = _matchers(row.matchers)
        if matchers is None:
            _LOG.warning(
                "silence %s cannot be understood and silences nothing: its matchers are "
                "damaged, or of a newer oomwatch",
                row.id,
            )
            continue
        yield Silence(
            id=row.id,
            starts_at=row.starts_ms / 1000,
            ends_at=row.ends_ms / 1000,
            reason=row.reason,
            author=row.author,
            **matchers,
        )


def _matchers(text: str) -> dict[str, Any] | None:
    """What a silence is about; None if that cannot be told."""
    try:
        given = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(given, dict) or not given.keys() <= set(MATCHERS):
        return None
    labels = given.pop("labels", [])
    if not isinstance(labels, list) or not all(
        isinstance(value, str) for value in (*labels, *given.values())
    ):
        return None
    return {**given, "labels": tuple(labels)}


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


def read_acknowledgements(
    connection: Connection, incident_ids: Sequence[str]
) -> Mapping[str, Acknowledgement]:
    """Who looks after these incidents, by id; those that nobody does are left out."""
    table = schema.acknowledgement
    query = select(table).where(table.c.incident_id.in_(incident_ids))
    rows = connection.execute(query).all()
    return {r.incident_id: Acknowledgement(r.incident_id, r.at_ms / 1000, r.author) for r in rows}


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
