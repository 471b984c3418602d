"""The page of the real agent, on a scripted driver and a stand-in engine."""

from __future__ import annotations

import base64
import contextlib
import http.client
import shutil
import socket
import subprocess
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_agent import RunningAgent
from stand_in import StandIn
from test_export_otlp import Collector

from oomwatch.report.pages import title
from oomwatch.units import GIB

TWO_GPUS = """
driver 580.65.06
gpu 0 GPU-00000000 00000000:10:00.0 NVIDIA H100 80GB HBM3
gpu 1 GPU-00000001 00000000:11:00.0 NVIDIA H100 80GB HBM3
memory 0 0 80G 1G 70G
memory 1 0 80G 1G 60G
"""
START = """\
(EngineCore_DP0 pid=7) INFO 03-02 03:12:10 [gpu_model_runner.py:2653] Model loading took 14.2488 GiB and 3.274 seconds
(EngineCore_DP0 pid=7) INFO 03-02 03:12:30 [gpu_worker.py:298] Available KV cache memory: 10.90 GiB
"""


class Page:
    """One reading of the page: samples by name."""

    def __init__(self, port: int, path: str = "/metrics", login: str = "") -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        proof = "Basic " + base64.b64encode(login.encode()).decode()
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Authorization": proof} if login else {})
            answer = connection.getresponse()
            self.status, self.text = answer.status, answer.read().decode()
        self.samples = (
            [s for family in text_string_to_metric_families(self.text) for s in family.samples]
            if (answer.status, path) == (200, "/metrics")
            else []
        )

    def __call__(self, name: str, **labels: str) -> list[float]:
        """Values of the series that have these labels."""
        return [
            sample.value
            for sample in self.samples
            if sample.name == f"oomwatch_{name}" and labels.items() <= sample.labels.items()
        ]

    def labels(self, name: str) -> list[dict[str, str]]:
        return [sample.labels for sample in self.samples if sample.name == f"oomwatch_{name}"]


@pytest.fixture
def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def engine(tmp_path):
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with contextlib.closing(StandIn(tmp_path / "engine", port)) as one:
        yield one.start()


