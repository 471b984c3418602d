"""Messages to receivers: written whole each time something becomes of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, and_, delete, func, or_, select, update

from oomwatch.records import OutboxRow
from oomwatch.store import schema
from oomwatch.store.control import changed
from oomwatch.store.dictionary import plain
from oomwatch.store.inserts import upsert
from oomwatch.store.rows import to_json, to_ms

PENDING: Final = ("held", "waiting", "retry")
"""States of messages that may still be sent."""
SETTLED_SECONDS: Final = 7 * 86_400
"""How long a settled message is kept, so that the same one is not sent again."""
_STALE_SECONDS: Final = 30 * 86_400
"""What waits for a host or receiver that is gone is kept for so long."""


def save_outbox(connection: Connection, host_id: int, rows: Iterable[OutboxRow]) -> None:
    """Insert messages of a host, or replace what is stored of them."""
    connection.execute(
        upsert(connection, schema.outbox),
        [
            {
                "id": plain(row.id),
                "host_id": host_id,
                "sink": plain(row.sink),
                "kind": row.kind,
                "state": row.state,
                "created_ms": to_ms(row.created_at),
                "changed_ms": to_ms(row.changed_at),
                "incident_id": plain(row.incident_id),
                "change": row.change,
                "headline": plain(row.headline),
                "notice": None if row.notice is None else to_json(row.notice),
                "attempts": row.attempts,
                "due_ms": None if row.due_at is None else to_ms(row.due_at),
                "reason": plain(row.reason),
                "reference": plain(row.reference),
            }
            for row in rows
        ],
    )


def read_outbox(
    connection: Connection,
    *,
    host: str | None = None,
    states: Sequence[str] | None = None,
    limit: int | None = 1000,
) -> tuple[OutboxRow, ...]:
    """The messages that changed last, the newest first; all of them without a limit."""
    table = schema.outbox
    query = _select().order_by(table.c.changed_ms.desc(), table.c.id).limit(limit)
    if host is not None:
        query = query.where(schema.host.c.name == (plain(host) or "unknown"))
    if states is not None:
        query = query.where(table.c.state.in_(states))
    return tuple(map(_row, connection.execute(query)))


def ask_again(connection: Connection, ids: Sequence[str] | None, now: float) -> int:
    """Have the agents send failed and waiting messages now; without `ids` all. How many."""
    table = schema.outbox
    query = update(table).where(table.c.state.in_(("failed", "waiting")))
    if ids is not None:
        query = query.where(table.c.id.in_(ids))
    done = connection.execute(query.values(state="retry", due_ms=to_ms(now)))
    changed(connection)
    return done.rowcount


def prune_outbox(connection: Connection, now_ms: int) -> int:
    """Forget messages that were settled long ago, within the transaction that is open."""
    return connection.execute(delete(schema.outbox).where(_is_old(now_ms))).rowcount


def count_old_messages(connection: Connection, now_ms: int) -> int:
    """How many `prune_outbox` would forget."""
    query = select(func.count()).select_from(schema.outbox).where(_is_old(now_ms))
    return connection.scalar(query) or 0


def _is_old(now_ms: int) -> Any:
    """Settled a while ago, and not about an incident that is still open."""
    table, incident = schema.outbox.c, schema.incident.c
    still_open = select(incident.id).where(incident.state == "open")
    settled = and_(
        table.state.not_in(PENDING),
        table.changed_ms < now_ms - SETTLED_SECONDS * 1000,
        or_(table.incident_id.is_(None), table.incident_id.not_in(still_open)),
    )
    return or_(settled, table.changed_ms < now_ms - _STALE_SECONDS * 1000)


def _object(text: str | None) -> dict[str, Any] | None:
    """A JSON object; None for what is none: one row must not keep an agent from its start."""
    try:
        value = json.loads(text or "null")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _select() -> Select[Any]:
    return select(schema.outbox, schema.host.c.name.label("host")).join(
        schema.host, schema.host.c.id == schema.outbox.c.host_id
    )


def _row(row: Row[Any]) -> OutboxRow:
    return OutboxRow(
        id=row.id,
        sink=row.sink,
        kind=row.kind,
        state=row.state,
        created_at=row.created_ms / 1000,
        changed_at=row.changed_ms / 1000,
        incident_id=row.incident_id,
        change=row.change,
        headline=row.headline,
        notice=_object(row.notice),
        attempts=row.attempts,
        due_at=None if row.due_ms is None else row.due_ms / 1000,
        reason=row.reason,
        reference=row.reference,
        host=row.host,
    )
