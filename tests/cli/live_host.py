"""A host for tests: real processes that call themselves an engine, in a /proc of their own.

The tree under `proc` links to the real entries of the processes that the test started, and to
nothing else, so that what else runs here is not seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options, Places
from oomwatch.records import Diagnosis

# Serves a page whose counters move as the file "pace" says: seconds, then a growth per second.
SERVER = """
import http.server, os, subprocess, sys, time
folder = os.environ["STAND_IN"]
print(open(folder + "/banner").read(), end="", flush=True)
begun = time.time()
core = subprocess.Popen(
    ["bash", "-c", "(exec -a VLLM::Worker sleep 60) & exec -a VLLM::EngineCore sleep 60"]
)
def page():
    state = eval(open(folder + "/state").read())
    if state.get("hang"):
        time.sleep(60)
    grown = time.time() - begun
    names = {
        "num_requests_running": state["running"], "num_requests_waiting": state["waiting"],
        "kv_cache_usage_perc": state["kv"],
        "num_preemptions_total": 10 + state["preempted"] * grown,
        "generation_tokens_total": 500 + state["tokens"] * grown, "prompt_tokens_total": 40,
    }
    lines = ['vllm:%s{engine="0",model_name="m"} %r' % (n, float(v)) for n, v in names.items()]
    lines.append('vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="256"} 1.0')
    return ("\\n".join(lines) + "\\n").encode()
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = page()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Page) if port < 65535 else None
with open(folder + "/ready.new", "w") as file:
    file.write("%d %d" % (server.server_address[1] if server else 0, core.pid))
os.rename(folder + "/ready.new", folder + "/ready")
server.serve_forever() if server else time.sleep(60)
"""


def stamp(minutes_ago: float) -> str:
    """A time as vLLM logs it."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(time.time() - 60 * minutes_ago))


AT, LATER = stamp(60), stamp(59)
PREFIX = f"(APIServer pid=41) INFO {AT}"
LOG = f"""{PREFIX} [api_server.py:1] vLLM API server version 0.11.0
{PREFIX} [utils.py:233] non-default args: {{'model': '/models/m', 'max_model_len': 2048}}
(EngineCore_DP0 pid=42) INFO {LATER} [kv_cache_utils.py:1087] GPU KV cache size: 4,096 tokens
(EngineCore_DP0 pid=42) INFO {LATER} [kv_cache_utils.py:1091] Maximum concurrency for 2,048 \
tokens per request: 2.00x
(APIServer pid=41) INFO:     Application startup complete.
"""
IDLE = {"running": 0, "waiting": 0, "kv": 0.0, "preempted": 0, "tokens": 0}
REFUSED = f"""{PREFIX} [api_server.py:1] vLLM API server version 0.11.0
(EngineCore_DP0 pid=42) ERROR {LATER} [core.py:708] EngineCore failed to start.
(EngineCore_DP0 pid=42) ERROR {LATER} [core.py:708] Traceback (most recent call last):
(EngineCore_DP0 pid=42) ERROR {LATER} [core.py:708]   File "/v/kv_cache_utils.py", line 662, \
in check_enough_kv_cache_memory
(EngineCore_DP0 pid=42) ERROR {LATER} [core.py:708]     raise ValueError(
(EngineCore_DP0 pid=42) ERROR {LATER} [core.py:708] ValueError: No available memory for the \
cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
"""


