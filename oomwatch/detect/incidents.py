"""Which triggers are one event: over all ranks, all witnesses, and restarts of the agent.

A failure of an engine stays one incident until the engine serves again, however often its keeper
starts it in between. Pressure (a full pool, shrinking headroom) is an incident of its own, so that
a warning is never lost in the failure it came before. What is read again, after the agent or a log
was started anew, and what a witness says late about an event that is over, opens nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Final

from oomwatch.config.schema import IncidentsConfig
from oomwatch.records import StoredIncident, Trigger, TriggerKind

_WITNESS_SECONDS: Final = 60.0
"""Witnesses of one event on other sources (the kernel, other ranks) speak within this time."""
_RESTART_SECONDS: Final = 120.0
"""A condition that held before the agent was started anew may take so long to be seen again."""
_SAME_SECONDS: Final = 0.002
"""The store keeps milliseconds."""
_MAX_TRIGGERS: Final = 64
_MAX_EXPLAINED: Final = 4
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
    """The incidents that are open, and those closed a moment ago. `now` is monotonic time.

    One thread changes it; any may read it.
    """

    def __init__(
        self,
        host: str,
        settings: IncidentsConfig,
        known: Iterable[StoredIncident] = (),
        *,
        now: float = 0.0,
    ) -> None:
        self._host = host
        self._settings = settings
        self._incidents: dict[str, StoredIncident] = {i.id: i for i in known}
        self._touched = dict.fromkeys(self._incidents, now + _RESTART_SECONDS)
        self._is_known = frozenset(self._incidents)

    def reconfigure(self, settings: IncidentsConfig) -> None:
        """Use other limits from now on."""
        self._settings = settings

    @property
    def open(self) -> list[StoredIncident]:
        """Open incidents, oldest first."""
        return sorted(
            (i for i in list(self._incidents.values()) if i.state == "open"),
            key=lambda i: i.opened_at,
        )

    @property
    def known(self) -> list[StoredIncident]:
        """All that are open or were closed lately."""
        return list(self._incidents.values())

    def get(self, incident_id: str) -> StoredIncident | None:
        """An incident that is open or was closed lately."""
        return self._incidents.get(incident_id)

    def touched(self, incident: StoredIncident) -> float:
        """When something was last seen of it, in monotonic time."""
        return self._touched.get(incident.id, 0.0)

    def is_from_before(self, incident: StoredIncident) -> bool:
        """Whether an earlier run of the agent opened it, and nothing was seen of it since."""
        return incident.id in self._is_known

    def failing_since(self, engine_id: str) -> float | None:
        """When a failure of the engine began that is not over, in epoch time; None without one."""
        failures = (i for i in self.open if i.engine_id == engine_id and family(i) == "failure")
        return next((incident.opened_at for incident in failures), None)

    def take(self, trigger: Trigger, happened: float) -> StoredIncident | None:
        """Open an incident or add to the one this belongs to; None where it is known already.

        `happened` is when it did, in monotonic time: what is read late touches nothing now.
        """
        kind = FAMILY[trigger.kind]
        alike = [i for i in self._incidents.values() if family(i) == kind]
        if any(_same(trigger, other) for incident in alike for other in incident.triggers):
            return None
        incident = self._match(trigger, kind, alike)
        if incident is None:
            new = self._new(trigger, kind)
            if new.id in self._incidents:
                return None
            self._touched[new.id] = happened
            return self._keep(new)
        if incident.state == "open":
            last = happened if incident.id in self._is_known else self.touched(incident)
            self._touched[incident.id] = max(last, happened)
            self._is_known -= {incident.id}
        return self._keep(self._joined(incident, trigger))

    def put(self, incident: StoredIncident) -> None:
        """Take over what a later stage has added (the diagnosis)."""
        self._keep(incident)

    def close(self, incident: StoredIncident, at: float) -> StoredIncident:
        """The event is over since `at`, in epoch time."""
        closed_at = max(at, incident.opened_at)  # the clock may have been set back
        return self._keep(dataclasses.replace(incident, state="closed", closed_at=closed_at))

    # ---------------------------------------------------------------- which is which
    def _match(
        self, trigger: Trigger, kind: str, alike: Iterable[StoredIncident]
    ) -> StoredIncident | None:
        """The newest open incident that it belongs to, else one that was over when it came in."""
        newest = sorted(alike, key=lambda i: i.opened_at, reverse=True)
        for incident in newest:
            if incident.state == "open" and self._belongs(trigger, kind, incident):
                return incident
        for incident in newest:
            ended = incident.closed_at
            if kind != "failure" or ended is None or incident.engine_id != trigger.engine_id:
                continue
            last = max(t.at for t in incident.triggers) + _WITNESS_SECONDS
            if incident.opened_at - _WITNESS_SECONDS <= trigger.at <= min(ended, last):
                return incident
        return None

    def _belongs(self, trigger: Trigger, kind: str, incident: StoredIncident) -> bool:
        if incident.engine_id == trigger.engine_id:
            same_gpu = trigger.gpu is None or trigger.gpu in {t.gpu for t in incident.triggers}
            if trigger.engine_id is not None or same_gpu:
                return True
        near = abs(trigger.at - incident.opened_at) <= _WITNESS_SECONDS
        unnamed = incident.engine_id is None or trigger.engine_id is None
        return kind == "failure" and near and unnamed

    def _joined(self, incident: StoredIncident, trigger: Trigger) -> StoredIncident:
        triggers = (*incident.triggers, trigger)
        if len(triggers) > _MAX_TRIGGERS:
            half = _MAX_TRIGGERS // 2
            triggers = (*triggers[:half], *triggers[-half:])
        begin, end = self._window(trigger)
        if abs(trigger.at - incident.opened_at) > _WITNESS_SECONDS:
            begin = incident.window_from or begin  # a clock that was set back widens nothing
        return dataclasses.replace(
            incident,
            triggers=triggers,
            engine_id=incident.engine_id or trigger.engine_id,
            window_from=min(incident.window_from or begin, begin),
            window_to=max(incident.window_to or end, end),
        )

    def _window(self, trigger: Trigger) -> tuple[float, float]:
        settings = self._settings
        return (
            trigger.at - settings.window_before_seconds,
            trigger.at + settings.window_after_seconds,
        )

    def _new(self, trigger: Trigger, kind: str) -> StoredIncident:
        subject = trigger.engine_id or (f"gpu{trigger.gpu}" if trigger.gpu is not None else "host")
        fingerprint = f"{subject}/{kind}"
        place = trigger.evidence[0].where if trigger.evidence else ""
        key = f"{self._host}|{fingerprint}|{trigger.at:.3f}|{place}"
        begin, end = self._window(trigger)
        return StoredIncident(
            id=f"inc-{hashlib.sha256(key.encode()).hexdigest()[:12]}",
            fingerprint=fingerprint,
            state="open",
            opened_at=trigger.at,
            engine_id=trigger.engine_id,
            host=self._host,
            triggers=(trigger,),
            window_from=begin,
            window_to=end,
        )

    def _keep(self, incident: StoredIncident) -> StoredIncident:
        self._incidents[incident.id] = incident
        explained = [
            i for i in self._incidents.values() if i.state == "closed" and i.diagnosis is not None
        ]
        # A diagnosis is large, and stored; here closed incidents only tell what is known already.
        for old in sorted(explained, key=lambda i: i.closed_at or 0.0)[:-_MAX_EXPLAINED]:
            self._incidents[old.id] = dataclasses.replace(old, diagnosis=None)
        if len(self._incidents) > _MAX_KEPT:
            closed = [i for i in self._incidents.values() if i.state == "closed"]
            for old in sorted(closed, key=lambda i: i.opened_at)[: len(closed) // 2]:
                del self._incidents[old.id]
                self._touched.pop(old.id, None)
        return incident


def family(incident: StoredIncident) -> str:
    """The kind of event an incident is, a value of `FAMILY`."""
    return incident.fingerprint.rpartition("/")[2]


def _same(a: Trigger, b: Trigger) -> bool:
    """Whether two triggers are one thing seen twice."""
    return (a.kind, a.engine_id, a.pid, a.gpu) == (b.kind, b.engine_id, b.pid, b.gpu) and (
        a.text == b.text
        and (abs(a.at - b.at) < _SAME_SECONDS or (bool(a.evidence) and a.evidence == b.evidence))
    )
