"""A stand-in engine server: real processes, a real port, and a log that grows.

What it does is set at any time: `page` (figures, hang, garbage, huge), how many ordinary lines it
logs in a second, and the numbered lines that tell something. It opens its log anew when that was
renamed, as a server told to by logrotate does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SERVER = r"""
import http.server, json, os, subprocess, sys, threading, time
folder = os.environ["STAND_IN"]
log = folder + "/server.log"
def reopened():
    try:
        if os.stat(log).st_ino == os.fstat(1).st_ino:
            return
    except FileNotFoundError:
        pass
    new = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(new, 1); os.dup2(new, 2); os.close(new)
def say(text):
    reopened()
    os.write(1, text.encode())
prefix = "(APIServer pid=%d) INFO %s " % (os.getpid(), time.strftime("%m-%d %H:%M:%S"))
say(prefix + "[api_server.py:1] vLLM API server version 0.11.0\n")
# Takes memory, 1 MiB after the other, once there is a file "eat".
CORE = "import os, sys, time\nkept = []\nwhile True:\n    time.sleep(0.002)\n    if os.path.exists(sys.argv[1]): kept.append(b'x' * 2**20)"
core = subprocess.Popen(
    ["bash", "-c", 'exec -a VLLM::EngineCore "$0" -c "$1" "$2"', sys.executable, CORE, folder + "/eat"]
)
FIGURES = '''vllm:num_requests_running{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.2
vllm:num_preemptions_total{engine="0",model_name="m"} 3.0
vllm:generation_tokens_total{engine="0",model_name="m"} %d.0
vllm:prompt_tokens_total{engine="0",model_name="m"} %d.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="256"} 1.0
'''
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        mode = state()["page"]
        if mode == "hang":
            time.sleep(9999)
        self.send_response(200); self.end_headers()
        grown = 10 * time.monotonic()
        if mode == "garbage":
            self.wfile.write(os.urandom(50_000))
        elif mode == "huge":
            line = FIGURES.encode() % (grown, grown)
            for _ in range(200_000_000 // len(line)):
                self.wfile.write(line)
        else:
            self.wfile.write((FIGURES % (grown, grown)).encode())
    def log_message(self, *_): pass
    def handle(self):
        try:
            super().handle()
        except OSError:
            pass
def state():
    try:
        return json.load(open(folder + "/state"))
    except (OSError, ValueError):  # being replaced
        time.sleep(0.01)
        return state()
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Page)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
told = 0
say("(APIServer pid=%d) INFO:     Application startup complete.\n" % os.getpid())
while True:
    now = state()
    ordinary = '(APIServer pid=1) INFO:     127.0.0.1:42 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    say(ordinary * (now["load"] // 10))
    while told < now["told"]:
        told += 1
        say("WARNING %s [x.py:1] memory is low, number %d.\n" % (time.strftime("%m-%d %H:%M:%S"), told))
    if core.poll() is not None and not now["orphaned"]:
        say("(APIServer pid=%d) ERROR %s [core_client.py:564] Engine core proc EngineCore_DP0 "
            "died unexpectedly, shutting down client.\n"
            % (os.getpid(), time.strftime("%m-%d %H:%M:%S")))
        sys.exit(1)
    time.sleep(0.1)
"""


class StandIn:
    """One engine; a new `start` on the same port is a restart."""

    def __init__(self, folder: Path, port: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = port
        self.log = folder / "server.log"
        self.program = folder / "vllm"
        self.program.write_text(SERVER)
        self._state: dict[str, Any] = {"page": "figures", "load": 0, "told": 0, "orphaned": False}
        self.child: subprocess.Popen[bytes] | None = None

    @property
    def id(self) -> str:
        """As discovery names it."""
        return f"vllm-{self.port}"

    def set(self, **state: Any) -> None:
        """Change what it does."""
        self._state |= state
        new = self.folder / "state.new"
        new.write_text(json.dumps(self._state))
        new.rename(self.folder / "state")
        if state.get("eat"):
            (self.folder / "eat").touch()

    def start(self, *, cgroup: Path | None = None) -> StandIn:
        """Start it, in a control group where one is given."""
        self.set()
        words = [sys.executable, str(self.program), "serve", "/models/m", "--port", str(self.port)]

        if cgroup is not None:
            join = 'echo $$ >"$0"; exec "$@"'
            words = ["/bin/sh", "-c", join, str(cgroup / "cgroup.procs"), *words]
        with self.log.open("ab") as file:
            self.child = subprocess.Popen(
                words,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=os.environ | {"STAND_IN": str(self.folder)},
            )
        return self

    def pid_of(self, title: str) -> int:
        """The process of this engine that calls itself so."""
        assert self.child is not None
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            for entry in Path("/proc").iterdir():
                with contextlib.suppress(OSError, ValueError):
                    if (
                        entry.name.isdigit()
                        and os.getsid(int(entry.name)) == self.child.pid
                        and (entry / "cmdline").read_bytes().startswith(title.encode())
                    ):
                        return int(entry.name)
            time.sleep(0.05)
        raise AssertionError(f"there is no {title}")

    def kill_core(self) -> float:
        """SIGKILL to the engine core; when."""
        core = self.pid_of("VLLM::EngineCore")
        os.kill(core, signal.SIGKILL)
        return time.time()

    def close(self) -> None:
        """End all of it."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
