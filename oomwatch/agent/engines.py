"""The engines that run here, one start each, with what is kept of them while they are watched."""

from __future__ import annotations

import collections
import dataclasses
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from oomwatch.detect.engine import EngineWatch
from oomwatch.discovery import DiscoveredEngine, Discovery, GpuHolder
from oomwatch.records import EngineExit, EngineSample
from oomwatch.sources.log_tail import LogTail
from oomwatch.sources.procfs import read_process

_KEPT_ENDED: Final = 16
_REQUESTS: Final = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_KEPT_STARTS: Final = 64
_KEPT_EXITS: Final = 64
_KEPT_NAMES: Final = 256
_LONGEST_START_SECONDS: Final = 1800.0
"""Weights of hundreds of GiB from a network disk take a quarter of an hour and more."""


@dataclasses.dataclass(slots=True)
class WatchedEngine:
    """One start of one engine."""

    found: DiscoveredEngine
    seen_monotonic: float
    """When it was found."""
    begun_monotonic: float
    """When it was started, as far as that is known."""
    watches: dict[str, EngineWatch] = dataclasses.field(default_factory=dict)
    """The conditions of its pools, by the name that its page's samples have."""
    tails: list[LogTail] = dataclasses.field(default_factory=list)
    exits: collections.deque[EngineExit] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_KEPT_EXITS)
    )
    serving_since: float | None = None
    """Epoch time of the first page that this start answered."""
    served_monotonic: float | None = None
    """The same in monotonic time."""
    worked_monotonic: float | None = None
    """When a counter of tokens was last seen to rise."""
    ended_at: float | None = None
    crippled: bool = False
    """Whether a process that it cannot do without was killed or has crashed."""
    load: EngineSample | None = None
    """Its last reading."""
    page_monotonic: float | None = None
    """When its page was last read."""
    first_pool: str = "0"
    """What its page calls the first of its pools, whose samples go by the engine's id."""
    answer_seconds: float | None = None
    """How long that took."""
    settled: bool = False
    """Whether its end has been judged."""
    judged_before: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Once it is settled: up to where its logs had been judged with the start before."""

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
        """Whether it is gone, or cannot go on."""
        return self.ended_at is not None or self.crippled

    @property
    def up_monotonic(self) -> float | None:
        """Since when it serves; one without a page is taken at its word that it runs, at last."""
        if self.served_monotonic is None and self.found.recorded.metrics_url is None:
            return self.begun_monotonic + _LONGEST_START_SECONDS
        return self.served_monotonic

    def is_starting(self, now: float) -> bool:
        """Whether it has not answered yet and may still come to it; some have no page to answer."""
        young = now - self.begun_monotonic < _LONGEST_START_SECONDS
        return not self.broken and self.served_monotonic is None and young


class EngineTable:
    """Engines by id, updated by discovery; the starts that ended last are kept for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, WatchedEngine] = {}
        self._ended: collections.deque[WatchedEngine] = collections.deque(maxlen=_KEPT_ENDED)
        self._starts: dict[str, collections.deque[float]] = {}
        self.orphans: dict[int, str] = {}
        """Processes left behind, with the id of the engine that is gone."""
        self.holders: tuple[GpuHolder, ...] = ()
        """Who held memory of the GPUs at the last search."""

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

    def of_process(self, pid: int | None, engine_id: str | None = None) -> WatchedEngine | None:
        """The start that a process belongs or belonged to; of that engine, where it is known."""
        with self._lock:
            both = [*self._running.values(), *reversed(self._ended)]
        found = [engine for engine in both if pid in engine.pids]
        return next((e for e in found if e.id == engine_id), found[0] if found else None)

    def is_alive(self, engine: WatchedEngine) -> bool:
        """Whether its server still runs, though a search did not find it again."""
        if not engine.found.members:
            return False
        known = engine.found.members[0].process
        process = read_process(known.pid)
        return process is not None and process.start_ticks == known.start_ticks

    def live_pids(self) -> set[int]:
        """Processes of engines that run."""
        return {pid for engine in self if engine.ended_at is None for pid in engine.pids}

    def update(
        self, discovery: Discovery, now: float
    ) -> tuple[list[WatchedEngine], list[WatchedEngine]]:
        """Take a search in: starts that came, and starts that went."""
        servers = [engine for engine in discovery.engines if not engine.orphan]
        with self._lock:
            servers = _under_their_names(servers, self._running)
            self.orphans = {
                pid: engine.recorded.id
                for engine in discovery.engines
                if engine.orphan
                for pid in engine.recorded.pids
            }
            self.holders = discovery.holders
            before = self._running
            running = {e.recorded.id: self._take(e, before, discovery.at, now) for e in servers}
            kept = set(map(id, running.values()))
            went = [engine for engine in before.values() if id(engine) not in kept]
            came = [e for name, e in running.items() if before.get(name) is not e]
            self._running = running
            self._ended.extend(went)
        for engine in came:
            starts = self._starts.setdefault(engine.id, collections.deque(maxlen=_KEPT_STARTS))
            starts.append(engine.found.started_at or discovery.at)
        while len(self._starts) > _KEPT_NAMES:
            del self._starts[next(iter(self._starts))]
        return came, went

    def _take(
        self, found: DiscoveredEngine, before: dict[str, WatchedEngine], at: float, now: float
    ) -> WatchedEngine:
        known = before.get(found.recorded.id)
        if known is not None and _root(found) == known.root:
            known.found = found
            return known
        age = 0.0 if found.started_at is None else max(0.0, at - found.started_at)
        return WatchedEngine(found, seen_monotonic=now, begun_monotonic=now - age)

    def starts_since(self, engine_id: str, at: float) -> int:
        """How often an engine was started since then, in epoch time."""
        return sum(1 for start in self._starts.get(engine_id, ()) if start >= at)


def is_abnormal(end: EngineExit) -> bool:
    """Whether a process ended otherwise than on request; False where that isn't known."""
    if end.signal is not None:
        return end.signal not in _REQUESTS
    return end.exit_code not in {None, 0, *(128 + number for number in _REQUESTS)}


def _under_their_names(
    found: Sequence[DiscoveredEngine], before: Mapping[str, WatchedEngine]
) -> list[DiscoveredEngine]:
    """One start is one engine: it keeps its name, though another's end may have freed a better."""
    known = {engine.root: name for name, engine in before.items() if engine.found.members}
    kept = {root: known[root] for root in map(_root, found) if root in known}
    free = [engine.recorded.id for engine in found if engine.recorded.id not in kept.values()]
    named = []
    for engine in found:
        name = kept.get(_root(engine))
        if name is None:
            name = engine.recorded.id if engine.recorded.id in free else free[0]
            free.remove(name)
        recorded = dataclasses.replace(engine.recorded, id=name)
        named.append(dataclasses.replace(engine, recorded=recorded))
    return named


def _root(found: DiscoveredEngine) -> tuple[int, int | None]:
    if not found.members:  # known by its page or log alone
        return 0, None
    process = found.members[0].process
    return process.pid, process.start_ticks
