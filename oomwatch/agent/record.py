"""Records a live host: the agent itself, whose readings also go into a recording.

The agent brings its sources and its judgement (an incident may end the recording); beside it one
thread copies the engines' logs as they are and one keeps a raw metrics page now and then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from oomwatch.agent.engines import WatchedEngine
from oomwatch.agent.explain import gpu_of
from oomwatch.agent.service import Agent
from oomwatch.config import Loaded
from oomwatch.errors import OomwatchError
from oomwatch.records import EngineSample, KernelEvent, ProcessSample, StoredIncident
from oomwatch.sources.follow import FileFollower
from oomwatch.sources.follow_program import follow_container, follow_unit
from oomwatch.sources.kernel import read_live_kernel_log
from oomwatch.sources.log_render import kernel_line
from oomwatch.sources.log_tail import HEAD_BYTES, LATE_BYTES, Follower
from oomwatch.sources.metrics_fetch import read_url
from oomwatch.sources.output import LogLocation
from oomwatch.sources.recording_rows import AnySample
from oomwatch.sources.recording_write import RecordingWriter
from oomwatch.sources.regular_file import open_regular
from oomwatch.store.rows import Event
from oomwatch.store.writer import StoreWriter

_LOG = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 0.3
_PAGE_SECONDS: Final = 60.0
_PAGE_TIMEOUT_SECONDS: Final = 15.0
_MAX_PAGE_BYTES: Final = 8 << 20
_BLOCK_BYTES: Final = 1 << 20
_KERNEL_SECONDS: Final = 86_400.0
"""What the kernel said before is about something else."""


class TappedWriter(StoreWriter):
    """The agent's writer, which hands on what it is given."""

    def __init__(self, *args: Any, tap: LiveRecorder, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tap = tap

    def put(self, samples: Iterable[AnySample]) -> None:
        """Hand samples over, in order of time."""
        kept = tuple(samples)
        self._tap.take_samples(kept)
        super().put(kept)

    def put_events(self, events: Iterable[Event], engine_id: str | None = None) -> None:
        """Hand log lines and kernel events over; the lines of logs are copied elsewhere."""
        kept = tuple(events)
        self._tap.take_kernel(event for event in kept if isinstance(event, KernelEvent))
        super().put_events(kept, engine_id)


class LiveRecorder:
    """A recording of this host while it lives; `start`, `incidents` at any time, `stop`."""

    def __init__(
        self, loaded: Loaded, writer: RecordingWriter, *, pids: frozenset[int] = frozenset()
    ) -> None:
        """With `pids` only the engines that these processes belong to are recorded."""
        self._writer = writer
        self._pids = pids
        self._agent = Agent(loaded, make_writer=functools.partial(TappedWriter, tap=self))
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self._copied: dict[tuple[str, str], _Copied] = {}
        self._engines: dict[str, WatchedEngine] = {}
        self.error: OomwatchError | None = None
        """Why nothing can be written any more."""
        self.started_at = time.time()

    def start(self) -> None:
        """Record from now on.

        Raises:
            OomwatchError: the store or the recording cannot be written.

        """
        self._agent.start()
        self._guard(self._add_kernel_of_before)
        for name, work in (("copy logs", self._copy_logs), ("keep pages", self._keep_pages)):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def engines(self) -> list[str]:
        """The engines that are recorded."""
        self._note_engines()
        return list(self._engines)

    @property
    def incidents(self) -> list[StoredIncident]:
        """Incidents that opened since the start, of the engines that are recorded."""
        detector = self._agent.detector
        found = [] if detector is None else detector.book.open
        return [i for i in found if i.engine_id is None or i.engine_id in self.engines]

    def stop(self) -> None:
        """End, and write all that is left; then the recording has its name.

        Raises:
            OomwatchError: it cannot be written.

        """
        self._note_engines()
        self._agent.stop()
        self._ending.set()
        for thread in self._threads:
            thread.join(1.0)
        self._guard(self._copy_once)
        if self.error is not None:
            raise self.error
        reading = self._agent.feeds.last_reading
        self._writer.finish(
            host=self._agent.host,
            started_at=self.started_at,
            ended_at=time.time(),
            engines=[
                dataclasses.replace(
                    engine.found.recorded,
                    ended=engine.broken,
                    started_at=engine.found.started_at,
                )
                for engine in self._engines.values()
            ],
            gpus=[gpu_of(sample) for sample in reading.samples] if reading else (),
            exits=[each for engine in self._engines.values() for each in engine.exits],
        )

    # ---------------------------------------------------------------- readings
    def take_samples(self, samples: tuple[AnySample, ...]) -> None:
        """Keep samples of the host, its GPUs, and the engines that are recorded."""
        if self._pids:
            self._note_engines()
            pids = {pid for engine in list(self._engines.values()) for pid in engine.pids}
            samples = tuple(
                sample
                for sample in samples
                if not (isinstance(sample, ProcessSample) and sample.pid not in pids)
                and not (
                    isinstance(sample, EngineSample)
                    and sample.engine.partition("/")[0] not in self._engines
                )
            )
        self._guard(lambda: self._writer.add_samples(samples))

    def take_kernel(self, events: Iterable[KernelEvent]) -> None:
        """Keep what the kernel says."""
        for event in events:
            self._guard(functools.partial(self._writer.add_kernel_line, kernel_line(event)))

    def _add_kernel_of_before(self) -> None:
        if not self._agent.config.sources.kernel:
            return
        with contextlib.suppress(OomwatchError):  # it may not be read: the agent says so too
            events, _ = read_live_kernel_log()
            since = self.started_at - _KERNEL_SECONDS
            self.take_kernel(e for e in events if e.at is not None and e.at >= since)

    def _guard(self, work: Callable[[], None]) -> None:
        """No thread of the agent's must end because the recording cannot be written."""
        if self.error is not None:
            return
        try:
            work()
        except OomwatchError as error:
            self.error = error

    def _note_engines(self) -> None:
        for engine in self._agent.table:
            if not self._pids or self._pids & engine.pids:
                self._engines[engine.id] = engine

    # ---------------------------------------------------------------- logs and pages
    def _copy_logs(self) -> None:
        while not self._ending.wait(_LOOK_SECONDS):
            self._guard(self._copy_once)

    def _copy_once(self) -> None:
        self._note_engines()
        for engine in list(self._engines.values()):
            for location in engine.found.logs:
                place = location.path or location.name or ""
                key = (engine.id, place)
                if key not in self._copied:
                    follower = _follower_of(location, engine.found.started_at)
                    if follower is None:
                        continue
                    number = sum(1 for name, _ in self._copied if name == engine.id)
                    name = self._writer.log_name(engine.id, number)
                    self._copied[key] = _Copied(name, follower)
                self._copied[key].copy(self._writer)

    def _keep_pages(self) -> None:
        due: dict[str, float] = {}
        while not self._ending.wait(_LOOK_SECONDS):
            for engine_id, engine in list(self._engines.items()):
                url, now = engine.found.recorded.metrics_url, time.monotonic()
                if url is None or engine.ended_at is not None or now < due.get(engine_id, 0.0):
                    continue
                due[engine_id] = now + _PAGE_SECONDS
                try:
                    page = read_url(
                        url, timeout_seconds=_PAGE_TIMEOUT_SECONDS, max_bytes=_MAX_PAGE_BYTES
                    )
                except OomwatchError as error:
                    _LOG.info("%s: %s", engine_id, error)
                    continue
                self._guard(functools.partial(self._writer.add_page, time.time(), engine_id, page))


class _Copied:
    """A log that is copied: of a long one its beginning, and from near its end on."""

    def __init__(self, name: str, follower: Follower) -> None:
        self._name = name
        self._follower = follower
        self._taken = 0
        self._skipped = False

    def copy(self, writer: RecordingWriter) -> None:
        """Copy what is new."""
        while True:
            size = 0
            try:
                for chunk in self._follower.read(limit=_BLOCK_BYTES):
                    size += len(chunk.data)
                    writer.add_log(self._name, chunk.data)
            except OSError:
                return
            self._taken += size
            if not self._skipped and self._taken >= HEAD_BYTES:
                self._skipped = True
                self._skip_middle()
            if size < _BLOCK_BYTES:
                return

    def _skip_middle(self) -> None:
        if not isinstance(self._follower, FileFollower):
            return
        position = self._follower.position
        end = _size_of(self._follower.path) - LATE_BYTES
        if position is not None and end > position.offset:
            self._follower.skip_to(end)


def _size_of(path: str) -> int:
    with contextlib.suppress(OSError), open_regular(path) as file:
        return file.seek(0, os.SEEK_END)
    return 0


def _follower_of(location: LogLocation, since: float | None) -> Follower | None:
    """What reads a log from its beginning; None for one that cannot be read."""
    if location.path is not None:
        return FileFollower(location.path)
    if location.kind == "unit" and location.name and shutil.which("journalctl"):
        return follow_unit(location.name, None, since=since)
    program = next((p for p in ("docker", "podman", "nerdctl") if shutil.which(p)), None)
    if location.kind == "container" and location.name and program:
        return follow_container(location.name, None, since=since, program=program)
    return None


@contextlib.contextmanager
def store_of_its_own() -> Any:
    """The path of a store that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="oomwatch-record-") as folder:
        yield f"{folder}/oomwatch.db"
