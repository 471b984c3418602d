"""A Diagnosis in its contract form, ``oomwatch.diagnosis/1``; schema/ holds the JSON Schema.

Every key is always present, null where unknown. Beyond the contract's keys stand `count` (times
an incident repeated), `started_at` of an engine, `summary` of a risk, and `advice` (wrong flags of
the user's own).
"""

from __future__ import annotations

import json
import math
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, Final

import oomwatch
from oomwatch.records import (
    Alternative,
    Diagnosis,
    Effect,
    EngineFacts,
    Evidence,
    Gpu,
    GpuLedger,
    Incident,
    Remedy,
    Risk,
)
from oomwatch.report.sanitize import clean
from oomwatch.units import format_rfc3339

SCHEMA: Final = "oomwatch.diagnosis/1"
_QUOTE_LIMIT: Final = 2000  # characters of one quoted line; longer ones are JSON blobs
_TEXT_LIMIT: Final = 4000


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain dicts, lists, texts and numbers, ready for `json.dumps`."""
    return {
        "schema": SCHEMA,
        "oomwatch_version": oomwatch.__version__,
        "generated_at": format_rfc3339(diagnosis.generated_at),
        "host": _text(diagnosis.host),
        "verdict": diagnosis.verdict,
        "engines": [_engine(engine) for engine in diagnosis.engines],
        "gpus": [_gpu(gpu) for gpu in diagnosis.gpus],
        "incidents": [_incident(incident) for incident in diagnosis.incidents],
        "risks": [_risk(risk) for risk in diagnosis.risks],
        "sources": [
            {"name": _line(item.name), "status": item.status, "detail": _text(item.detail)}
            for item in diagnosis.sources
        ],
        "advice": [_line(text) for text in diagnosis.advice],
    }


def render_json(diagnosis: Diagnosis) -> str:
    """The contract form as indented JSON text, ending in a line feed."""
    return json.dumps(to_json(diagnosis), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def read_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) that `to_json` obeys, from package data."""
    text = pkgutil.get_data("oomwatch.report", "schema/oomwatch.diagnosis-1.schema.json")
    schema: dict[str, Any] = json.loads(text or b"{}")
    return schema


def _engine(engine: EngineFacts) -> dict[str, Any]:
    return {
        "id": _line(engine.id),
        "engine": _text(engine.engine),
        "version": _text(engine.version),
        "model": _text(engine.model),
        "command": None if engine.command is None else [clean(part) for part in engine.command],
        "arguments": _plain(engine.arguments),
        "pids": list(engine.pids),
        "gpus": list(engine.gpus),
        "phase": engine.phase,
        "started_at": _time(engine.started_at),
        "kv_tokens": engine.kv_tokens,
    }


def _gpu(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "uuid": _text(gpu.uuid),
        "name": _text(gpu.name),
        "total_bytes": gpu.total_bytes,
        "used_bytes": gpu.used_bytes,
        "free_bytes": gpu.free_bytes,
        "reserved_bytes": gpu.reserved_bytes,
    }


def _incident(incident: Incident) -> dict[str, Any]:
    finding = incident.finding
    return {
        "id": _line(incident.id),
        "at": _time(finding.at),
        "engine": _text(finding.engine_id),
        "class": finding.cls,
        "cause": finding.cause,
        "confidence": _confidence(finding.confidence),
        "summary": _line(finding.summary),
        "count": incident.count,
        "evidence": [_evidence(item) for item in finding.evidence],
        "alternatives": [_alternative(item) for item in incident.alternatives],
        "memory": [_ledger(ledger) for ledger in incident.memory],
        "remedies": _remedies(incident.remedies),
        "unseen": [_line(text) for text in finding.unseen],
    }


def _risk(risk: Risk) -> dict[str, Any]:
    finding = risk.finding
    return {
        "class": finding.cls,
        "cause": finding.cause,
        "engine": _text(finding.engine_id),
        "gpu": risk.gpu,
        "eta_seconds": _number(risk.eta_seconds),
        "confidence": _confidence(finding.confidence),
        "summary": _line(finding.summary),
        "evidence": [_evidence(item) for item in finding.evidence],
        "remedies": _remedies(risk.remedies),
    }


def _evidence(item: Evidence) -> dict[str, Any]:
    value = item.value
    if isinstance(value, str):
        value = clean(value, _QUOTE_LIMIT)
    elif isinstance(value, float):
        value = _number(value)
    return {
        "source": item.source,
        "where": _line(item.where),
        "at": _time(item.at),
        "text": None if item.text is None else clean(item.text, _QUOTE_LIMIT),
        "value": value,
        "unit": _text(item.unit),
    }


def _alternative(item: Alternative) -> dict[str, Any]:
    return {
        "class": item.cls,
        "cause": item.cause,
        "confidence": _confidence(item.confidence),
        "why_less_likely": _line(item.why_less_likely),
    }


def _ledger(ledger: GpuLedger) -> dict[str, Any]:
    return {
        "gpu": ledger.gpu,
        "total_bytes": ledger.total_bytes,
        "parts": [
            {"name": _line(part.name), "bytes": part.bytes, "source": part.source}
            for part in ledger.parts
        ],
    }


def _remedies(remedies: Sequence[Remedy]) -> list[dict[str, Any]]:
    return [_remedy(rank, remedy) for rank, remedy in enumerate(remedies, 1)]


def _remedy(rank: int, remedy: Remedy) -> dict[str, Any]:
    return {
        "rank": rank,
        "id": remedy.id,
        "title": _line(remedy.title),
        "set": {clean(flag): flag_value(value) for flag, value in remedy.set.items()},
        "unset": [clean(flag) for flag in remedy.unset],
        "env": {clean(name): clean(value) for name, value in remedy.env.items()},
        "action": _text(remedy.action),
        "direction": remedy.direction,
        "effect": None if remedy.effect is None else _effect(remedy.effect),
        "cost": _line(remedy.cost),
        "why": _line(remedy.why),
        "valid_for": _text(remedy.valid_for),
        "validated": remedy.validated,
        "enough": remedy.enough,
    }


def _effect(effect: Effect) -> dict[str, Any] | None:
    """What is predicted, None where nothing is."""
    known = {
        "kv_tokens_before": effect.kv_tokens_before,
        "kv_tokens_after": effect.kv_tokens_after,
        "freed_bytes": effect.freed_bytes,
        "max_concurrency_before": _number(effect.max_concurrency_before),
        "max_concurrency_after": _number(effect.max_concurrency_after),
        "kv_tokens_after_low": effect.kv_tokens_after_low,
        "kv_tokens_after_high": effect.kv_tokens_after_high,
    }
    return known if any(value is not None for value in known.values()) else None


def flag_value(value: Any) -> str | bool:
    """A flag's value as typed: text, or True for a switch that takes none."""
    if value is None or isinstance(value, bool):
        return True if value is None else value
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(_plain(value), ensure_ascii=False, separators=(",", ":"))
    return clean(value)


def _plain(value: Any) -> Any:
    """`value` made of JSON types only, without control characters or numbers JSON lacks."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        return {clean(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    return clean(value, _TEXT_LIMIT)


def _line(text: str) -> str:
    return clean(text, _TEXT_LIMIT)


def _text(text: str | None) -> str | None:
    return None if text is None else clean(text, _TEXT_LIMIT)


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _confidence(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 3)


def _time(at: float | None) -> str | None:
    """RFC 3339, or None for times that no calendar has (broken clocks in logs)."""
    try:
        return None if at is None else format_rfc3339(at)
    except (ValueError, OverflowError, OSError):
        return None
