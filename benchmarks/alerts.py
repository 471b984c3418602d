"""From the line in a log to the webhook, with everything running.

``python benchmarks/alerts.py`` runs the agent on the host of ``benchmarks/agent.py`` (a scripted
NVML library with 8 GPUs of 4 processes each, two servers whose pages are read every second) and has
it follow further logs, in which one engine after the other fails; a signed webhook says when it
heard of each. Printed too: what the agent keeps resident after that. It fails where the p99 is 2 s
or more.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.agent import PORTS, Usage, host  # noqa: E402 - the folder above is put on the path
from tests.faulty_receiver import SECRET, FaultyReceiver  # noqa: E402 - as above

BUDGET_SECONDS = 2.0
STARTED = "(APIServer pid=41) INFO {when} [api_server.py:1] vLLM API server version 0.11.0\n"
REFUSED = """\
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710] torch.OutOfMemoryError: CUDA out of memory. \
Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.10 GiB is free. \
Including non-PyTorch memory, this process has 22.50 GiB memory in use. Of the allocated memory \
21.80 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.
"""


def write(log: Path, text: str) -> float:
    """Append to a log; when."""
    with log.open("a") as file:
        file.write(text.format(when=time.strftime("%m-%d %H:%M:%S")))
    return time.time()


def start_agent(folder: Path, environment: dict[str, str], logs: Sequence[Path], url: str) -> Usage:
    """The agent, once it has had time for its first search and pages."""
    config = folder / "alerts.toml"
    servers = "".join(f'[[engine]]\nname = "vllm-{port}"\nport = {port}\n' for port in PORTS)
    followed = "".join(f'[[engine]]\nname = "{log.stem}"\nlog = "{log}"\n' for log in logs)
    config.write_text(
        f"schema_version = 1\n[discovery]\nenabled = false\n{servers}{followed}"
        f'[[notify.webhook]]\nname = "hook"\nurl = "{url}"\n[export]\nlisten = []\n'
    )
    words = [sys.executable, "-m", "oomwatch", "agent", "--config", str(config)]
    words += ["--store", str(folder / "alerts.db"), "--set", "agent.burst_on=[]"]
    variables = {"PYTHONPATH": str(ROOT), "OOMWATCH_NOTIFY_HOOK_SECRET": SECRET}
    usage = Usage(words, environment | variables, folder / "alerts.log")
    time.sleep(15)
    return usage


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100, help="failures")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        receiver = FaultyReceiver()
        stack.callback(receiver.close)
        logs = [folder / f"e{number}.log" for number in range(given.count)]
        for log in logs:
            write(log, STARTED)
        environment = stack.enter_context(host(folder))
        usage = start_agent(folder, environment, logs, receiver.url)
        stack.callback(usage.stop)
        seconds = []
        for number, log in enumerate(logs):
            written_at = write(log, REFUSED)
            deadline = time.monotonic() + 60
            while len(receiver.taken) <= number:
                if time.monotonic() > deadline:
                    sys.exit(f"failure {number} was not told within a minute")
                time.sleep(0.005)
            seconds.append(receiver.taken[number][2] - written_at)
        late = statistics.quantiles(seconds, n=100)[98]
        print(f"log line to webhook, {given.count} failures, 8 GPUs, everything running")
        print(f"  median {statistics.median(seconds):.2f} s, p99 {late:.2f} s")
        print(f"  resident after that {usage.resident_mib():.1f} MiB")
        if late >= BUDGET_SECONDS:
            sys.exit(f"the p99 is not below {BUDGET_SECONDS:g} s")


if __name__ == "__main__":
    main()
