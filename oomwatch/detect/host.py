"""Conditions of the host: kills the cgroup counted, memory that will be used up."""

from __future__ import annotations

import collections
from typing import Final

from oomwatch.detect.forecast import Point, forecast
from oomwatch.records import Evidence, HostSample, Trigger
from oomwatch.units import format_bytes, format_duration

_POINTS: Final = 1800
_LEAST_SECONDS: Final = 300.0
_RESERVE_RATIO: Final = 0.02
"""The kernel kills before the last page is gone."""


class HostWatch:
    """Memory of the host, and the kill counters of the watched cgroups."""

    def __init__(self) -> None:
        self._available: collections.deque[Point] = collections.deque(maxlen=_POINTS)
        self._total_bytes: int | None = None
        self._kills: dict[str, int] = {}

    def feed(self, sample: HostSample, now: float) -> None:
        """Take a reading at monotonic time `now`."""
        if sample.mem_available_bytes is not None and sample.mem_total_bytes is not None:
            self._available.append((now, sample.mem_available_bytes))
            self._total_bytes = sample.mem_total_bytes

    def kills(self, group: str, count: int, at: float, engine_id: str | None) -> Trigger | None:
        """Take the kill counter of a cgroup; its first reading is the base."""
        before = self._kills.get(group)
        self._kills[group] = count
        if before is None or count <= before:
            return None
        text = f"the kernel killed {count - before} process(es) of the memory cgroup {group}"
        return Trigger(
            "cgroup_oom",
            at,
            engine_id,
            text=text,
            values={"group": group, "kills": count - before},
            evidence=(Evidence("kernel", group, at, text, count - before),),
        )

    def predict(self, at: float) -> Trigger | None:
        """The host's memory will be used up soon, if it goes on like this."""
        if self._total_bytes is None:
            return None
        total = self._total_bytes
        used = [(when, total - value) for when, value in self._available]
        ahead = forecast(used, total * (1 - _RESERVE_RATIO), least_seconds=_LEAST_SECONDS)
        if ahead is None:
            return None
        text = (
            f"host memory: {format_bytes(total - ahead.level)} available and falling by "
            f"{format_bytes(ahead.slope_per_second * 60)} a minute: used up in "
            f"{format_duration(ahead.eta_seconds)} ({format_duration(ahead.eta_low_seconds)} to "
            f"{format_duration(ahead.eta_high_seconds)})"
        )
        values = {
            "eta_seconds": ahead.eta_seconds,
            "eta_low_seconds": ahead.eta_low_seconds,
            "eta_high_seconds": ahead.eta_high_seconds,
            "available_bytes": round(total - ahead.level),
        }
        evidence = (Evidence("process", "host memory", at, text),)
        return Trigger("forecast_host", at, text=text, values=values, evidence=evidence)
