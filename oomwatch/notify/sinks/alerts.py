"""Incidents as alerts in Alertmanager's form: labels that say which it is, annotations that tell.

The labels are an alert's identity. So none of them changes while the incident is the same, but for
what a diagnosis changes: severity, class, cause, GPUs. Who sends alerts ends the one before then.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from typing import Any, Final

from oomwatch.notify import text
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.wording import words
from oomwatch.units import format_rfc3339

_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_NEVER: Final = "0001-01-01T00:00:00Z"
"""How Alertmanager writes that an alert has not ended."""


def incident_labels(incident: IncidentNotice) -> dict[str, str]:
    """Labels of the names that oomwatch's metrics have, and those of the configuration."""
    own = {
        "alertname": "OomwatchIncident",
        "severity": incident.severity,
        "class": incident.incident_class,
        "cause": incident.cause,
        "kind": incident.fingerprint.rpartition("/")[2],
        "host": incident.host,
        "engine_id": incident.engine_id,
        "engine": incident.engine,
        "model_name": incident.model,
        "gpu": ",".join(map(str, incident.gpus)),
        "fingerprint": incident.fingerprint,
    }
    return {**incident.labels, **{name: value for name, value in own.items() if value}}


def incident_annotations(incident: IncidentNotice, note: str | None = None) -> dict[str, str]:
    """What a person is told of it; `note` is what its message says of itself."""
    runbook = None if incident.runbook_url else text.more_about(incident, "en")
    todo = [remedy.title for remedy in incident.remedies]
    confidence = "" if incident.confidence is None else f"{incident.confidence:.2f}"
    known = {
        "summary": f"{incident.headline} ({text.place(incident)})",
        "description": incident.why,
        "flags": " ".join(incident.flags),
        "remedies": "; ".join(todo),
        "memory": incident.memory,
        "confidence": confidence,
        "note": note or incident.note,
        "incident": incident.id,
        "show": text.shown_by(incident),
        "runbook": runbook,
        "runbook_url": incident.runbook_url,
    }
    return {name: value for name, value in known.items() if value}


def notice_labels(notice: Notice) -> dict[str, str]:
    """Labels of a message that is about no incident of its own: a test, messages given up."""
    name = "OomwatchTest" if notice.kind == "test" else "OomwatchUndelivered"
    severity = "info" if notice.kind == "test" else "warning"
    own = {"alertname": name, "severity": severity, "host": platform.node() or "unknown"}
    return {**notice.labels, **own}


def notice_annotations(notice: Notice) -> dict[str, str]:
    """What a person is told by it."""
    summary = words("en")["test" if notice.kind == "test" else "undelivered"]
    ids = ", ".join(one.id for one in notice.incidents[:20])
    known = {"summary": summary, "description": text.note(notice, "en"), "incidents": ids}
    return {name: value for name, value in known.items() if value}


def is_own(notice: Notice) -> bool:
    """Whether a message is about itself rather than about an incident."""
    return notice.kind in {"test", "undelivered"}


def alert(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    starts_at: float,
    ends_at: float | None,
) -> dict[str, Any]:
    """One alert; `ends_at` in the past resolves it."""
    return {
        "labels": dict(labels),
        "annotations": dict(annotations),
        "startsAt": format_rfc3339(starts_at),
        "endsAt": _NEVER if ends_at is None else format_rfc3339(max(ends_at, starts_at)),
        "generatorURL": annotations.get("runbook_url", ""),
    }


def fingerprint(labels: Mapping[str, str]) -> str:
    """The name that Prometheus and Alertmanager give to a set of labels: 64-bit FNV-1a in hex."""
    value = _FNV_OFFSET
    for byte in b"".join(
        name.encode() + b"\xff" + labels[name].encode() + b"\xff" for name in sorted(labels)
    ):
        value = ((value ^ byte) * _FNV_PRIME) % 2**64
    return f"{value:016x}"


def common(items: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The pairs that all of them have."""
    sets = [set(item.items()) for item in items]
    return dict(sorted(set.intersection(*sets))) if sets else {}
