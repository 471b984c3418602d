"""One GPU's figures, call by call; what is "not supported" is None."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from oomwatch.records import GpuProcessSample, GpuSample
from oomwatch.sources.kernel_events import normalize_pci

NvmlOutcome = Literal[
    "ok",
    "no_driver",
    "library_mismatch",
    "no_permission",
    "gpu_lost",
    "unified_memory",
    "wsl",
    "hung",
    "not_available",
    "error",
]

_MOST_BYTES: Final = 2**50  # larger figures are the driver's way of saying that it does not know
_LISTS: Final = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)


WORST_FIRST: Final = (
    "no_driver",
    "library_mismatch",
    "gpu_lost",
    "no_permission",
    "error",
    "unified_memory",
)
"""Outcomes of single GPUs that decide that of the whole."""


class EccCounts(NamedTuple):
    """Memory errors of a GPU; volatile counts start anew with the driver."""

    volatile_corrected: int | None = None
    volatile_uncorrected: int | None = None
    aggregate_corrected: int | None = None
    aggregate_uncorrected: int | None = None


class RemappedRows(NamedTuple):
    """Memory rows that were replaced by spare ones; `pending` wants a reset, `failed` an RMA."""

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


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


class Call:
    """The call that a thread is in, for those who wait for it."""

    def __init__(self) -> None:
        self.enter("start")

    def enter(self, function: str, gpu: int | None = None) -> None:
        """A call of the driver is about to be made."""
        self._function, self._gpu, self.started = function, gpu, time.monotonic()

    @property
    def name(self) -> str:
        """As ``nvmlDeviceGetMemoryInfo of GPU 1``."""
        return self._function if self._gpu is None else f"{self._function} of GPU {self._gpu}"


class GpuFacts(NamedTuple):
    """What never or slowly changes of a GPU."""

    uuid: str | None
    name: str | None
    pci: str | None
    mig_enabled: bool | None
    ecc: EccCounts | None
    remapped_rows: RemappedRows | None
    reports_xid: bool | None


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


class Driver:
    """Makes calls by name; what this board or driver does not offer gives None.

    Errors that concern the GPU as a whole (lost, no permission) are raised.
    """

    def __init__(self, pynvml: Any, call: Call) -> None:
        self.pynvml = pynvml
        self.gpu: int | None = None
        self._call = call
        self._none = (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            pynvml.NVML_ERROR_INVALID_ARGUMENT,
            pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            pynvml.NVML_ERROR_NOT_FOUND,
            pynvml.NVML_ERROR_NO_DATA,
            pynvml.NVML_ERROR_NOT_READY,
        )

    def ask(self, name: str, *arguments: Any) -> Any:
        """The call's answer, bytes as text; None where it is not offered to us."""
        self._call.enter(name, self.gpu)
        function: Callable[..., Any] | None = getattr(self.pynvml, name, None)
        if function is None:
            return None
        try:
            answer = function(*arguments)
        except self.pynvml.NVMLError as error:
            if error.value in self._none:
                return None
            if error.value == self.pynvml.NVML_ERROR_UNKNOWN and "MemoryInfo" not in name:
                return None
            # What an ordinary user may not see of a GPU is unknown, not a failure of the GPU.
            if error.value == self.pynvml.NVML_ERROR_NO_PERMISSION:
                return None
            raise
        return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def read_cuda_version(driver: Driver) -> str | None:
    """The newest CUDA that the driver takes, as ``13.0``."""
    cuda = driver.ask("nvmlSystemGetCudaDriverVersion")
    return f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None


def read_facts(driver: Driver, handle: Any) -> GpuFacts:
    """The facts of one GPU. Raises `NVMLError` if the GPU as a whole does not answer."""
    mig_mode = driver.ask("nvmlDeviceGetMigMode", handle)
    return GpuFacts(
        uuid=driver.ask("nvmlDeviceGetUUID", handle),
        name=driver.ask("nvmlDeviceGetName", handle),
        pci=_pci(driver, handle),
        mig_enabled=bool(mig_mode[0]) if mig_mode else None,
        ecc=_ecc(driver, handle),
        remapped_rows=_remapped_rows(driver, handle),
        reports_xid=_reports_xid(driver, handle),
    )


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


def _ecc(driver: Driver, handle: Any) -> EccCounts | None:
    pynvml = driver.pynvml
    counts = EccCounts(
        *(
            driver.ask("nvmlDeviceGetTotalEccErrors", handle, kind, counter)
            for counter in (pynvml.NVML_VOLATILE_ECC, pynvml.NVML_AGGREGATE_ECC)
            for kind in (
                pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
                pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
            )
        )
    )
    return None if all(count is None for count in counts) else counts


def _remapped_rows(driver: Driver, handle: Any) -> RemappedRows | None:
    rows = driver.ask("nvmlDeviceGetRemappedRows", handle)
    if rows is None:
        return None
    corrected, uncorrected, pending, failed = rows
    return RemappedRows(int(corrected), int(uncorrected), bool(pending), bool(failed))


def _reports_xid(driver: Driver, handle: Any) -> bool | None:
    types = driver.ask("nvmlDeviceGetSupportedEventTypes", handle)
    if types is None:
        return None
    return bool(types & driver.pynvml.nvmlEventTypeXidCriticalError)


def _pci(driver: Driver, handle: Any) -> str | None:
    info = driver.ask("nvmlDeviceGetPciInfo", handle)
    if info is None:
        return None
    bus_id = info.busId
    return normalize_pci(bus_id.decode("ascii", "replace") if isinstance(bus_id, bytes) else bus_id)


_NO_INSTANCE: Final = 0xFFFFFFFF


def instance_id(value: int | None) -> int | None:
    """A MIG instance's id; the driver says "none" with all bits set."""
    return None if value is None or value == _NO_INSTANCE else int(value)


def outcome_of(pynvml: Any, error: Exception) -> tuple[NvmlOutcome, str]:
    """The outcome that an NVML error stands for, and one line on it."""
    code = getattr(error, "value", None)
    outcomes: dict[int, tuple[NvmlOutcome, str]] = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: ("no_driver", "libnvidia-ml.so.1 is not installed"),
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: ("no_driver", "the NVIDIA driver is not loaded"),
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
            "library_mismatch",
            "driver library and kernel module differ in version: reboot, or reload the module",
        ),
        pynvml.NVML_ERROR_NO_PERMISSION: (
            "no_permission",
            "this user may not open /dev/nvidia*: check their permissions and the device cgroup",
        ),
        pynvml.NVML_ERROR_GPU_IS_LOST: ("gpu_lost", "it has fallen off the bus"),
        pynvml.NVML_ERROR_RESET_REQUIRED: ("gpu_lost", "it needs a reset"),
    }
    return outcomes.get(code or -1, ("error", f"NVML: {error}"))
