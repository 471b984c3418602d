"""What the threads of the agent hand to its detector, each with the monotonic time it was seen."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Mapping
from typing import Final

from oomwatch.config.schema import Config
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


@dataclasses.dataclass(frozen=True, slots=True)
class Reconfigured:
    """The configuration was read anew."""

    now: float
    config: Config


Message = (
    GpusSwept
    | PageRead
    | HostRead
    | TellingLines
    | ProcessEnded
    | KernelSaid
    | Discovered
    | Seen
    | Reconfigured
)
READINGS: Final = (GpusSwept, PageRead, HostRead)
"""Those that the next one makes up for."""
_MOST_READINGS: Final = 512
"""A minute of everything at full rate; a detector that is further behind wants fresh ones."""


class Mailbox:
    """The bounded queue before the detector; readings that find many others are dropped, counted.

    What happens once (an end, a line that tells something) waits for room rather than be lost.
    """

    def __init__(self, capacity: int) -> None:
        self._queue: queue.Queue[Message] = queue.Queue(capacity)
        self._lock = threading.Lock()
        self.dropped_total = 0

    def __len__(self) -> int:
        return self._queue.qsize()

    def put(self, message: Message) -> None:
        """Hand a message over, from any thread."""
        is_reading = isinstance(message, READINGS)
        try:
            if is_reading and self._queue.qsize() >= _MOST_READINGS:
                raise queue.Full  # noqa: TRY301 - as if it were
            self._queue.put(message, block=not is_reading, timeout=1.0)
        except queue.Full:
            with self._lock:
                self.dropped_total += 1

    def take(self, timeout_seconds: float) -> Message | None:
        """The next message; None if none came in that time."""
        try:
            return self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
