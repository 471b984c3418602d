"""The shipped route in Debian's Alertmanager: alerts of the rules, and those of the agent itself."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request

import pytest
from test_deploy_prometheus import free_port, get, wait_for
from test_deploy_rules import DEPLOY

from oomwatch.config.sinks import AlertmanagerConfig
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.outcome import Delivered
from oomwatch.notify.sinks import make_sink

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus-alertmanager") is None,
    reason="prometheus-alertmanager is not installed",
)


class Alertmanager:
    """One with the shipped route."""

    def __init__(self, folder) -> None:
        self.port = free_port()
        self._log = (folder / "log").open("wb")
        self._child = subprocess.Popen(
            [
                "prometheus-alertmanager",
                f"--config.file={DEPLOY / 'alertmanager' / 'oomwatch.example.yml'}",
                f"--storage.path={folder}/alerts",
                f"--web.listen-address=127.0.0.1:{self.port}",
                "--cluster.listen-address=",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        wait_for(self._is_up, "it answers")

    def _is_up(self) -> bool:
        assert self._child.poll() is None, "it has ended: see amtool check-config"
        return bool(get(self.port, "/api/v2/status"))

    def post(self, *alerts: dict) -> None:
        """As Prometheus does it."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/v2/alerts",
            json.dumps([{"labels": labels} for labels in alerts]).encode(),
            {"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=20).close()  # noqa: S310

    def told(self) -> dict[str, set[str]]:
        """The engines, or else names, of the alerts that each receiver is told of."""
        found: dict[str, set[str]] = {}
        for alert in get(self.port, "/api/v2/alerts"):
            if not alert["status"]["inhibitedBy"]:
                labels = alert["labels"]
                who = labels.get("engine_id", labels["alertname"])
                for receiver in alert["receivers"]:
                    found.setdefault(receiver["name"], set()).add(who)
        return found

    def groups(self) -> list[dict]:
        return [
            group["labels"]
            for group in get(self.port, "/api/v2/alerts/groups")
            if group["receiver"]["name"] != "nobody"
        ]

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
        self._log.close()


@pytest.fixture
def alertmanager(tmp_path):
    with contextlib.closing(Alertmanager(tmp_path)) as one:
        yield one


def incident(kind: str, engine: str | None, host: str, severity="critical") -> IncidentNotice:
    at = time.time() - 5
    fingerprint = f"{engine or 'gpu-0'}/{kind}"
    return IncidentNotice(
        f"inc-{host}-{engine}", fingerprint, host, severity, "It failed", at, engine_id=engine
    )


def test_alerts_of_the_agent_itself(alertmanager):
    url = f"http://127.0.0.1:{alertmanager.port}"
    sink = make_sink(AlertmanagerConfig(name="am", urls=(url,)), {})
    told = (
        incident("failure", "chat", "gpu-1"),
        incident("kv_pressure", "embed", "gpu-1", "warning"),
        incident("failure", "other", "gpu-2"),
        incident("kv_pressure", "slow", "gpu-2", "warning"),
        incident("kv_forecast", "soon", "gpu-2", "info"),
    )
    for each in told:
        assert sink.send(Notice(f"msg-{each.id}", "opened", each.opened_at, (each,)), None) == (
            Delivered()
        )
    assert sink.send(Notice("msg-test", "test", time.time()), None) == Delivered()
    everything = {
        "inference-oncall": {"chat", "other"},
        "inference-team": {"embed", "slow", "OomwatchTest"},
        "nobody": {"soon"},
    }
    wait_for(lambda: alertmanager.told() == everything, "all are told where they belong")
    hosts = [group["host"] for group in alertmanager.groups()]
    assert {host: hosts.count(host) for host in ("gpu-1", "gpu-2")} == {"gpu-1": 2, "gpu-2": 2}

    # A GPU that is gone is told instead of what its engines complain of, on its host alone.
    lost = incident("gpu", None, "gpu-1")
    sink.send(Notice("msg-lost", "opened", lost.opened_at, (lost,)), None)
    left = {
        "inference-oncall": {"OomwatchIncident", "other"},
        "inference-team": {"slow", "OomwatchTest"},
        "nobody": {"soon"},
    }
    wait_for(lambda: alertmanager.told() == left, "the others on its host are quiet")


def test_alerts_of_the_rules(alertmanager):
    def failed(instance: str, engine: str) -> dict:
        return {
            "alertname": "OomwatchIncidentCritical",
            "severity": "critical",
            "kind": "failure",
            "instance": instance,
            "engine_id": engine,
        }

    lost = {"alertname": "OomwatchIncidentCritical", "severity": "critical", "kind": "gpu"}
    down = {"alertname": "OomwatchDown", "severity": "warning", "job": "oomwatch"}
    alertmanager.post(
        failed("gpu-1:20666", "chat"),
        failed("gpu-2:20666", "other"),
        failed("gpu-3:20666", "third"),
        {**lost, "instance": "gpu-1:20666"},
        {**down, "instance": "gpu-3:20666"},
    )
    left = {
        "inference-oncall": {"OomwatchIncidentCritical", "other"},
        "inference-team": {"OomwatchDown"},
    }
    wait_for(lambda: alertmanager.told() == left, "what explains the others is told")
    assert {group["instance"] for group in alertmanager.groups()} == {
        f"gpu-{n}:20666" for n in (1, 2, 3)
    }
