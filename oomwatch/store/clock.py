"""Notices when the wall clock is set, by a clock that counts from boot and cannot be."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

STEP_MS: Final = 500  # a smaller difference is drift, or a slow call


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """A stretch of time in which wall and boot clock went together.

    Wall clock = boot clock + `offset_ms`; it began at `from_ms` of the wall clock.
    """

    boot_id: str
    offset_ms: int
    from_ms: int


def read_boot_id(path: Path = Path("/proc/sys/kernel/random/boot_id")) -> str:
    """The kernel's name of this boot; empty where it is hidden."""
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def wall_ms() -> int:
    """Wall clock, milliseconds of the UTC epoch."""
    return time.time_ns() // 1_000_000


def boot_ms() -> int:
    """Milliseconds since boot, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


class ClockWatch:
    """Gives the clock that holds now; a new one after the wall clock was set.

    `last` is the one the store knew last: it goes on if nothing was set since.
    """

    def __init__(
        self,
        last: Clock | None = None,
        *,
        wall: Callable[[], int] = wall_ms,
        boot: Callable[[], int] = boot_ms,
        boot_id: str | None = None,
    ) -> None:
        self._wall, self._boot = wall, boot
        self._lock = threading.Lock()
        self._boot_id = read_boot_id() if boot_id is None else boot_id
        self._clock = last if last is not None and last.boot_id == self._boot_id else None

    def now(self) -> Clock:
        """The clock that holds now; any thread may ask."""
        with self._lock:
            wall = self._wall()
            offset = wall - self._boot()
            if self._clock is None or abs(offset - self._clock.offset_ms) > STEP_MS:
                self._clock = Clock(self._boot_id, offset, wall)
            return self._clock
