"""Rows of samples back to records, with the names that their ids stand for."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, select

from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    ProcessSample,
)
from oomwatch.store import schema
from oomwatch.store.rows import ENGINE_COUNTS, Sample

COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpu": (
        "used_bytes",
        "free_bytes",
        "reserved_bytes",
        "utilization_ppm",
        "temperature_celsius",
        "power_milliwatts",
        "used_max_bytes",
        "free_min_bytes",
    ),
    "gpu_process": ("used_bytes",),
    "process": ("rss_bytes", "shared_bytes", "swap_bytes", "state"),
    "host": ("mem_total_bytes", "mem_available_bytes", "swap_used_bytes", "cgroup_oom_kills"),
    "engine": ("kv_usage_ppm", "extra", *ENGINE_COUNTS),
}
"""What a row must bring beside time, clock and key, in the order that the records are built in."""

_NAMES: Final = {
    "gpu": ("gpu", "uuid", "name", "total_bytes"),
    "holder": ("gpu", "pid", "name", "kind", "mig"),
    "process": ("pid", "ppid", "name", "cmdline", "cgroup", "unit", "container"),
    "host": ("name",),
    "engine": ("name",),
}
_IDS_AT_ONCE: Final = 500

Values = Sequence[Any]


def build(
    connection: Connection, table: schema.SampleTable, rows: Sequence[Values]
) -> Iterator[Sample]:
    """Records of rows ``(ts_ms, clock_id, key, *COLUMNS[table.name])``, in their order."""
    names = _read_names(connection, table, {row[2] for row in rows})
    return _BUILDERS[table.name]((row, names[row[2]]) for row in rows if row[2] in names)


def _read_names(
    connection: Connection, table: schema.SampleTable, ids: set[int]
) -> dict[int, Values]:
    columns = table.dictionary.c
    wanted = [columns[name] for name in _NAMES[table.dictionary.name]]
    ordered = sorted(ids)
    found: dict[int, Values] = {}
    for start in range(0, len(ordered), _IDS_AT_ONCE):
        some = columns.id.in_(ordered[start : start + _IDS_AT_ONCE])
        for identity, *values in connection.execute(select(columns.id, *wanted).where(some)):
            found[identity] = tuple(values)
    return found


Named = Iterator[tuple[Values, Values]]


def _gpus(rows: Named) -> Iterator[Sample]:
    for (ts, _, _, used, free, reserved, busy, celsius, milliwatts, high, low), names in rows:
        gpu, uuid, name, total = names
        yield GpuSample(
            at=ts / 1000,
            gpu=gpu,
            uuid=uuid or None,
            name=name,
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            reserved_bytes=reserved,
            utilization_ratio=None if busy is None else busy / 1_000_000,
            temperature_celsius=celsius,
            power_watts=None if milliwatts is None else milliwatts / 1000,
            used_max_bytes=high,
            free_min_bytes=low,
        )


def _gpu_processes(rows: Named) -> Iterator[Sample]:
    for (ts, _, _, used), (gpu, pid, name, kind, mig) in rows:
        yield GpuProcessSample(ts / 1000, gpu, pid, name, used, kind, mig)


def _processes(rows: Named) -> Iterator[Sample]:
    lines: dict[str, tuple[str, ...]] = {}  # one tuple for all samples of a process
    for (ts, _, _, rss, shared, swap, state), names in rows:
        pid, ppid, name, cmdline, cgroup, unit, container = names
        if cmdline is not None and cmdline not in lines:
            lines[cmdline] = tuple(json.loads(cmdline))
        yield ProcessSample(
            at=ts / 1000,
            pid=pid,
            ppid=ppid,
            name=name,
            cmdline=None if cmdline is None else lines[cmdline],
            rss_bytes=rss,
            shared_bytes=shared,
            swap_bytes=swap,
            cgroup=cgroup,
            unit=unit,
            container=container,
            state=state,
        )


def _hosts(rows: Named) -> Iterator[Sample]:
    for (ts, _, _, total, available, swap, kills), _ in rows:
        yield HostSample(ts / 1000, total, available, swap, kills)


def _engines(rows: Named) -> Iterator[Sample]:
    """`extra` of a row holds what changed; the key "" marks one that holds all."""
    extras: dict[tuple[int, int | None], dict[str, float]] = collections.defaultdict(dict)
    for (ts, clock, key, kv_usage, extra, *counts), (name,) in rows:
        if extra is not None:
            changed = json.loads(extra)
            before = {} if changed.pop("", None) else extras[key, clock]
            extras[key, clock] = {**before, **changed}
        yield EngineSample(
            at=ts / 1000,
            engine=name,
            kv_usage_ratio=None if kv_usage is None else kv_usage / 1_000_000,
            extra=extras[key, clock],
            **dict(zip(ENGINE_COUNTS, counts, strict=True)),
        )


_BUILDERS: Final[Mapping[str, Callable[[Named], Iterator[Sample]]]] = {
    "gpu": _gpus,
    "gpu_process": _gpu_processes,
    "process": _processes,
    "host": _hosts,
    "engine": _engines,
}