@pytest.fixture
def new_agent(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(*engines, **options):
            folder = tmp_path / "agent"
            folder.mkdir()
            return stack.enter_context(
                contextlib.closing(RunningAgent(folder, *engines, **options))
            )

        yield make


def await_page(agent, port, holds, what) -> Page:
    last: list[Page] = []

    def look():
        with contextlib.suppress(OSError):
            last[:] = [Page(port)]
            return last[0] if holds(last[0]) else None

    try:
        return agent.wait_for(look, what)
    except AssertionError:
        print("\n".join(page.text for page in last))
        raise


def test_a_host_from_its_start_to_the_end_of_its_engine(
    new_agent, engine, free_port, fake_nvml, tmp_path
):
    while "startup complete" not in engine.log.read_text():
        time.sleep(0.05)
    with engine.log.open("a") as log:
        log.write(START)
    holder = f"process 0 0 -1 {engine.pid_of('VLLM::EngineCore')} compute 50G\n"
    stranger = "process 0 0 -1 999999 compute 5G\n"
    textfile, unix = tmp_path / "oomwatch.prom", tmp_path / "metrics.sock"
    with contextlib.closing(Collector()) as collector:
        agent = new_agent(
            engine,
            environment=fake_nvml.environment(TWO_GPUS + holder + stranger),
            export__listen=f'["127.0.0.1:{free_port}", "unix:{unix}"]',
            export__textfile=str(textfile),
            export__textfile_interval="1s",
            export__otlp__enabled="true",
            export__otlp__endpoint=collector.url,
            export__otlp__interval="1s",
        ).start()
        name = engine.id

        # It serves: who holds what, what its page and its log say.
        page = await_page(
            agent,
            free_port,
            lambda p: (
                p("gpu_holder_memory_bytes", engine_id=name)
                and p("engine_memory_bytes")
                and p("kv_usage_ratio")
            ),
            "the engine's figures",
        )
        assert page("gpus_present") == page("gpus_expected") == [2]
        assert page("gpu_memory_used_bytes", gpu="1", uuid="GPU-00000001") == [60 * GIB]
        assert page("gpu_memory_used_max_bytes", gpu="0") == [70 * GIB]
        assert page("gpu_holder_memory_bytes", engine_id=name, role="engine") == [50 * GIB]
        assert page("gpu_holder_memory_bytes", role="other") == [5 * GIB]
        assert page("gpu_memory_unattributed_bytes", gpu="0") == [15 * GIB]
        assert "pid" not in page.labels("gpu_holder_memory_bytes")[0]
        assert page("engine_state", engine_id=name, state="serving") == [1]
        assert page("scrape_success", engine_id=name) == [1]
        assert page("kv_usage_ratio", engine_id=name, engine="0") == [0.2]
        assert page("kv_blocks", state="used") == [51]
        assert page("kv_blocks", state="free") == [204]
        assert page("preemptions_total", engine_id=name) == [3]
        assert page("engine_memory_bytes", component="kv") == [pytest.approx(10.9 * GIB, rel=0.001)]
        assert page("engine_memory_bytes", component="weights") == [
            pytest.approx(14.2488 * GIB, rel=0.001)
        ]
        assert page("incident_open") == []
        assert sum(page("incidents_total")) == 0
        assert page("source_success", source="nvml") == [1]
        assert page("self_resident_bytes")[0] > 10 << 20
        assert unix.is_socket()
        if shutil.which("promtool"):
            words = ["promtool", "check", "metrics"]
            linted = subprocess.run(
                words, input=page.text.encode(), capture_output=True, check=False
            )
            assert (linted.returncode, linted.stdout + linted.stderr) == (0, b"")

        # It fails: one incident, counted once, and told to the collector.
        engine.kill_core()
        page = await_page(agent, free_port, lambda p: p("incident_open"), "the incident is open")
        (labels,) = page.labels("incident_open")
        (incident,) = agent.wait_for(agent.incidents, "it is stored")
        assert labels["incident_id"] == incident.id
        assert (labels["kind"], labels["cause"]) == ("failure", "killed_by_signal")
        assert labels["severity"] == "critical"  # it serves no more
        assert labels["engine_id"] == name
        assert page.labels("cause_info") == [
            {"cause": "killed_by_signal", "title": title("killed_by_signal", "en")}
        ]
        page = await_page(
            agent,
            free_port,
            lambda p: sum(p("incidents_total")) and not p("engine_info"),
            "it is counted, and the engine is gone",
        )
        assert sum(page("incidents_total")) == 1
        (latest,) = page.labels("incident_last_timestamp_seconds")
        assert page("incidents_total", **latest) == [1]
        gone = ("engine_state", "scrape_success", "kv_usage_ratio", "engine_memory_bytes")
        assert [page(each) for each in gone] == [[], [], [], []]
        agent.wait_for(
            lambda: [body for path, _, body in collector.received if path == "/v1/logs"],
            "the collector is told of the incident",
        )
        record = next(body for path, _, body in collector.received if path == "/v1/logs")
        assert incident.id in str(record)
        figures = next(body for path, _, body in collector.received if path == "/v1/metrics")
        assert "hw.gpu.memory.usage" in str(figures)

        # A wrong configuration is told, and the old one stays.
        agent.config.write_text("schema_version = 1\n[agent]\nqueue_size = 'x'\n")
        agent.send(1)
        await_page(agent, free_port, lambda p: p("config_reload_success") == [0], "it is wrong")

        assert "oomwatch_gpu_memory_used_bytes" in textfile.read_text()
        with socket.create_connection(("127.0.0.1", free_port)):  # one who never asks
            status, seconds = agent.stop()
    assert status == 0
    assert seconds < 5
    assert not textfile.exists()
    assert not unix.exists()


def test_a_gpu_that_is_lost_has_no_figures_any_more(new_agent, free_port, fake_nvml):
    lost = "error nvmlDeviceGetMemoryInfo_v2 15 1 4 -1\n"
    agent = new_agent(
        environment=fake_nvml.environment(TWO_GPUS + lost),
        export__listen=f"127.0.0.1:{free_port}",
    ).start()
    page = await_page(
        agent, free_port, lambda p: p("gpu_success", gpu="1") == [0], "the second GPU is lost"
    )
    assert page("gpus_present") == [1]
    assert page("gpus_expected") == [2]
    assert page("source_success", source="nvml") == [0]
    assert page("gpu_memory_used_bytes", gpu="1") == []
    assert page("gpu_memory_used_max_bytes", gpu="1") == []
    assert page("gpu_info", gpu="1") == []
    assert page("gpu_memory_used_bytes", gpu="0") == [70 * GIB]
    await_page(
        agent,
        free_port,
        lambda p: p("incident_open", kind="gpu", severity="critical"),
        "that is an incident",
    )


def test_other_settings_take_effect_with_a_reload(new_agent, free_port, fake_nvml):
    agent = new_agent(environment=fake_nvml.environment(TWO_GPUS))
    del agent._settings["agent.burst_on"]
    agent.config.write_text(
        "schema_version = 1\n[discovery]\nenabled = false\n[export]\nlisten = []\n"
    )
    agent.start()
    with pytest.raises(ConnectionRefusedError):
        Page(free_port)
    agent.config.write_text(
        f"schema_version = 1\n[discovery]\nenabled = false\n"
        f'[export]\nlisten = ["127.0.0.1:{free_port}"]\ndcgm_labels = true\n'
    )
    agent.send(1)
    page = await_page(agent, free_port, lambda p: p("gpu_info"), "the page is there")
    assert page.labels("gpu_info")[1] == {
        "gpu": "1",
        "uuid": "GPU-00000001",
        "gpu_name": "NVIDIA H100 80GB HBM3",
        "UUID": "GPU-00000001",
        "pci_bus_id": "0000:11:00",
        "driver_version": "580.65.06",
        "modelName": "NVIDIA H100 80GB HBM3",
        "device": "nvidia1",
    }
    assert Page(free_port, "/runbooks/kv_lt_max_len").text.startswith("# ")
    assert time.time() - page("self_start_timestamp_seconds")[0] < 600

    # Users, and then another password in the same file.
    users = agent.folder / "users"
    users.write_text("prometheus:first\n")
    with agent.config.open("a") as file:
        file.write(f'users_file = "{users}"\n')
    agent.send(1)
    answers = lambda login: Page(free_port, login=login).status  # noqa: E731 - for waiting
    agent.wait_for(lambda: tried(answers, "") == 401, "a password is needed")
    assert answers("prometheus:first") == 200
    users.write_text("prometheus:second\n")
    agent.send(1)
    agent.wait_for(lambda: tried(answers, "prometheus:second") == 200, "the new one is taken")
    assert answers("prometheus:first") == 401
    users.unlink()
    agent.send(1)
    agent.wait_for(lambda: "metrics are not served" in agent.said(), "it is told in the log")
    assert "export.users_file" in agent.said()
    assert agent.alive()


def tried(answers, login: str) -> int | None:
    """A status, or None while the page is being served anew."""
    with contextlib.suppress(OSError):
        return answers(login)
    return None
