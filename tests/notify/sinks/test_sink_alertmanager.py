"""Against Debian's Alertmanager, which tells a receiver of ours in turn."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from loopback_receiver import Receiver, Reply, wait_until
from notice_samples import INCIDENT, notice

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import AlertmanagerConfig
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink
from oomwatch.notify.sinks.alerts import fingerprint
from oomwatch.units import format_rfc3339

PROGRAM = shutil.which("prometheus-alertmanager")
NOW = time.time()
CURRENT = dataclasses.replace(INCIDENT, opened_at=NOW - 5)

CONFIG = """
route:
  receiver: hook
  group_by: [alertname, host, fingerprint]
  group_wait: 100ms
  group_interval: 200ms
  repeat_interval: 1h
receivers:
- name: hook
  webhook_configs:
  - url: {url}
"""


class Alertmanager:
    def __init__(self, folder, told: Receiver) -> None:
        self.told = told
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "alertmanager.yml"
        config.write_text(CONFIG.format(url=told.url), encoding="utf-8")
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={config}",
                f"--storage.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--cluster.listen-address=",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        wait_until(self._ready, 60)

    def _ready(self) -> bool:
        assert self.process.poll() is None, "alertmanager has ended"
        try:
            return self._get("/-/ready") is not None
        except OSError:
            return False

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:  # noqa: S310
            return answer.read()

    def alerts(self, name: str) -> list[dict]:
        """Those of an incident or message that are active."""
        return [
            one
            for one in json.loads(self._get("/api/v2/alerts?active=true"))
            if name in {one["annotations"].get("incident"), one["labels"]["alertname"]}
        ]

    def told_of(self, name: str) -> list[tuple[str, dict]]:
        """Status and alert of what was told about an incident."""
        return [
            (alert["status"], alert)
            for got in list(self.told.got)
            for alert in got.json["alerts"]
            if name in {alert["annotations"].get("incident"), alert["labels"]["alertname"]}
        ]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("needs Debian's prometheus-alertmanager")
    told = Receiver()
    server = Alertmanager(tmp_path_factory.mktemp("alertmanager"), told)
    yield server
    server.close()
    told.close()


def sink_of(*urls, **keys):
    return make_sink(AlertmanagerConfig(name="am", urls=urls, timeout_seconds=10.0, **keys), {})


def incident(identity: str, **changes):
    return dataclasses.replace(CURRENT, id=identity, fingerprint=f"{identity}/failure", **changes)


def test_it_receives_an_alert_and_tells_it(alertmanager):
    sink = sink_of(f"{alertmanager.url}/")
    assert sink.send(notice("opened", incident("inc-one")), None) == Delivered()

    [alert] = alertmanager.alerts("inc-one")
    assert alert["labels"] == {
        "alertname": "OomwatchIncident",
        "severity": "critical",
        "class": "long_context",
        "cause": "prefill_activation_peak",
        "kind": "failure",
        "host": "gpu-07.example.com",
        "engine_id": "chat-70b",
        "engine": "vllm",
        "model_name": "/models/Qwen3-32B",
        "gpu": "0,1",
        "fingerprint": "inc-one/failure",
        "team": "chat",
    }
    assert alert["annotations"]["flags"] == "--max-num-batched-tokens 4096"
    assert alert["annotations"]["runbook_url"].endswith("/prefill_activation_peak")
    assert alert["generatorURL"].endswith("/prefill_activation_peak")
    assert alert["status"]["state"] == "active"
    assert alert["fingerprint"] == fingerprint(alert["labels"]), "as in our own webhooks"
    wait_until(lambda: [status for status, _ in alertmanager.told_of("inc-one")] == ["firing"])


def test_what_is_over_is_resolved_there(alertmanager):
    sink = sink_of(alertmanager.url)
    one = incident("inc-over")
    sink.send(notice("opened", one), None)
    wait_until(lambda: bool(alertmanager.told_of("inc-over")))
    over = dataclasses.replace(notice("resolved", one), incidents=(dataclasses.replace(one, closed_at=time.time()),))  # fmt: skip
    assert sink.send(over, None) == Delivered()
    wait_until(lambda: "resolved" in [status for status, _ in alertmanager.told_of("inc-over")])
    assert alertmanager.alerts("inc-over") == []


def test_it_is_kept_while_it_is_told_again_and_ends_by_itself_else(alertmanager):
    sink = sink_of(alertmanager.url)
    sink.lasts_seconds = 3.0
    told = notice("opened", incident("inc-kept"))
    sink.send(told, None)
    end = time.monotonic() + 3.5
    while time.monotonic() < end:
        assert sink.refresh([told]) == Delivered()
        assert alertmanager.alerts("inc-kept")
        time.sleep(0.2)
    wait_until(lambda: not alertmanager.alerts("inc-kept"))
    wait_until(lambda: "resolved" in [status for status, _ in alertmanager.told_of("inc-kept")])
    assert next(status for status, _ in alertmanager.told_of("inc-kept")) == "firing"


def test_a_diagnosis_that_changes_leaves_one_alert(alertmanager):
    sink = sink_of(alertmanager.url)
    before = incident("inc-new", cause=None, confidence=None, incident_class=None)
    sink.send(notice("opened", before), None)
    sink.send(notice("updated", incident("inc-new")), None)
    [alert] = alertmanager.alerts("inc-new")
    assert alert["labels"]["cause"] == "prefill_activation_peak"
    sink.refresh([notice("updated", incident("inc-new", severity="warning"))])
    [alert] = alertmanager.alerts("inc-new")
    assert alert["labels"]["severity"] == "warning"


@pytest.mark.parametrize(
    ("kind", "name"), [("test", "OomwatchTest"), ("undelivered", "OomwatchUndelivered")]
)
def test_messages_about_messages(alertmanager, kind, name):
    assert sink_of(alertmanager.url).send(notice(kind, at=NOW), None) == Delivered()
    [alert] = alertmanager.alerts(name)
    assert alert["annotations"]["description"] == notice(kind).note


def test_what_it_refuses_is_said(alertmanager):
    wrong = incident("inc-wrong", labels={"not a label": "x"})
    said = sink_of(alertmanager.url).send(notice("opened", wrong), None)
    assert isinstance(said, Refused)
    assert "answered 400" in said.reason


def test_one_of_a_cluster_is_enough(receiver):
    with socket.create_server(("127.0.0.1", 0)) as free:
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
    assert sink_of(dead, receiver.url).send(notice("opened", CURRENT), None) == Delivered()
    assert receiver.got[0].path == "/api/v2/alerts"
    receiver.answer(Reply(503, b""))
    assert isinstance(sink_of(receiver.url, dead).send(notice("opened", CURRENT), None), Later)


def test_after_a_failure_the_old_alert_is_still_ended(receiver):
    sink = sink_of(receiver.url)
    sink.send(notice("opened", dataclasses.replace(CURRENT, cause=None)), None)
    receiver.answer(Reply(503, b""), Reply())
    assert isinstance(sink.send(notice("updated", CURRENT), None), Later)
    assert sink.send(notice("updated", CURRENT), None) == Delivered()
    old, new = receiver.got[2].json
    assert "cause" not in old["labels"]
    assert new["labels"]["cause"] == "prefill_activation_peak"
    assert old["endsAt"] < new["endsAt"]


def test_it_says_how_often_to_tell_again(receiver):
    sink = sink_of(receiver.url)
    assert sink.refresh_seconds * 3 <= sink.lasts_seconds
    assert sink.refresh([]) == Delivered()
    assert not receiver.got
    assert not sink.groups


def test_credentials_are_sent_and_not_told(receiver, secret):
    sink = sink_of(receiver.url, headers_file=secret("Authorization: Bearer t0ps3cret"))
    receiver.answer(Reply(401, b"not Bearer t0ps3cret"))
    said = sink.send(notice("opened", CURRENT), None)
    assert receiver.got[0].headers["authorization"] == "Bearer t0ps3cret"
    assert isinstance(said, Refused)
    assert "t0ps3cret" not in said.reason
    with pytest.raises(ConfigError, match="headers_file of receiver am has a header"):
        sink_of(receiver.url, headers_file=secret("nonsense"))


def test_credentials_that_are_gone_are_a_reason_to_wait(receiver, tmp_path):
    path = tmp_path / "headers"
    path.write_text("X-Key: k\n", encoding="utf-8")
    sink = sink_of(receiver.url, headers_file=str(path))
    path.unlink()
    for said in (sink.send(notice("opened", CURRENT), None), sink.refresh([notice("opened")])):
        assert isinstance(said, Later)
        assert "no such file" in said.reason


def test_preview_is_what_is_posted(receiver):
    [alert] = json.loads(sink_of(receiver.url).preview(notice("opened", CURRENT), None))
    assert alert["labels"]["alertname"] == "OomwatchIncident"
    assert not receiver.got


def test_what_is_over_is_resolved_at_once_also_if_the_clock_was_set_back(receiver):
    one = dataclasses.replace(CURRENT, opened_at=NOW + 86_400, closed_at=NOW + 86_500)
    (alert,) = json.loads(sink_of(receiver.url).preview(notice("resolved", one), None))
    now = format_rfc3339(time.time())
    assert alert["startsAt"] <= alert["endsAt"] <= now


def test_a_path_that_is_not_there_says_what_to_write(alertmanager):
    said = sink_of(f"{alertmanager.url}/api/v2/alerts").send(notice("opened", CURRENT), None)
    assert isinstance(said, Refused)
    assert "give only the base address in urls" in said.reason


def test_an_alert_says_that_it_is_back_and_where_to_read_on(receiver):
    back = notice("opened", dataclasses.replace(CURRENT, runbook_url=None), note="It is back.")
    sink = sink_of(receiver.url)
    for told in (sink.send(back, None), sink.refresh([back])):
        assert told == Delivered()
    for got in receiver.got:
        [alert] = got.json
        said = alert["annotations"]
        assert said["note"] == "It is back."
        assert said["runbook"] == "oomwatch explain prefill_activation_peak"
        assert said["show"] == "oomwatch incidents show inc-0123456789ab"
        assert "runbook_url" not in said


@pytest.mark.parametrize("kind", ["test", "undelivered"])
def test_messages_about_messages_can_be_routed_by_the_labels_of_the_configuration(receiver, kind):
    sink_of(receiver.url).send(notice(kind, at=NOW, labels={"site": "fra1"}), None)
    [alert] = receiver.got[0].json
    assert alert["labels"]["site"] == "fra1"
    assert alert["labels"]["alertname"].startswith("Oomwatch")
