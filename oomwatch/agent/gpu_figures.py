"""GPUs and who holds their memory, as they are exported."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping

from oomwatch.agent.engines import EngineTable
from oomwatch.discovery import DiscoveredEngine
from oomwatch.export.snapshot import GpuFigures, HolderFigures
from oomwatch.records import GpuProcessSample
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.nvml_device import GpuReading

_NO_ANSWER = frozenset({"gpu_lost", "hung", "no_permission", "error"})


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


def holder_figures(
    processes: Iterable[GpuProcessSample],
    uuids: Mapping[int, str | None],
    table: EngineTable,
    *,
    by_pid: bool,
) -> list[HolderFigures]:
    """Memory by holder: processes of one engine and role on one GPU are one, unless `by_pid`."""
    members = {
        member.process.pid: (engine, member.role)
        for engine in table
        for member in engine.found.members
    }
    others = {holder.sample.pid: holder for holder in table.holders}
    held: collections.Counter[HolderFigures] = collections.Counter()
    for process in processes:
        if process.used_bytes is None:
            continue
        who = HolderFigures(
            gpu=process.gpu,
            uuid=uuids.get(process.gpu),
            used_bytes=0,
            mig=process.mig or "",
            pid=process.pid if by_pid else None,
        )
        found = members.get(process.pid)
        other = others.get(process.pid)
        if found is not None:
            engine, role = found
            namespace, pod = pod_of(engine.found)
            who = dataclasses.replace(
                who,
                engine_id=engine.id,
                role=role,
                unit=engine.found.unit,
                container=engine.found.container and engine.found.container[:12],
                namespace=namespace,
                pod=pod,
            )
        else:
            who = dataclasses.replace(
                who,
                engine_id=table.orphans.get(process.pid),
                role="orphan" if process.pid in table.orphans else "other",
                process=process.name or (other.title if other is not None else None),
                unit=other.unit if other is not None else None,
                container=other.container and other.container[:12] if other is not None else None,
            )
        held[who] += process.used_bytes
    return [dataclasses.replace(who, used_bytes=size) for who, size in held.items()]


def pod_of(engine: DiscoveredEngine) -> tuple[str | None, str | None]:
    """Namespace and name of an engine's pod."""
    for log in engine.logs:
        if log.kind == "pod" and log.name is not None:
            namespace, _, name = log.name.partition("/")
            return namespace, name
    return None, None
