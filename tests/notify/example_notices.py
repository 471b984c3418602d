"""Incidents and receivers for tests, each with what a test does not care about filled in."""

from __future__ import annotations

import dataclasses
from typing import Any

from oomwatch.config.notify import NotifySettings, SinkConfig
from oomwatch.notify.notice import IncidentNotice, RemedyNotice

NOW = 1_764_400_000.0
SINK = SinkConfig(name="oncall")
SETTINGS = NotifySettings()
INCIDENT = IncidentNotice(
    id="inc-1",
    fingerprint="chat/failure",
    host="gpu-1",
    severity="critical",
    headline="The KV cache is too small",
    opened_at=NOW,
    engine_id="chat",
    incident_class="startup",
    cause="kv_no_blocks",
    remedies=(RemedyNotice("Give it more", ("--gpu-memory-utilization 0.94",)),),
    labels={"team": "chat"},
)


def an_incident(**changes: Any) -> IncidentNotice:
    return dataclasses.replace(INCIDENT, **changes)


def a_sink(**changes: Any) -> SinkConfig:
    return dataclasses.replace(SINK, **changes)
