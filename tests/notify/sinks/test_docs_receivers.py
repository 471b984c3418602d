"""docs/receivers.md shows what is really sent. `OOMWATCH_WRITE_DOCS=1` writes it anew."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import time
import tomllib
from pathlib import Path

import jsonschema
import pytest
from notice_samples import INCIDENT, notice

from oomwatch.config.fields import members
from oomwatch.config.receivers import NotifyConfig
from oomwatch.config.sinks import SINKS
from oomwatch.notify.data import read_schema
from oomwatch.notify.sinks import alerts
from oomwatch.notify.sinks.slack_blocks import shown, slack_payload
from oomwatch.notify.sinks.webhook import make_body

PAGE = Path(__file__).parents[3] / "docs" / "receivers.md"
SAMPLE = notice(
    "opened",
    dataclasses.replace(INCIDENT, remedies=INCIDENT.remedies[:1], evidence=INCIDENT.evidence[:1]),
    id="msg-2b1c7d",
)


def pretty(data: object) -> str:
    return json.dumps(data, ensure_ascii=False, indent=2)


def a_body() -> str:
    body = json.loads(make_body(SAMPLE))
    body["data"]["host"] = SAMPLE.incidents[0].host
    return pretty(body)


def an_alert() -> list[dict]:
    [incident] = SAMPLE.incidents
    labels = alerts.incident_labels(incident)
    said = alerts.incident_annotations(incident)
    return [alerts.alert(labels, said, incident.opened_at, incident.opened_at + 240)]


EXAMPLES = {
    "slack": lambda: shown(slack_payload(SAMPLE, "en")),
    "webhook": a_body,
    "alertmanager": lambda: pretty(an_alert()),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_what_is_sent(name):
    text = PAGE.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- example: {name} -->\n```\w+\n)(.*?)(```\n)", re.DOTALL)
    expected = pattern.sub(lambda match: f"{match[1]}{EXAMPLES[name]()}\n{match[3]}", text)
    assert pattern.search(text)
    if os.environ.get("OOMWATCH_WRITE_DOCS"):
        PAGE.write_text(expected, encoding="utf-8")
    else:
        assert text == expected


def test_the_webhook_s_example_obeys_the_schema():
    jsonschema.Draft202012Validator.check_schema(read_schema())
    jsonschema.validate(json.loads(make_body(SAMPLE))["data"], read_schema())


@pytest.mark.parametrize("kind", SINKS)
def test_every_kind_is_a_table_and_a_module(kind):
    [table] = [member for member in members(NotifyConfig) if member.name == kind]
    assert table.repeated
    assert table.cls is SINKS[kind]
    assert importlib.import_module(f"oomwatch.notify.sinks.{kind}").make


@pytest.mark.parametrize("kind", SINKS)
def test_every_receiver_is_described_with_keys_that_it_has(kind):
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n## {kind}\n" in text
    tables = re.findall(rf"```toml\n(\[\[notify\.{kind}\]\].*?)```", text, re.DOTALL)
    assert tables
    for table in tables:
        [given] = tomllib.loads(table)["notify"][kind]
        known = {member.name: member for member in members(SINKS[kind])}
        values = {known[name].field: known[name].kind.read(value, text=False) for name, value in given.items()}  # fmt: skip
        assert list(SINKS[kind](**values).problems()) == []
