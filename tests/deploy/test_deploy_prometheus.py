"""Debian's Prometheus scrapes the real agent, and its rules reach Debian's Alertmanager."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from running_agent import RunningAgent
from stand_in import StandIn
from test_deploy_rules import DEPLOY, ROOT, load

GPUS = """
driver 580.65.06
gpu 0 GPU-00000000 00000000:10:00.0 NVIDIA H100 80GB HBM3
gpu 1 GPU-00000001 00000000:11:00.0 NVIDIA H100 80GB HBM3
memory 0 0 80G 1G 70G
memory 1 0 80G 1G 60G
sensors 0 60 55 400000
sensors 1 60 55 400000
"""
START = """\
(EngineCore_DP0 pid=7) INFO 03-02 03:12:10 [gpu_model_runner.py:2653] Model loading took 14.2488 GiB and 3.274 seconds
(EngineCore_DP0 pid=7) INFO 03-02 03:12:30 [gpu_worker.py:298] Available KV cache memory: 10.90 GiB
"""
FAILURE = "".join(
    line.replace("pid=2", "pid=7")
    for line in (ROOT / "tests/fixtures/cli/refused.log").read_text().splitlines(keepends=True)
    if "EngineCore" in line
)
NOW_AND_THEN = (
    "oomwatch_forecast_exhaustion_seconds",
    "oomwatch_preemptions_per_minute",
    "increase(",
)
"""What has nothing to show on a host where nothing grows, or not in the first minute."""

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("prometheus", "prometheus-alertmanager"))),
    reason="prometheus and prometheus-alertmanager are not installed",
)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def get(port: int, path: str, **query: str):
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


class Monitor:
    """Prometheus with the shipped rules, and Alertmanager with the shipped route."""

    def __init__(self, folder: Path, agent_port: int) -> None:
        self.port, self.alertmanager = free_port(), free_port()
        shutil.copy(DEPLOY / "prometheus" / "oomwatch.rules.yml", folder)
        config = yaml.safe_load((DEPLOY / "prometheus" / "scrape.example.yml").read_text())
        config["global"] = {"evaluation_interval": "1s"}
        job = config["scrape_configs"][0]
        job["scrape_interval"] = "1s"
        job["static_configs"] = [{"targets": [f"127.0.0.1:{agent_port}"]}]
        config["alerting"] = {
            "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self.alertmanager}"]}]}]
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        route = DEPLOY / "alertmanager" / "oomwatch.example.yml"
        self._log = (folder / "log").open("wb")
        commands = (
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            [
                "prometheus-alertmanager",
                f"--config.file={route}",
                f"--storage.path={folder}/alerts",
                f"--web.listen-address=127.0.0.1:{self.alertmanager}",
                "--cluster.listen-address=",
            ],
        )
        self._children = [
            subprocess.Popen(words, stdout=self._log, stderr=self._log) for words in commands
        ]
        self.folder = folder

    def query(self, text: str) -> list[dict]:
        answer = get(self.port, "/api/v1/query", query=text)
        assert answer["status"] == "success", answer
        return answer["data"]["result"]

    def alerts(self) -> list[dict]:
        """Those that Alertmanager has."""
        with contextlib.suppress(OSError):
            return get(self.alertmanager, "/api/v2/alerts")
        return []

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        self._log.close()


def wait_for(answer, what: str, seconds: float = 90.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if found := answer():
                return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def test_from_a_log_line_to_an_alert_with_a_page_that_opens(tmp_path, fake_nvml):
    agent_port = free_port()
    with contextlib.ExitStack() as stack:
        engine = StandIn(tmp_path / "engine", free_port())
        stack.enter_context(contextlib.closing(engine))
        engine.start()
        wait_for(lambda: "startup complete" in engine.log.read_text(), "the engine serves")
        with engine.log.open("a") as log:
            log.write(START)
        holder = f"process 0 0 -1 {engine.pid_of('VLLM::EngineCore')} compute 50G\n"
        folder = tmp_path / "agent"
        folder.mkdir()
        agent = RunningAgent(
            folder,
            engine,
            environment=fake_nvml.environment(GPUS + holder),
            export__listen=f"127.0.0.1:{agent_port}",
        )
        with agent.config.open("a") as file:  # a receiver that is not there
            file.write('[[notify.webhook]]\nname = "nobody"\nurl_file = "/nowhere/url"\n')
        stack.enter_context(contextlib.closing(agent))
        agent.start()
        (tmp_path / "monitor").mkdir()
        monitor = Monitor(tmp_path / "monitor", agent_port)
        stack.enter_context(contextlib.closing(monitor))

        # It is scraped, and every panel of the dashboard has something to show.
        wait_for(lambda: monitor.query("oomwatch_engine_memory_bytes"), "a start's memory")
        assert monitor.query("up")[0]["value"][1] == "1"
        queries = load("grafana/dashboard").queries()

        def empty() -> list[str]:
            """What has nothing to show, of what should have."""
            asked = [q for q in queries if not any(name in q for name in NOW_AND_THEN)]
            return [query for query in asked if not monitor.query(filled(query))]

        # Nothing has failed yet; everything else comes with the second scrape.
        wait_for(lambda: empty() == ['oomwatch_incident_open{instance=~"$instance"}'], "all panels")

        # It fails as the fixture's server did.
        with engine.log.open("a") as log:
            log.write(FAILURE)
        engine.kill_core()
        fired = wait_for(
            lambda: [
                alert
                for alert in monitor.alerts()
                if alert["labels"].get("cause") == "kv_lt_max_len"
                and alert["labels"]["alertname"] == "OomwatchIncidentCritical"
            ],
            "the alert is in Alertmanager",
        )
        (alert,) = fired
        (incident,) = agent.wait_for(lambda: agent.incidents(engine.id), "it is stored")
        assert alert["labels"]["incident_id"] == incident.id
        assert alert["labels"]["engine_id"] == engine.id
        assert [receiver["name"] for receiver in alert["receivers"]] == ["inference-oncall"]
        assert incident.id in alert["annotations"]["description"]
        assert not [a for a in monitor.alerts() if "error" in str(a["annotations"]).lower()]
        url = alert["annotations"]["runbook_url"]
        assert url == f"http://127.0.0.1:{agent_port}/runbooks/kv_lt_max_len"
        with urllib.request.urlopen(url, timeout=20) as page:  # noqa: S310 - as just said
            assert page.read().decode().startswith("# The KV cache is too small for one request")
        counted = monitor.query('increase(oomwatch_incidents_total{cause="kv_lt_max_len"}[5m]) > 0')
        assert wait_for(lambda: counted, "it is counted")
        assert monitor.query(filled('oomwatch_incident_open{instance=~"$instance"}'))


def filled(query: str) -> str:
    """A query of the dashboard with its variables filled in."""
    for name, value in (("$instance", ".*"), ("$engine", ".*"), ("$__rate_interval", "1m")):
        query = query.replace(name, value)
    return query
