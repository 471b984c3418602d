"""One GPU's figures, call by call; what is "not supported" is None."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from oomwatch.records import GpuProcessSample, GpuSample
from oomwatch.sources.nvml_driver import Driver, NvmlOutcome
from oomwatch.sources.nvml_facts import EccCounts, GpuFacts, RemappedRows

_MOST_BYTES: Final = 2**50  # larger figures are the driver's way of saying that it does not know
_LISTS: Final = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)


@dataclasses.dataclass(frozen=True, slots=True)
class MigInstance:
    """A slice of a GPU; `sample.gpu` is the index of the whole GPU, `sample.uuid` the slice's."""

    sample: GpuSample
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuReading:
    """All that one GPU said. `processes_known` is False where the driver lists none on purpose."""

    sample: GpuSample
    outcome: NvmlOutcome = "ok"
    pci: str | None = None
    mig_enabled: bool | None = None
    instances: tuple[MigInstance, ...] = ()
    ecc: EccCounts | None = None
    remapped_rows: RemappedRows | None = None
    reports_xid: bool | None = None
    processes_known: bool = True
    note: str | None = None


class _Process(NamedTuple):
    pid: int
    used_bytes: int | None
    gpu_instance: int | None
    compute_instance: int | None


class _Memory(NamedTuple):
    total: int | None = None
    used: int | None = None
    free: int | None = None
    reserved: int | None = None


def read_gpu(
    driver: Driver,
    handle: Any,
    at: float,
    facts: GpuFacts,
    name_of: Callable[[int], str | None],
) -> tuple[GpuReading, list[GpuProcessSample]]:
    """The figures of one GPU, that of `driver.gpu`; `name_of` gives the name of a process.

    Raises:
        NVMLError: the GPU as a whole does not answer.

    """
    index = driver.gpu or 0
    memory = _memory(driver, handle)
    sample = _sample(driver, handle, at, facts, memory)
    instances = _instances(driver, handle, index, at) if facts.mig_enabled else []
    found, known = _processes(driver, handle, [instance_handle for instance_handle, _ in instances])
    mig_uuids = {
        (instance.gpu_instance, instance.compute_instance): instance.sample.uuid
        for _, instance in instances
    }
    note = None
    if memory.total is None:
        note = "no memory figures (it shares the host's memory, or the driver hides them)"
    used = [process.used_bytes or 0 for _, process in found]
    if memory.total is not None and sum(used) > memory.total:
        # A binding that does not fit the driver reads garbage: better no figure than a wrong one.
        note = "its processes seem to use more memory than it has; their figures are dropped"
        found = [(kind, process._replace(used_bytes=None)) for kind, process in found]
    samples = [
        GpuProcessSample(
            at,
            index,
            process.pid,
            name_of(process.pid),
            process.used_bytes,
            kind,
            mig_uuids.get((process.gpu_instance, process.compute_instance)),
        )
        for kind, process in found
    ]
    if note is None and not known:
        note = "the driver does not list its processes"
    hidden = bool(found) and all(process.used_bytes is None for _, process in found)
    return (
        GpuReading(
            sample=sample,
            outcome="ok" if memory.total is not None else "unified_memory",
            pci=facts.pci,
            mig_enabled=facts.mig_enabled,
            instances=tuple(instance for _, instance in instances),
            ecc=facts.ecc,
            remapped_rows=facts.remapped_rows,
            reports_xid=facts.reports_xid,
            processes_known=known and not hidden,
            note=note,
        ),
        samples,
    )


