"""Replays a recording through the agent's own detector and store, by a clock of its own.

Everything that judges (conditions, failures, incidents, explanations, the store's writer and its
housekeeping) is the agent's; only the sources are the recording's, and the time is its time.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Callable, Iterator
from typing import Final

from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.explain import Explainer
from oomwatch.agent.messages import (
    Discovered,
    GpusSwept,
    HostRead,
    KernelSaid,
    PageRead,
    ProcessEnded,
    TellingLines,
)
from oomwatch.agent.retention import retention_of
from oomwatch.config import Config
from oomwatch.detect.incidents import IncidentBook
from oomwatch.discovery import DiscoveredEngine, Discovery, EngineMember
from oomwatch.records import (
    EngineExit,
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    RecordedEngine,
    Series,
    StoredIncident,
)
from oomwatch.sources.lifecycle import Ended
from oomwatch.sources.log_tail import LogTail
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import ProcessInfo, ProcessTree
from oomwatch.sources.recording import Recording
from oomwatch.sources.recording_rows import AnySample
from oomwatch.sources.recording_stream import ReplayFollower, stream_samples
from oomwatch.store.clock import ClockWatch
from oomwatch.store.database import open_reader
from oomwatch.store.location import parse_store
from oomwatch.store.queries import read_window
from oomwatch.store.writer import StoreWriter

_STEP_SECONDS: Final = 0.5
_LONGEST_STEP_SECONDS: Final = 10.0
"""Stretches without anything are stepped over so fast."""
_STRIDE_SECONDS: Final = 60.0
_LONGEST_GAP_SECONDS: Final = 86_400.0
"""What is said to be of a later day comes at once: its clock was set, or is another one."""
_PENDING: Final = 1000
"""Records that may wait to be written; a replay has to wait for the disk, not the disk for it."""
_FLUSH_SECONDS: Final = 60.0
_MOST_EXCERPT_LINES: Final = 200
_PROCESS: Final = re.compile(r"process (\d+)(?: \((.*)\))?")


class Replay:
    """One replay; `run` returns when the recording has ended and what it set off has settled."""

    def __init__(
        self,
        recording: Recording,
        config: Config,
        store: str,
        *,
        speed: float | None = None,
        on_incident: Callable[[StoredIncident, float], None] = lambda _incident, _at: None,
        on_step: Callable[[float], None] = lambda _at: None,
    ) -> None:
        """`speed`: seconds of the recording in one second; None as fast as it goes.

        `on_incident` is told what opens, changes and closes, with the recording's time; `on_step`
        the time after each step.
        """
        self._recording = recording
        self._config = config
        self._speed = speed
        self._on_step = on_step
        self._at = self.begin = self._paced_from = _begin(recording)
        self._host = recording.host or "recording"
        self._store = store
        limits = config.store
        self.writer = StoreWriter(
            store,
            self._host,
            retention=retention_of(limits),
            clock=ClockWatch(
                wall=self._wall_ms, boot=lambda: self._wall_ms() - 1_000, boot_id="replay"
            ),
            wall=self._wall_ms,
        )
        self._table = EngineTable()
        book = IncidentBook(self._host, config.incidents, now=self._at)
        self.detector = Detector(
            config,
            self._table,
            Explainer(self._host, self._read_window, wall=self._wall),
            self.writer,
            book,
            on_incident=lambda incident: on_incident(incident, self._at),
            started_at=self._at,
            wall=self._wall,
        )
        self._exits = collections.deque(
            sorted(recording.exits, key=lambda each: each.at if each.at is not None else 0.0)
        )
        self._followers: list[ReplayFollower] = []
        self._sweep: dict[int, GpuSample] = {}
        self._holders: list[GpuProcessSample] = []
        self._page: list[EngineSample] = []
        self._housekeeping_due = self._at + config.agent.housekeeping_interval_seconds

    # ---------------------------------------------------------------- the run
    def run(self) -> None:
        """Replay all of it.

        Raises:
            OomwatchError: the store cannot be used.

        """
        self.writer.start()
        began = time.monotonic()
        try:
            self._find_engines()
            for sample in stream_samples(self._recording):
                at = sample.at if sample.at is not None else self._at
                while at > self._at + _STEP_SECONDS:
                    self._step(min(at, self._at + self._stride(at)), began)
                self._take(sample)
            self._settle(began)
        finally:
            for follower in self._followers:
                follower.close()
            self.writer.stop(_FLUSH_SECONDS)

    def _stride(self, at: float) -> float:
        gap = at - self._at
        if gap >= _LONGEST_GAP_SECONDS:
            return gap
        return _STEP_SECONDS if gap < _LONGEST_STEP_SECONDS else _LONGEST_STEP_SECONDS

    def _settle(self, began: float) -> None:
        """The rest of the logs, and the time that an incident is looked at again after it."""
        times = [self._recording.ended_at, self._at, *(each.at for each in self._exits)]
        end = max(at for at in times if at is not None)
        while True:
            dues = [f.due_at for f in self._followers if f.due_at is not None]
            if not dues and self._at >= end:
                break
            target = min(dues) if dues else end
            if target - self._at < _LONGEST_GAP_SECONDS:
                target = min(target, self._at + _STRIDE_SECONDS)
            self._step(max(self._at + _STEP_SECONDS, target), began)
        incidents = self._config.incidents
        end = self._at + incidents.window_after_seconds + incidents.close_after_seconds + 10.0
        while self._at < end:
            self._step(self._at + 1.0, began)

    def _step(self, at: float, began: float) -> None:
        """Everything up to now is judged, then the clock goes on."""
        self._flush_readings()
        if at - self._at >= _LONGEST_GAP_SECONDS:
            self._paced_from += at - self._at
        self._at = at
        while self._exits and (self._exits[0].at or 0.0) <= at:
            self._end(self._exits.popleft())
        for engine in self._table:
            for tail in engine.tails:
                lines = list(tail.poll())
                if lines:
                    self.writer.put_events(lines[:_MOST_EXCERPT_LINES], engine.id)
                if tail.tells:
                    self.detector.handle(TellingLines(at, engine.id))
        self.detector.tick(at)
        if at >= self._housekeeping_due:
            self._housekeeping_due = at + self._config.agent.housekeeping_interval_seconds
            self.writer.keep_house()
        if self.writer.status.pending > _PENDING:
            self.writer.flush(_FLUSH_SECONDS)
        self._on_step(at)
        if self._speed is not None:
            time.sleep(max(0.0, began + (at - self._paced_from) / self._speed - time.monotonic()))

    # ---------------------------------------------------------------- readings
    def _take(self, sample: AnySample | KernelEvent) -> None:
        match sample:
            case KernelEvent():
                self.writer.put_events([sample])
                self.detector.handle(KernelSaid(self._at, sample))
                return
            case GpuSample():
                if sample.gpu in self._sweep:
                    self._flush_sweep()
                self._sweep[sample.gpu] = sample
            case GpuProcessSample():
                self._holders.append(sample)
            case EngineSample():
                if self._page and self._page[0].at != sample.at:
                    self._flush_page()
                self._page.append(sample)
            case HostSample():
                self.detector.handle(HostRead(sample.at, sample))
        self.writer.put((sample,))

    def _flush_readings(self) -> None:
        self._flush_sweep()
        self._flush_page()

    def _flush_sweep(self) -> None:
        if not self._sweep:
            return
        samples = tuple(self._sweep[gpu] for gpu in sorted(self._sweep))
        newest = {(holder.gpu, holder.pid): holder for holder in self._holders}
        self._sweep.clear()
        self._holders.clear()
        self.detector.handle(GpusSwept(samples[0].at, samples, tuple(newest.values())))

    def _flush_page(self) -> None:
        of_engine: dict[str, list[EngineSample]] = collections.defaultdict(list)
        for sample in self._page:
            of_engine[sample.engine.partition("/")[0]].append(sample)
        self._page.clear()
        for engine_id, samples in of_engine.items():
            self.detector.handle(PageRead(samples[0].at, engine_id, tuple(samples)))

    # ---------------------------------------------------------------- engines
    def _find_engines(self) -> None:
        found = tuple(_discovered(engine) for engine in self._recording.engines)
        reading = NvmlReading(at=self._at, outcome="ok")
        discovery = Discovery(self._at, found, (), reading, ProcessTree(()))
        self.detector.handle(Discovered(self._at, discovery))
        for engine in self._table:
            path = self._recording.logs.get(engine.id)
            if path is not None:
                follower = ReplayFollower(path, self._recording, self._wall)
                self._followers.append(follower)
                name = self._recording.cite(path)
                engine.tails.append(LogTail(follower, name, wall=self._wall))

    def _end(self, end: EngineExit) -> None:
        engine = self._table.get(end.engine)
        if engine is None:
            return
        match = _PROCESS.match(end.where)
        pid = int(match[1]) if match else engine.root[0]
        self.detector.handle(
            ProcessEnded(
                self._at,
                Ended(
                    pid=pid,
                    engine_id=engine.id,
                    at=end.at if end.at is not None else self._at,
                    name=match[2] if match else None,
                    role=_role(engine, pid),
                    exit_code=end.exit_code,
                    signal=end.signal,
                    oom_killed=end.oom_killed,
                    detail=end.detail,
                ),
            )
        )

    # ---------------------------------------------------------------- the clock
    def _wall(self) -> float:
        return self._at

    def _wall_ms(self) -> int:
        return round(self._at * 1000)

    def _read_window(self, begin: float, end: float) -> Series:
        self.writer.flush(_FLUSH_SECONDS)
        with open_reader(parse_store(self._store)) as connection:
            return read_window(connection, begin, end, host=self._host, step=0)


def _begin(recording: Recording) -> float:
    if recording.started_at is not None:
        return recording.started_at
    first = next(_times(recording), None)
    return first if first is not None else time.time()


def _times(recording: Recording) -> Iterator[float]:
    return (sample.at for sample in stream_samples(recording) if sample.at is not None)


def _discovered(recorded: RecordedEngine) -> DiscoveredEngine:
    """The engine as a search would have found it; its first process is the server."""
    members = tuple(
        EngineMember(
            ProcessInfo(pid=pid, start_ticks=0, started_at=recorded.started_at),
            "server" if place == 0 else "engine",
        )
        for place, pid in enumerate(recorded.pids)
    )
    return DiscoveredEngine(
        recorded=recorded, members=members, logs=(), started_at=recorded.started_at
    )


def _role(engine: WatchedEngine, pid: int) -> str | None:
    return next((m.role for m in engine.found.members if m.process.pid == pid), None)
