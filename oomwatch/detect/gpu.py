"""Conditions of the GPUs: lost, driver silent, memory held by the dead, neighbours that grow."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Point, forecast
from oomwatch.detect.levels import Level, Switch
from oomwatch.records import Evidence, GpuProcessSample, GpuSample, Trigger, TriggerKind
from oomwatch.units import MIB, format_bytes, format_duration

_LEAST_HEADROOM: Final = 256 * MIB
_FORECAST_POINTS: Final = 4096
_GROWTH_HOLD_SECONDS: Final = 5.0
_FORECAST_LEAST_SECONDS: Final = 300.0


class GpuWatch:
    """All conditions of one GPU; fed with each sweep."""

    def __init__(self, gpu: int, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self.gpu = gpu
        self._rules = rules
        self._forecasts = forecasts
        room = rules.gpu_headroom
        self._headroom = [
            Switch(Level(name, -enter, -room.clear_bytes, room.hold_seconds))
            for name, enter in (("warn", room.warn_bytes), ("critical", room.critical_bytes))
        ]
        self._free: collections.deque[Point] = collections.deque(maxlen=_FORECAST_POINTS)
        self._orphans: dict[int, Switch] = {}
        self._neighbours: dict[int, tuple[Switch, collections.deque[Point]]] = {}
        self._total_bytes: int | None = None

    def restart(self) -> None:
        """An engine starts or has ended here: what was seen before is no trend."""
        self._free.clear()

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        rules = self._rules
        growing = [switch for switch, _ in self._neighbours.values()]
        families = {
            "gpu_memory": [*self._headroom, *growing],
            "orphan": [*self._orphans.values()],
        }
        return {
            name
            for name, switches in families.items()
            if any(
                s.on or s.flaps(now, rules.flap_window_seconds) >= rules.flap_count
                for s in switches
            )
        }

    def lasts_seconds(self) -> float | None:
        """For how long the headroom lasts at the pace of the last readings; None: for ever."""
        if len(self._free) < 2:
            return None
        (then, before), (now, free) = self._free[max(-10, -len(self._free))], self._free[-1]
        if now <= then or free >= before:
            return None
        return free / ((before - free) / (now - then))

    def feed(
        self,
        sample: GpuSample | None,
        holders: Iterable[GpuProcessSample],
        now: float,
        *,
        engine_pids: Collection[int],
        dead: Mapping[int, str],
    ) -> list[Trigger]:
        """Take a sweep at monotonic time `now`.

        `engine_pids` are the processes of engines that live; `dead` are processes left behind,
        with the id of the engine that is gone.
        """
        found: list[Trigger] = []
        if sample is not None and sample.free_bytes is not None:
            free = sample.free_bytes if sample.free_min_bytes is None else sample.free_min_bytes
            self._free.append((now, free))
            self._total_bytes = sample.total_bytes
            if engine_pids:
                found += self._short(sample, free, now)
        seen = set()
        for holder in holders:
            seen.add(holder.pid)
            if holder.pid in dead:
                found += self._orphan(holder, dead[holder.pid], now)
            elif engine_pids and holder.pid not in engine_pids:
                found += self._neighbour(holder, now)
        for gone in (set(self._orphans) | set(self._neighbours)) - seen:
            self._orphans.pop(gone, None)
            self._neighbours.pop(gone, None)
        return found

    def predict(self, at: float) -> Trigger | None:
        """The headroom will be used up soon, if it goes on like this. Called every few seconds."""
        if not self._free:
            return None
        total = self._total_bytes or max(value for _, value in self._free)
        begin = self._free[-1][0] - self._forecasts.window_seconds
        used = [(when, total - value) for when, value in self._free if when >= begin]
        ahead = forecast(
            used,
            total - _LEAST_HEADROOM,
            least_seconds=_FORECAST_LEAST_SECONDS,
            confidence=self._forecasts.confidence_ratio,
        )
        if ahead is None or ahead.eta_seconds > self._forecasts.gpu_horizon_seconds:
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

    def _short(self, sample: GpuSample, free: int, now: float) -> list[Trigger]:
        entered = [s for s in self._headroom if s.feed(now, -free) == "entered"]
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
                collections.deque(maxlen=_FORECAST_POINTS),
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
