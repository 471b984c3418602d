"""Sweeps all GPUs and their processes, again and again, in a thread of its own.

A call of the driver that hangs holds up this thread and nothing else; `silent_seconds` tells how
long. A GPU that is lost leaves the others as they are; after a reset, or when the driver was loaded
anew, the library is opened again. Peaks between two sweeps that are handed on are kept.

What never or slowly changes (names, addresses, error counts) is asked every ten seconds: that
halves the cost of a sweep, and the calls that may hang.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from oomwatch.records import GpuProcessSample, GpuSample
from oomwatch.sources.nvml import NvmlReading, load_binding
from oomwatch.sources.nvml_device import GpuReading, read_gpu
from oomwatch.sources.nvml_driver import WORST_FIRST, Call, Driver, NvmlOutcome, outcome_of
from oomwatch.sources.nvml_facts import GpuFacts, read_cuda_version, read_facts
from oomwatch.sources.paced import PacedThread
from oomwatch.sources.procfs import PROC_ROOT, read_comm

_log = logging.getLogger(__name__)

REOPEN_SECONDS: Final = 30.0
"""Between two tries to open the library again while a GPU is lost."""
_SLOW_SECONDS: Final = 10.0
_MAX_PAUSE_SECONDS: Final = 60.0

HandOn = Callable[[NvmlReading, float], None]
"""A sweep, with its monotonic time."""


class GpuSampler(PacedThread):
    """All GPUs every `interval_seconds`, of which one sweep each `keep_seconds` is handed on.

    That one says in `used_max_bytes` and `free_min_bytes` what the sweeps since the one before saw
    at most and at least. Both times may be set at any time.
    """

    def __init__(
        self,
        hand_on: HandOn,
        *,
        interval_seconds: float = 1.0,
        keep_seconds: float = 1.0,
        proc_root: str = PROC_ROOT,
        reopen_seconds: float = REOPEN_SECONDS,
    ) -> None:
        super().__init__("gpu sampler", interval_seconds)
        self.keep_seconds = keep_seconds
        self._hand_on = hand_on
        self._call = Call()
        self._in_call = False
        self._peaks: dict[tuple[int, str | None], _Peak] = {}
        self._kept_at: float | None = None
        self._failures = 0
        self._library = _Library(self._call, proc_root, reopen_seconds)

    def start(self) -> None:
        """Sweep now, and then on."""
        load_binding()  # here, since a filter of warnings is not for a second thread to set
        super().start()

    @property
    def silent_seconds(self) -> float:
        """How long the driver has not come back from the call it is in; 0 where it is in none."""
        started = self._call.started
        return max(0.0, time.monotonic() - started) if self._in_call else 0.0

    @property
    def silent_call(self) -> str | None:
        """The call that the driver is in: ``nvmlDeviceGetMemoryInfo of GPU 1``."""
        return self._call.name if self._in_call else None

    # ---------------------------------------------------------------- the thread
    def _pause_seconds(self) -> float:
        """The interval, or more where there is no driver to be asked."""
        backed_off = self.interval_seconds * 2.0 ** min(self._failures, 10)
        return max(self.interval_seconds, min(_MAX_PAUSE_SECONDS, backed_off))

    def _end(self) -> None:
        self._library.close()

    def _step(self) -> None:
        at, monotonic = time.time(), time.monotonic()
        self._call.enter("start")
        self._in_call = True
        try:
            reading = self._library.read(at, monotonic)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end the thread
            _log.exception("sweeping the GPUs")
            reading = NvmlReading(at, "error", f"{type(error).__name__}: {error}")
        finally:
            self._in_call = False
        self._failures = 0 if reading.gpus else self._failures + 1
        for sample in _all_samples(reading):
            self._peaks.setdefault(_key(sample), _Peak()).feed(sample)
        # A tenth of leeway: the clock of the sweeps is not that of those that are kept.
        since = None if self._kept_at is None else monotonic - self._kept_at
        if since is not None and since < self.keep_seconds - self.interval_seconds / 10:
            return
        self._kept_at = monotonic
        peaks, self._peaks = self._peaks, {}
        self._give(_with_peaks(reading, peaks), monotonic)

    def _give(self, reading: NvmlReading, monotonic: float) -> None:
        if self.stopping:
            return
        try:
            self._hand_on(reading, monotonic)
        except Exception:  # noqa: BLE001 - nor one of whoever takes the figures
            _log.exception("handing on a sweep of the GPUs")


class _Library:
    """The driver's library, open between sweeps."""

    def __init__(self, call: Call, proc_root: str, reopen_seconds: float) -> None:
        self._call = call
        self._proc_root = proc_root
        self._reopen_seconds = reopen_seconds
        self._driver: Driver | None = None
        self._opened_at = 0.0
        self._known: dict[str, int] = {}  # UUID to index of every GPU that was ever listed
        self._forget(0.0)

    def _forget(self, monotonic: float) -> None:
        """Ask everything anew."""
        self._learnt_at = monotonic
        self._versions: tuple[str | None, str | None] | None = None
        self._facts: dict[int, GpuFacts] = {}
        self._names: dict[int, str | None] = {}

    def read(self, at: float, monotonic: float) -> NvmlReading:
        """One sweep. What the driver does is an outcome."""
        pynvml = load_binding()
        if monotonic - self._learnt_at >= _SLOW_SECONDS:
            self._forget(monotonic)
        try:
            driver = self._open(pynvml, monotonic)
            gpus, processes = self._read_gpus(driver, at)
            version, cuda = self._versions = self._versions or _read_versions(driver)
        except pynvml.NVMLError as error:
            self.close()
            return NvmlReading(at, *outcome_of(pynvml, error))
        outcome, detail = self._judge(gpus)
        if outcome not in ("ok", "unified_memory") and (
            all(gpu.outcome != "ok" for gpu in gpus)
            or monotonic - self._opened_at >= self._reopen_seconds
        ):
            self.close()  # after a reset, or with another driver, the old handles answer nothing
        return NvmlReading(at, outcome, detail, version, cuda, tuple(gpus), tuple(processes))

    def close(self) -> None:
        """Let go of the library."""
        if self._driver is None:
            return
        self._driver = None
        pynvml = load_binding()
        self._call.enter("nvmlShutdown")
        try:
            pynvml.nvmlShutdown()
        except pynvml.NVMLError as error:
            _log.debug("nvmlShutdown: %s", error)

    def _open(self, pynvml: Any, monotonic: float) -> Driver:
        if self._driver is None:
            self._call.enter("nvmlInit")
            pynvml.nvmlInit()
            self._driver = Driver(pynvml, self._call)
            self._opened_at = monotonic
            self._forget(monotonic)
        return self._driver

    def _read_gpus(
        self, driver: Driver, at: float
    ) -> tuple[list[GpuReading], list[GpuProcessSample]]:
        pynvml = driver.pynvml
        gpus: list[GpuReading] = []
        processes: list[GpuProcessSample] = []
        self._call.enter("nvmlDeviceGetCount")
        for index in range(pynvml.nvmlDeviceGetCount()):
            driver.gpu = index
            try:
                self._call.enter("nvmlDeviceGetHandleByIndex", index)
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                if index not in self._facts:
                    self._facts[index] = read_facts(driver, handle)
                reading, held = read_gpu(driver, handle, at, self._facts[index], self._name_of)
            except pynvml.NVMLError as error:
                self._facts.pop(index, None)
                outcome, note = outcome_of(pynvml, error)
                lost = GpuSample(at, index, self._uuid(index))
                gpus.append(GpuReading(lost, outcome, processes_known=False, note=note))
                continue
            if reading.sample.uuid:
                self._known[reading.sample.uuid] = index
            gpus.append(reading)
            processes += held
        self._names = {process.pid: process.name for process in processes}
        return gpus, processes

    def _name_of(self, pid: int) -> str | None:
        """Of a process that held memory in the last sweep it is known."""
        if pid not in self._names:
            self._names[pid] = read_comm(pid, proc_root=self._proc_root)
        return self._names[pid]

    def _uuid(self, index: int) -> str | None:
        return next((uuid for uuid, known in self._known.items() if known == index), None)

    def _judge(self, gpus: list[GpuReading]) -> tuple[NvmlOutcome, str | None]:
        """The outcome of the whole: that of the worst part."""
        for outcome in WORST_FIRST:
            named = [gpu for gpu in gpus if gpu.outcome == outcome]
            if named:
                indexes = ", ".join(str(gpu.sample.gpu) for gpu in named)
                return named[0].outcome, f"GPU {indexes}: {named[0].note}"
        listed = {gpu.sample.uuid for gpu in gpus}
        # A library that was opened after a GPU was lost leaves it out, and counts the others anew.
        missing = [
            f"GPU {index} ({uuid})" for uuid, index in self._known.items() if uuid not in listed
        ]
        if missing:
            return "gpu_lost", f"{', '.join(missing)}: the driver no longer lists it"
        return "ok", None


