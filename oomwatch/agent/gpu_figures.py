"""GPUs and who holds their memory, as they are exported."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from oomwatch.agent.engines import EngineTable
from oomwatch.discovery import DiscoveredEngine, GpuHolder
from oomwatch.export.snapshot import GpuFigures, HolderFigures
from oomwatch.records import GpuProcessSample
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.nvml_device import GpuReading

_NO_ANSWER: Final = frozenset({"gpu_lost", "hung", "no_permission", "error"})


def gpu_figures(reading: NvmlReading, *, is_fresh: bool) -> Iterator[GpuFigures]:
    """Whole GPUs and MIG instances; those of an old reading are not ok."""
    for gpu in reading.gpus:
        ok = is_fresh and gpu.outcome not in _NO_ANSWER
        of_gpu = [process for process in reading.processes if process.gpu == gpu.sample.gpu]
        yield GpuFigures(gpu.sample, ok, pci=gpu.pci, unattributed_bytes=_unattributed(gpu, of_gpu))
        for instance in gpu.instances:
            yield GpuFigures(instance.sample, ok, mig=instance.sample.uuid or "", pci=gpu.pci)


def _unattributed(gpu: GpuReading, processes: Iterable[GpuProcessSample]) -> int | None:
    used = gpu.sample.used_bytes
    shares = [process.used_bytes for process in processes]
    known = [share for share in shares if share is not None]
    if used is None or not gpu.processes_known or len(known) < len(shares):
        return None
    return max(0, used - sum(known))


class _Who(NamedTuple):
    """Whose a process is, by the names that holders are told by."""

    engine_id: str | None = None
    role: str = "other"
    process: str | None = None
    unit: str | None = None
    container: str | None = None
    namespace: str | None = None
    pod: str | None = None


def holder_figures(
    processes: Iterable[GpuProcessSample],
    uuids: Mapping[int, str | None],
    table: EngineTable,
    *,
    by_pid: bool,
) -> list[HolderFigures]:
    """Memory by holder: processes of one engine and role on one GPU are one, unless `by_pid`."""
    members = {
        member.process.pid: (engine.found, member.role)
        for engine in table
        for member in engine.found.members
    }
    others = {holder.sample.pid: holder for holder in table.holders}
    held: dict[tuple[int, str, _Who, int | None], int] = collections.defaultdict(int)
    for process in processes:
        if process.used_bytes is None:
            continue
        pid = process.pid
        found = members.get(pid)
        if found is not None:
            who = _member(*found)
        else:
            who = _other(process, others.get(pid), table.orphans.get(pid))
        held[process.gpu, process.mig or "", who, pid if by_pid else None] += process.used_bytes
    return [
        HolderFigures(gpu, uuids.get(gpu), used_bytes, mig, **who._asdict(), pid=pid)
        for (gpu, mig, who, pid), used_bytes in held.items()
    ]


def _member(engine: DiscoveredEngine, role: str) -> _Who:
    namespace, pod = pod_of(engine)
    return _Who(
        engine_id=engine.recorded.id,
        role=role,
        unit=engine.unit,
        container=short_id(engine.container),
        namespace=namespace,
        pod=pod,
    )


def _other(process: GpuProcessSample, holder: GpuHolder | None, orphan_of: str | None) -> _Who:
    """A process of no engine that runs: what a search has found about it, if one has."""
    return _Who(
        engine_id=orphan_of,
        role="other" if orphan_of is None else "orphan",
        process=process.name or (holder.title if holder is not None else None),
        unit=holder.unit if holder is not None else None,
        container=short_id(holder.container) if holder is not None else None,
    )


def short_id(container: str | None) -> str | None:
    """A container's id as people know it."""
    return container and container[:12]


def pod_of(engine: DiscoveredEngine) -> tuple[str | None, str | None]:
    """Namespace and name of an engine's pod."""
    for log in engine.logs:
        if log.kind == "pod" and log.name is not None:
            namespace, _, name = log.name.partition("/")
            return namespace, name
    return None, None
