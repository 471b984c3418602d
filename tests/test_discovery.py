from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests

from oomwatch.discovery import DiscoveredEngine, Discovery, discover, holder_kind
from oomwatch.engines.launchers import _MODULES, _PROGRAMS
from oomwatch.engines.processes import read_launch, read_title
from oomwatch.records import GpuProcessSample, GpuSample
from oomwatch.sources.nvml import GpuReading, NvmlReading, Roots

# A stand-in for the server: the real one's command line, processes, titles and socket.
SERVER = """
import http.server, os, subprocess, sys, threading
core = "(exec -a VLLM::Worker_TP0 sleep 60) & (exec -a VLLM::Worker_TP1 sleep 60) & sleep 60"
child = subprocess.Popen(["VLLM::EngineCore", "-c", core], executable="/bin/bash")
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"vllm:x 1\\n")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[sys.argv.index("--port") + 1])), Page)
print("ready", server.server_address[1], child.pid, flush=True)
print("ready", server.server_address[1], child.pid, file=open(os.environ["READY"], "w"), flush=True)
server.serve_forever()
"""
NO_GPUS = NvmlReading(at=0.0, outcome="no_driver")


class Host:
    """Starts processes and ends them, with all that they started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "venv" / "bin" / "vllm"
        self.program.parent.mkdir(parents=True)
        self.program.write_text(SERVER)
        self._groups: list[subprocess.Popen] = []

    def start(self, words: list[str], **options) -> subprocess.Popen:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL} | options
        options["env"] = os.environ | options.get("env", {}) | {"READY": str(self.folder / "ready")}
        child = subprocess.Popen(words, start_new_session=True, **options)
        self._groups.append(child)
        return child

    def serve(self, *flags: str, port: int = 0, **options) -> tuple[int, int, int]:
        """A server; its pid, its port and its engine core's pid."""
        words = [sys.executable, str(self.program), "serve", "/models/tiny", "--port", str(port)]
        child = self.start([*words, *flags], **options)
        _, found, core = self.wait_for(lambda: (self.folder / "ready").read_text().split())
        return child.pid, int(found), int(core)

    def wait_for(self, answer: Callable):
        """The answer, once it is there and not empty."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                if found := answer():
                    return found
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError("it did not happen within 30 s")

    def close(self) -> None:
        for child in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@pytest.fixture
def host(tmp_path) -> Iterator[Host]:
    made = Host(tmp_path)
    yield made
    made.close()


def look(**options) -> Discovery:
    return discover(nvml=options.pop("nvml", NO_GPUS), **options)


def engine_of(pid: int, **options) -> DiscoveredEngine:
    (found,) = [e for e in look(**options).engines if pid in e.recorded.pids]
    return found


def workers_of(pid: int) -> list[int]:
    """Those of the two workers that have named themselves; their shell may still be there."""
    members = engine_of(pid).members
    return [m.process.pid for m in members if m.role == "worker"] if len(members) >= 5 else []


# ---------------------------------------------------------------- real processes
def test_server_with_its_processes_metrics_and_log(host, tmp_path):
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        pid, port, core = host.serve(
            "--max-model-len",
            "2048",
            stdout=file,
            stderr=subprocess.STDOUT,
            env={"VLLM_LOGGING_LEVEL": "INFO", "VLLM_API_KEY": "hush", "HF_TOKEN": "hush"},
        )
        host.wait_for(lambda: len(workers_of(pid)) == 2)
    engine = engine_of(pid)
    recorded = engine.recorded
    assert (recorded.engine, engine.model, engine.orphan) == ("vllm", "/models/tiny", False)
    assert recorded.command is not None
    assert recorded.command[-2:] == ("--max-model-len", "2048")
    assert recorded.pids[0] == pid
    assert core in recorded.pids
    roles = {member.role: member.rank for member in engine.members if member.role != "helper"}
    assert roles["server"] is None
    assert {m.rank for m in engine.members if m.role == "worker"} == {"TP0", "TP1"}
    assert recorded.gpus == ()
    assert recorded.log == str(log)
    assert [location.kind for location in engine.logs] == ["file"]
    # It listens elsewhere than the command says (port 0): the socket tells.
    assert recorded.metrics_url == f"http://127.0.0.1:{port}/metrics"
    assert requests.get(recorded.metrics_url, timeout=10).content == b"vllm:x 1\n"
    assert recorded.env["VLLM_LOGGING_LEVEL"] == "INFO"
    assert "hush" not in str(recorded)
    assert recorded.id == f"vllm-{port}"
    assert engine.started_at is not None


def test_version_from_the_environment_that_the_server_runs_in(host, tmp_path):
    packages = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (packages / "vllm-0.32.0+cu129.dist-info").mkdir(parents=True)
    (packages / "vllm_extra-9.9.dist-info").mkdir()
    pid, _, _ = host.serve()
    assert engine_of(pid).recorded.version == "0.32.0+cu129"


def test_orphans_of_a_killed_server_are_one_engine_and_flagged(host):
    pid, _, core = host.serve()
    host.wait_for(lambda: len(workers_of(core)) == 2)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    engine = engine_of(core)
    assert engine.orphan is True
    assert engine.recorded.pids[0] == core
    assert pid not in engine.recorded.pids
    assert {m.rank for m in engine.members if m.role == "worker"} == {"TP0", "TP1"}
    assert (engine.recorded.metrics_url, engine.metrics_reason) == (None, "its server is gone")
    assert engine.recorded.command is None


def test_engine_inside_a_script_of_the_users_own(host, tmp_path):
    script = tmp_path / "offline.py"
    script.write_text(
        "import subprocess\nsubprocess.run(['VLLM::EngineCore', '60'], executable='/bin/sleep')\n"
    )
    child = host.start([sys.executable, str(script)])
    engine = host.wait_for(lambda: [e for e in look().engines if child.pid in e.recorded.pids])[0]
    assert engine.orphan is False
    assert [member.role for member in engine.members] == ["script", "engine"]


def test_sglang_server_with_titles_and_metrics_switched_off(host, tmp_path):
    package = tmp_path / "sglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "launch_server.py").write_text(
        "import subprocess\n"
        "subprocess.run(['sglang::scheduler_DP0_TP1', '60'], executable='/bin/sleep')\n"
    )
    words = [sys.executable, "-u", "-m", "sglang.launch_server", "--model-path", "m"]
    child = host.start([*words, "--port", "31999"], cwd=tmp_path)
    host.wait_for(
        lambda: [e for e in look().engines if child.pid in e.recorded.pids and len(e.members) > 1]
    )
    engine = engine_of(child.pid)
    assert (engine.recorded.engine, engine.model) == ("sglang", "m")
    assert [(m.role, m.rank) for m in engine.members[1:]] == [("worker", "DP0_TP1")]
    assert engine.recorded.metrics_url is None
    assert engine.metrics_reason == "it was started without --enable-metrics"


def test_wrappers_and_lookalikes_are_no_engines(host, tmp_path):
    before = {e.recorded.id for e in look().engines}
    for words in (
        ["/bin/bash", "-c", "sleep 60; true # vllm serve m"],
        ["tail", "-f", "/dev/null", str(tmp_path / "vllm")],
        [sys.executable, "-c", "import time; time.sleep(60)", "vllm", "serve", "m"],
    ):
        host.start(words)
    time.sleep(0.2)
    assert {e.recorded.id for e in look().engines} == before
    wrapped = "true; " + " ".join([sys.executable, str(host.program), "serve m --port 0"])
    shell = host.start(["/bin/bash", "-c", wrapped + "; true"])
    host.wait_for((tmp_path / "ready").read_text)
    found = [e for e in look().engines if e.recorded.id not in before]
    assert len(found) == 1
    assert shell.pid not in found[0].recorded.pids


def test_output_through_tee_is_found_in_its_file(host, tmp_path):
    log = tmp_path / "tee.log"
    tee = host.start(["tee", str(log)], stdin=subprocess.PIPE)
    assert tee.stdin is not None
    pid, _, _ = host.serve(stdout=tee.stdin.fileno())
    tee.stdin.close()
    host.wait_for(lambda: engine_of(pid).recorded.log)
    assert engine_of(pid).recorded.log == str(log)
    host.wait_for(lambda: "ready" in log.read_text())


def test_output_that_cannot_be_read_says_why(host):
    reader = host.start(["/bin/sleep", "60"], stdin=subprocess.PIPE)
    assert reader.stdin is not None
    pid, _, _ = host.serve(stdout=reader.stdin.fileno())
    reader.stdin.close()
    engine = engine_of(pid)
    assert engine.recorded.log is None
    (location,) = engine.logs
    assert location.kind == "none"
    assert location.reason == f"its output is piped to sleep (pid {reader.pid})"


def test_output_to_a_terminal_and_to_nothing(host, tmp_path):
    primary, secondary = os.openpty()
    pid, _, _ = host.serve(stdout=secondary)
    (location,) = engine_of(pid).logs
    assert location.reason is not None
    assert "terminal" in location.reason
    os.close(primary)
    os.close(secondary)
    (tmp_path / "ready").unlink()
    pid, _, _ = host.serve()
    (location,) = engine_of(pid).logs
    assert location.reason == "its output goes to /dev/null"


def test_deleted_log_is_read_through_the_process(host, tmp_path):
    log = tmp_path / "gone.log"
    with log.open("wb") as file:
        pid, _, _ = host.serve(stdout=file)
    log.unlink()
    engine = engine_of(pid)
    assert engine.recorded.log is not None
    assert b"ready" in Path(engine.recorded.log).read_bytes()
    assert engine.logs[0].reason is not None
    assert "deleted" in engine.logs[0].reason


def test_gpus_of_workers_and_the_other_holders(host):
    pid, _, _ = host.serve()
    host.wait_for(lambda: len(workers_of(pid)) == 2)
    workers = workers_of(pid)
    other = host.start([sys.executable, "-c", "import time; time.sleep(60)", "ipykernel_launcher"])
    processes = [
        *(GpuProcessSample(0.0, gpu, worker) for gpu, worker in enumerate(workers)),
        GpuProcessSample(0.0, 1, other.pid, "python3"),
        GpuProcessSample(0.0, 1, 2**22 + 5, "Xorg"),
    ]
    nvml = NvmlReading(0.0, "ok", gpus=(GpuReading(GpuSample(0.0, 0)),), processes=tuple(processes))
    found = look(nvml=nvml)
    (engine,) = [e for e in found.engines if pid in e.recorded.pids]
    assert engine.recorded.gpus == (0, 1)
    assert {m.process.pid: m.gpus for m in engine.members if m.gpus} == {
        worker: (gpu,) for gpu, worker in enumerate(workers)
    }
    assert [(h.kind, h.engine) for h in found.holders] == [
        ("engine", engine.recorded.id),
        ("engine", engine.recorded.id),
        ("notebook", None),
        ("desktop", None),
    ]
    assert any("cannot be seen" in note for note in found.notes)


def test_whole_discovery_on_the_scripted_driver(fake_nvml):
    found = fake_nvml.run(
        "gpu 0 GPU-a 00000000:3B:00 NVIDIA H100\nmemory 0 0 80G 600M 70G\n"
        "process 0 0 -1 1 compute 60G\n",
        """
