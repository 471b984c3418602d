"""The agent against its budgets, beside other monitors on the same stand-ins.

``python benchmarks/agent.py`` builds a host of 8 GPUs with 4 processes each on a scripted NVML
library, two servers that answer with a metrics page of vLLM 0.32 on which every counter and
histogram grows but that of preemptions, and a log of each that grows by a line ten times a second.
Then it runs the agent beside them and prints what it takes of a core, at one sweep a second and in
a burst of ten, and what it keeps resident; how late its sweeps are while a server does not answer
and the store cannot be written; then each of the other programs in `PEERS` that is installed, here
or in `--peers-path`, the same way as the first. It fails where a budget is broken: 1.5 % of a core,
6 % in a burst, 72 MiB, 50 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.fakenvml.library import FakeNvml  # noqa: E402 - the folder above is put on the path

GPUS, PROCESSES = 8, 4
PORTS = (18001, 18002)
CORE_BUDGET, BURST_BUDGET, RESIDENT_BUDGET_MIB, LATE_BUDGET_SECONDS = 0.015, 0.06, 72, 0.05
PEERS = (
    ("nvitop-exporter", ["nvitop-exporter", "--port", "9394"]),
    ("gpustat -i 1", ["gpustat", "-i", "1", "--no-color"]),
    (
        "vllm-doctor --watch",
        ["vllm-doctor", "diagnose", f"http://127.0.0.1:{PORTS[0]}/metrics", "--watch"],
    ),
)
PAGE = Path(__file__).parent / "vllm-0.32.0.metrics"
"""Of vLLM 0.32.0 on a CPU, after requests that were preempted."""
TICKS = os.sysconf("SC_CLK_TCK")

SERVER = r"""
import http.server, os, re, subprocess, sys, threading, time
GROWS = re.compile(r"^(?!vllm:num_preemptions)\w.*_(total|sum|count|bucket)\{")
lines = [line.rpartition(" ") for line in open(os.environ["PAGE"])]
asked = 0
def page():
    global asked
    asked += 1
    return "".join(
        f"{head} {float(value) + asked}\n" if GROWS.search(head) else f"{head} {value}"
        for head, _, value in lines
    ).encode()
title = "exec -a VLLM::Worker_TP%d sleep 9999"
workers = [subprocess.Popen(["bash", "-c", title % n]) for n in range(16)]
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path != "/metrics":
            self.send_error(404)
            return
        told = page()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)
    def log_message(self, *_): pass
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Page)
threading.Thread(target=server.serve_forever, daemon=True).start()
prefix = "(APIServer pid=%d) INFO" % os.getpid()
print(prefix + " 11-29 12:00:00 [api_server.py:1] vLLM API server version 0.32.0")
for said in (
    "[gpu_model_runner.py:1] Model loading took 14.99 GiB memory and 3.2 seconds",
    "[gpu_worker.py:1] Available KV cache memory: 54.81 GiB",
    "[kv_cache_utils.py:1] GPU KV cache size: 446,432 tokens, "
    "Maximum concurrency for 40,960 tokens per request: 10.90x",
    "[gpu_model_runner.py:1] Graph capturing finished in 12 secs, took 0.55 GiB",
):
    print("(EngineCore pid=%d) INFO 11-29 12:00:09 %s" % (workers[0].pid, said))
print(prefix + ":     Application startup complete.", flush=True)
open(os.environ["PIDS"][:-2] + "-%d" % port, "w").write(str(os.getpid()))
open(os.environ["PIDS"] + str(port), "w").write(" ".join(str(w.pid) for w in workers))
while True:
    print(prefix + ':     127.0.0.1:42 - "POST /v1/completions HTTP/1.1" 200 OK', flush=True)
    time.sleep(0.1)
