"""A file system that refused what the server wanted to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options

CASES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    ("case", "said", "first"),
    [
        ("disk-full-download", "disk", "Free the disk"),
        ("disk-quota-exceeded", "quota", "Free space within the quota"),
        ("disk-read-only", "read-only", "Give the server a directory"),
        ("disk-permission-denied", "permission", "Give the server's user access"),
    ],
)
def test_what_the_file_system_refused_is_said_with_its_path(
    case: str, said: str, first: str
) -> None:
    incident = run_diagnosis(Options(logs=(str(CASES / case / "server.log"),))).incidents[0]
    quoted = next(e.text for e in incident.finding.evidence if e.text and "Errno" in e.text)
    path = quoted.split("'")[1]
    assert said in incident.finding.summary
    assert path in incident.finding.summary
    assert incident.remedies[0].title.startswith(first)
    assert str(Path(path).parent) in str(incident.remedies[0].action)
    assert "read-first-error" not in [remedy.id for remedy in incident.remedies]
