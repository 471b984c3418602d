"""Conditions of the GPUs: lost, driver silent, memory held by the dead, neighbours that grow."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Forecast
from oomwatch.detect.levels import Level, Switch, held_families
from oomwatch.detect.points import Point
from oomwatch.detect.track import Track
from oomwatch.records import Evidence, GpuProcessSample, GpuSample, Trigger, TriggerKind
from oomwatch.units import MIB, format_bytes, format_duration

_LEAST_HEADROOM: Final = 256 * MIB
_MOST_LEVELS: Final = 1024
_GROWTH_HOLD_SECONDS: Final = 15.0
"""Longer than a search for engines takes: one that starts is a neighbour until it is found."""
_PACE_READINGS: Final = 10
_FORECAST_LEAST_SECONDS: Final = 300.0


class GpuWatch:
    """All conditions of one GPU; fed with each sweep."""

    def __init__(self, gpu: int, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self.gpu = gpu
        self._rules = rules
        self._horizon_seconds = forecasts.gpu_horizon_seconds
        room = rules.gpu_headroom
        self._headroom = [
            Switch(Level(name, -enter, -room.clear_bytes, room.hold_seconds))
            for name, enter in (("warn", room.warn_bytes), ("critical", room.critical_bytes))
        ]
        self._used = Track(
            forecasts.window_seconds, _FORECAST_LEAST_SECONDS, forecasts.confidence_ratio
        )
        self._orphans: dict[int, Switch] = {}
        self._neighbours: dict[int, tuple[Switch, collections.deque[Point]]] = {}
        self._total_bytes: int | None = None
        self.lasts_seconds: float | None = None
        """How long the headroom lasts at the pace of the last readings; None: it does not shrink.

        May be read by any thread.
        """
        self.ahead: Forecast | None = None
        """The last forecast, near or far."""

    def restart(self) -> None:
        """An engine starts or has ended here: what was seen before is no trend."""
        self._used.clear()
        self.lasts_seconds = None

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        families = {
            "gpu_memory": [*self._headroom, *(switch for switch, _ in self._neighbours.values())],
            "orphan": [*self._orphans.values()],
        }
        return held_families(families, now, self._rules)

    def feed(
        self,
        sample: GpuSample | None,
        holders: Iterable[GpuProcessSample],
        now: float,
        *,
        served: bool,
        engine_pids: Collection[int],
        dead: Mapping[int, str],
    ) -> list[Trigger]:
        """Take a sweep at monotonic time `now`.

        `served`: whether an engine is known to run on this GPU, also where its processes are not
        seen; `engine_pids` are the processes of engines that live; `dead` are processes left
        behind, with the id of the engine that is gone.
        """
        holders = list(holders)
        served = served or any(holder.pid in engine_pids for holder in holders)
        found: list[Trigger] = []
        if sample is not None and sample.free_bytes is not None:
            free = sample.free_bytes if sample.free_min_bytes is None else sample.free_min_bytes
            total = sample.total_bytes
            if total is not None:
                self._used.add(now, total - free)
                self._total_bytes = total
                pace = self._used.pace(_PACE_READINGS)
                self.lasts_seconds = None if pace is None else free / pace
            found += self._short(sample, free, now, served=served)
        orphans, neighbours = set(), set()
        for holder in holders:
            if holder.pid in dead:
                orphans.add(holder.pid)
                found += self._orphan(holder, dead[holder.pid], now)
            elif served and holder.pid not in engine_pids:
                neighbours.add(holder.pid)
                found += self._neighbour(holder, now)
        for gone in self._orphans.keys() - orphans:
            del self._orphans[gone]
        for gone in self._neighbours.keys() - neighbours:
            del self._neighbours[gone]
        return found

    def predict(self, at: float, now: float) -> Trigger | None:
        """The headroom will be used up soon, if it goes on like this. `at` is epoch time."""
        self.ahead = None
        if self._total_bytes is None:
            return None
        total = self._total_bytes
        ahead = self.ahead = self._used.forecast(now, total - _LEAST_HEADROOM)
        if ahead is None or ahead.eta_seconds > self._horizon_seconds:
            return None
        text = (
            f"GPU {self.gpu}: {format_bytes(total - ahead.level)} free and falling by "
            f"{format_bytes(ahead.slope_per_second * 60)} a minute: used up in "
            f"{format_duration(ahead.eta_seconds)} ({format_duration(ahead.eta_low_seconds)} to "
            f"{format_duration(ahead.eta_high_seconds)})"
        )
        return self._trigger(
            "forecast_gpu",
            at,
            text,
            eta_seconds=ahead.eta_seconds,
            eta_low_seconds=ahead.eta_low_seconds,
            eta_high_seconds=ahead.eta_high_seconds,
            free_bytes=round(total - ahead.level),
            slope_bytes_per_second=ahead.slope_per_second,
        )

    def _short(self, sample: GpuSample, free: int, now: float, *, served: bool) -> list[Trigger]:
        value = -free if served else -math.inf  # memory that no engine needs is never short
        entered = [s for s in self._headroom if s.feed(now, value) == "entered"]
        if not entered:
            return []
        text = (
            f"GPU {self.gpu}: {format_bytes(free)} of {format_bytes(sample.total_bytes)} free, "
            "with an engine running on it"
        )
        level = entered[-1].level.name
        return [self._trigger("gpu_headroom", sample.at, text, level=level, free_bytes=free)]

    def _orphan(self, holder: GpuProcessSample, engine: str, now: float) -> list[Trigger]:
        rule = self._rules.orphan_holder
        switch = self._orphans.setdefault(
            holder.pid, Switch(Level("orphaned", 1, 1, rule.hold_seconds))
        )
        holds = holder.used_bytes is None or holder.used_bytes >= rule.min_size_bytes
        if switch.feed(now, float(holds)) != "entered":
            return []
        text = (
            f"{holder.name or 'a process'} (PID {holder.pid}) still holds "
            f"{format_bytes(holder.used_bytes)} on GPU {self.gpu}; its server is gone"
        )
        return [
            self._trigger(
                "orphan_holder",
                holder.at,
                text,
                engine_id=engine,
                pid=holder.pid,
                held_bytes=holder.used_bytes,
            )
        ]

    def _neighbour(self, holder: GpuProcessSample, now: float) -> list[Trigger]:
        if holder.used_bytes is None:
            return []
        rule = self._rules.neighbour_growth
        least = rule.min_growth_bytes
        switch, levels = self._neighbours.setdefault(
            holder.pid,
            (
                Switch(Level("growth", least, least / 2, _GROWTH_HOLD_SECONDS)),
                collections.deque(maxlen=_MOST_LEVELS),
            ),
        )
        levels.append((now, holder.used_bytes))
        while now - levels[0][0] > rule.window_seconds:
            levels.popleft()
        grown = holder.used_bytes - min(value for _, value in levels)
        if switch.feed(now, grown) != "entered":
            return []
        text = (
            f"{holder.name or 'a process'} (PID {holder.pid}) beside the engine on GPU {self.gpu} "
            f"has grown by {format_bytes(grown)} to {format_bytes(holder.used_bytes)}"
        )
        return [
            self._trigger(
                "neighbour_growth",
                holder.at,
                text,
                pid=holder.pid,
                grown_bytes=round(grown),
                held_bytes=holder.used_bytes,
            )
        ]

    def _trigger(
        self,
        kind: TriggerKind,
        at: float,
        text: str,
        *,
        engine_id: str | None = None,
        pid: int | None = None,
        **values: object,
    ) -> Trigger:
        evidence = (Evidence("nvml", str(pid or f"GPU {self.gpu}"), at=at, text=text),)
        return Trigger(kind, at, engine_id, self.gpu, pid, text, values, evidence)


def lost(gpu: int, at: float, detail: str) -> Trigger:
    """The driver says that a GPU is gone."""
    text = f"GPU {gpu} is lost: {detail}"
    return Trigger(
        "gpu_lost", at, gpu=gpu, text=text, evidence=(Evidence("nvml", f"GPU {gpu}", at, text),)
    )


def silent(at: float, seconds: float) -> Trigger:
    """A driver call has not come back."""
    text = f"the NVIDIA driver has not answered for {format_duration(seconds)}"
    return Trigger(
        "driver_unresponsive",
        at,
        text=text,
        values={"seconds": seconds},
        evidence=(Evidence("nvml", "driver", at, text),),
    )
