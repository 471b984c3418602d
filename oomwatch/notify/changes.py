"""What a receiver would act upon of an incident, and what of it is another than it was told."""

from __future__ import annotations

import json
from typing import Any, Final

from oomwatch.notify.notice import IncidentNotice
from oomwatch.notify.wording import words
from oomwatch.report.locale import Language
from oomwatch.report.sanitize import clean

_LABELS: Final = {
    "severity": "severity",
    "class": "class",
    "cause": "the_cause",
    "todo": "to_do",
}
"""What is said of a change, and the fixed word for it."""
_VALUE: Final = 160


def change_of(incident: IncidentNotice) -> str:
    """What a receiver would act upon, as JSON: severity, cause, first remedy, a loop of starts."""
    return json.dumps(_acted_upon(incident), ensure_ascii=False, separators=(",", ":"))


def change_note(before: str | None, incident: IncidentNotice, lang: Language) -> str | None:
    """``Changed: cause: startup_unknown → kv_no_blocks.``; None if `before` cannot be read."""
    old, new, own = _read(before), _acted_upon(incident), words(lang)
    parts = [
        f"{own[label]}{own['colon']}{_value(name, old[name], lang)} → "
        f"{_value(name, new[name], lang)}"
        for name, label in _LABELS.items()
        if name in old and old[name] != new[name]
    ]
    if new["restarts"] and old.get("restarts") is False:
        parts.append(own["restarts"])
    return own["changed"].format(parts=own["then"].join(parts)) if parts else None


def _acted_upon(incident: IncidentNotice) -> dict[str, Any]:
    first = incident.remedies[0] if incident.remedies else None
    todo = None if first is None else " ".join(filter(None, (*first.flags, first.action)))
    return {
        "severity": incident.severity,
        "class": incident.incident_class,
        "cause": incident.cause,
        "todo": todo,
        "restarts": incident.restarts is not None,
    }


def _read(told: str | None) -> dict[str, Any]:
    """What was told; nothing where an earlier version wrote a digest."""
    try:
        found = json.loads(told or "")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _value(name: str, value: object, lang: Language) -> str:
    own = words(lang)
    if not value:
        return own["unknown"]
    return own.get(str(value), str(value)) if name == "severity" else clean(str(value), _VALUE)
