"""Replay every folder of `tests/cases` through the real command path.

A case is a folder with `case.json` and its inputs. `cause` null means that no incident is right.
`lookalike_of` names the causes that this case is the nearest look-alike of.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from oomwatch.causes import CAUSES, class_of
from oomwatch.cli.diagnose import exit_status, run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.report.json_report import read_schema, to_json
from oomwatch.report.pages import title
from oomwatch.report.phrases import left_in_english

ROOT = Path(__file__).parent / "cases"
_CLAIMED = re.compile(r"(?i)ran out|out of memory|耗尽|显存不足")
CASES = sorted(path.parent for path in ROOT.glob("*/case.json"))


def _load(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "case.json").read_text(encoding="utf-8"))


def _options(folder: Path, case: dict[str, Any]) -> Options:
    inputs = case["inputs"]

    def path(name: str) -> str:
        return str(folder / name)

    return Options(
        logs=tuple(path(name) for name in inputs.get("log", ())),
        metrics=tuple(path(name) for name in inputs.get("metrics", ())),
        kernel_logs=tuple(path(name) for name in inputs.get("kernel_log", ())),
        recordings=(path(inputs["recording"]),) if "recording" in inputs else (),
        command=inputs.get("command"),
        model_config=path(inputs["model_config"]) if "model_config" in inputs else None,
    )


@pytest.mark.parametrize("folder", CASES, ids=lambda folder: folder.name)
def test_case(folder: Path) -> None:
    case = _load(folder)
    diagnosis = run_diagnosis(_options(folder, case))
    answer = to_json(diagnosis)
    jsonschema.validate(answer, read_schema())
    top = next(iter(answer["incidents"] or answer["risks"]), None)
    assert diagnosis.verdict == case["verdict"], top and top["cause"]
    for found in (*diagnosis.incidents, *diagnosis.risks):
        for remedy in found.remedies:
            assert left_in_english(remedy, "zh") == [], "no Chinese for it in report/locale"
    if case["cause"] is None:
        assert top is None or top["cause"] == "shutdown_requested", top
        assert exit_status(diagnosis) == 0
        return
    assert top is not None
    assert (top["class"], top["cause"]) == (class_of(case["cause"]), case["cause"])
    assert exit_status(diagnosis) == 1 or case["verdict"] == "healthy"
    if case["verdict"] == "unknown":
        said = (title(top["cause"], "en"), title(top["cause"], "zh"), top["summary"])
        assert not _CLAIMED.search(" ".join(said)), "it claims what is not decided"
    else:
        assert top["remedies"], "no remedy"
        assert top["remedies"][0]["direction"] == case["direction"]
    for evidence in top["evidence"]:
        if evidence["source"] == "log":
            assert _stands(evidence, folder), evidence


def _stands(evidence: dict[str, Any], folder: Path) -> bool:
    """Whether the quoted words stand in the cited line, or in the lines just after it."""
    name, _, number = evidence["where"].rpartition(":")
    file = next(p for p in folder.rglob("*") if p.name == Path(name).name)
    data = file.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    lines = data.decode("utf-8", "replace").split("\n")
    near = " ".join(lines[int(number) - 1 : int(number) + 3])
    words = [word for word in str(evidence["text"]).split() if word.isalnum()][:6]
    return all(word in near for word in words)


def test_every_cause_has_a_case_and_a_look_alike() -> None:
    cases = [_load(folder) for folder in CASES]
    causes = {cause for group in CAUSES.values() for cause in group}
    assert {case["cause"] for case in cases} - {None} == causes
    assert {cause for case in cases for cause in case.get("lookalike_of", ())} == causes
