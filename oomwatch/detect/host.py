"""Conditions of the host: kills that a cgroup counted, and memory that runs short."""

from __future__ import annotations

from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Forecast
from oomwatch.detect.levels import Level, Switch, held_families
from oomwatch.detect.track import Track
from oomwatch.records import Evidence, HostSample, Trigger
from oomwatch.units import format_bytes, format_duration

_LEAST_SECONDS: Final = 300.0
_RESERVE_RATIO: Final = 0.02
"""The kernel kills before the last page is gone."""


class HostWatch:
    """Memory of the host; fed with each reading."""

    def __init__(self, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self._rules = rules
        self._horizon_seconds = forecasts.host_horizon_seconds
        room = rules.host_headroom
        self._headroom = [
            Switch(Level(name, -enter, -room.clear_ratio, room.hold_seconds))
            for name, enter in (("warn", room.warn_ratio), ("critical", room.critical_ratio))
        ]
        self._used = Track(forecasts.window_seconds, _LEAST_SECONDS, forecasts.confidence_ratio)
        self._total_bytes: int | None = None
        self.ahead: Forecast | None = None
        """The last forecast, near or far."""

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        return held_families({"host_memory": self._headroom}, now, self._rules)

    def feed(self, sample: HostSample, now: float) -> list[Trigger]:
        """Take a reading at monotonic time `now`."""
        available, total = sample.mem_available_bytes, sample.mem_total_bytes
        if available is None or not total:
            return []
        self._used.add(now, total - available)
        self._total_bytes = total
        entered = [s for s in self._headroom if s.feed(now, -available / total) == "entered"]
        if not entered:
            return []
        text = f"{format_bytes(available)} of {format_bytes(total)} host memory is available"
        values = {"level": entered[-1].level.name, "available_bytes": available}
        evidence = (Evidence("process", "host memory", sample.at, text, available, "bytes"),)
        return [Trigger("host_headroom", sample.at, text=text, values=values, evidence=evidence)]

    def predict(self, at: float, now: float) -> Trigger | None:
        """The host's memory will be used up soon, if it goes on like this. `at` is epoch time."""
        if self._total_bytes is None:
            return None
        total = self._total_bytes
        ahead = self.ahead = self._used.forecast(now, total * (1 - _RESERVE_RATIO))
        if ahead is None or ahead.eta_seconds > self._horizon_seconds:
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


def cgroup_kill(group: str, count: int, at: float, engine_id: str) -> Trigger:
    """The kernel has killed in the memory cgroup of an engine."""
    text = f"the kernel killed {count} process(es) of the memory cgroup {group}"
    return Trigger(
        "cgroup_oom",
        at,
        engine_id,
        text=text,
        values={"group": group, "kills": count},
        evidence=(Evidence("kernel", group, at, text, count),),
    )
