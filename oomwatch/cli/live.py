"""Reading of this host: engines that run, or the one that just died, and the kernel's word.

Metrics are read twice, each engine in a thread of its own, while the other sources are read; then
processes are looked at a second time: what is only passing (a worker that ends a moment after its
server) is no finding. Where no engine runs, what is left of the last one is read.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Final

from oomwatch.cli.readings import Readings
from oomwatch.cli.remains import add_ended
from oomwatch.diagnose.inputs import KernelInput, Orphan
from oomwatch.errors import OomwatchError
from oomwatch.records import Gpu, ProcessSample, RecordedEngine, SourceStatus
from oomwatch.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomwatch.cli.gather import Gatherer
    from oomwatch.discovery import DiscoveredEngine, Discovery
    from oomwatch.sources.procfs import ProcessInfo

_SECOND_LOOK_SECONDS: Final = 2.0
_SLOW_SECONDS: Final = 5.0
_KERNEL_SECONDS: Final = 7 * 86400.0
"""Kernel messages older than that are no news, unless --since asks for them."""
_STARTS: Final = 3
"""Starts of a service that are read: a restarted one shows why only in the start before."""
_ENDED: Final = frozenset("ZXx")


def gather_live(gatherer: Gatherer) -> None:
    """Add everything that can be seen on this host to what was gathered."""
    from oomwatch.discovery import discover
    from oomwatch.sources.nvml import Roots

    begun = time.monotonic()
    options = gatherer.options
    found = discover(roots=Roots(proc=options.places.proc_root))
    engines = _wanted(gatherer, found)
    if options.pids and not engines and not options.live:
        return  # what the host says besides is about nothing that was asked for
    gatherer.live = True
    readings = {
        engine.recorded.id: Readings(engine.recorded.metrics_url)
        for engine in engines
        if engine.recorded.metrics_url is not None
    }
    _add_gpus(gatherer, found)
    taken: set[str] = set()
    for engine in engines:
        _add_engine(gatherer, engine, taken)
    if not gatherer.options.pids:
        add_ended(gatherer, engines)
    _add_kernel(gatherer)
    for engine in engines:
        _add_readings(gatherer, engine, readings.get(engine.recorded.id), found.at)
    _look_again(gatherer, found, engines, begun)
    for note in found.notes:
        gatherer.sources.append(SourceStatus("processes", "warning", note))
    gatherer.read += 1


def _wanted(gatherer: Gatherer, found: Discovery) -> list[DiscoveredEngine]:
    """All engines, or those with the pids that were asked for."""
    wanted = set(gatherer.options.pids)
    engines = [e for e in found.engines if not wanted or wanted & set(e.recorded.pids)]
    for pid in sorted(wanted - {pid for e in engines for pid in e.recorded.pids}):
        gatherer.sources.append(
            SourceStatus(
                f"pid {pid}", "error", f"process {pid} is no engine that is known, or is gone"
            )
        )
    return engines


def _add_gpus(gatherer: Gatherer, found: Discovery) -> None:
    reading = found.nvml
    if reading.outcome == "no_driver":  # a host without a GPU is nothing to worry about
        gatherer.sources.append(SourceStatus("NVIDIA driver (NVML)", "not_available"))
    else:
        status = {"ok": "ok", "unified_memory": "ok", "wsl": "warning"}.get(
            reading.outcome, "not_available"
        )
        gatherer.sources.append(SourceStatus("nvml", status, reading.detail))  # type: ignore[arg-type]
    for gpu in reading.gpus:
        sample = gpu.sample
        gatherer.gpus.append(
            Gpu(
                index=sample.gpu,
                uuid=sample.uuid,
                name=sample.name,
                total_bytes=sample.total_bytes,
                used_bytes=sample.used_bytes,
                free_bytes=sample.free_bytes,
                reserved_bytes=sample.reserved_bytes,
            )
        )
    for holder in found.holders:
        if holder.kind is not None and holder.engine is None:
            size = format_bytes(holder.sample.used_bytes)
            gatherer.sources.append(
                SourceStatus(
                    f"GPU {holder.sample.gpu}",
                    "warning",
                    f"{holder.title or holder.sample.name} (PID {holder.sample.pid}), a "
                    f"{holder.kind} process, holds {size}",
                )
            )


# ---------------------------------------------------------------- engines that run
def _add_engine(gatherer: Gatherer, engine: DiscoveredEngine, taken: set[str]) -> None:
    """The engine, and those of its logs that can be read; `taken` are logs of engines before."""
    recorded: RecordedEngine = engine.recorded
    gatherer.engines.append(recorded)
    reasons: list[str] = []
    read = False
    for location in engine.logs:
        place = location.path or f"{location.kind} {location.name}"
        if place in taken:  # what an earlier server left behind writes to the same file
            read = True
            continue
        try:
            if location.kind == "file" and location.path:
                gatherer.add_log_file(location.path, recorded.id)
            elif location.kind == "unit" and location.name:
                gatherer.add_unit(location.name, recorded.id, starts=_STARTS)
            elif location.kind == "container" and location.name:
                gatherer.add_container(location.name, recorded.id, last_start=False)
            elif location.kind == "pod" and location.name:
                gatherer.add_pod(location.name, recorded.id)
            else:
                reasons.append(location.reason or "its output goes where it cannot be read back")
                continue
        except OomwatchError as error:
            reasons.append(str(error))
            continue
        taken.add(place)
        read = True
    if not read:
        detail = "; ".join(dict.fromkeys(reasons)) or "its log was not found"
        gatherer.sources.append(
            SourceStatus(f"{recorded.id} log", "warning", f"{detail}; give it with --log")
        )


def _add_readings(
    gatherer: Gatherer, engine: DiscoveredEngine, readings: Readings | None, now: float
) -> None:
    """The pages of an engine, once they are there, or why there are none."""
    name = engine.recorded.id
    if readings is None:
        if engine.metrics_reason and not engine.orphan:
            gatherer.sources.append(
                SourceStatus(f"{name} metrics", "not_available", engine.metrics_reason)
            )
        return
    _wait(readings, name, gatherer.options.waiting)
    for page in readings.pages:
        gatherer.add_page(page, name)
    if readings.error is not None and not readings.pages:
        gatherer.sources.append(_no_page(engine, readings, now))
    elif readings.error is not None:
        gatherer.sources.append(SourceStatus(readings.url, "warning", str(readings.error)))
    elif all(status.name != readings.url for status in gatherer.sources):
        slow = readings.slowest_seconds
        detail = f"answered after {slow:.1f} s: the server is short of CPU" if slow > 1 else None
        status = "warning" if slow > _SLOW_SECONDS else "ok"
        gatherer.sources.append(SourceStatus(readings.url, status, detail))  # type: ignore[arg-type]


def _wait(readings: Readings, name: str, say: Callable[[str], None] | None) -> None:
    """Wait for the pages; a server under load may take its time, so a terminal is told."""
    begun = time.monotonic()
    readings.join(1.0)
    while readings.is_alive():
        if say is not None:
            say(f"reading the metrics of {name} … {time.monotonic() - begun:.0f} s")
        readings.join(1.0)
    if say is not None:
        say("")


def _no_page(engine: DiscoveredEngine, readings: Readings, now: float) -> SourceStatus:
    """Refused by a young server is no fault: it opens its port when it is ready."""
    refused = "cannot connect" in str(readings.error)
    age = now - engine.started_at if engine.started_at is not None else None
    if refused and age is not None:
        return SourceStatus(
            readings.url,
            "not_available",
            f"nothing listens there yet, {format_duration(max(age, 1))} after the server was "
            "started",
        )
    return SourceStatus(readings.url, "warning", str(readings.error))


def _look_again(
    gatherer: Gatherer, found: Discovery, engines: list[DiscoveredEngine], begun: float
) -> None:
    """Look at the processes a second time: samples of both looks, orphans that are still there."""
    from oomwatch.sources.procfs import read_host, read_process

    proc_root = gatherer.options.places.proc_root
    members = {m.process.pid: m.process for e in engines for m in e.members}
    orphaned = any(engine.orphan for engine in engines)
    if orphaned or gatherer.pages:
        time.sleep(max(0.0, _SECOND_LOOK_SECONDS - (time.monotonic() - begun)))
    at = time.time()
    again: list[ProcessSample] = []
    for pid, process in members.items():
        now = read_process(pid, proc_root=proc_root)
        if now is not None and now.start_ticks == process.start_ticks and now.state not in _ENDED:
            again.append(now.sample(at))
    gatherer.series = dataclasses.replace(
        gatherer.series,
        gpus=(*gatherer.series.gpus, *found.nvml.samples),
        gpu_processes=(*gatherer.series.gpu_processes, *found.nvml.processes),
        processes=(
            *gatherer.series.processes,
            *(process.sample(found.at) for process in members.values()),
            *again,
        ),
        hosts=(*gatherer.series.hosts, read_host(at=at, proc_root=proc_root)),
    )
    alive = {sample.pid for sample in again}
    held = {h.sample.pid: h.sample for h in found.holders if h.sample.used_bytes}
    for engine in engines:
        if engine.orphan:
            left = [m.process for m in engine.members if m.process.pid in alive]
            for process in left:
                sample = held.get(process.pid)
                gatherer.orphans.append(
                    Orphan(
                        pid=process.pid,
                        name=_short(process),
                        gpu=sample.gpu if sample else None,
                        held_bytes=sample.used_bytes if sample else process.rss_bytes,
                        on_gpu=sample is not None,
                        engine_id=engine.recorded.id,
                    )
                )


def _short(process: ProcessInfo) -> str:
    """A title that a process gave itself, else the name of its program."""
    first = (process.cmdline or ("",))[0]
    return (first if "::" in first else process.comm or first)[:60]


# ---------------------------------------------------------------- the kernel
def _add_kernel(gatherer: Gatherer) -> None:
    """The running kernel's log. Where no engine is known, only of late: old kills are no news."""
    from oomwatch.sources.kernel import read_kernel_log, read_live_kernel_log

    path = gatherer.options.places.kernel_log
    try:
        events, where = (read_kernel_log(path), path) if path else read_live_kernel_log()
    except OomwatchError as error:
        gatherer.sources.append(SourceStatus("kernel log", "not_available", str(error)))
        return
    since = gatherer.options.since
    if since is None and not gatherer.engines:
        since = time.time() - _KERNEL_SECONDS
    recent = tuple(e for e in events if e.at is None or since is None or e.at >= since)
    gatherer.kernel.append(KernelInput(where, recent, live=True))
    gatherer.sources.append(SourceStatus("kernel log", "ok", where))
