"""The engines that run here, one start each, with what is kept of them while they are watched."""

from __future__ import annotations

import collections
import dataclasses
import signal
import threading
from collections.abc import Iterator
from typing import Final

from oomwatch.config.schema import Config
from oomwatch.detect.engine import EngineWatch
from oomwatch.discovery import DiscoveredEngine, Discovery
from oomwatch.records import EngineExit, EngineSample
from oomwatch.sources.log_tail import LogTail

_KEPT_ENDED: Final = 16
_REQUESTS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_KEPT_STARTS: Final = 64


@dataclasses.dataclass(slots=True)
class WatchedEngine:
    """One start of one engine."""

    found: DiscoveredEngine
    watch: EngineWatch
    seen_monotonic: float
    tails: list[LogTail] = dataclasses.field(default_factory=list)
    exits: list[EngineExit] = dataclasses.field(default_factory=list)
    serving_since: float | None = None
    """Epoch time of the first page that this start answered."""
    ended_at: float | None = None
    load: EngineSample | None = None
    """Its last reading."""
    settled: bool = False
    """Whether its end has been judged."""

    @property
    def id(self) -> str:
        """Id of the engine, the same for all its starts."""
        return self.found.recorded.id

    @property
    def root(self) -> tuple[int, int | None]:
        """The server's process and the tick it was started at: one start."""
        return _root(self.found)

    @property
    def pids(self) -> set[int]:
        """All its processes."""
        return set(self.found.recorded.pids)

    @property
    def broken(self) -> bool:
        """Whether it is gone, or a process that it cannot do without was killed or crashed."""
        return self.ended_at is not None or any(map(is_abnormal, self.exits))

    @property
    def starting(self) -> bool:
        """Whether it has not answered yet."""
        return self.ended_at is None and self.serving_since is None


class EngineTable:
    """Engines by id, updated by discovery; the starts that ended last are kept for a while."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._running: dict[str, WatchedEngine] = {}
        self._ended: collections.deque[WatchedEngine] = collections.deque(maxlen=_KEPT_ENDED)
        self._starts: dict[str, collections.deque[float]] = {}
        self.orphans: dict[int, str] = {}
        """Processes left behind, with the id of the engine that is gone."""

    def __iter__(self) -> Iterator[WatchedEngine]:
        with self._lock:
            return iter(list(self._running.values()))

    def get(self, engine_id: str | None) -> WatchedEngine | None:
        """The running start of an engine, else the last one that ended."""
        with self._lock:
            found = self._running.get(engine_id or "")
            if found is not None:
                return found
            return next((e for e in reversed(self._ended) if e.id == engine_id), None)

    def by_pid(self, pid: int | None) -> WatchedEngine | None:
        """The engine a process belongs to, or belonged to."""
        with self._lock:
            both = [*self._running.values(), *reversed(self._ended)]
        return next((e for e in both if pid in e.pids), None)

    def live_pids(self) -> set[int]:
        """Processes of engines that run."""
        return {pid for engine in self if engine.ended_at is None for pid in engine.pids}

    def update(
        self, discovery: Discovery, now: float
    ) -> tuple[list[WatchedEngine], list[WatchedEngine]]:
        """Take a search in: starts that came, and starts that went."""
        servers = [engine for engine in discovery.engines if not engine.orphan]
        with self._lock:
            self.orphans = {
                pid: engine.recorded.id
                for engine in discovery.engines
                if engine.orphan
                for pid in engine.recorded.pids
            }
            before = self._running
            running = {e.recorded.id: self._take(e, before, now) for e in servers}
            kept = set(map(id, running.values()))
            went = [engine for engine in before.values() if id(engine) not in kept]
            came = [e for name, e in running.items() if before.get(name) is not e]
            self._running = running
            self._ended.extend(went)
        for engine in came:
            starts = self._starts.setdefault(engine.id, collections.deque(maxlen=_KEPT_STARTS))
            starts.append(engine.found.started_at or discovery.at)
        return came, went

    def _take(
        self, found: DiscoveredEngine, before: dict[str, WatchedEngine], now: float
    ) -> WatchedEngine:
        known = before.get(found.recorded.id)
        if known is not None and _root(found) == known.root:
            known.found = found
            return known
        watch = EngineWatch(found.recorded.id, self._config.detect, self._config.forecast)
        return WatchedEngine(found, watch, now)

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on; conditions begin anew."""
        with self._lock:
            self._config = config
            for engine in self._running.values():
                engine.watch = EngineWatch(engine.id, config.detect, config.forecast)

    def starts_within(self, engine_id: str, seconds: float, at: float) -> int:
        """How often an engine was started lately."""
        return sum(1 for start in self._starts.get(engine_id, ()) if at - start <= seconds)


def is_abnormal(end: EngineExit) -> bool:
    """Whether a process ended otherwise than on request; False where that isn't known."""
    if end.signal is not None:
        return end.signal not in _REQUESTS
    return end.exit_code not in {None, 0, *(128 + number for number in _REQUESTS)}


def _root(found: DiscoveredEngine) -> tuple[int, int | None]:
    if not found.members:  # known by its page or log alone
        return 0, None
    process = found.members[0].process
    return process.pid, process.start_ticks