class LiveHost:
    """Starts stand-ins and looks at them as `oomwatch diagnose` does without arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "bin" / "vllm"
        self.program.parent.mkdir()
        self.program.write_text(SERVER)
        self.proc = folder / "proc"
        self.proc.mkdir()
        for name in ("stat", "meminfo", "self", "net", "vmstat"):
            (self.proc / name).symlink_to(f"/proc/{name}")
        (folder / "kernel.log").write_text("")
        (folder / "docker").mkdir()
        (folder / "copies").mkdir()
        self.log = folder / "server.log"
        self._started: list[subprocess.Popen[bytes]] = []

    def serve(
        self, log: str = LOG, *, port: int = 0, launcher: Sequence[str] = (), **state: Any
    ) -> int:
        """A server that prints this log and whose page says this; the pid that was started."""
        (self.folder / "banner").write_text(log)
        (self.folder / "state").write_text(repr(IDLE | state))
        words = [sys.executable, str(self.program), "serve", "/models/m", "--port", str(port)]
        with self.log.open("ab") as file:
            child = subprocess.Popen(
                [*launcher, *words],
                stdout=subprocess.DEVNULL if launcher else file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ
                | {"STAND_IN": str(self.folder), "TMPDIR": str(self.folder / "copies")},
            )
        self._started.append(child)
        self.wait_for((self.folder / "ready").exists)
        self.wait_for(lambda: len(self._session(child.pid)) >= (4 if launcher else 3))
        for pid in self._session(child.pid):
            (self.proc / str(pid)).symlink_to(f"/proc/{pid}")
        return child.pid

    def pid_of(self, title: str) -> int:
        """The process that calls itself so."""
        (pid,) = [
            int(entry.name)
            for entry in self.proc.iterdir()
            if entry.name.isdigit()
            and (entry / "cmdline").exists()
            and (entry / "cmdline").read_bytes().startswith(title.encode())
        ]
        return pid

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        """End one of them, and collect it."""
        os.kill(pid, number)
        if number != signal.SIGKILL:
            return
        for child in self._started:
            if child.pid == pid:
                child.wait()
        # A signal is sent and taken in its own time; until then the children keep their parent.
        self.wait_for(lambda: self._has_ended(pid))

    @staticmethod
    def _has_ended(pid: int) -> bool:
        try:
            return b") Z" in Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return True

    def container(self, name: str, *, words: list[str], log: str = "", **state: Any) -> None:
        """What Docker keeps of a container that exited an hour ago."""
        identity = name.encode().hex().ljust(64, "0")
        folder = self.folder / "docker" / "containers" / identity
        folder.mkdir(parents=True)
        ago = time.time() - state.pop("ago", 3600)
        config = {
            "ID": identity,
            "Name": f"/{name}",
            "Path": words[0],
            "Args": words[1:],
            "Config": {"Image": state.pop("image", "vllm/vllm-openai:v0.11.0"), "Env": []},
            "RestartCount": 2,
            "State": {
                "Running": False,
                "Pid": 0,
                "OOMKilled": False,
                "ExitCode": 1,
                "StartedAt": rfc3339(ago - 600),
                "FinishedAt": rfc3339(ago),
            }
            | state,
        }
        (folder / "config.v2.json").write_text(json.dumps(config))
        rows = [
            json.dumps({"log": line + "\n", "stream": "stderr", "time": rfc3339(ago - 300)})
            for line in log.splitlines()
        ]
        (folder / f"{identity}-json.log").write_text("".join(row + "\n" for row in rows))

    @property
    def places(self) -> Places:
        """Where this host's trees are."""
        return Places(
            proc_root=str(self.proc),
            docker_root=str(self.folder / "docker"),
            systemd_root=str(self.folder / "systemd"),
            copies=str(self.folder / "copies"),
            kernel_log=str(self.folder / "kernel.log"),
            store=str(self.folder / "agent.db"),
        )

    def diagnose(self, **options: Any) -> Diagnosis:
        """The diagnosis of this host."""
        return run_diagnosis(Options(places=self.places, **options))

    def wait_for(self, answer: Callable[[], Any]) -> Any:
        """The answer, once it is there and not empty."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if found := answer():
                return found
            time.sleep(0.02)
        raise AssertionError("it did not happen within 30 s")

    def close(self) -> None:
        """End all that was started."""
        for child in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    @staticmethod
    def _session(leader: int) -> list[int]:
        """The processes of the session, once all have the name that they take."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if entry.name.isdigit() and os.getsid(int(entry.name)) == leader:
                    if b"bash" in (entry / "cmdline").read_bytes():
                        return []
                    found.append(int(entry.name))
        return found


def rfc3339(at: float) -> str:
    """A time as Docker writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z", time.gmtime(at))
