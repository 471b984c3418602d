"""A model that the hub does not have, and one that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.records import Incident

CASES = Path(__file__).parents[1] / "cases"


def incident_of(case: str) -> Incident:
    return run_diagnosis(Options(logs=(str(CASES / case / "server.log"),))).incidents[0]


@pytest.mark.parametrize(
    ("case", "first", "misspelt"),
    [
        ("gated-model", "give-hub-token", False),
        ("gated-model-misspelt", "check-model-name", True),
    ],
)
def test_the_name_is_doubted_only_where_the_hub_has_none(
    case: str, first: str, misspelt: bool
) -> None:
    incident = incident_of(case)
    assert incident.remedies[0].id == first
    assert ("misspelt" in incident.finding.summary) is misspelt
    assert ("example/chat-8" in incident.finding.summary) is misspelt
    assert [remedy.id for remedy in incident.remedies][-1] == "give-hub-token"
