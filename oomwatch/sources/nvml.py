"""NVIDIA GPUs, through the driver's management library (NVML) and its binding `pynvml`.

What a driver or a board cannot tell is None. How the reading as a whole went is a named outcome:

ok               everything that this board and driver offer was read
no_driver        the library is not installed, or the kernel module is not loaded
library_mismatch the library and the kernel module are of different versions (reboot, or reload)
no_permission    the device nodes may not be opened by this user, or are missing in this container
gpu_lost         a GPU fell off the bus or needs a reset
unified_memory   a GPU shares the host's memory: NVML has no memory figures of it
wsl              Windows Subsystem for Linux: NVML has no figures per process
hung             a call did not come back before the deadline; the driver may be stuck
not_available    accelerators of another make only; they are not read
error            anything else, with the driver's own word for it
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import threading
import time
import types
import warnings
from typing import Any

from oomwatch.records import GpuProcessSample, GpuSample
from oomwatch.sources.accelerators import NVIDIA, find_accelerators, is_wsl
from oomwatch.sources.nvml_device import GpuReading, MigInstance, instance_id, read_gpu
from oomwatch.sources.nvml_driver import WORST_FIRST, Call, Driver, NvmlOutcome, outcome_of
from oomwatch.sources.nvml_facts import EccCounts, RemappedRows, read_cuda_version, read_facts

__all__ = [
    "EccCounts",
    "GpuReading",
    "MigInstance",
    "NvmlOutcome",
    "NvmlReading",
    "NvmlSession",
    "RemappedRows",
    "Roots",
    "XidEvent",
    "XidWatcher",
    "load_binding",
    "read_gpus",
]
from oomwatch.sources.procfs import read_comm

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class NvmlReading:
    """One reading of all GPUs. With `hung`, the GPUs that answered before are in it."""

    at: float
    outcome: NvmlOutcome
    detail: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: tuple[GpuReading, ...] = ()
    processes: tuple[GpuProcessSample, ...] = ()
    other_vendors: tuple[str, ...] = ()

    @property
    def samples(self) -> tuple[GpuSample, ...]:
        """Samples of the whole GPUs, by index."""
        return tuple(gpu.sample for gpu in self.gpus)


@dataclasses.dataclass(frozen=True, slots=True)
class XidEvent:
    """An Xid as NVML reports it; the kernel log may hold the same one (join by GPU and code)."""

    at: float
    gpu: int | None
    uuid: str | None
    xid: int
    gpu_instance: int | None = None
    compute_instance: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Roots:
    """Where the host's trees are mounted."""

    proc: str = "/proc"
    sys: str = "/sys"
    dev: str = "/dev"


@dataclasses.dataclass(slots=True)
class Draft:
    """What a reading thread has so far; the waiting thread takes it as it is at the deadline."""

    outcome: NvmlOutcome = "ok"
    detail: str | None = None
    driver_version: str | None = None
    cuda_version: str | None = None
    gpus: list[GpuReading] = dataclasses.field(default_factory=list)
    processes: list[GpuProcessSample] = dataclasses.field(default_factory=list)


class NvmlSession:
    """Keeps the library initialised between readings; one at a time, from any thread.

    Calls run in a daemon thread of their own. One that does not come back within the deadline
    makes the reading `hung`, and so are all later ones until it does come back.
    """

    def __init__(self, *, roots: Roots | None = None) -> None:
        self._roots = roots or Roots()
        self._initialized = False
        self._call = Call()
        self._done: threading.Event | None = None  # of the last reading

    def read(self, deadline_seconds: float = 5.0) -> NvmlReading:
        """One reading; the deadline is that of each call. Never raises for what the driver does."""
        at = time.time()
        vendors = find_accelerators(sys_root=self._roots.sys, dev_root=self._roots.dev)
        others = tuple(vendor for vendor in vendors if vendor != NVIDIA)
        if self._is_stuck():
            return NvmlReading(at, "hung", self._hung_detail(), other_vendors=others)
        load_binding()  # here, since a filter of warnings is not for a second thread to set
        draft, done = Draft(), threading.Event()
        self._call.enter("start")
        threading.Thread(
            target=self._work, args=(draft, done, at), name="nvml", daemon=True
        ).start()
        self._done = done
        while not done.wait(max(0.001, self._call.started + deadline_seconds - time.monotonic())):
            if time.monotonic() - self._call.started >= deadline_seconds:
                break
        if done.is_set():
            outcome, detail = self._judge(draft, vendors)
        else:
            outcome, detail = "hung", self._hung_detail()
        return NvmlReading(
            at,
            outcome,
            detail,
            draft.driver_version,
            draft.cuda_version,
            tuple(draft.gpus),
            tuple(draft.processes),
            others,
        )

    def close(self) -> None:
        """Let go of the library, unless a call is still stuck in it."""
        if self._initialized and not self._is_stuck():
            pynvml = load_binding()
            try:
                pynvml.nvmlShutdown()
            except pynvml.NVMLError as error:
                _log.debug("nvmlShutdown: %s", error)
        self._initialized = False

    def _is_stuck(self) -> bool:
        return self._done is not None and not self._done.is_set()

    def _hung_detail(self) -> str:
        waited = time.monotonic() - self._call.started
        return f"{self._call.name} has not returned for {waited:.0f} s; the driver may be stuck"

    def _work(self, draft: Draft, done: threading.Event, at: float) -> None:
        try:
            self._fill(draft, at)
        except Exception as error:  # noqa: BLE001 - whatever it is, the reader must not wait for it
            draft.outcome, draft.detail = "error", f"{type(error).__name__}: {error}"
        finally:
            done.set()

    def _fill(self, draft: Draft, at: float) -> None:
        pynvml = load_binding()
        try:
            if not self._initialized:
                self._call.enter("nvmlInit")
                pynvml.nvmlInit()
                self._initialized = True
            _fill(draft, pynvml, self._call, at, proc_root=self._roots.proc)
        except pynvml.NVMLError as error:
            draft.outcome, draft.detail = outcome_of(pynvml, error)
            if self._initialized:
                # Start afresh next time: after a reset the old handles answer nothing.
                self._call.enter("nvmlShutdown")
                self._initialized = False
                pynvml.nvmlShutdown()

    def _judge(self, draft: Draft, vendors: tuple[str, ...]) -> tuple[NvmlOutcome, str | None]:
        """The outcome of the whole, from those of the parts and from what else the host has."""
        others = [vendor for vendor in vendors if vendor != NVIDIA]
        if draft.outcome == "no_driver" or (draft.outcome == "ok" and not draft.gpus):
            if NVIDIA in vendors:
                return draft.outcome, draft.detail and (
                    f"{draft.detail}; an NVIDIA GPU is in this host"
                )
            if others:
                return "not_available", f"{' and '.join(others)} hardware is not read"
        if draft.outcome != "ok":
            return draft.outcome, draft.detail
        for outcome in WORST_FIRST:
            named = [gpu for gpu in draft.gpus if gpu.outcome == outcome]
            if named:
                indexes = ", ".join(str(gpu.sample.gpu) for gpu in named)
                return named[0].outcome, f"GPU {indexes}: {named[0].note}"
        hidden = [gpu for gpu in draft.gpus if not gpu.processes_known]
        if hidden and is_wsl(proc_root=self._roots.proc, dev_root=self._roots.dev):
            return "wsl", "the driver of Windows gives no figures per process"
        notes = [f"GPU {gpu.sample.gpu}: {gpu.note}" for gpu in draft.gpus if gpu.note]
        return "ok", "; ".join(notes) or None


