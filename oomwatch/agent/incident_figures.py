"""Incidents as they are exported: which are open, and how many there were."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from oomwatch.detect.incidents import family
from oomwatch.export.snapshot import IncidentFigures
from oomwatch.notify.message import severity_of
from oomwatch.records import StoredIncident

_SETTLED_SECONDS: Final = 6.0
"""An incident is judged at once and again after five seconds, with the samples around it."""


class IncidentCounts:
    """Counts each incident once, by its cause once that has settled. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, float | None] = {}
        """By incident: when it was first seen; None once it was counted."""
        self.total: collections.Counter[tuple[str, str]] = collections.Counter()
        self.last: dict[tuple[str, str], float] = {}

    def start(self, known: Iterable[StoredIncident]) -> None:
        """Take what is known from before, which is not counted again."""
        for incident in known:
            self._seen[incident.id] = None
            self._note(incident)

    def look(self, known: Iterable[StoredIncident], now: float) -> None:
        """Take the incidents that the detector knows at monotonic time `now`."""
        with self._lock:
            before, self._seen = self._seen, {}
            for incident in known:
                first = self._seen[incident.id] = before.get(incident.id, now)
                if first is None:
                    continue
                if incident.state == "closed" or now - first >= _SETTLED_SECONDS:
                    self._seen[incident.id] = None
                    self.total[class_and_cause(incident)] += 1
                    self._note(incident)

    def open(self, known: Iterable[StoredIncident]) -> Iterator[IncidentFigures]:
        """Those of them that are open, the newest first."""
        found = [incident for incident in known if incident.state == "open"]
        for incident in sorted(found, key=lambda each: each.opened_at, reverse=True):
            yield incident_figures(incident)

    def _note(self, incident: StoredIncident) -> None:
        key = class_and_cause(incident)
        self.last[key] = max(incident.opened_at, self.last.get(key, 0.0))


def incident_figures(incident: StoredIncident) -> IncidentFigures:
    """An incident with what its diagnosis says in short."""
    lead = _lead(incident)
    cause = lead.get("cause")
    return IncidentFigures(
        id=incident.id,
        kind=family(incident),
        severity=severity_of(incident, cause),
        opened_at=incident.opened_at,
        cls=lead.get("class"),
        cause=cause,
        engine_id=incident.engine_id,
        summary=lead.get("summary") or next((t.text for t in incident.triggers if t.text), None),
    )


def class_and_cause(incident: StoredIncident) -> tuple[str, str]:
    """Class and cause of an incident; ``unknown`` where nothing is known."""
    lead = _lead(incident)
    return lead.get("class") or "unknown", lead.get("cause") or "unknown"


def _lead(incident: StoredIncident) -> dict[str, Any]:
    """The first incident of its diagnosis, else the first risk."""
    diagnosis = incident.diagnosis or {}
    for part in ("incidents", "risks"):
        rows = diagnosis.get(part)
        for found in rows if isinstance(rows, list | tuple) else ():
            return dict(found) if isinstance(found, Mapping) else {}
    return {}
