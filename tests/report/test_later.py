"""What became of an engine after the start that failed, in every form for people."""

from __future__ import annotations

import dataclasses

import pytest
from report_samples import SGLANG, VLLM, kv_lt_max_len

from oomwatch.records import Diagnosis, Phase, Risk
from oomwatch.report.html import render_html
from oomwatch.report.json_read import from_json
from oomwatch.report.json_report import to_json
from oomwatch.report.locale import Language
from oomwatch.report.markdown import render_markdown
from oomwatch.report.text import render_text

NOON = 1_794_916_800.0


def restarted(phase: Phase) -> Diagnosis:
    """A start that failed, and a newer one of the same engine."""
    failed = kv_lt_max_len()
    (incident,) = failed.incidents
    older = dataclasses.replace(VLLM, id="vllm-1#1")
    newest = dataclasses.replace(VLLM, phase=phase, started_at=NOON)
    finding = dataclasses.replace(incident.finding, engine_id=older.id)
    return dataclasses.replace(
        failed,
        engines=(newest, older, SGLANG),
        incidents=(dataclasses.replace(incident, finding=finding),),
    )


@pytest.mark.parametrize(
    ("lang", "phase", "said"),
    [
        ("en", "serving", "A later start (2026-11-17 12:00:00 UTC) serves."),
        ("en", "starting", "A later start (2026-11-17 12:00:00 UTC) is under way"),
        ("zh", "serving", "之后的一次启动（2026-11-17 12:00:00 UTC）正在服务。"),
        ("zh", "starting", "之后的一次启动（2026-11-17 12:00:00 UTC）正在进行"),
    ],
)
def test_a_later_start_stands_above_the_reason(lang: Language, phase: Phase, said: str) -> None:
    diagnosis = restarted(phase)
    summary = diagnosis.incidents[0].finding.summary[:24]
    texts = [
        render_text(diagnosis, lang=lang),
        render_text(diagnosis, lang=lang, quiet=True),
        render_markdown(diagnosis, lang=lang).replace("\\", ""),
        render_html(diagnosis, lang=lang),
    ]
    for text in texts:
        assert said in text
        assert text.index(said) < text.index(summary)


def test_a_start_that_is_gone_too_is_not_called_later() -> None:
    assert "later" not in render_text(restarted("exited"))


def test_the_only_start_has_none_after_it() -> None:
    assert "later" not in render_text(kv_lt_max_len())


def test_a_stored_report_says_it_as_well() -> None:
    again = from_json(to_json(restarted("serving")))
    assert render_text(again) == render_text(restarted("serving"))


@pytest.mark.parametrize(
    ("lang", "said"),
    [
        ("en", "It is at risk itself: The KV cache is full"),
        ("zh", "但它本身也有风险：KV 缓存已满"),
    ],
)
def test_a_later_start_that_is_at_risk_is_not_called_well(lang: Language, said: str) -> None:
    diagnosis = restarted("serving")
    finding = dataclasses.replace(
        diagnosis.incidents[0].finding, cls="long_context", cause="kv_saturation"
    )
    told = {
        name: dataclasses.replace(
            diagnosis, risks=(Risk(dataclasses.replace(finding, engine_id=name)),)
        )
        for name in ("vllm-1", "vllm-1#1")
    }
    assert said in render_text(told["vllm-1"], lang=lang, quiet=True, width=200)
    assert said not in render_text(told["vllm-1#1"], lang=lang, quiet=True, width=200)
