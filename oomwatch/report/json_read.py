"""A diagnosis from its JSON form, as `json_report` writes it: stored ones are shown like new ones.

What the form leaves out (values that remedies were made from) is not there afterwards; what does
not fit is left out rather than fail: an older or newer version may have written it.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any

from oomwatch.records import (
    Alternative,
    Diagnosis,
    Effect,
    EngineFacts,
    Evidence,
    Finding,
    Gpu,
    GpuLedger,
    Incident,
    MemoryPart,
    Remedy,
    Risk,
    SourceStatus,
)


def from_json(value: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis of a JSON object."""
    return Diagnosis(
        verdict=value.get("verdict", "unknown"),
        generated_at=_time(value.get("generated_at")) or 0.0,
        host=value.get("host"),
        engines=tuple(_engine(row) for row in _rows(value, "engines")),
        gpus=tuple(Gpu(**_known(Gpu, row)) for row in _rows(value, "gpus") if "index" in row),
        incidents=tuple(_incident(row) for row in _rows(value, "incidents")),
        risks=tuple(_risk(row) for row in _rows(value, "risks")),
        sources=tuple(
            SourceStatus(str(row.get("name", "?")), row.get("status", "ok"), row.get("detail"))
            for row in _rows(value, "sources")
        ),
        advice=_texts(value, "advice"),
    )


def _rows(value: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    rows = value.get(name)
    return (row for row in rows if isinstance(row, Mapping)) if isinstance(rows, list) else iter(())


def _known(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    """Those fields of a record that are in the row."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: item for name, item in row.items() if name in names}


def _engine(row: Mapping[str, Any]) -> EngineFacts:
    known = _known(EngineFacts, row)
    for name in ("command", "pids", "gpus"):
        value = known.pop(name, None)
        if isinstance(value, list):
            known[name] = tuple(value)
    known["started_at"] = _time(row.get("started_at"))
    for name in ("arguments", "in_force", "env"):
        if not isinstance(known.get(name), Mapping):
            known.pop(name, None)
    return EngineFacts(**{"id": "engine-0", **known})


def _finding(row: Mapping[str, Any], *, risk: bool) -> Finding:
    return Finding(
        cls=row.get("class", "irregular"),
        cause=str(row.get("cause", "unknown")),
        confidence=_number(row.get("confidence")),
        summary=str(row.get("summary", "")),
        evidence=tuple(_evidence(item) for item in _rows(row, "evidence")),
        unseen=_texts(row, "unseen"),
        engine_id=row.get("engine"),
        at=_time(row.get("at")),
        risk=risk,
    )


def _incident(row: Mapping[str, Any]) -> Incident:
    return Incident(
        id=str(row.get("id", "")),
        finding=_finding(row, risk=False),
        alternatives=tuple(
            Alternative(
                item.get("class", "irregular"),
                str(item.get("cause", "unknown")),
                _number(item.get("confidence")),
                str(item.get("why_less_likely", "")),
            )
            for item in _rows(row, "alternatives")
        ),
        memory=tuple(
            GpuLedger(
                ledger.get("gpu"),
                ledger.get("total_bytes"),
                tuple(
                    MemoryPart(**_known(MemoryPart, part))
                    for part in _rows(ledger, "parts")
                    if {"name", "bytes", "source"} <= part.keys()
                ),
            )
            for ledger in _rows(row, "memory")
        ),
        remedies=tuple(_remedy(item) for item in _rows(row, "remedies")),
        count=max(1, int(_number(row.get("count")))),
    )


def _risk(row: Mapping[str, Any]) -> Risk:
    return Risk(
        finding=_finding(row, risk=True),
        gpu=row.get("gpu"),
        eta_seconds=row.get("eta_seconds"),
        remedies=tuple(_remedy(item) for item in _rows(row, "remedies")),
    )


def _evidence(row: Mapping[str, Any]) -> Evidence:
    known = _known(Evidence, row)
    known["at"] = _time(row.get("at"))
    return Evidence(**{"source": "log", "where": "?", **known})


def _remedy(row: Mapping[str, Any]) -> Remedy:
    known = _known(Remedy, row)
    known["unset"] = _texts(row, "unset")
    for name in ("set", "env"):
        if not isinstance(known.get(name), Mapping):
            known.pop(name, None)
    effect = row.get("effect")
    known["effect"] = Effect(**_known(Effect, effect)) if isinstance(effect, Mapping) else None
    blank = {"id": "?", "title": "", "direction": "other", "why": "", "cost": ""}
    return Remedy(**{**blank, **known})


def _texts(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    value = row.get(name)
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    return float(value) if is_number else 0.0


def _time(text: Any) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
