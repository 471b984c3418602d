"""What the agent itself takes of the host."""

from __future__ import annotations

import dataclasses
import time

import psutil

from oomwatch.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class OwnUsage:
    """One reading; `cpu_ratio` is the share of one core since the reading before."""

    rss_bytes: int
    cpu_ratio: float
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.rss_bytes)} resident, {self.cpu_ratio:.1%} of a core, "
            f"{self.threads} threads, {self.descriptors} open files"
        )


class OwnUsageMeter:
    """Reads it; each reading counts from the one before."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._cpu_seconds, self._at = self._cpu(), time.monotonic()

    def read(self) -> OwnUsage:
        """What is taken now."""
        cpu, now = self._cpu(), time.monotonic()
        elapsed = max(now - self._at, 1e-6)
        ratio, self._cpu_seconds, self._at = (cpu - self._cpu_seconds) / elapsed, cpu, now
        with self._process.oneshot():
            return OwnUsage(
                rss_bytes=self._process.memory_info().rss,
                cpu_ratio=ratio,
                threads=self._process.num_threads(),
                descriptors=self._process.num_fds(),
            )

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)
