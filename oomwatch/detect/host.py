"""Conditions of the host: kills the cgroup counted, memory that will be used up."""

from __future__ import annotations

import collections
from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Point, forecast
from oomwatch.detect.levels import Level, Switch
from oomwatch.records import Evidence, HostSample, Trigger
from oomwatch.units import format_bytes, format_duration

_POINTS: Final = 4096
_LEAST_SECONDS: Final = 300.0
_RESERVE_RATIO: Final = 0.02
"""The kernel kills before the last page is gone."""


class HostWatch:
    """Memory of the host, and the kill counters of the watched cgroups."""

    def __init__(self, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self._rules = rules
        self._forecasts = forecasts
        room = rules.host_headroom
        self._headroom = [
            Switch(Level(name, -enter, -room.clear_ratio, room.hold_seconds))
            for name, enter in (("warn", room.warn_ratio), ("critical", room.critical_ratio))
        ]
        self._available: collections.deque[Point] = collections.deque(maxlen=_POINTS)
        self._total_bytes: int | None = None
        self._kills: dict[str, int] = {}

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        rules = self._rules
        held = any(
            s.on or s.flaps(now, rules.flap_window_seconds) >= rules.flap_count
            for s in self._headroom
        )
        return {"host_memory"} if held else set()

    def feed(self, sample: HostSample, now: float) -> list[Trigger]:
        """Take a reading at monotonic time `now`."""
        available, total = sample.mem_available_bytes, sample.mem_total_bytes
        if available is None or not total:
            return []
        self._available.append((now, available))
        self._total_bytes = total
        entered = [s for s in self._headroom if s.feed(now, -available / total) == "entered"]
        if not entered:
            return []
        text = f"{format_bytes(available)} of {format_bytes(total)} host memory is available"
        values = {"level": entered[-1].level.name, "available_bytes": available}
        evidence = (Evidence("process", "host memory", sample.at, text, available, "bytes"),)
        return [Trigger("host_headroom", sample.at, text=text, values=values, evidence=evidence)]

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
        if not self._available:
            return None
        begin = self._available[-1][0] - self._forecasts.window_seconds
        used = [(when, total - value) for when, value in self._available if when >= begin]
        ahead = forecast(
            used,
            total * (1 - _RESERVE_RATIO),
            least_seconds=_LEAST_SECONDS,
            confidence=self._forecasts.confidence_ratio,
        )
        if ahead is None or ahead.eta_seconds > self._forecasts.host_horizon_seconds:
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