def _sample(driver: Driver, handle: Any, at: float, facts: GpuFacts, memory: _Memory) -> GpuSample:
    rates = driver.ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = driver.ask("nvmlDeviceGetPowerUsage", handle)
    temperature = driver.ask("nvmlDeviceGetTemperature", handle, driver.pynvml.NVML_TEMPERATURE_GPU)
    return GpuSample(
        at=at,
        gpu=driver.gpu or 0,
        uuid=facts.uuid,
        name=facts.name,
        total_bytes=memory.total,
        used_bytes=memory.used,
        free_bytes=memory.free,
        reserved_bytes=memory.reserved,
        utilization_ratio=None if rates is None else min(1.0, rates.gpu / 100),
        temperature_celsius=None if temperature is None else float(temperature),
        power_watts=None if milliwatts is None else milliwatts / 1000,
    )


def _memory(driver: Driver, handle: Any) -> _Memory:
    """Version 2 tells the driver's own share; version 1 (before driver 510) counts it as used."""
    reserved = None
    found = driver.ask("nvmlDeviceGetMemoryInfo", handle, driver.pynvml.nvmlMemory_v2)
    if found is not None:
        reserved = int(found.reserved)
    else:
        found = driver.ask("nvmlDeviceGetMemoryInfo", handle)
    total = 0 if found is None else int(found.total)
    if not 0 < total < _MOST_BYTES:
        return _Memory()
    used, free = int(found.used), int(found.free)
    if max(used, free, reserved or 0) > total:
        return _Memory(total)
    return _Memory(total, used, free, reserved)


def _instances(driver: Driver, handle: Any, index: int, at: float) -> list[tuple[Any, MigInstance]]:
    """MIG instances, with their handles. Positions without an instance are skipped."""
    instances = []
    for position in range(driver.ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
        mig = driver.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, position)
        if mig is None:
            continue
        memory = _memory(driver, mig)
        sample = GpuSample(
            at=at,
            gpu=index,
            uuid=driver.ask("nvmlDeviceGetUUID", mig),
            name=driver.ask("nvmlDeviceGetName", mig),
            total_bytes=memory.total,
            used_bytes=memory.used,
            free_bytes=memory.free,
            reserved_bytes=memory.reserved,
        )
        gpu_instance = driver.ask("nvmlDeviceGetGpuInstanceId", mig)
        compute_instance = driver.ask("nvmlDeviceGetComputeInstanceId", mig)
        instances.append((mig, MigInstance(sample, gpu_instance, compute_instance)))
    return instances


def _processes(
    driver: Driver, handle: Any, mig_handles: list[Any]
) -> tuple[list[tuple[str, _Process]], bool]:
    """Processes with their kind, each once per instance; and whether the driver lists any at all.

    A process that computes and draws stands in two lists with the same bytes, an MPS client in two
    as well. With MIG the whole GPU lists what it may show to this user, each instance its own.
    """
    found: dict[tuple[int, int | None, int | None], tuple[str, _Process]] = {}
    known = False
    for kind, name in _LISTS:
        for device in (handle, *mig_handles):
            listed = _list(driver, name, device)
            if listed is None:
                continue
            known = True
            for process in listed:
                key = (process.pid, process.gpu_instance, process.compute_instance)
                earlier = found.get(key)
                if earlier is None:
                    found[key] = (kind, process)
                elif (earlier[1].used_bytes or 0) < (process.used_bytes or 0):
                    found[key] = (earlier[0], process)
    return list(found.values()), known


def _list(driver: Driver, name: str, device: Any) -> list[_Process] | None:
    """The newest version of the list that this driver has; the binding does not fall back."""
    for version in ("_v3", "_v2"):
        listed = driver.ask(name + version, device)
        if listed is not None:
            return [
                _Process(
                    int(process.pid),
                    _used(process.usedGpuMemory),
                    instance_id(process.gpuInstanceId),
                    instance_id(process.computeInstanceId),
                )
                for process in listed
            ]
    return None


def _used(value: int | None) -> int | None:
    return None if value is None or value >= _MOST_BYTES else int(value)


_NO_INSTANCE: Final = 0xFFFFFFFF


def instance_id(value: int | None) -> int | None:
    """A MIG instance's id; the driver says "none" with all bits set."""
    return None if value is None or value == _NO_INSTANCE else int(value)
