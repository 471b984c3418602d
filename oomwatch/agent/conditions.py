"""Readings to triggers: the conditions and forecasts of all GPUs, engines and of the host."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.messages import GpusSwept, HostRead, PageRead
from oomwatch.config.schema import Config
from oomwatch.detect.engine import EngineWatch
from oomwatch.detect.forecast import Forecast
from oomwatch.detect.gpu import GpuWatch, lost
from oomwatch.detect.host import HostWatch
from oomwatch.detect.incidents import family
from oomwatch.records import EngineSample, GpuSample, StoredIncident, Trigger

_CONFIRMED_WITHIN: Final = 3
_FRESH_FOR: Final = 4
"""Forecasts confirm each other, and hold an incident open, for so many intervals."""
_WORK: Final = ("generation_tokens_total", "prompt_tokens_total")


class Conditions:
    """All of it belongs to the detector's thread, but for what says otherwise."""

    def __init__(self, config: Config, table: EngineTable, wall: Callable[[], float]) -> None:
        """`wall` is the clock of epoch time."""
        self._config = config
        self._table = table
        self._wall = wall
        self._gpus: dict[int, GpuWatch] = {}
        self._host = HostWatch(config.detect, config.forecast)
        self._lost: frozenset[int] = frozenset()
        self._swept_at = 0.0
        self._predicted: dict[tuple[str, str], float] = {}
        self.last_gpus: dict[int, GpuSample] = {}
        """The last sample of each GPU that is there."""
        self.forecasts: Mapping[tuple[str, str], Forecast] = {}
        """By resource (``gpu``, ``kv``, ``host``) and its name; made anew, not changed."""

    def reconfigure(self, config: Config) -> None:
        """Use other thresholds from now on; conditions begin anew."""
        self._config = config
        self._gpus = {}
        self._host = HostWatch(config.detect, config.forecast)
        for engine in self._table:
            engine.watches = {}

    def restart(self, gpus: Iterable[int]) -> None:
        """An engine starts or has ended on these: what was seen before is no trend."""
        for gpu in gpus:
            self._gpu(gpu).restart()

    def headroom_lasts_seconds(self) -> float | None:
        """The least time that any GPU's headroom lasts at its present pace. From any thread."""
        lasts = [watch.lasts_seconds for watch in list(self._gpus.values())]
        return min((seconds for seconds in lasts if seconds is not None), default=None)

    # ---------------------------------------------------------------- readings
    def swept(self, message: GpusSwept) -> Iterator[Trigger]:
        """Take a sweep of all GPUs."""
        self._swept_at = message.now
        holders = collections.defaultdict(list)
        for process in message.processes:
            holders[process.gpu].append(process)
        live = self._table.live_pids()
        served = {
            gpu
            for engine in self._table
            if engine.ended_at is None
            for gpu in engine.found.recorded.gpus
        }
        if message.gpus:
            self.last_gpus = {sample.gpu: sample for sample in message.gpus}
        for sample in message.gpus:
            yield from self._gpu(sample.gpu).feed(
                sample,
                holders[sample.gpu],
                message.now,
                served=sample.gpu in served,
                engine_pids=live,
                dead=self._table.orphans,
            )
        for gpu in message.lost.keys() - self._lost:
            yield lost(gpu, self._wall(), message.lost[gpu])
        self._lost = frozenset(message.lost)

    def page(self, engine: WatchedEngine, message: PageRead) -> Iterator[Trigger]:
        """Take a metrics page of an engine: a sample for each of its pools."""
        if engine.served_monotonic is None:
            engine.serving_since, engine.served_monotonic = message.samples[0].at, message.now
        if engine.load is not None and _has_worked(engine.load, message.samples[0]):
            engine.worked_monotonic = message.now
        engine.load = message.samples[0]
        for sample in message.samples:
            watch = engine.watches.get(sample.engine)
            if watch is None:
                watch = EngineWatch(engine.id, self._config.detect, self._config.forecast)
                engine.watches = {**engine.watches, sample.engine: watch}
            yield from watch.feed(sample, message.now)

    def host(self, message: HostRead) -> Iterator[Trigger]:
        """Take a reading of the host's memory."""
        yield from self._host.feed(message.sample, message.now)

    def _gpu(self, index: int) -> GpuWatch:
        if index not in self._gpus:
            self._gpus[index] = GpuWatch(index, self._config.detect, self._config.forecast)
        return self._gpus[index]

    # ---------------------------------------------------------------- forecasts
    def predict(self, now: float) -> list[Trigger]:
        """What was forecast twice: one forecast may be noise, the next has new readings too."""
        interval, wall = self._config.forecast.interval_seconds, self._wall()
        pools = {
            name: watch
            for engine in self._table
            if engine.ended_at is None
            for name, watch in engine.watches.items()
        }
        settling = self._settling(now)
        gpus = {gpu: watch for gpu, watch in self._gpus.items() if gpu not in settling}
        found: list[Trigger | None] = [self._host.predict(wall, now)]
        found += [watch.predict(now) for watch in pools.values()]
        found += [watch.predict(wall, now) for watch in gpus.values()]
        ahead = {
            ("host", ""): self._host.ahead,
            **{("kv", name): watch.ahead for name, watch in pools.items()},
            **{("gpu", str(gpu)): watch.ahead for gpu, watch in gpus.items()},
        }
        self.forecasts = {key: one for key, one in ahead.items() if one is not None}
        before = {
            key: at for key, at in self._predicted.items() if now - at < _FRESH_FOR * interval
        }
        self._predicted = dict(before)
        confirmed = []
        for trigger in found:
            if trigger is None:
                continue
            key = _forecast_key(trigger)
            self._predicted[key] = now
            if now - before.get(key, float("-inf")) < _CONFIRMED_WITHIN * interval:
                confirmed.append(trigger)
        return confirmed

    def _settling(self, now: float) -> set[int]:
        """GPUs on which an engine warms up; all of them where it is not known which."""
        settling: set[int] = set()
        warm_up = self._config.forecast.warm_up_seconds
        for engine in self._table:
            if engine.is_starting(now) or now - engine.begun_monotonic < warm_up:
                settling.update(engine.found.recorded.gpus or self._gpus)
        return settling

    # ---------------------------------------------------------------- what holds
    def hold(self, incident: StoredIncident, touched: float, now: float) -> bool:
        """Whether what an incident of pressure is about still is so; `touched`: when last seen."""
        kind = family(incident)
        if kind == "driver":
            return self._swept_at <= touched
        gpus = {trigger.gpu for trigger in incident.triggers}
        if kind == "gpu":
            return bool(gpus & self._lost)
        interval = self._config.forecast.interval_seconds
        keys = {_forecast_key(trigger) for trigger in incident.triggers}
        if any(
            now - self._predicted[key] < _FRESH_FOR * interval
            for key in keys & self._predicted.keys()
        ):
            return True
        engine = self._table.get(incident.engine_id)
        watches: list[EngineWatch | GpuWatch | HostWatch] = [self._host]
        if engine is not None and engine.ended_at is None:
            watches += engine.watches.values()
        watches += [watch for gpu, watch in self._gpus.items() if gpu in gpus]
        return any(kind in watch.held(now) for watch in watches)


def _forecast_key(trigger: Trigger) -> tuple[str, str]:
    return trigger.kind, trigger.engine_id or f"gpu{trigger.gpu}"


def _has_worked(before: EngineSample, after: EngineSample) -> bool:
    return any(
        then is not None and now is not None and now > then
        for then, now in ((getattr(before, name), getattr(after, name)) for name in _WORK)
    )
