"""A message as JSON for programs, ``oomwatch.notice/1``; schema/ holds its JSON Schema.

Every key is always there, null where unknown. Where room is short, evidence goes first, then what
remedies change, then the words; who and what never. `truncated` says so, and `left_out` is the
number of incidents, of very many, that found no room at all.
"""

from __future__ import annotations

import dataclasses
import json
import pkgutil
import platform
from collections.abc import Iterator
from typing import Any, Final

from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.units import format_rfc3339

SCHEMA: Final = "oomwatch.notice/1"
_LEAST: Final = (
    "id", "fingerprint", "host", "severity", "opened_at", "closed_at", "engine_id", "class",
    "cause", "confidence",
)  # fmt: skip
"""What is told of an incident even where hardly any room is left."""


def event_type(notice: Notice) -> str:
    """``oomwatch.incident.opened``, ``oomwatch.test``, ``oomwatch.undelivered``."""
    if notice.kind in {"test", "undelivered"}:
        return f"oomwatch.{notice.kind}"
    return f"oomwatch.incident.{notice.kind}"


def notice_data(notice: Notice, limit_bytes: int) -> dict[str, Any]:
    """The message in at most so many bytes of compact JSON."""
    data: dict[str, Any] = {}
    for data in _ever_smaller(notice):
        if len(compact(data)) <= limit_bytes:
            return data
    while data["incidents"] and len(compact(data)) > limit_bytes:
        data["incidents"].pop()
        data["left_out"] += 1
    return data


def compact(data: Any) -> bytes:
    """JSON without blanks, in UTF-8."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def read_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `notice_data`, from package data."""
    text = pkgutil.get_data("oomwatch.notify", "schema/oomwatch.notice-1.schema.json")
    schema: dict[str, Any] = json.loads(text or b"{}")
    return schema


def _ever_smaller(notice: Notice) -> Iterator[dict[str, Any]]:
    data: dict[str, Any] = {
        "schema": SCHEMA,
        "id": notice.id,
        "kind": notice.kind,
        "at": format_rfc3339(notice.at),
        "host": platform.node() or None,
        "note": notice.note,
        "labels": dict(notice.labels),
        "truncated": False,
        "left_out": 0,
        "incidents": [_incident(one) for one in notice.incidents],
    }
    yield data
    data["truncated"] = True
    for incident in data["incidents"]:
        incident["evidence"] = []
    yield data
    for incident in data["incidents"]:
        for remedy in incident["remedies"]:
            remedy["action"] = remedy["effect"] = None
    yield data
    for incident in data["incidents"]:
        incident["memory"] = incident["why"] = None
        incident["remedies"] = incident["remedies"][:1]
    yield data
    for incident in data["incidents"]:
        empty = {
            "remedies": [],
            "evidence": [],
            "gpus": [],
            "flags": [],
            "labels": {},
            "headline": "",
        }
        for key in incident.keys() - set(_LEAST):
            incident[key] = empty.get(key)
    yield data


def _incident(incident: IncidentNotice) -> dict[str, Any]:
    known = dataclasses.asdict(incident)
    known["class"] = known.pop("incident_class")
    known["opened_at"] = format_rfc3339(incident.opened_at)
    known["closed_at"] = None if incident.closed_at is None else format_rfc3339(incident.closed_at)
    return json.loads(json.dumps(known))  # type: ignore[no-any-return] # tuples become lists
