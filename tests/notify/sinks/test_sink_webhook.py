from __future__ import annotations

import base64
import dataclasses
import json

import jsonschema
import pytest
from loopback_receiver import Reply
from notice_samples import INCIDENT, KINDS, notice
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import WebhookConfig
from oomwatch.notify.data import event_type, read_schema
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink

FIRST = "whsec_" + base64.b64encode(b"a" * 32).decode()
SECOND = "whsec_" + base64.b64encode(b"b" * 32).decode()


def sink_of(receiver, secret, secrets=FIRST, **keys):
    keys = {"url": receiver.url, "secret_file": secret(secrets), **keys}
    return make_sink(WebhookConfig(name="hook", timeout_seconds=10.0, **keys), {})


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_of_standard_webhooks_verifies_every_kind(receiver, secret, kind):
    told = notice(kind)

    assert sink_of(receiver, secret).send(told, None) == Delivered()

    [got] = receiver.got
    body = Webhook(FIRST).verify(got.body, dict(got.headers))
    assert body["type"] == event_type(told)
    assert body["timestamp"] == "2026-09-21T14:13:21.000Z"
    jsonschema.validate(body["data"], read_schema())
    assert got.headers["webhook-id"] == body["data"]["id"] == told.id


def test_a_tampered_body_is_rejected(receiver, secret):
    sink_of(receiver, secret).send(notice("opened"), None)
    [got] = receiver.got
    tampered = got.body.replace(b"critical", b"info", 1)
    assert tampered != got.body
    with pytest.raises(WebhookVerificationError):
        Webhook(FIRST).verify(tampered, dict(got.headers))


def test_while_the_secret_changes_both_receivers_verify(receiver, secret):
    sink_of(receiver, secret, f"{FIRST}\n{SECOND}").send(notice("opened"), None)
    [got] = receiver.got
    for known in (FIRST, SECOND):
        Webhook(known).verify(got.body, dict(got.headers))
    with pytest.raises(WebhookVerificationError):
        Webhook(base64.b64encode(b"c" * 32).decode()).verify(got.body, dict(got.headers))


def test_a_secret_that_changes_is_used_without_a_restart(receiver, tmp_path):
    path = tmp_path / "secret"
    path.write_text(FIRST, encoding="utf-8")
    config = WebhookConfig(name="hook", url=receiver.url, secret_file=str(path))
    sink = make_sink(config, {})
    path.write_text(SECOND, encoding="utf-8")
    sink.send(notice("opened"), None)
    Webhook(SECOND).verify(receiver.got[0].body, dict(receiver.got[0].headers))

    path.unlink()
    again = sink.send(notice("opened"), None)
    assert isinstance(again, Later)
    assert "no such file" in again.reason


def test_secrets_and_address_may_come_from_the_environment(receiver):
    environ = {"OOMWATCH_NOTIFY_HOOK_1_URL": receiver.url, "OOMWATCH_NOTIFY_HOOK_1_SECRET": FIRST}
    assert make_sink(WebhookConfig(name="hook-1"), environ).send(notice("test"), None) == (
        Delivered()
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("whsec_c2hvcnQ=", "24 to 64 bytes"),
        ("not base64 at all!", "24 to 64 bytes"),
    ],
)
def test_a_bad_secret_is_named_without_being_told(receiver, secret, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        sink_of(receiver, secret, text)
    assert text not in str(caught.value)


def test_a_missing_secret_says_what_to_do(receiver):
    with pytest.raises(ConfigError, match=r"has no secret_file.*OOMWATCH_NOTIFY_HOOK_SECRET.*whse"):
        make_sink(WebhookConfig(name="hook", url=receiver.url), {})


def test_headers_are_sent_along(receiver, secret):
    sink = sink_of(
        receiver, secret, headers={"X-Team": "a"}, headers_file=secret("Authorization: Bearer t0")
    )
    sink.send(notice("opened"), None)
    headers = receiver.got[0].headers
    assert headers["x-team"] == "a"
    assert headers["authorization"] == "Bearer t0"
    assert headers["user-agent"].startswith("oomwatch/")


def test_many_incidents_stay_below_20_kb_and_say_what_is_missing(receiver, secret):
    many = [
        dataclasses.replace(INCIDENT, id=f"inc-{number:012x}", labels={"x": "y" * 900})
        for number in range(300)
    ]
    sink_of(receiver, secret).send(notice("undelivered", *many), None)
    body = receiver.got[0].body
    data = json.loads(body)["data"]
    assert len(body) < 20_000
    assert data["truncated"] is True
    assert len(data["incidents"]) + data["left_out"] == 300
    assert data["incidents"][0]["cause"] == "prefill_activation_peak"
    assert data["incidents"][0]["host"] == "gpu-07.example.com"
    jsonschema.validate(data, read_schema())


def test_evidence_goes_first_and_flags_stay(receiver, secret):
    wordy = dataclasses.replace(INCIDENT, evidence=("x" * 300,) * 80)
    sink_of(receiver, secret).send(notice("opened", wordy), None)
    [incident] = json.loads(receiver.got[0].body)["data"]["incidents"]
    assert incident["evidence"] == []
    assert incident["remedies"][0]["flags"] == ["--max-num-batched-tokens 4096"]
    assert incident["remedies"][0]["effect"] == "frees 2.1 GiB"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (200, Delivered),
        (204, Delivered),
        (404, Refused),
        (410, Refused),
        (429, Later),
        (503, Later),
    ],
)
def test_what_a_status_means(receiver, secret, status, kind):
    receiver.answer(Reply(status, b"" if status == 204 else b"why"))
    assert isinstance(sink_of(receiver, secret).send(notice("opened"), None), kind)


def test_preview_shows_the_body_and_sends_nothing(receiver, secret):
    shown = sink_of(receiver, secret).preview(notice("opened"), None)
    assert '"oomwatch.incident.opened"' in shown
    assert "--max-num-batched-tokens 4096" in shown
    assert not receiver.got