import json
from oomwatch.discovery import discover
found = discover()
print(json.dumps([found.nvml.outcome, [h.sample.pid for h in found.holders]]))
""",
    )
    assert found == ["ok", [1]]


# ---------------------------------------------------------------- process trees on disk
ID = "ab" * 32
POD_UID = "3f1c0b2a-6d5e-4f70-8a9b-0c1d2e3f4a5b"


def fake_host(folder: Path, processes: dict[int, tuple[int, str, list[str], str]]) -> Path:
    """pid -> (parent, name, command line, cgroup)."""
    proc = folder / "proc"
    for pid, (ppid, comm, words, cgroup) in processes.items():
        (proc / str(pid) / "fd").mkdir(parents=True)
        stat = f"{pid} ({comm}) S {ppid} " + "0 " * 17 + f"{pid} 0\n"
        (proc / str(pid) / "stat").write_text(stat)
        (proc / str(pid) / "cmdline").write_bytes(b"\0".join(w.encode() for w in words) + b"\0")
        (proc / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
    (proc / "stat").write_text("btime 1700000000\n")
    return proc


def open_on(proc: Path, pid: int, **targets: str) -> None:
    for descriptor, target in targets.items():
        (proc / str(pid) / "fd" / descriptor[1:]).symlink_to(target)


def look_at(folder: Path, proc: Path) -> Discovery:
    roots = Roots(proc=str(proc), sys=str(folder / "sys"), dev=str(folder / "dev"))
    return discover(roots=roots, nvml=NO_GPUS, var_root=str(folder / "var"))


SERVE = ["/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m"]


def test_service_that_writes_to_the_journal(tmp_path):
    proc = fake_host(tmp_path, {50: (1, "vllm", SERVE, "/system.slice/vllm.service")})
    open_on(proc, 50, d1="socket:[77]", d2="socket:[77]")
    (engine,) = look_at(tmp_path, proc).engines
    assert (engine.unit, engine.recorded.log) == ("vllm.service", None)
    assert [(log.kind, log.name) for log in engine.logs] == [("unit", "vllm.service")]
    # Nothing is seen to listen, the default port is what can be said.
    assert engine.recorded.metrics_url == "http://127.0.0.1:8000/metrics"
    assert engine.metrics_reason is not None


def test_container_of_docker(tmp_path):
    proc = fake_host(tmp_path, {50: (40, "vllm", SERVE, f"/system.slice/docker-{ID}.scope")})
    open_on(proc, 50, d1="pipe:[77]", d2="pipe:[78]")
    (engine,) = look_at(tmp_path, proc).engines
    (log,) = engine.logs
    assert (engine.container, log.kind, log.name, log.path) == (ID, "container", ID, None)
    path = tmp_path / "var" / "lib" / "docker" / "containers" / ID / f"{ID}-json.log"
    path.parent.mkdir(parents=True)
    path.write_text("{}\n")
    (engine,) = look_at(tmp_path, proc).engines
    assert engine.recorded.log == str(path)


def test_container_of_podman_in_a_unit(tmp_path):
    cgroup = f"/system.slice/llm.service/libpod-payload-{ID}"
    proc = fake_host(tmp_path, {50: (40, "vllm", SERVE, cgroup)})
    open_on(proc, 50, d1="pipe:[77]", d2="pipe:[78]")
    (engine,) = look_at(tmp_path, proc).engines
    assert (engine.unit, engine.container) == ("llm.service", ID)
    assert [(log.kind, log.name) for log in engine.logs] == [("unit", "llm.service")]


@pytest.mark.parametrize("place", ["containers", "pods"])
def test_pod_of_kubernetes(tmp_path, place):
    cgroup = (
        f"/kubepods.slice/kubepods-pod{POD_UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope"
    )
    proc = fake_host(tmp_path, {50: (40, "vllm", SERVE, cgroup)})
    open_on(proc, 50, d1="pipe:[77]", d2="pipe:[78]")
    pod_log = tmp_path / "var" / "log" / "pods" / f"ml_llama-0_{POD_UID}" / "server" / "3.log"
    pod_log.parent.mkdir(parents=True)
    pod_log.write_text("x")
    expected = pod_log
    if place == "containers":
        expected = tmp_path / "var" / "log" / "containers" / f"llama-0_ml_server-{ID}.log"
        expected.parent.mkdir()
        expected.symlink_to(pod_log)
    (engine,) = look_at(tmp_path, proc).engines
    (log,) = engine.logs
    assert (engine.pod_uid, log.kind, log.name) == (POD_UID, "pod", "ml/llama-0")
    assert log.path == str(expected)


def test_descriptors_that_may_not_be_seen(tmp_path):
    proc = fake_host(
        tmp_path,
        {
            50: (1, "vllm", SERVE, "/system.slice/vllm.service"),
            60: (1, "vllm", SERVE, "/user.slice/session-1.scope"),
        },
    )
    for pid in (50, 60):
        # A file where the folder should be: the kernel would say EACCES, this says ENOTDIR.
        (proc / str(pid) / "fd").rmdir()
        (proc / str(pid) / "fd").write_text("")
    service, session = look_at(tmp_path, proc).engines
    assert (service.logs[0].kind, service.logs[0].name) == ("unit", "vllm.service")
    assert session.logs[0].kind == "none"
    assert session.logs[0].reason is not None
    assert "run as root" in session.logs[0].reason


def test_data_parallel_tree_is_one_engine(tmp_path):
    title = "/system.slice/v.service"
    proc = fake_host(
        tmp_path,
        {
            10: (1, "vllm", [*SERVE, "--data-parallel-size", "2", "--port", "9000"], title),
            11: (10, "python3", ["/usr/bin/python3", "-c", "from multiprocessing import x"], title),
            12: (10, "VLLM::DPCoordin", ["VLLM::DPCoordinator", "", ""], title),
            13: (10, "VLLM::EngineCor", ["VLLM::EngineCore_DP0"], title),
            14: (13, "VLLM::Worker", ["VLLM::Worker"], title),
            15: (10, "VLLM::EngineCor", ["VLLM::EngineCore_DP1"], title),
            16: (15, "VLLM::Worker", ["VLLM::Worker"], title),
            17: (10, "VLLM::APIServer", ["VLLM::APIServer_0"], title),
        },
    )
    (engine,) = look_at(tmp_path, proc).engines
    assert {m.process.pid: (m.role, m.rank) for m in engine.members} == {
        10: ("server", None),
        11: ("helper", None),
        12: ("helper", None),
        13: ("engine", "DP0"),
        14: ("worker", None),
        15: ("engine", "DP1"),
        16: ("worker", None),
        17: ("api", None),
    }
    assert engine.recorded.id == "vllm-9000"


def test_two_orphaned_cores_of_one_server_are_one_engine(tmp_path):
    proc = fake_host(
        tmp_path,
        {
            1: (0, "systemd", ["/sbin/init"], "/init.scope"),
            13: (1, "VLLM::EngineCor", ["VLLM::EngineCore_DP0"], "/a"),
            14: (13, "VLLM::Worker", ["VLLM::Worker"], "/a"),
            15: (1, "VLLM::EngineCor", ["VLLM::EngineCore_DP1"], "/a"),
            90: (1, "VLLM::EngineCor", ["VLLM::EngineCore"], "/another"),
        },
    )
    first, second = look_at(tmp_path, proc).engines
    assert (first.orphan, first.recorded.pids) == (True, (13, 14, 15))
    assert (second.orphan, second.recorded.pids) == (True, (90,))


def test_workers_of_ray_join_the_engine_that_asked_for_ray(tmp_path):
    proc = fake_host(
        tmp_path,
        {
            10: (1, "vllm", [*SERVE, "--distributed-executor-backend", "ray"], "/a"),
            20: (1, "raylet", ["/opt/ray/raylet"], "/b"),
            21: (20, "ray::RayWorkerW", ["ray::RayWorkerWrapper.execute_method"], "/b"),
        },
    )
    (engine,) = look_at(tmp_path, proc).engines
    assert engine.recorded.pids == (10, 21)


def test_forked_children_and_launchers_are_not_counted_twice(tmp_path):
    tgi = ["text-generation-launcher", "--model-id", "m"]
    proc = fake_host(
        tmp_path,
        {
            10: (1, "vllm", SERVE, "/a"),
            11: (10, "vllm", SERVE, "/a"),
            30: (1, "text-generation", tgi, "/b"),
            31: (30, "text-generation", ["/usr/bin/text-generation-server", "serve", "m"], "/b"),
        },
    )
    found = {e.recorded.engine: e.recorded.pids for e in look_at(tmp_path, proc).engines}
    assert found == {"vllm": (10, 11), "tgi": (30, 31)}


@pytest.mark.parametrize(
    ("flags", "url", "reason"),
    [
        (["--host", "10.1.2.3", "--port", "9001"], "http://127.0.0.1:9001/metrics", "still"),
        (["--ssl-keyfile", "k"], "https://127.0.0.1:8000/metrics", "still"),
        (["--disable-log-stats"], "http://127.0.0.1:8000/metrics", "--disable-log-stats"),
        (["--uds", "/run/x"], None, "Unix socket"),
        (["--headless"], None, "headless"),
    ],
)
def test_metrics_address_from_the_flags(tmp_path, flags, url, reason):
    proc = fake_host(tmp_path, {50: (1, "vllm", [*SERVE, *flags], "/a")})
    (engine,) = look_at(tmp_path, proc).engines
    assert engine.recorded.metrics_url == url
    assert reason in (engine.metrics_reason or "")


def test_server_in_another_network_namespace_is_asked_at_its_own_address(tmp_path):
    proc = fake_host(tmp_path, {50: (1, "vllm", SERVE, f"/docker/{ID}")})
    for name, namespace in (("self", "net:[1]"), ("50", "net:[2]")):
        (proc / name / "ns").mkdir(parents=True)
        (proc / name / "ns" / "net").symlink_to(namespace)
    (proc / "50" / "net").mkdir()
    (proc / "50" / "net" / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 127.0.0.1\n        /32 host LOCAL\n"
        "     |-- 172.17.0.5\n        /32 host LOCAL\n"
    )
    (engine,) = look_at(tmp_path, proc).engines
    assert engine.recorded.metrics_url == "http://172.17.0.5:8000/metrics"


# ---------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("name", "cmdline", "kind"),
    [
        ("Xorg", ["/usr/lib/xorg/Xorg", ":0"], "desktop"),
        ("gnome-shell", ["/usr/bin/gnome-shell"], "desktop"),
        ("chrome", ["/opt/google/chrome/chrome", "--type=gpu-process"], "browser"),
        ("firefox-bin", ["/usr/lib/firefox/firefox-bin"], "browser"),
        ("python3", ["python3", "-m", "ipykernel_launcher", "-f", "k.json"], "notebook"),
        ("jupyter-lab", ["/usr/bin/python", "/usr/bin/jupyter-lab"], "notebook"),
        ("nvidia-cuda-mps", ["nvidia-cuda-mps-server"], "mps"),
        ("nv-hostengine", ["nv-hostengine"], "monitoring"),
        ("VLLM::Worker_TP", ["VLLM::Worker_TP0"], "engine"),
        ("ollama", ["/usr/bin/ollama", "serve"], "engine"),
        ("python", ["python", "-m", "vllm.entrypoints.openai.api_server"], "engine"),
        ("python", ["torchrun", "train.py"], "training"),
        ("python", ["python", "app.py"], None),
        ("python", None, None),
        (None, [], None),
    ],
)
def test_who_holds_gpu_memory(name, cmdline, kind):
    assert holder_kind(name, cmdline) == kind


@pytest.mark.parametrize(
    ("name", "cmdline", "expected"),
    [
        ("VLLM::EngineCor", None, ("vllm", "engine", None)),
        ("x", ["VLLM::EngineCore_DP1"], ("vllm", "engine", "DP1")),
        ("x", ["VLLM::Worker_PP0_TP3_EP3"], ("vllm", "worker", "PP0_TP3_EP3")),
        ("sglang::schedul", None, ("sglang", "worker", None)),
        ("x", ["sglang::scheduler_DP0_TP1"], ("sglang", "worker", "DP0_TP1")),
        ("x", ["sglang::detokenizer"], ("sglang", "helper", None)),
        ("vllm", ["vllm", "serve"], None),
        (None, None, None),
    ],
)
def test_titles(name, cmdline, expected):
    title = read_title(name, cmdline)
    found = None if title is None else (title.engine, title.role, title.rank)
    assert found == expected


@pytest.mark.parametrize(
    ("cmdline", "engine"),
    [
        (["vllm", "serve", "m"], "vllm"),
        (["/opt/bin/python3.12", "-u", "-X", "dev", "/opt/bin/vllm", "serve", "m"], "vllm"),
        (["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"], "vllm"),
        (["python3", "-m", "vllm", "serve", "m"], "vllm"),
        (["python3", "/src/vllm/entrypoints/openai/api_server.py"], "vllm"),
        (["python", "-m", "sglang.launch_server"], "sglang"),
        (["sglang", "serve", "--model-path", "m"], "sglang"),
        (["lmdeploy", "serve", "api_server", "m"], "lmdeploy"),
        (["llama-server", "-m", "x.gguf"], "llama.cpp"),
        (["vllm", "bench", "serve"], None),
        (["sudo", "vllm", "serve", "m"], None),
        (["bash", "-c", "vllm serve m"], None),
        (["docker", "run", "vllm/vllm-openai", "vllm", "serve", "m"], None),
        (["grep", "-r", "vllm", "serve"], None),
        (["python3", "-c", "x", "vllm", "serve"], None),
        ([], None),
        (None, None),
    ],
)
def test_a_process_that_is_itself_a_server(cmdline, engine):
    launch = read_launch(cmdline)
    assert (launch.engine if launch else None) == engine


@pytest.mark.parametrize(
    "cmdline",
    [
        *([f"/bin/{name}", *follow] for name, (_, follow) in _PROGRAMS.items()),
        *(["python3", "-m", name, *follow] for name, (_, follow) in _MODULES.items()),
    ],
    ids=" ".join,
)
def test_every_server_that_a_line_may_start_is_seen_as_a_process(cmdline):
    assert read_launch(cmdline) is not None
