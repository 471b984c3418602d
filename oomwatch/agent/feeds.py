"""What is read of the host all the time, for the store and the detector: GPUs, memory, kernel."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from oomwatch.agent.engines import EngineTable
from oomwatch.agent.messages import GpusSwept, HostRead, KernelSaid, Mailbox, PageRead, Seen
from oomwatch.config.schema import Config
from oomwatch.detect.gpu import silent
from oomwatch.errors import OomwatchError, PermissionDeniedError
from oomwatch.records import EngineSample, HostSample, ProcessSample
from oomwatch.sources.kernel_follow import follow_kernel
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import look_again, read_host
from oomwatch.sources.sampler import GpuSampler
from oomwatch.store.writer import StoreWriter

_LOG = logging.getLogger(__name__)

_HOST_SECONDS: Final = 1.0
_MEMBER_SECONDS: Final = 5.0
"""A look at a process costs as much as one at a GPU, and host memory grows slowly."""
_KERNEL_RETRY_SECONDS: Final = 60.0


class Feeds:
    """Hands all readings to the store, then to the detector. Each feed has a thread of its own."""

    def __init__(
        self,
        config: Config,
        table: EngineTable,
        writer: StoreWriter,
        mailbox: Mailbox,
        stop: threading.Event,
    ) -> None:
        self.config = config
        self._table = table
        self._writer = writer
        self._mailbox = mailbox
        self._stop = stop
        self._outcome = ""
        self.sampler: GpuSampler | None = None
        self.last_reading: NvmlReading | None = None
        self.last_host: HostSample | None = None
        self.on_reading: Callable[[NvmlReading, float], None] = lambda _reading, _now: None
        """Is told of each sweep, with its monotonic time, in the sampler's thread."""
        self.fast = False
        """Whether something happens that is over in a moment."""
        self.driver_silent = False
        self.swept_at = 0.0
        self.host_read_at = 0.0
        """When these threads came round last, in monotonic seconds."""

    # ---------------------------------------------------------------- GPUs
    def start_sampler(self) -> None:
        """Read the GPUs from now on."""
        self.sampler = GpuSampler(
            self._on_sweep, interval_seconds=self.config.agent.sampling_interval_seconds
        )
        self.sampler.start()

    def set_rate(self, *, fast: bool) -> None:
        """Read at the rate of a burst, or at the usual one."""
        self.fast = fast
        if self.sampler is not None:
            agent = self.config.agent
            self.sampler.interval_seconds = (
                agent.burst_interval_seconds if fast else agent.sampling_interval_seconds
            )

    def _on_sweep(self, reading: NvmlReading, now: float) -> None:
        self.last_reading = reading
        self.swept_at = now
        if reading.outcome != self._outcome:
            self._outcome = reading.outcome
            log = _LOG.info if reading.outcome in {"ok", "no_driver"} else _LOG.warning
            log("NVIDIA driver: %s", reading.detail or reading.outcome)
        self._writer.put((*reading.samples, *reading.processes))
        lost = {
            gpu.sample.gpu: gpu.note or "the driver does not reach it"
            for gpu in reading.gpus
            if gpu.outcome == "gpu_lost"
        }
        self._mailbox.put(GpusSwept(now, reading.samples, reading.processes, lost))
        self.on_reading(reading, now)

    def check_driver(self, now: float) -> None:
        """A driver call that does not come back is a finding, not a fault of ours."""
        seconds = self.sampler.silent_seconds if self.sampler is not None else 0.0
        if seconds < self.config.detect.driver_unresponsive.after_seconds:
            self.driver_silent = False
        elif not self.driver_silent:
            self.driver_silent = True
            self._mailbox.put(Seen(now, silent(time.time(), seconds)))

    # ---------------------------------------------------------------- engines' pages
    def on_page(
        self, engine_id: str, samples: tuple[EngineSample, ...], now: float, answer_seconds: float
    ) -> None:
        """Take a metrics page."""
        # One start is one engine: the label of its first one is its id; others stay apart.
        named = tuple(
            dataclasses.replace(
                sample, engine=engine_id if index == 0 else f"{engine_id}/{sample.engine}"
            )
            for index, sample in enumerate(samples)
        )
        engine = self._table.get(engine_id)
        if engine is not None:
            engine.page_monotonic, engine.answer_seconds = now, answer_seconds
            engine.first_pool = samples[0].engine if samples else engine.first_pool
        self._writer.put(named)
        self._mailbox.put(PageRead(now, engine_id, named))

    # ---------------------------------------------------------------- host and kernel
    def watch_host(self) -> None:
        """Memory of the host once a second, of the engines' processes less often."""
        due = members_due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            now, at = time.monotonic(), time.time()
            due = max(due + _HOST_SECONDS, now)
            if self.config.sources.procfs:
                sample = self.last_host = read_host(at=at)
                self._writer.put((sample, *(self._members(at) if now >= members_due else ())))
                self._mailbox.put(HostRead(now, sample))
            if now >= members_due:
                members_due = now + (_HOST_SECONDS if self.fast else _MEMBER_SECONDS)
            self.host_read_at = now

    def _members(self, at: float) -> list[ProcessSample]:
        """The processes of the engines."""
        return [
            process.sample(at)
            for engine in self._table
            for member in engine.found.members
            if (process := look_again(member.process)) is not None
        ]

    def watch_kernel(self) -> None:
        """Follow what the kernel says; what cannot be read now is tried again, if it may be."""
        said = None
        while not self._stop.is_set():
            try:
                for event in follow_kernel(self._stop):
                    self._writer.put_events([event])
                    self._mailbox.put(KernelSaid(time.monotonic(), event))
            except OomwatchError as error:
                if str(error) != said:
                    said = str(error)
                    _LOG.warning("kernel log: %s", error)
                if isinstance(error, PermissionDeniedError):
                    return
            self._stop.wait(_KERNEL_RETRY_SECONDS)
