"""Hostile text in every text field of a diagnosis, through every renderer."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_samples import SAMPLES, at_risk, kv_lt_max_len, prefill_peak

from oomwatch import records
from oomwatch.report.json_report import render_json
from oomwatch.report.markdown import render_markdown
from oomwatch.report.text import render_text

ATTACKS = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\u202etxt.exe",
    "\u2066\u2069",
    "[bold red]markup[/] [/] [link=x]",
    "\r\noverwritten\b\b",
    "\ud83d lone",
    "```\n</details>",
    "<!--",
    "| a | b |",
    "@everyone #1",
    "{cause} {0} {percent} %s",
    "\x00\x7f\x85\u2028\u2029",
    "：显存显存显存" * 30,
    "w" * 5000,
    " ",
    "",
)


def poison(value: Any, kind: Any, text: str) -> Any:
    """`value` with every free text in it, and in the records below, replaced by `text`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        return dataclasses.replace(
            value,
            **{
                field.name: poison(getattr(value, field.name), hints[field.name], text)
                for field in dataclasses.fields(value)
                if field.name not in ("cause", "source", "id")
            },
        )
    if typing.get_origin(kind) is typing.Literal:
        return value
    if isinstance(value, str):
        return text
    if isinstance(value, tuple):
        inner = (typing.get_args(kind) or (str,))[0]
        if isinstance(inner, str) or inner is str:
            return tuple(text for _ in value)
        return tuple(poison(item, inner, text) for item in value)
    if isinstance(value, Mapping):
        return dict.fromkeys([text], text) if value else {}
    return value


def outputs(diagnosis: records.Diagnosis) -> list[str]:
    return [
        render_json(diagnosis),
        render_markdown(diagnosis),
        render_markdown(diagnosis, lang="zh"),
        render_text(diagnosis, verbose=True),
        render_text(diagnosis, lang="zh", width=40),
        render_text(diagnosis, quiet=True),
        re.sub(r"\x1b\[[0-9;]+m", "", render_text(diagnosis, color=True, verbose=True)),
    ]


def assert_harmless(diagnosis: records.Diagnosis) -> None:
    for text in outputs(diagnosis):
        bad = {char for char in text if char != "\n" and not char.isprintable()}
        assert not bad
        text.encode("utf-8")
    json.loads(render_json(diagnosis))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", SAMPLES)
def test_known_attacks(name: str, attack: str) -> None:
    diagnosis = SAMPLES[name]()
    assert_harmless(poison(diagnosis, records.Diagnosis, attack))


def test_the_poison_reaches_the_fields() -> None:
    diagnosis = poison(kv_lt_max_len(), records.Diagnosis, "POISON")
    incident = diagnosis.incidents[0]
    assert incident.finding.summary == "POISON"
    assert incident.finding.evidence[0].text == "POISON"
    assert incident.remedies[0].set == {"POISON": "POISON"}
    assert diagnosis.engines[0].command[0] == "POISON"
    assert diagnosis.engines[0].phase == "exited"
    assert diagnosis.advice == ("POISON",)
    assert incident.memory[0].parts[0].name == "POISON"


@given(text=st.text(max_size=60), name=st.sampled_from([kv_lt_max_len, prefill_peak, at_risk]))
@settings(
    max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_any_text(text: str, name: Any) -> None:
    assert_harmless(poison(name(), records.Diagnosis, text))
