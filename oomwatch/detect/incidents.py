"""Which triggers are one event: over all ranks, all witnesses, and restarts of the agent.

A failure of an engine stays one incident until the engine serves again, however often its keeper
starts it in between. Pressure (a full pool, shrinking headroom) is an incident of its own, so that
a warning is never lost in the failure it came before.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from oomwatch.config.schema import IncidentsConfig
from oomwatch.records import StoredIncident, Trigger, TriggerKind

_WITNESS_SECONDS: Final = 60.0
"""Witnesses of one event on other sources (the kernel, other ranks) speak within this time."""
_MAX_TRIGGERS: Final = 64
_MAX_KEPT: Final = 256

FAMILY: Final[Mapping[TriggerKind, str]] = {
    "log_failure": "failure",
    "process_exit": "failure",
    "cgroup_oom": "failure",
    "kernel_oom": "failure",
    "restart_loop": "failure",
    "gpu_lost": "gpu",
    "driver_unresponsive": "driver",
    "kv_saturation": "kv_pressure",
    "preemption_storm": "kv_pressure",
    "forecast_kv": "kv_forecast",
    "never_fits": "stuck_request",
    "zombie_engine": "zombie",
    "orphan_holder": "orphan",
    "neighbour_growth": "gpu_memory",
    "gpu_headroom": "gpu_memory",
    "forecast_gpu": "gpu_memory",
    "host_headroom": "host_memory",
    "forecast_host": "host_memory",
}


class IncidentBook:
    """The incidents that are open, and those closed a moment ago."""

    def __init__(
        self, host: str, settings: IncidentsConfig, known: Iterable[StoredIncident] = ()
    ) -> None:
        self._host = host
        self._settings = settings
        self._incidents: dict[str, StoredIncident] = {i.id: i for i in known}

    def reconfigure(self, settings: IncidentsConfig) -> None:
        """Use other limits from now on."""
        self._settings = settings

    @property
    def open(self) -> list[StoredIncident]:
        """Open incidents, oldest first."""
        return sorted(
            (i for i in self._incidents.values() if i.state == "open"), key=lambda i: i.opened_at
        )

    def get(self, incident_id: str) -> StoredIncident | None:
        """An incident that is open or was closed lately."""
        return self._incidents.get(incident_id)

    def take(self, trigger: Trigger) -> StoredIncident | None:
        """Open an incident or add to the one this belongs to; None where it is known already."""
        incident = self._match(trigger)
        if incident is None:
            incident = self._new(trigger)
            known = self._incidents.get(incident.id)
            if known is not None:  # read a second time after a restart of the agent
                return None
            return self._keep(incident)
        if any(_same(trigger, other) for other in incident.triggers):
            return None
        triggers = (*incident.triggers, trigger)
        if len(triggers) > _MAX_TRIGGERS:
            half = _MAX_TRIGGERS // 2
            triggers = (*triggers[:half], *triggers[-half:])
        return self._keep(
            dataclasses.replace(
                incident,
                triggers=triggers,
                engine_id=incident.engine_id or trigger.engine_id,
                window_to=max(
                    incident.window_to or 0.0, trigger.at + self._settings.window_after_seconds
                ),
            )
        )

    def put(self, incident: StoredIncident) -> None:
        """Take over what a later stage has added (the diagnosis)."""
        self._keep(incident)

    def served(self, engine_id: str, since: float, at: float) -> list[StoredIncident]:
        """The engine has served since then: failures of before are over. What was closed."""
        if at - since < self._settings.close_after_seconds:
            return []
        return [
            self._close(incident, at)
            for incident in self.open
            if incident.engine_id == engine_id
            and incident.opened_at < since
            and family(incident) in {"failure", "zombie", "stuck_request", "orphan"}
            and all(trigger.at < since for trigger in incident.triggers)
        ]

    def calm(self, at: float, is_held: Callable[[StoredIncident], bool]) -> list[StoredIncident]:
        """Close pressure that is over; `is_held` says whether its condition still holds."""
        return [
            self._close(incident, at)
            for incident in self.open
            if family(incident) != "failure"
            and at - max(t.at for t in incident.triggers) > self._settings.close_after_seconds
            and not is_held(incident)
        ]

    # ---------------------------------------------------------------- which is which
    def _match(self, trigger: Trigger) -> StoredIncident | None:
        kind = FAMILY[trigger.kind]
        for incident in reversed(self.open):
            if family(incident) != kind:
                continue
            same_engine = incident.engine_id == trigger.engine_id
            same_gpu = trigger.gpu is None or trigger.gpu in {t.gpu for t in incident.triggers}
            if same_engine and (trigger.engine_id is not None or same_gpu):
                return incident
            near = abs(trigger.at - incident.opened_at) <= _WITNESS_SECONDS
            unnamed = incident.engine_id is None or trigger.engine_id is None
            if kind == "failure" and near and unnamed:
                return incident
        return None

    def _new(self, trigger: Trigger) -> StoredIncident:
        kind = FAMILY[trigger.kind]
        subject = trigger.engine_id or (f"gpu{trigger.gpu}" if trigger.gpu is not None else "host")
        fingerprint = f"{subject}/{kind}"
        place = trigger.evidence[0].where if trigger.evidence else ""
        key = f"{self._host}|{fingerprint}|{trigger.at:.3f}|{place}"
        return StoredIncident(
            id=f"inc-{hashlib.sha256(key.encode()).hexdigest()[:12]}",
            fingerprint=fingerprint,
            state="open",
            opened_at=trigger.at,
            engine_id=trigger.engine_id,
            host=self._host,
            triggers=(trigger,),
            window_from=trigger.at - self._settings.window_before_seconds,
            window_to=trigger.at + self._settings.window_after_seconds,
        )

    def _close(self, incident: StoredIncident, at: float) -> StoredIncident:
        return self._keep(dataclasses.replace(incident, state="closed", closed_at=at))

    def _keep(self, incident: StoredIncident) -> StoredIncident:
        self._incidents[incident.id] = incident
        if len(self._incidents) > _MAX_KEPT:
            closed = [i for i in self._incidents.values() if i.state == "closed"]
            for old in sorted(closed, key=lambda i: i.opened_at)[: len(closed) // 2]:
                del self._incidents[old.id]
        return incident


def family(incident: StoredIncident) -> str:
    """The kind of event an incident is, a value of `FAMILY`."""
    return incident.fingerprint.rpartition("/")[2]


def _same(a: Trigger, b: Trigger) -> bool:
    """Whether two triggers are one thing seen twice."""
    return (a.kind, a.pid, a.gpu) == (b.kind, b.pid, b.gpu) and (
        (a.at, a.text) == (b.at, b.text)
        or (a.text == b.text and bool(a.evidence) and a.evidence == b.evidence)
    )