def _fill(draft: Draft, pynvml: Any, call: Call, at: float, *, proc_root: str) -> None:
    """All GPUs into `draft`, one by one. Raises `NVMLError` if none can be reached."""
    driver = Driver(pynvml, call)
    name_of = functools.partial(read_comm, proc_root=proc_root)
    draft.driver_version = driver.ask("nvmlSystemGetDriverVersion")
    draft.cuda_version = read_cuda_version(driver)
    call.enter("nvmlDeviceGetCount")
    for index in range(pynvml.nvmlDeviceGetCount()):
        driver.gpu = index
        try:
            call.enter("nvmlDeviceGetHandleByIndex", index)
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            facts = read_facts(driver, handle)
            reading, processes = read_gpu(driver, handle, at, facts, name_of)
        except pynvml.NVMLError as error:
            outcome, note = outcome_of(pynvml, error)
            reading = GpuReading(GpuSample(at, index), outcome, processes_known=False, note=note)
            processes = []
        draft.gpus.append(reading)
        draft.processes.extend(processes)


def read_gpus(deadline_seconds: float = 5.0, *, roots: Roots | None = None) -> NvmlReading:
    """One reading of all GPUs of this host; see `NvmlSession` for repeated ones."""
    session = NvmlSession(roots=roots)
    try:
        return session.read(deadline_seconds)
    finally:
        session.close()


class XidWatcher:
    """Waits for Xids of all GPUs that report them. Use it in a thread that may wait."""

    def __init__(self) -> None:
        """Raises `pynvml.NVMLError` if events are not offered here."""
        self._pynvml = load_binding()
        self._pynvml.nvmlInit()
        self._gpus: dict[str, int] = {}
        self._set = self._pynvml.nvmlEventSetCreate()
        wanted = self._pynvml.nvmlEventTypeXidCriticalError
        for index in range(self._pynvml.nvmlDeviceGetCount()):
            try:
                handle = self._pynvml.nvmlDeviceGetHandleByIndex(index)
                if self._pynvml.nvmlDeviceGetSupportedEventTypes(handle) & wanted:
                    self._pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
                    self._gpus[self._pynvml.nvmlDeviceGetUUID(handle)] = index
            except self._pynvml.NVMLError as error:
                _log.debug("no Xid events of GPU %d: %s", index, error)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Indexes of the GPUs that report."""
        return tuple(sorted(self._gpus.values()))

    def wait(self, timeout_seconds: float) -> XidEvent | None:
        """The next Xid, or None after the timeout."""
        pynvml = self._pynvml
        try:
            event = pynvml.nvmlEventSetWait_v2(self._set, max(0, round(timeout_seconds * 1000)))
        except pynvml.NVMLError_Timeout:
            return None
        try:
            uuid = pynvml.nvmlDeviceGetUUID(event.device)
        except pynvml.NVMLError:
            uuid = None  # a GPU that has just been lost does not tell its name
        return XidEvent(
            time.time(),
            self._gpus.get(uuid) if uuid else None,
            uuid,
            int(event.eventData),
            instance_id(event.gpuInstanceId),
            instance_id(event.computeInstanceId),
        )

    def close(self) -> None:
        """Stop listening."""
        self._pynvml.nvmlEventSetFree(self._set)
        self._pynvml.nvmlShutdown()


@functools.cache
def load_binding() -> types.ModuleType:
    """The module pynvml, without the warning of the deprecated distribution of that name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pynvml package is deprecated.*")
        import pynvml  # noqa: PLC0415 - 6 MB, only where GPUs are read
    if _deprecated_distribution():
        _log.debug("the deprecated package pynvml is installed beside nvidia-ml-py; remove it")
    return pynvml  # type: ignore[no-any-return]


def _deprecated_distribution() -> bool:
    try:
        importlib.metadata.distribution("pynvml")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
