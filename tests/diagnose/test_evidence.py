"""What a finding cites."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options

CASES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    "log", ["host-oom-kill-ollama-served/server.log", "kubectl-oomkilled/server.log"]
)
def test_a_line_is_cited_once(log: str) -> None:
    incident = run_diagnosis(Options(logs=(str(CASES / log),))).incidents[0]
    places = Counter((item.where, item.text) for item in incident.finding.evidence)
    assert set(places.values()) == {1}


def test_an_exit_code_does_not_say_whose_limit_it_was() -> None:
    log = CASES / "host-oom-load-compose/compose.log"
    incident = run_diagnosis(Options(logs=(str(log),))).incidents[0]
    for said in (incident.finding.summary, incident.remedies[0].why):
        assert "the container's" in said.lower()
        assert "or the host's" in said


@pytest.mark.parametrize(("share", "word"), [("97.0", "nearly full"), ("99.6", "full")])
def test_a_cache_with_room_left_is_nearly_full(tmp_path: Path, share: str, word: str) -> None:
    whole = (CASES / "kv-saturation/server.log").read_text(encoding="utf-8")
    log = tmp_path / "server.log"
    log.write_text(re.sub(r"KV cache usage: 9[\d.]+%", f"KV cache usage: {share}%", whole))
    risk = run_diagnosis(Options(logs=(str(log),))).risks[0]
    assert f"is {word} (" in risk.finding.summary