def _read_versions(driver: Driver) -> tuple[str | None, str | None]:
    """Of the driver and of CUDA."""
    driver.gpu = None
    return driver.ask("nvmlSystemGetDriverVersion"), read_cuda_version(driver)


class _Peak:
    """The most used and least free bytes of one GPU or instance, of several sweeps."""

    def __init__(self) -> None:
        self.sweeps = 0
        self.used_max: int | None = None
        self.free_min: int | None = None

    def feed(self, sample: GpuSample) -> None:
        self.sweeps += 1
        if sample.used_bytes is not None:
            self.used_max = max(sample.used_bytes, self.used_max or 0)
        if sample.free_bytes is not None:
            free = sample.free_bytes
            self.free_min = free if self.free_min is None else min(free, self.free_min)


class _Key(NamedTuple):
    gpu: int
    uuid: str | None


def _key(sample: GpuSample) -> _Key:
    return _Key(sample.gpu, sample.uuid)


def _all_samples(reading: NvmlReading) -> list[GpuSample]:
    samples = [gpu.sample for gpu in reading.gpus]
    return samples + [one.sample for gpu in reading.gpus for one in gpu.instances]


def _with_peaks(reading: NvmlReading, peaks: dict[tuple[int, str | None], _Peak]) -> NvmlReading:
    """The sweep, with what those before it saw."""
    if all(peak.sweeps < 2 for peak in peaks.values()):
        return reading

    def peaked(sample: GpuSample) -> GpuSample:
        peak = peaks[_key(sample)]
        return dataclasses.replace(
            sample, used_max_bytes=peak.used_max, free_min_bytes=peak.free_min
        )

    gpus = tuple(
        dataclasses.replace(
            gpu,
            sample=peaked(gpu.sample),
            instances=tuple(
                dataclasses.replace(one, sample=peaked(one.sample)) for one in gpu.instances
            ),
        )
        for gpu in reading.gpus
    )
    return dataclasses.replace(reading, gpus=gpus)
