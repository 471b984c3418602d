"""`oomwatch check`: what can be seen from here, source by source, and how to see more."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch import __version__
from oomwatch.errors import NoDataError, OomwatchError, PermissionDeniedError
from oomwatch.records import SourceStatusName
from oomwatch.report.sanitize import clean
from oomwatch.units import format_bytes, format_duration, format_rfc3339

if TYPE_CHECKING:
    from oomwatch.discovery import DiscoveredEngine, Discovery
    from oomwatch.sources.nvml import NvmlReading

_WORDS: Final = {
    "ok": "okay",
    "warning": "warning",
    "error": "error",
    "not_available": "not available",
}
_COLOURS: Final = {"ok": "green", "warning": "yellow", "error": "red", "not_available": "cyan"}
_NAME_WIDTH: Final = 18
_WORD_WIDTH: Final = 15

_GPU_HINTS: Final = {
    "no_driver": "fine on a host without one; else install its driver, and start a container with "
    "--gpus all (Docker) or the nvidia runtime class (Kubernetes)",
    "library_mismatch": "reboot, or unload and load the nvidia kernel modules",
    "no_permission": "add this user to the group of /dev/nvidia*, or allow the devices",
    "gpu_lost": "see the kernel log for its Xid; reset the GPU or reboot the host",
    "unified_memory": "host memory is the GPU's memory here; it is read instead",
    "wsl": "run nvidia-smi on the Windows side for figures per process",
    "hung": "see the kernel log for Xids; a driver that stays stuck needs a reboot",
    "not_available": "logs, metrics and host memory are read; that GPU's memory is not",
    "error": "run nvidia-smi: it asks the same library",
}
_METRICS_TIMEOUT_SECONDS: Final = 15.0
"""A page took 11 s to come from a busy vLLM."""
_STOPPED: Final = frozenset("Tt")


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """One line of the answer; `hint` says how to see more."""

    name: str
    status: SourceStatusName
    detail: str
    hint: str | None = None


@click.command(
    "check",
    epilog="\b\nExamples:\n  oomwatch check\n  sudo oomwatch check\n  oomwatch check --json",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (oomwatch.check/1).")
def command(as_json: bool) -> None:
    """Say what can be seen from here, and how to see more.

    Each source is okay, warning, error or not available. Nothing is changed.
    """
    if as_json:
        click.echo(json.dumps(_as_json(list(_items())), indent=2, ensure_ascii=False))
        return
    color = False if os.environ.get("NO_COLOR") else None
    width = max(60, shutil.get_terminal_size((100, 24)).columns)
    for item in _items():
        click.echo(_as_text(item, width), color=color)


def _as_text(item: Item, width: int) -> str:
    """The line of one source; text too long for it hangs below, and so does the hint."""
    word = _WORDS[item.status]
    indent = _WORD_WIDTH + _NAME_WIDTH + 1
    name = " " * (len(item.name) - len(item.name.lstrip())) + clean(item.name)
    paragraphs = [
        line
        for text in (item.detail, item.hint)
        if text
        for line in textwrap.wrap(
            clean(text), width - indent, break_long_words=False, break_on_hyphens=False
        )
    ]
    head = click.style(word, fg=_COLOURS[item.status]) + " " * (_WORD_WIDTH - len(word))
    return head + f"{name.ljust(_NAME_WIDTH)} " + f"\n{' ' * indent}".join(paragraphs)


def _as_json(items: list[Item]) -> dict[str, Any]:
    return {
        "schema": "oomwatch.check/1",
        "oomwatch_version": __version__,
        "generated_at": format_rfc3339(time.time()),
        "host": os.uname().nodename,
        "sources": [dataclasses.asdict(item) for item in items],
    }


def _items() -> Iterator[Item]:
    from oomwatch.discovery import discover

    found = discover()
    yield _gpu(found.nvml)
    yield _processes(found)
    yield _memory()
    yield _kernel_log()
    yield _journal()
    yield _containers()
    yield _pods()
    yield _engines(found)
    for engine in found.engines:
        yield _metrics(engine)
        yield _logs(engine)
    yield _ended()


def _gpu(reading: NvmlReading) -> Item:
    cards = [
        f"GPU {sample.gpu} {sample.name or 'of unknown name'}: "
        f"{format_bytes(sample.used_bytes)} of {format_bytes(sample.total_bytes)} used"
        for sample in reading.samples
    ]
    driver = [f"driver {reading.driver_version}"] if reading.driver_version else []
    detail = "; ".join([*driver, *cards, *([reading.detail] if reading.detail else [])])
    hint = _GPU_HINTS.get(reading.outcome)
    if reading.outcome == "ok":
        if not reading.gpus:
            return Item("gpu", "not_available", "the NVIDIA driver is loaded and sees no GPU")
        return Item("gpu", "ok", detail)
    if reading.outcome in ("no_driver", "not_available"):
        return Item("gpu", "not_available", detail, hint)
    status: SourceStatusName = (
        "warning" if reading.outcome in ("unified_memory", "wsl") else "error"
    )
    return Item("gpu", status, detail or reading.outcome, hint)


def _processes(found: Discovery) -> Item:
    seen = len(list(found.processes))
    if found.notes:
        hint = "run as root on the host, or start the container with --pid=host"
        return Item("processes", "warning", f"{seen} seen; {'; '.join(found.notes)}", hint)
    if os.geteuid() != 0:
        return Item(
            "processes",
            "ok",
            f"{seen} seen; open files, variables and sockets of this user's own only",
            "run as root to see those of all users",
        )
    return Item("processes", "ok", f"{seen} seen")


def _memory() -> Item:
    from oomwatch.sources.cgroup import parse_proc_cgroup, read_memory
    from oomwatch.sources.procfs import read_host

    host = read_host()
    available, total = format_bytes(host.mem_available_bytes), format_bytes(host.mem_total_bytes)
    parts = [f"{available} of {total} available"]
    try:
        paths = parse_proc_cgroup(Path("/proc/self/cgroup").read_text("utf-8", "replace"))
    except OSError:
        paths = {}
    group = read_memory(paths)
    if group is None:
        hint = "without cgroup limits, OOM kills are told by the kernel log alone"
        return Item("host memory", "warning", f"{parts[0]}; no memory cgroup", hint)
    if group.limit_bytes is not None:
        parts.append(f"limit here {format_bytes(group.limit_bytes)}")
    parts.append(f"cgroup version {group.version}")
    return Item("host memory", "ok", "; ".join(parts))


def _kernel_log() -> Item:
    from oomwatch.sources.kernel import read_live_kernel_log

    hint = "join the group systemd-journal, run as root, or give --kernel-log FILE (dmesg > FILE)"
    try:
        events, where = read_live_kernel_log()
    except PermissionDeniedError as error:
        return Item("kernel log", "warning", str(error), hint)
    except OomwatchError as error:
        return Item("kernel log", "not_available", str(error), hint)
    kills = sum(event.kind == "oom_kill" for event in events)
    xids = sum(event.kind == "xid" for event in events)
    return Item("kernel log", "ok", f"read from {where}: {kills} OOM kills, {xids} Xids")


def _journal() -> Item:
    from oomwatch.sources.kernel import probe_journal

    hint = "units that log to the journal need it; give --log FILE otherwise"
    try:
        probe_journal()
    except PermissionDeniedError as error:
        return Item("journal", "warning", str(error), hint)
    except NoDataError as error:
        return Item("journal", "not_available", str(error), hint)
    except OomwatchError as error:
        return Item("journal", "error", str(error), hint)
    return Item("journal", "ok", "units can be read with --unit NAME")


def _containers() -> Item:
    tools = [tool for tool in ("docker", "podman", "nerdctl") if shutil.which(tool)]
    logs = _folder("/var/lib/docker/containers", "/var/lib/containers/storage/overlay-containers")
    sockets = ("/run/docker.sock", "/var/run/docker.sock", "/run/podman/podman.sock")
    present = [socket for socket in sockets if os.access(socket, os.F_OK)]
    usable = [socket for socket in present if os.access(socket, os.R_OK | os.W_OK)]
    if not tools and not present and logs is None:
        return Item("containers", "not_available", "no container runtime is seen on this host")
    if logs or usable:
        how = "log files of the runtime" if logs else usable[0]
        return Item("containers", "ok", f"{how} can be read with --container NAME")
    if "podman" in tools:  # needs neither a daemon nor root
        return Item("containers", "ok", "podman's own containers, with --container NAME")
    reason = f"{present[0]} may not be opened" if present else "no daemon is running"
    status: SourceStatusName = "warning" if present or logs is False else "not_available"
    hint = "run as root; the group docker gives the same, and is as good as root"
    if status == "not_available":
        return Item("containers", status, f"{reason} ({', '.join(tools)})")
    return Item("containers", status, f"{reason} ({', '.join(tools) or 'log files'})", hint)


def _pods() -> Item:
    logs = _folder("/var/log/pods")
    if logs:
        return Item("pods", "ok", "log files of the kubelet can be read with --pod NS/NAME")
    config = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    token = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
    if shutil.which("kubectl") and any(
        os.access(path, os.F_OK) for path in (*config.split(":"), token)
    ):
        return Item("pods", "ok", "kubectl is there, for --pod NS/NAME")
    if logs is False:
        return Item("pods", "warning", "/var/log/pods may not be read", "run as root on the node")
    return Item("pods", "not_available", "no kubelet and no configured kubectl on this host")


def _folder(*paths: str) -> bool | None:
    """Whether one of the folders can be listed; None if there is none."""
    present = False
    for path in paths:
        try:
            present = present or Path(path).is_dir()
            if os.access(path, os.R_OK | os.X_OK):
                return True
        except PermissionError:
            present = True
    return False if present else None


def _engines(found: Discovery) -> Item:
    names = [
        f"{engine.recorded.id}"
        + (f" {engine.recorded.version}" if engine.recorded.version else "")
        + (" (ORPHAN: its server is gone)" if engine.orphan else "")
        + f", pid {engine.recorded.pids[0]}"
        for engine in found.engines
    ]
    if not names:
        return Item(
            "engines",
            "not_available",
            "no vLLM, SGLang or other known server runs here",
        )
    pids = [str(pid) for engine in found.engines if engine.orphan for pid in engine.recorded.pids]
    stopped = [
        str(member.process.pid)
        for engine in found.engines
        for member in engine.members
        if member.process.state in _STOPPED
    ]
    hints = []
    if pids:
        hints.append(f"the orphans still hold their memory; end them: kill {' '.join(pids)}")
    if stopped:
        hints.append(f"stopped, by SIGSTOP or a debugger: {', '.join(stopped)}")
    status: SourceStatusName = "warning" if hints else "ok"
    return Item("engines", status, "; ".join(names), "; ".join(hints) or None)


def _ended() -> Item:
    """What is left of engines that do not run any more."""
    from oomwatch.sources.ended import find_ended

    denied: list[str] = []
    ended = find_ended(denied=denied)
    hint = f"run as root: {denied[0]}" if denied else None
    if not ended:
        return Item(
            "ended engines",
            "warning" if denied else "not_available",
            "no container, service or output of `oomwatch run` of one that ended is seen",
            hint or "give --log FILE to diagnose one that has ended",
        )
    last = ended[0]
    ago = format_duration(max(1.0, time.time() - last.at))
    detail = f"{len(ended)} found; the last, {last.kind} {last.name}, ended {ago} ago"
    return Item("ended engines", "ok", detail, hint)


def _metrics(engine: DiscoveredEngine) -> Item:
    from oomwatch.sources.metrics import read_metrics

    name = f"  {engine.recorded.id}"
    url = engine.recorded.metrics_url
    if url is None:
        return Item(name, "not_available", f"no metrics: {engine.metrics_reason or 'unknown'}")
    try:
        page = read_metrics(url, timeout_seconds=_METRICS_TIMEOUT_SECONDS)
    except OomwatchError as error:
        hint = engine.metrics_reason or "give --metrics URL if they are elsewhere"
        return Item(name, "warning", f"metrics: {error}", hint)
    running = [sample.running for sample in page.samples if sample.running is not None]
    count = f"{sum(running):.0f}"
    busy = f", {count} request{'' if count == '1' else 's'} running" if running else ""
    return Item(name, "ok", f"metrics at {url}{busy}")


def _logs(engine: DiscoveredEngine) -> Item:
    name = f"  {engine.recorded.id}"
    log = engine.logs[0]
    note = f" ({log.reason})" if log.reason else ""
    if log.path:
        if os.access(log.path, os.R_OK):
            return Item(name, "ok", f"log at {log.path}{note}")
        return Item(name, "warning", f"log at {log.path} may not be read", "run as root")
    options: dict[str, Callable[[str], str]] = {
        "unit": lambda unit: f"log in the journal of {unit}",
        "container": lambda container: f"log of container {container[:12]}",
        "pod": lambda pod: f"log of pod {pod}",
    }
    if log.kind in options and log.name:
        return Item(name, "warning" if log.reason else "ok", options[log.kind](log.name) + note)
    return Item(name, "warning", f"no log: {log.reason}", "give it with --log FILE")
