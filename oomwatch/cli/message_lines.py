"""Messages of the outbox as `oomwatch notify list` shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from oomwatch.records import OutboxRow
from oomwatch.report.phrases import local_time
from oomwatch.report.sanitize import clean
from oomwatch.units import format_rfc3339, format_span


def pauses_of(rows: Iterable[OutboxRow], now: float) -> dict[tuple[str | None, str], float]:
    """When a receiver is tried again that did not take a message; by host and name."""
    pauses: dict[tuple[str | None, str], float] = {}
    for row in rows:
        if row.state == "waiting" and row.attempts and row.due_at is not None and row.due_at > now:
            place = row.host, row.sink
            pauses[place] = min(row.due_at, pauses.get(place, row.due_at))
    return pauses


def paused(row: OutboxRow, pauses: Mapping[tuple[str | None, str], float], now: float) -> OutboxRow:
    """A message whose time has come, but not that of a receiver in trouble, waits for that."""
    until = pauses.get((row.host, row.sink))
    if row.state != "waiting" or until is None or (row.due_at or now) > now:
        return row
    return dataclasses.replace(
        row, due_at=until, reason="the receiver is in trouble, another message is tried first"
    )


def message_as_json(row: OutboxRow) -> dict[str, Any]:
    """A message as `oomwatch.notify/1` has it."""
    return {
        "id": row.id,
        "host": row.host,
        "receiver": row.sink,
        "kind": row.kind,
        "state": row.state,
        "incident": row.incident_id,
        "headline": clean(row.headline),
        "created_at": format_rfc3339(row.created_at),
        "changed_at": format_rfc3339(row.changed_at),
        "due_at": None if row.due_at is None else format_rfc3339(row.due_at),
        "attempts": row.attempts,
        "reason": None if row.reason is None else clean(row.reason),
    }


def line_of(row: OutboxRow, now: float) -> str:
    """A message in one line."""
    when = local_time(row.created_at)
    state: str = row.state
    if row.state in {"waiting", "held"} and row.due_at is not None and row.due_at > now:
        state += f" for {format_span(row.due_at - now)}"
    parts = [
        f"{row.id}  {when}  {row.sink}  {row.kind}  {state}",
        f"after {row.attempts} attempt(s)" if row.attempts > 1 or row.state == "failed" else "",
        (row.reason or "").replace("_", " ") if row.state == "held" else row.reason or "",
        f"{row.incident_id or ''} {row.headline}".strip(),
    ]
    return "  ".join(part for part in parts if part)
