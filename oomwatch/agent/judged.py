"""What a diagnosis changes about an incident."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from oomwatch.agent.explain import as_json
from oomwatch.agent.failures import CALM
from oomwatch.detect.incidents import family
from oomwatch.records import Diagnosis, StoredIncident


def explained(incident: StoredIncident, found: Mapping[str, Any]) -> StoredIncident:
    """With a new diagnosis, unless that knows no cause and the one before does.

    A server that is started again finds in its log that the last one died, and no more.
    """
    known = incident.diagnosis
    if known is not None and known.get("verdict") != "unknown" == found.get("verdict"):
        return incident
    return dataclasses.replace(incident, diagnosis=found)


def part_for(incident: StoredIncident, diagnosis: Diagnosis) -> dict[str, Any] | None:
    """What a diagnosis says about this incident; None for nothing better than what is known.

    A failure is explained by a failure. Pressure is explained by what is at risk, if something is.
    """
    if family(incident) == "failure":
        lead = diagnosis.incidents[0].finding if diagnosis.incidents else None
        return None if lead is None or lead.cause in CALM else as_json(diagnosis, only=0)
    if diagnosis.risks:
        return as_json(dataclasses.replace(diagnosis, incidents=(), verdict="at_risk"))
    return as_json(diagnosis) if diagnosis.incidents else None
