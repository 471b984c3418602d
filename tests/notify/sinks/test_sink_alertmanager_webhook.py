from __future__ import annotations

import json

import pytest
from loopback_receiver import Reply
from notice_samples import INCIDENT, SECOND, notice

from oomwatch.config.sinks import AlertmanagerWebhookConfig
from oomwatch.notify.outcome import Delivered, Refused
from oomwatch.notify.sinks import make_sink


def sink_of(receiver, **keys):
    keys = {"url": f"{receiver.url}hook", **keys}
    return make_sink(AlertmanagerWebhookConfig(name="bridge", timeout_seconds=10.0, **keys), {})


def test_it_looks_like_alertmanagers_own(receiver):
    assert sink_of(receiver).send(notice("opened"), None) == Delivered()
    [got] = receiver.got
    body = got.json
    assert body.keys() >= {
        "version", "groupKey", "truncatedAlerts", "status", "receiver", "groupLabels",
        "commonLabels", "commonAnnotations", "externalURL", "alerts",
    }  # fmt: skip
    assert (body["version"], body["status"], body["receiver"]) == ("4", "firing", "bridge")
    assert body["groupKey"] == (
        '{}:{alertname="OomwatchIncident", fingerprint="chat-70b/failure", host="gpu-07.example.com"}'
    )
    [alert] = body["alerts"]
    assert alert.keys() >= {
        "status", "labels", "annotations", "startsAt", "endsAt", "generatorURL", "fingerprint",
    }  # fmt: skip
    assert alert["endsAt"] == "0001-01-01T00:00:00Z"
    assert body["commonLabels"] == alert["labels"]


def test_a_resolved_one_has_its_end(receiver):
    sink_of(receiver).send(notice("resolved"), None)
    body = receiver.got[0].json
    assert body["status"] == body["alerts"][0]["status"] == "resolved"
    assert body["alerts"][0]["endsAt"] == "2026-09-21T14:25:00.000Z"
    opened = json.loads(sink_of(receiver).preview(notice("opened"), None))
    assert opened["alerts"][0]["fingerprint"] == body["alerts"][0]["fingerprint"]
    assert opened["groupKey"] == body["groupKey"]


def test_what_several_have_in_common(receiver):
    sink_of(receiver).send(notice("grouped", INCIDENT, SECOND), None)
    body = receiver.got[0].json
    assert len(body["alerts"]) == 2
    assert "severity" not in body["commonLabels"]
    assert body["commonLabels"]["host"] == INCIDENT.host


@pytest.mark.parametrize("kind", ["test", "undelivered"])
def test_messages_about_messages(receiver, kind):
    sink_of(receiver).send(notice(kind), None)
    [alert] = receiver.got[0].json["alerts"]
    assert alert["labels"]["alertname"].lower() == f"oomwatch{kind}"


def test_the_address_may_be_a_secret(receiver, secret):
    url = f"{receiver.url}hook/T0PSECRET"
    sink = sink_of(receiver, url=None, url_file=secret(url), headers_file=secret("X-Key: k3y"))
    receiver.answer(Reply(404, b"no T0PSECRET, no k3y"))
    said = sink.send(notice("opened"), None)
    assert receiver.got[0].headers["x-key"] == "k3y"
    assert isinstance(said, Refused)
    assert "k3y" not in said.reason
