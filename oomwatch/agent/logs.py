"""The followers of logs: one thread looks at every log a few times a second."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from oomwatch.agent.engines import WatchedEngine
from oomwatch.config.schema import SourcesConfig
from oomwatch.records import LogLine
from oomwatch.sources.follow import FileFollower, FilePosition
from oomwatch.sources.follow_program import follow_container, follow_unit
from oomwatch.sources.log_tail import Follower, LogTail
from oomwatch.sources.output import LogLocation
from oomwatch.sources.regular_file import open_regular

_LOG = logging.getLogger(__name__)

_SWITCHES: Final = {"file": "logs", "unit": "journal", "container": "containers", "pod": "pods"}
"""By kind of place: the key of [sources] that switches it off."""
LOOK_SECONDS: Final = 0.3
_HURRY_SECONDS: Final = 0.1
"""Between two looks while somebody waits for last words."""
_SAVE_SECONDS: Final = 2.0
_KEEP_SECONDS: Final = 900.0
"""A keeper that backs off starts an engine anew after minutes: its log is followed for so long."""
_UNJUDGED_SECONDS: Final = 120.0
"""Telling lines that nobody has judged by then are not read again after a restart."""
_MAX_EXCERPT_LINES: Final = 200
"""Telling lines of one look that are stored; a flood of them says the same."""


class Sink(Protocol):
    """Where log lines and positions are kept."""

    def put_events(self, events: Iterable[LogLine], engine_id: str | None = None) -> None:
        """Keep lines of an engine."""

    def save_position(self, source: str, position: Mapping[str, Any]) -> None:
        """Keep where the follower of a source is."""


@dataclasses.dataclass(slots=True)
class _Followed:
    tail: LogTail
    engine_id: str
    trouble: str | None = None
    saved: Mapping[str, Any] | None = None
    unjudged: tuple[float, Mapping[str, Any] | None] | None = None
    """When telling lines were handed on, and the place after them, until they were judged."""
    alone_since: float | None = None
    """Since when no engine that runs writes it."""


class LogFollowers:
    """All followed logs, by their place; a restarted engine's log goes on being followed."""

    def __init__(
        self,
        sources: SourcesConfig,
        sink: Sink,
        on_telling: Callable[[str], None],
        positions: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        judged_at: Callable[[str], float] = lambda _engine_id: float("inf"),
        in_hurry: Callable[[], bool] = lambda: False,
    ) -> None:
        """`judged_at` says when telling lines of an engine were judged last, in monotonic time.

        `in_hurry` says whether somebody waits for what is written now.

        A position is saved once what stands before it was judged: an agent that is killed in
        between reads it again, and finds the failure that it tells of.
        """
        self._sources = sources
        self._judged_at = judged_at
        self._in_hurry = in_hurry
        self._sink = sink
        self._on_telling = on_telling
        self._positions = dict(positions or {})
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        self._save_at = 0.0
        self.looked_at = 0.0
        """Up to when all logs are read, in monotonic time."""
        self.lines_total = 0

    def reconfigure(self, sources: SourcesConfig) -> None:
        """Read other kinds of logs from now on; those that are followed go on."""
        self._sources = sources

    def attach(self, engine: WatchedEngine, named: str | None = None) -> list[str]:
        """Follow the logs of an engine; why there are none, if so. `named` is its log by name."""
        locations: Sequence[LogLocation] = engine.found.logs
        if named is not None:
            locations = (LogLocation("file", path=named),)
        reasons = []
        for location in locations:
            place, follower, size = self._open(location, engine)
            if follower is None:
                reasons.append(place)
                continue
            with self._lock:
                known = self._followed.get(place)
                if known is None:
                    tail = LogTail(follower, place, size=size)
                    known = self._followed[place] = _Followed(tail, engine.id)
                else:
                    follower.close()
                known.engine_id, known.alone_since = engine.id, None
            if known.tail not in engine.tails:
                engine.tails.append(known.tail)
        return reasons if not engine.tails else []

    def _open(
        self, location: LogLocation, engine: WatchedEngine
    ) -> tuple[str, Follower | None, int]:
        """The place of a log, its follower and its size; or why there is none."""
        since = engine.found.started_at
        switch = _SWITCHES.get(location.kind)
        if switch is not None and not getattr(self._sources, switch):
            return f"its log is not read: sources.{switch} is off", None, 0
        if location.path is not None:
            place = location.path
            try:
                with open_regular(place) as file:  # whether it may be read
                    size = file.seek(0, os.SEEK_END)
            except OSError as error:
                return f"{place}: {error.strerror}", None, 0
            position = FilePosition.from_json(self._positions.get(place, {}))
            return place, FileFollower(place, position), 0 if position else size
        if location.kind == "unit" and location.name:
            place = f"unit {location.name}"
            if shutil.which("journalctl") is None:
                return "journalctl is not there", None, 0
            return place, follow_unit(location.name, self._positions.get(place), since=since), 0
        if location.kind == "container" and location.name:
            place = f"container {location.name}"
            program = next((p for p in ("docker", "podman", "nerdctl") if shutil.which(p)), None)
            if program is None:
                return "its container's log cannot be read", None, 0
            saved = self._positions.get(place)
            return place, follow_container(location.name, saved, since=since, program=program), 0
        return location.reason or "its output goes where it cannot be read back", None, 0

    def keep(self, engine_ids: Collection[str]) -> None:
        """Follow the logs of these engines; those of others only for a while."""
        now = time.monotonic()
        with self._lock:
            for one in self._followed.values():
                if one.engine_id in engine_ids:
                    one.alone_since = None
                elif one.alone_since is None:
                    one.alone_since = now

    def look(self) -> None:
        """Read what is new in every log."""
        now = time.monotonic()
        with self._lock:
            self._let_go(now)
            followed = list(self._followed.items())
        saving = now >= self._save_at
        if saving:
            self._save_at = now + _SAVE_SECONDS
        for place, one in followed:
            self._look_at(place, one, saving=saving)
        self.looked_at = now

    def _let_go(self, now: float) -> None:
        for place, one in list(self._followed.items()):
            if one.alone_since is not None and now - one.alone_since > _KEEP_SECONDS:
                del self._followed[place]
                one.tail.follower.close()

    def _look_at(self, place: str, one: _Followed, *, saving: bool) -> None:
        lines: list[LogLine] = []
        try:
            lines.extend(one.tail.poll())  # what came before an error stays
            trouble = one.tail.follower.missed
        except Exception as error:  # noqa: BLE001 - one broken log must not stop the others
            trouble = getattr(error, "strerror", None) or str(error)
        if trouble != one.trouble:
            one.trouble = trouble
            if trouble:
                _LOG.warning("%s: %s", place, trouble)
        if lines:
            self.lines_total += len(lines)
            self._sink.put_events(lines[:_MAX_EXCERPT_LINES], one.engine_id)
        if one.tail.tells:
            if one.unjudged is None:
                one.unjudged = (time.monotonic(), _position(one))
            self._on_telling(one.engine_id)
        if one.unjudged is not None:
            told, position = one.unjudged
            is_judged = self._judged_at(one.engine_id) >= told
            if is_judged or time.monotonic() - told > _UNJUDGED_SECONDS:
                one.unjudged = None
                self._save(place, one, position)
        elif saving:
            self._save(place, one, _position(one))

    def _save(self, place: str, one: _Followed, position: Mapping[str, Any] | None) -> None:
        if position is not None and position != one.saved:
            one.saved = self._positions[place] = position
            self._sink.save_position(place, position)

    def run(self, stop: threading.Event) -> None:
        """Look again and again until told to stop."""
        while not stop.wait(_HURRY_SECONDS if self._in_hurry() else LOOK_SECONDS):
            self.look()
        self._save_at = 0.0
        self.look()
        with self._lock:
            for one in self._followed.values():
                one.tail.follower.close()


def _position(one: _Followed) -> Mapping[str, Any] | None:
    """Where its follower is now, as the store keeps it."""
    position = one.tail.follower.position
    return position.to_json() if isinstance(position, FilePosition) else position
