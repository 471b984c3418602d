"""Incidents: written whole each time something about them changes, read with their triggers."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, RowMapping, delete, insert, select

from oomwatch.engines.secrets import hide
from oomwatch.records import Evidence, IncidentState, StoredIncident, Trigger
from oomwatch.store import schema
from oomwatch.store.dictionary import plain
from oomwatch.store.inserts import upsert
from oomwatch.store.rows import to_json, to_ms

_LOG = logging.getLogger(__name__)

_DAMAGED: Final = (ValueError, TypeError, RecursionError)
"""What comes of a text that is no JSON, or of JSON that is something else than was written."""


def save_incident(connection: Connection, host_id: int, incident: StoredIncident) -> None:
    """Insert an incident, or replace what is stored of it; its window is pinned.

    One without a diagnosis leaves the stored diagnosis as it is.
    """
    identity = plain(incident.id)
    connection.execute(
        upsert(connection, schema.incident, keeping=("diagnosis",)).values(
            id=identity,
            host_id=host_id,
            fingerprint=plain(incident.fingerprint),
            state=incident.state,
            opened_ms=to_ms(incident.opened_at),
            closed_ms=_ms(incident.closed_at),
            engine=plain(incident.engine_id),
            window_from_ms=_ms(incident.window_from),
            window_to_ms=_ms(incident.window_to),
            diagnosis=None if incident.diagnosis is None else to_json(incident.diagnosis),
        )
    )
    triggers = schema.incident_trigger
    connection.execute(delete(triggers).where(triggers.c.incident_id == identity))
    if incident.triggers:
        connection.execute(
            insert(triggers),
            [
                {"incident_id": identity, "number": number, **_trigger_values(trigger)}
                for number, trigger in enumerate(incident.triggers)
            ],
        )
    if incident.window_from is not None and incident.window_to is not None:
        connection.execute(
            upsert(connection, schema.pinned_window).values(
                incident_id=identity,
                from_ms=to_ms(incident.window_from),
                to_ms=to_ms(incident.window_to),
            )
        )


def list_incidents(
    connection: Connection,
    *,
    state: IncidentState | None = None,
    engine_id: str | None = None,
    since: float | None = None,
    until: float | None = None,
    limit: int = 50,
) -> tuple[StoredIncident, ...]:
    """The newest incidents first; `since` and `until` are about when they opened."""
    table = schema.incident
    query = _select().order_by(table.c.opened_ms.desc(), table.c.id.desc()).limit(limit)
    if state is not None:
        query = query.where(table.c.state == state)
    if engine_id is not None:
        query = query.where(table.c.engine == engine_id)
    if since is not None:
        query = query.where(table.c.opened_ms >= to_ms(since))
    if until is not None:
        query = query.where(table.c.opened_ms <= to_ms(until))
    return _with_triggers(connection, connection.execute(query).all())


def get_incident(connection: Connection, identity: str) -> StoredIncident | None:
    """One incident by its id; None if there is none."""
    rows = connection.execute(_select().where(schema.incident.c.id == identity)).all()
    return next(iter(_with_triggers(connection, rows)), None)


def _select() -> Any:
    table = schema.incident
    return select(table, schema.host.c.name.label("host")).join(
        schema.host, schema.host.c.id == table.c.host_id
    )


def _with_triggers(connection: Connection, rows: Sequence[Row[Any]]) -> tuple[StoredIncident, ...]:
    if not rows:
        return ()
    table = schema.incident_trigger
    found: dict[str, list[Trigger]] = {}
    query = (
        select(table)
        .where(table.c.incident_id.in_([row.id for row in rows]))
        .order_by(table.c.incident_id, table.c.number)
    )
    for row in connection.execute(query).mappings().all():
        try:
            trigger = _trigger(row)
        except _DAMAGED as error:
            _LOG.warning(
                "a trigger of %s cannot be read and is left out: %s", row["incident_id"], error
            )
        else:
            found.setdefault(row["incident_id"], []).append(trigger)
    return tuple(
        StoredIncident(
            id=row.id,
            fingerprint=row.fingerprint,
            state=row.state,
            opened_at=row.opened_ms / 1000,
            closed_at=_seconds(row.closed_ms),
            engine_id=row.engine,
            host=row.host,
            diagnosis=_diagnosis(row.id, row.diagnosis),
            triggers=tuple(found.get(row.id, ())),
            window_from=_seconds(row.window_from_ms),
            window_to=_seconds(row.window_to_ms),
        )
        for row in rows
    )


def _diagnosis(incident_id: str, text: str | None) -> dict[str, Any] | None:
    """A stored diagnosis; None for what is none: the incident itself is there all the same."""
    try:
        value = json.loads(text or "null")
        if value is not None and not isinstance(value, dict):
            raise TypeError("it is no JSON object")
    except _DAMAGED as error:
        _LOG.warning("the diagnosis of %s cannot be read and is left out: %s", incident_id, error)
        return None
    else:
        return value


def _trigger_values(trigger: Trigger) -> dict[str, Any]:
    return {
        "kind": trigger.kind,
        "at_ms": to_ms(trigger.at),
        "engine": plain(trigger.engine_id),
        "gpu": trigger.gpu,
        "pid": trigger.pid,
        "text": plain(hide(trigger.text)),
        "values": to_json(trigger.values),
        "evidence": to_json(hide(list(map(_evidence_values, trigger.evidence)))),
    }


def _evidence_values(evidence: Evidence) -> dict[str, Any]:
    return {
        name: value
        for name in Evidence.__dataclass_fields__
        if (value := getattr(evidence, name)) is not None
    }


def _trigger(row: RowMapping) -> Trigger:
    evidence: list[dict[str, Any]] = json.loads(row["evidence"])
    known = Evidence.__dataclass_fields__
    values = json.loads(row["values"])
    if not isinstance(values, dict):
        raise TypeError("its values are no JSON object")
    return Trigger(
        kind=row["kind"],
        at=row["at_ms"] / 1000,
        engine_id=row["engine"],
        gpu=row["gpu"],
        pid=row["pid"],
        text=row["text"],
        values=values,
        evidence=tuple(
            Evidence(**{name: item[name] for name in item if name in known}) for item in evidence
        ),
    )


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else to_ms(seconds)


def _seconds(ms: int | None) -> float | None:
    return None if ms is None else ms / 1000
