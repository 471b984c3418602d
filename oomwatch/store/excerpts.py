"""Excerpts of incidents: one JSON object each, written whole, read whole. No secret is in them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, select

from oomwatch.engines.secrets import hide, hide_text, hide_values, hide_words
from oomwatch.records import EngineExit, Gpu, IncidentExcerpt, LogLine, RecordedEngine
from oomwatch.store import schema
from oomwatch.store.dictionary import plain
from oomwatch.store.inserts import upsert
from oomwatch.store.rows import to_json

_LINE_FIELDS: Final = tuple(field.name for field in dataclasses.fields(LogLine))


def save_excerpt(connection: Connection, excerpt: IncidentExcerpt) -> None:
    """Store an excerpt in place of an earlier one of its incident, which must be stored."""
    connection.execute(
        upsert(connection, schema.incident_excerpt).values(
            incident_id=plain(excerpt.incident_id),
            excerpt=to_json(
                {
                    "engines": list(map(_engine_row, excerpt.engines)),
                    "exits": [hide(dataclasses.asdict(each)) for each in excerpt.exits],
                    "gpus": list(map(dataclasses.asdict, excerpt.gpus)),
                    "lines": {
                        name: list(map(_line_row, lines)) for name, lines in excerpt.lines.items()
                    },
                }
            ),
        )
    )


def read_excerpt(connection: Connection, incident_id: str) -> IncidentExcerpt | None:
    """The excerpt of an incident; None if none is stored."""
    table = schema.incident_excerpt.c
    text = connection.scalar(select(table.excerpt).where(table.incident_id == incident_id))
    if text is None:
        return None
    values: Mapping[str, Any] = json.loads(text)
    return IncidentExcerpt(
        incident_id=incident_id,
        engines=tuple(_engine_of(row) for row in values.get("engines", ())),
        exits=tuple(EngineExit(**row) for row in values.get("exits", ())),
        gpus=tuple(Gpu(**row) for row in values.get("gpus", ())),
        lines={
            name: tuple(LogLine(**row) for row in rows)
            for name, rows in values.get("lines", {}).items()
        },
    )


def _engine_row(engine: RecordedEngine) -> dict[str, Any]:
    return {
        **dataclasses.asdict(engine),
        "command": None if engine.command is None else list(hide_words(engine.command)),
        "env": hide_values(engine.env),
        "metrics_url": None if engine.metrics_url is None else hide_text(engine.metrics_url),
    }


def _engine_of(row: Mapping[str, Any]) -> RecordedEngine:
    lists = {
        name: None if row.get(name) is None else tuple(row[name])
        for name in ("command", "pids", "gpus")
    }
    return RecordedEngine(**{**row, **lists})


def _line_row(line: LogLine) -> dict[str, Any]:
    row = {name: getattr(line, name) for name in _LINE_FIELDS}
    row["text"] = hide_text(line.text)
    return {name: value for name, value in row.items() if value not in (None, False)}
