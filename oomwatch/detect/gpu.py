"""Conditions of the GPUs: lost, driver silent, memory held by the dead, neighbours that grow."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from oomwatch.detect.forecast import Point, forecast
from oomwatch.detect.levels import Level, Switch
from oomwatch.records import Evidence, GpuProcessSample, GpuSample, Trigger, TriggerKind
from oomwatch.units import MIB, format_bytes, format_duration

ORPHANED: Final = Level("orphaned", enter=1, leave=1, hold_seconds=10)
"""Workers end a moment after their server."""
NEIGHBOUR_GROWTH: Final = Level("growth", enter=512 * MIB, leave=256 * MIB, hold_seconds=5)
_BASE_SECONDS: Final = 600.0
_LEAST_HEADROOM: Final = 256 * MIB
_FORECAST_POINTS: Final = 1800
_FORECAST_LEAST_SECONDS: Final = 300.0


class GpuWatch:
    """All conditions of one GPU; fed with each sweep."""

    def __init__(self, gpu: int) -> None:
        self.gpu = gpu
        self._free: collections.deque[Point] = collections.deque(maxlen=_FORECAST_POINTS)
        self._orphans: dict[int, Switch] = {}
        self._neighbours: dict[int, tuple[Switch, collections.deque[Point]]] = {}
        self._total_bytes: int | None = None

    def restart(self) -> None:
        """An engine starts or has ended here: what was seen before is no trend."""
        self._free.clear()

    @property
    def shrinking(self) -> bool:
        """Whether at this pace the headroom lasts less than a minute."""
        if len(self._free) < 2:
            return False
        (then, before), (now, free) = self._free[max(-10, -len(self._free))], self._free[-1]
        return now > then and free < before and free / ((before - free) / (now - then)) < 60

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
        if sample is not None and sample.free_bytes is not None:
            free = sample.free_bytes if sample.free_min_bytes is None else sample.free_min_bytes
            self._free.append((now, free))
            self._total_bytes = sample.total_bytes
        found: list[Trigger] = []
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
        used = [(when, total - value) for when, value in self._free]
        ahead = forecast(used, total - _LEAST_HEADROOM, least_seconds=_FORECAST_LEAST_SECONDS)
        if ahead is None:
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

    def _orphan(self, holder: GpuProcessSample, engine: str, now: float) -> list[Trigger]:
        switch = self._orphans.setdefault(holder.pid, Switch(ORPHANED))
        if (
            switch.feed(now, float(bool(holder.used_bytes or holder.used_bytes is None)))
            != "entered"
        ):
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
        switch, levels = self._neighbours.setdefault(
            holder.pid, (Switch(NEIGHBOUR_GROWTH), collections.deque(maxlen=4096))
        )
        levels.append((now, holder.used_bytes))
        while now - levels[0][0] > _BASE_SECONDS:
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
