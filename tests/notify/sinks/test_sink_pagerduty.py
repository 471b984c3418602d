from __future__ import annotations

import dataclasses
import json

import pytest
from loopback_receiver import Reply
from notice_samples import INCIDENT, notice

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import PagerDutyConfig
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink
from oomwatch.notify.sinks.pagerduty import dedup_key

KEY = "R0123456789ABCDEF0123456789ABCDE"


@pytest.fixture
def receiver(receiver):
    receiver.answer(Reply(202, b'{"status":"success"}'))
    return receiver


def sink_of(receiver, secret):
    config = PagerDutyConfig(
        name="pd", url=f"{receiver.url}v2/enqueue", routing_key_file=secret(KEY), timeout_seconds=10.0
    )  # fmt: skip
    return make_sink(config, {})


def test_an_incident_triggers(receiver, secret):
    assert sink_of(receiver, secret).send(notice("opened"), None) == Delivered()
    [got] = receiver.got
    event = got.json
    assert got.path == "/v2/enqueue"
    assert event["routing_key"] == KEY
    assert event["event_action"] == "trigger"
    assert event["dedup_key"] == "gpu-07.example.com/chat-70b/failure"
    payload = event["payload"]
    assert payload["summary"].startswith("[CRITICAL] A long prefill needed more")
    assert "3.1 GiB asked" in payload["summary"]
    assert (payload["source"], payload["severity"]) == ("gpu-07.example.com", "critical")
    assert (payload["component"], payload["class"]) == ("chat-70b", "prefill_activation_peak")
    [told] = payload["custom_details"]["incidents"]
    assert told["remedies"][0]["flags"] == ["--max-num-batched-tokens 4096"]
    assert event["links"][0]["href"] == INCIDENT.runbook_url


def test_all_that_is_said_of_an_incident_has_one_key(receiver, secret):
    sink = sink_of(receiver, secret)
    for kind in ("opened", "updated", "escalated", "resolved"):
        sink.send(notice(kind), None)
    assert [got.json["event_action"] for got in receiver.got] == ["trigger"] * 3 + ["resolve"]
    assert len({got.json["dedup_key"] for got in receiver.got}) == 1
    assert receiver.got[-1].json.keys() == {"routing_key", "event_action", "dedup_key"}


def test_a_test_is_resolved_at_once(receiver, secret):
    sink_of(receiver, secret).send(notice("test"), None)
    first, second = (got.json for got in receiver.got)
    assert first["payload"]["severity"] == "info"
    assert (first["event_action"], second["event_action"]) == ("trigger", "resolve")
    assert first["dedup_key"] == second["dedup_key"]


def test_messages_that_were_given_up(receiver, secret):
    sink_of(receiver, secret).send(notice("undelivered"), None)
    [got] = receiver.got
    assert got.json["payload"]["severity"] == "warning"
    assert "3 messages to oncall were given up" in got.json["payload"]["summary"]


def test_limits(receiver, secret):
    long = dataclasses.replace(
        INCIDENT, fingerprint="f" * 400, why="w" * 5000, evidence=("x" * 5000,) * 200
    )
    assert len(dedup_key(long)) <= 255
    sink_of(receiver, secret).send(notice("opened", long), None)
    assert len(receiver.got[0].body) < 512_000
    assert len(receiver.got[0].json["payload"]["summary"]) <= 1024


@pytest.mark.parametrize(("status", "kind"), [(400, Refused), (429, Later), (500, Later)])
def test_what_it_answers(receiver, secret, status, kind):
    receiver.answer(Reply(status, f'{{"message":"invalid {KEY}"}}'.encode()))
    said = sink_of(receiver, secret).send(notice("opened"), None)
    assert isinstance(said, kind)
    assert KEY not in said.reason


@pytest.mark.parametrize("status", [200, 202])
def test_what_only_looks_like_success(receiver, secret, status):
    receiver.answer(Reply(status, b"<html>Please log in</html>"))
    told = sink_of(receiver, secret).send(notice("opened"), None)
    assert isinstance(told, Later)
    assert "is there a log-in in between?" in told.reason


@pytest.mark.parametrize("body", [b"", b"ok", b"[]", b'{"status":"invalid event"}'])
def test_200_alone_is_no_success(receiver, secret, body):
    receiver.answer(Reply(200, body))
    told = sink_of(receiver, secret).send(notice("opened"), None)
    assert isinstance(told, Later)
    assert "does not answer like PagerDuty" in told.reason
    receiver.answer(Reply(200, b'{"status":"success"}'))
    assert sink_of(receiver, secret).send(notice("opened"), None) == Delivered()


def test_the_key_is_needed_and_not_shown(receiver, secret):
    with pytest.raises(ConfigError, match="OOMWATCH_NOTIFY_PD_ROUTING_KEY"):
        make_sink(PagerDutyConfig(name="pd"), {})
    shown = sink_of(receiver, secret).preview(notice("opened"), None)
    assert KEY not in shown
    assert json.loads(shown)[0]["event_action"] == "trigger"


def test_that_it_is_back_is_said(receiver, secret):
    sink_of(receiver, secret).send(notice("opened", note="It is back: 2 times in 3 min."), None)
    payload = receiver.got[0].json["payload"]
    assert "It is back: 2 times in 3 min.: " not in payload["summary"]
    assert "It is back: 2 times in 3 min. The activations" in payload["summary"]
    assert payload["custom_details"]["note"] == "It is back: 2 times in 3 min."