"""


@contextlib.contextmanager
def host(folder: Path) -> Iterator[dict[str, str]]:
    """The servers and their processes; the variables under which the GPUs are seen."""
    program = folder / "vllm"
    program.write_text(SERVER)
    servers = []
    try:
        for port in PORTS:
            with (folder / f"{port}.log").open("wb") as log:
                words = [sys.executable, str(program), "serve", "/models/m", "--port", str(port)]
                servers.append(
                    subprocess.Popen(
                        words,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                        env=os.environ | {"PAGE": str(PAGE), "PIDS": f"{folder}/pids-"},
                    )
                )
        pids: list[int] = []
        while len(pids) < GPUS * PROCESSES:
            time.sleep(0.1)
            pids = [
                int(word) for path in folder.glob("pids-*") for word in path.read_text().split()
            ]
        yield FakeNvml(folder).environment(scenario(pids))
    finally:
        for server in servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def scenario(pids: Sequence[int]) -> str:
    """What the scripted library says."""
    lines = ["driver 580.65.06", "cuda 13000"]
    for gpu in range(GPUS):
        lines.append(f"gpu {gpu} GPU-{gpu:08d} 00000000:{gpu + 16:02X}:00.0 NVIDIA H100 80GB HBM3")
        lines.append(f"memory {gpu} 0 80G 1G 70G")
        lines.append(f"sensors {gpu} 60 55 400000")
        lines += [
            f"process {gpu} 0 -1 {pids[gpu * PROCESSES + n]} compute 17G" for n in range(PROCESSES)
        ]
    return "\n".join(lines) + "\n"


class Usage:
    """What a program takes: all its processes together."""

    def __init__(self, words: Sequence[str], environment: dict[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                words,
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_mib(self) -> float:
        for line in Path(f"/proc/{self.child.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
        return 0.0

    def of_a_core(self, seconds: float) -> float:
        """Share of a core over this time."""
        before, begun = self.cpu_seconds(), time.monotonic()
        time.sleep(seconds)
        return (self.cpu_seconds() - before) / (time.monotonic() - begun)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGTERM)
        try:
            self.child.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()


def start_agent(
    folder: Path, environment: dict[str, str], name: str, interval: str = "1s"
) -> Usage:
    """The agent on the two servers, for 15 s: its start, the first search, the first pages."""
    config = folder / "oomwatch.toml"
    engines = "".join(f'[[engine]]\nname = "vllm-{port}"\nport = {port}\n' for port in PORTS)
    config.write_text(f"schema_version = 1\n[discovery]\nenabled = false\n{engines}")
    words = [sys.executable, "-m", "oomwatch", "agent", "--config", str(config)]
    words += ["--store", str(folder / f"{name}.db")]
    for setting in (f"agent.sampling_interval={interval}", "agent.burst_on=[]"):
        words += ["--set", setting]
    usage = Usage(words, environment | {"PYTHONPATH": str(ROOT)}, folder / f"{name}.log")
    time.sleep(15)
    return usage


def measure_agent(
    folder: Path, environment: dict[str, str], seconds: float, interval: str, name: str
) -> tuple[float, float]:
    """Share of a core, and MiB resident at the end."""
    usage = start_agent(folder, environment, name, interval)
    try:
        share = usage.of_a_core(seconds)
        return share, usage.resident_mib()
    finally:
        usage.stop()


def measure_lateness(folder: Path, environment: dict[str, str], seconds: float) -> list[float]:
    """Seconds that each sweep was late, while a server hangs and the store is locked."""
    store = folder / "late.db"
    server = int((folder / f"pid-{PORTS[1]}").read_text())
    usage = start_agent(folder, environment, "late")
    try:
        begun = time.time()
        os.kill(server, signal.SIGSTOP)
        with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            time.sleep(seconds)
            lock.execute("ROLLBACK")
        ended = time.time()
        os.kill(server, signal.SIGCONT)
        time.sleep(15)  # what waited is written once it is tried again
    finally:
        usage.stop()
    with contextlib.closing(sqlite3.connect(store)) as rows:
        window = (round(begun * 1000), round(ended * 1000))
        query = "SELECT ts_ms FROM gpu_sample WHERE ts_ms BETWEEN ? AND ? GROUP BY ts_ms"
        times = [at / 1000 for (at,) in rows.execute(query + " ORDER BY ts_ms", window)]
    assert len(times) > seconds / 2, f"{len(times)} sweeps in {seconds:g} s"
    return [max(0.0, after - before - 1) for before, after in itertools.pairwise(times)]


def main() -> None:
    """Print the table; end with 1 where a budget is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--peers-path", default="", help="a folder with the other programs")
    given = parser.parse_args()
    rows: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as name, host(Path(name)) as environment:
        folder = Path(name)
        share, resident = measure_agent(folder, environment, given.seconds, "1s", "normal")
        rows.append(("oomwatch agent, 1 Hz", share, resident))
        burst, burst_resident = measure_agent(folder, environment, given.seconds, "100ms", "burst")
        rows.append(("oomwatch agent, 10 Hz", burst, burst_resident))
        late = measure_lateness(folder, environment, given.seconds)
        path = os.pathsep.join(
            [given.peers_path, str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        for title, words in PEERS:
            found = shutil.which(words[0], path=path)
            if found is None:
                print(f"{title}: not installed, left out (pip install {words[0]})")
                continue
            usage = Usage([found, *words[1:]], environment, folder / "peer.log")
            time.sleep(8)
            if usage.child.poll() is not None:
                print(f"{title}: ended with status {usage.child.returncode}, left out")
                print((folder / "peer.log").read_text(errors="replace")[-300:])
                continue
            rows.append((title, usage.of_a_core(given.seconds / 2), usage.resident_mib()))
            usage.stop()
    print("| program | of a core | resident |\n|---|---:|---:|")
    for title, used, mib in rows:
        print(f"| {title} | {used:.2%} | {mib:.0f} MiB |")
    latest = statistics.quantiles(late, n=100, method="inclusive")[98]
    print(f"sweeps while a server and the store hang: {latest * 1000:.0f} ms late (p99)")
    broken = [
        text
        for bad, text in (
            (share > CORE_BUDGET, f"{share:.2%} of a core is over {CORE_BUDGET:.1%}"),
            (burst > BURST_BUDGET, f"{burst:.2%} of a core in a burst is over {BURST_BUDGET:.0%}"),
            (
                latest > LATE_BUDGET_SECONDS,
                f"sweeps {latest * 1000:.0f} ms late are over {LATE_BUDGET_SECONDS * 1000:.0f} ms",
            ),
            (
                max(resident, burst_resident) > RESIDENT_BUDGET_MIB,
                f"{max(resident, burst_resident):.0f} MiB is over {RESIDENT_BUDGET_MIB}",
            ),
        )
        if bad
    ]
    if broken:
        sys.exit("; ".join(broken))


if __name__ == "__main__":
    main()
