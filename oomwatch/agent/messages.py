"""What the threads of the agent hand to its detector, each with the monotonic time it was seen."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Mapping

from oomwatch.discovery import Discovery
from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    Trigger,
)
from oomwatch.sources.lifecycle import Ended


@dataclasses.dataclass(frozen=True, slots=True)
class GpusSwept:
    """One sweep of all GPUs; `lost` are GPUs the driver cannot reach any more, and why."""

    now: float
    gpus: tuple[GpuSample, ...]
    processes: tuple[GpuProcessSample, ...]
    lost: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class PageRead:
    """One metrics page of an engine."""

    now: float
    engine_id: str
    samples: tuple[EngineSample, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class HostRead:
    """One reading of the host's memory."""

    now: float
    sample: HostSample


@dataclasses.dataclass(frozen=True, slots=True)
class TellingLines:
    """Telling lines were read in a log of an engine; the tail of the log keeps them."""

    now: float
    engine_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A process of an engine ended."""

    now: float
    ended: Ended


@dataclasses.dataclass(frozen=True, slots=True)
class KernelSaid:
    """The kernel reported something."""

    now: float
    event: KernelEvent


@dataclasses.dataclass(frozen=True, slots=True)
class Discovered:
    """The host was searched for engines."""

    now: float
    discovery: Discovery
    done: threading.Event | None = None
    """Set once it was taken in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """A condition that another thread noticed."""

    now: float
    trigger: Trigger


Message = (
    GpusSwept | PageRead | HostRead | TellingLines | ProcessEnded | KernelSaid | Discovered | Seen
)


class Mailbox:
    """The bounded queue before the detector; readings that find it full are dropped and counted.

    What happens once (an end, a kernel line) waits for room rather than be lost.
    """

    def __init__(self, capacity: int) -> None:
        self._queue: queue.Queue[Message] = queue.Queue(capacity)
        self.dropped_total = 0

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, message: Message) -> None:
        """Hand a message over, from any thread."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            if isinstance(message, GpusSwept | PageRead | HostRead | TellingLines):
                self.dropped_total += 1
                return
            try:
                self._queue.put(message, timeout=1.0)
            except queue.Full:
                self.dropped_total += 1

    def take(self, timeout_seconds: float) -> Message | None:
        """The next message; None if none came in that time."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
