"""Reading of this host: engines that run, their GPUs, metrics and logs, and the kernel's word.

Metrics are read twice, with the other sources in between, so that counters become rates.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Final

from oomwatch.diagnose.inputs import KernelInput, Orphan
from oomwatch.errors import OomwatchError
from oomwatch.records import Gpu, RecordedEngine, SourceStatus
from oomwatch.units import format_bytes

if TYPE_CHECKING:
    from oomwatch.cli.gather import Gatherer
    from oomwatch.discovery import DiscoveredEngine, Discovery

_WINDOW_SECONDS: Final = 2.0
"""Least time between the two readings of the counters."""
_METRICS_TIMEOUT_SECONDS: Final = 10.0
"""A scrape took up to 5 s under load on a real vLLM 0.32."""


def gather_live(gatherer: Gatherer) -> None:
    """Add everything that can be seen on this host to what was gathered."""
    from oomwatch.discovery import discover

    found = discover()
    wanted = set(gatherer.options.pids)
    engines = [e for e in found.engines if not wanted or wanted & set(e.recorded.pids)]
    for pid in sorted(wanted - {pid for e in engines for pid in e.recorded.pids}):
        gatherer.sources.append(
            SourceStatus(
                f"pid {pid}", "error", f"process {pid} is no engine that is known, or is gone"
            )
        )
    gatherer.live = True
    _add_gpus(gatherer, found)
    _add_processes(gatherer, found)
    begun = time.monotonic()
    for engine in engines:
        _scrape(gatherer, engine)
    for engine in engines:
        _add_engine(gatherer, engine)
    _add_kernel(gatherer)
    if gatherer.pages:
        time.sleep(max(0.0, _WINDOW_SECONDS - (time.monotonic() - begun)))
        for engine in engines:
            _scrape(gatherer, engine)
    for note in found.notes:
        gatherer.sources.append(SourceStatus("processes", "warning", note))
    if not engines:
        gatherer.sources.append(
            SourceStatus(
                "engines",
                "not_available",
                "no inference server runs here; give the log of the one that failed: --log FILE, --unit NAME, --container NAME",
            )
        )
    gatherer.read += 1


def _add_gpus(gatherer: Gatherer, found: Discovery) -> None:
    reading = found.nvml
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
                    f"{holder.title or holder.sample.name} (PID {holder.sample.pid}), a {holder.kind} process, holds {size}",
                )
            )


def _add_processes(gatherer: Gatherer, found: Discovery) -> None:
    from oomwatch.sources.procfs import read_host

    members = {m.process.pid: m.process for e in found.engines for m in e.members}
    gatherer.series = dataclasses.replace(
        gatherer.series,
        gpus=(*gatherer.series.gpus, *found.nvml.samples),
        gpu_processes=(*gatherer.series.gpu_processes, *found.nvml.processes),
        processes=(*gatherer.series.processes, *(p.sample(found.at) for p in members.values())),
        hosts=(*gatherer.series.hosts, read_host(at=found.at)),
    )
    held = {h.sample.pid: h.sample for h in found.holders if h.sample.used_bytes}
    for engine in found.engines:
        if not engine.orphan:
            continue
        for member in engine.members:
            process = member.process
            sample = held.get(process.pid)
            gatherer.orphans.append(
                Orphan(
                    pid=process.pid,
                    name=process.title[:60],
                    gpu=sample.gpu if sample else None,
                    held_bytes=sample.used_bytes if sample else process.rss_bytes,
                    on_gpu=sample is not None,
                )
            )


def _scrape(gatherer: Gatherer, engine: DiscoveredEngine) -> None:
    from oomwatch.sources.metrics import read_metrics

    url = engine.recorded.metrics_url
    if url is None:
        if engine.metrics_reason and all(
            s.detail != engine.metrics_reason for s in gatherer.sources
        ):
            gatherer.sources.append(
                SourceStatus(
                    f"{engine.recorded.id} metrics", "not_available", engine.metrics_reason
                )
            )
        return
    begun = time.monotonic()
    try:
        page = read_metrics(url, timeout_seconds=_METRICS_TIMEOUT_SECONDS)
    except OomwatchError as error:
        if all(s.name != url for s in gatherer.sources):
            gatherer.sources.append(SourceStatus(url, "warning", str(error)))
        return
    seconds = time.monotonic() - begun
    gatherer.add_page(page, engine.recorded.id)
    if all(s.name != url for s in gatherer.sources):
        slow = f"answered after {seconds:.1f} s: the server is busy" if seconds > 1 else None
        gatherer.sources.append(SourceStatus(url, "ok", slow))


def _add_engine(gatherer: Gatherer, engine: DiscoveredEngine) -> None:
    """The engine, and the first of its logs that can be read."""
    recorded: RecordedEngine = engine.recorded
    gatherer.engines.append(recorded)
    reasons: list[str] = []
    read = False
    for location in engine.logs:
        try:
            if location.kind == "file" and location.path:
                gatherer.add_log_file(location.path, recorded.id)
            elif location.kind == "unit" and location.name:
                gatherer.add_unit(location.name, recorded.id)
            elif location.kind == "container" and location.name:
                gatherer.add_container(location.name, recorded.id)
            elif location.kind == "pod" and location.name:
                gatherer.add_pod(location.name, recorded.id)
            else:
                reasons.append(location.reason or "its output goes where it cannot be read back")
                continue
        except OomwatchError as error:
            reasons.append(str(error))
            continue
        read = True
    if not read:
        detail = "; ".join(dict.fromkeys(reasons)) or "its log was not found"
        gatherer.sources.append(
            SourceStatus(f"{recorded.id} log", "not_available", f"{detail}; give it with --log")
        )


def _add_kernel(gatherer: Gatherer) -> None:
    from oomwatch.sources.kernel import read_live_kernel_log

    try:
        events, where = read_live_kernel_log()
    except OomwatchError as error:
        gatherer.sources.append(SourceStatus("kernel log", "not_available", str(error)))
        return
    gatherer.kernel.append(KernelInput(where, tuple(events)))
    gatherer.sources.append(SourceStatus("kernel log", "ok", where))
