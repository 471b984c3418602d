"""What was stored is shown as it was when it was new."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.records import Diagnosis, Finding, Remedy, Risk
from oomwatch.remedies.render import render
from oomwatch.report.json_read import from_json
from oomwatch.report.json_report import to_json
from oomwatch.report.text import render_text

CASES = Path(__file__).parent.parent / "cases"
INPUTS = {
    "log": "logs",
    "metrics": "metrics",
    "kernel_log": "kernel_logs",
}


def diagnosis_of(folder: Path) -> Diagnosis:
    inputs = json.loads((folder / "case.json").read_text(encoding="utf-8"))["inputs"]
    files = {
        option: tuple(str(folder / name) for name in inputs.get(kind, ()))
        for kind, option in INPUTS.items()
    }
    recording = (str(folder / inputs["recording"]),) if "recording" in inputs else ()
    config = str(folder / inputs["model_config"]) if "model_config" in inputs else None
    return run_diagnosis(
        Options(**files, recordings=recording, command=inputs.get("command"), model_config=config)
    )


def through_json(diagnosis: Diagnosis) -> Diagnosis:
    return from_json(json.loads(json.dumps(to_json(diagnosis))))


@pytest.mark.parametrize(
    "folder", sorted(p.parent for p in CASES.glob("*/case.json")), ids=lambda p: p.name
)
def test_every_case_reads_the_same_afterwards(folder):
    new = diagnosis_of(folder)
    stored = through_json(new)
    # JSON leaves out what an engine said of its memory, when a risk was seen, what is unseen of it.
    risks = tuple(
        dataclasses.replace(risk, finding=dataclasses.replace(risk.finding, at=None, unseen=()))
        for risk in new.risks
    )
    bare = dataclasses.replace(new, engines=stored.engines, risks=risks)
    assert render_text(stored, verbose=True) == render_text(bare, verbose=True)
    assert render_text(stored) == render_text(bare)
    assert to_json(stored) == to_json(new)
    for before, after in zip(new.incidents, stored.incidents, strict=True):
        engine = next((e for e in new.engines if e.id == before.finding.engine_id), None)
        if engine is not None:
            assert render(after.remedies, engine, "args") == render(before.remedies, engine, "args")


def test_risks_and_their_remedies_come_back():
    remedy = Remedy(
        "lower", "Lower it", "less_kv", "why", "cost", {"--max-num-seqs": "8"}, ("--x",), {"A": "b"}
    )
    finding = Finding("irregular", "gpu_leak_growth", 0.7, "it grows", engine_id="e", risk=True)
    new = Diagnosis("at_risk", 1000.0, "h", risks=(Risk(finding, 3, 60.0, (remedy,)),))
    assert through_json(new).risks == new.risks
    assert through_json(new).generated_at == 1000.0


def test_what_is_missing_is_unknown():
    empty = from_json({})
    assert (empty.verdict, empty.host, empty.incidents) == ("unknown", None, ())
    assert "unknown" in to_json(empty)["verdict"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = sorted(
    {"engines", "gpus", "incidents", "risks", "sources", "advice", "verdict", "generated_at"}
)
INNER = sorted(
    [
        "id",
        "command",
        "pids",
        "gpus",
        "arguments",
        "index",
        "name",
        "summary",
        "evidence",
        "alternatives",
        "memory",
        "parts",
        "count",
        "remedies",
        "unset",
        "set",
        "env",
        "effect",
        "confidence",
        "unseen",
        "at",
        "cause",
        "class",
        "eta_seconds",
        "source",
        "where",
    ]
)
ROW = st.dictionaries(
    st.sampled_from(INNER), JSON | st.lists(st.dictionaries(st.sampled_from(INNER), JSON))
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(ROW, max_size=3)))
def test_what_does_not_fit_is_left_out(value):
    assert isinstance(from_json(value), Diagnosis)
