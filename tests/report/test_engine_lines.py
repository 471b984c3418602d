"""Several engines in one report are told apart."""

from __future__ import annotations

import dataclasses

import pytest
from report_samples import VLLM, kv_lt_max_len

from oomwatch.records import Diagnosis, EngineSample
from oomwatch.report.engine_lines import engine_lines
from oomwatch.report.html import render_html
from oomwatch.report.locale import catalogue
from oomwatch.report.markdown import render_markdown
from oomwatch.report.text import render_text

TWO = (
    dataclasses.replace(VLLM, id="vllm-8000", pids=(4121,)),
    dataclasses.replace(VLLM, id="vllm-8001", pids=(5121,), phase="serving"),
)


def healthy(*ids: str) -> Diagnosis:
    load = EngineSample(at=1.0, engine="0", running=1)
    engines = tuple(
        dataclasses.replace(VLLM, id=name, pids=(number,), phase="serving", load=load)
        for number, name in enumerate(ids, 71)
    )
    return Diagnosis(verdict="healthy", generated_at=1.0, engines=engines)


@pytest.mark.parametrize("render", [render_text, render_markdown, render_html])
def test_servers_of_one_model_are_told_apart(render) -> None:
    said = render(healthy("vllm-8000", "vllm-8001")).replace("\\", "")
    assert "vllm-8000 · PID 71 · vLLM 0.11.0" in said
    assert "vllm-8001 · PID 72 · vLLM 0.11.0" in said


@pytest.mark.parametrize("render", [render_text, render_markdown, render_html])
def test_a_finding_names_the_server_that_it_is_about(render) -> None:
    failed = kv_lt_max_len()
    (incident,) = failed.incidents
    finding = dataclasses.replace(incident.finding, engine_id="vllm-8001")
    said = render(
        dataclasses.replace(
            failed, engines=TWO, incidents=(dataclasses.replace(incident, finding=finding),)
        )
    ).replace("\\", "")
    head = said[: said.index(finding.summary[:24])]
    assert "vllm-8001" in head
    assert "vllm-8000" not in head


@pytest.mark.parametrize("ids", [("vllm-8000",), ("vllm-8000", "vllm-8000#1")])
def test_one_server_needs_no_name(ids: tuple[str, ...]) -> None:
    assert not any("PID" in line for line in engine_lines(healthy(*ids), catalogue("en")))
