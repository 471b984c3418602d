"""Failures of engines: what their logs say, and how their processes ended.

Failures are told by the judge itself, on the lines that are kept of a followed log: telling lines
only say when to ask it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Final

from oomwatch.agent.engines import EngineTable, WatchedEngine, is_abnormal
from oomwatch.agent.explain import as_json
from oomwatch.agent.messages import ProcessEnded
from oomwatch.config.detection import RestartLoop
from oomwatch.records import Diagnosis, EngineExit, Evidence, Finding, Trigger, TriggerKind
from oomwatch.sources.lifecycle import Ended
from oomwatch.units import format_duration

_LOG = logging.getLogger(__name__)

_SETTLE_SECONDS: Final = 0.3
"""A traceback is written in one go; ranks write theirs within a moment."""
_LAST_WORDS_SECONDS: Final = 0.25
"""The last lines of a process come a moment after its end."""
_END_SECONDS: Final = 0.6
"""So long is waited for logs to be read until then."""
_QUIET_SECONDS: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Between two judgements of a log that tells nothing new, time and again."""
_RETRY_SECONDS: Final = (1.0, 5.0, 20.0)
"""After judging has failed: a descriptor or memory that was missing may be there again."""
_OLD_SECONDS: Final = 600.0
_MOST_TOLD: Final = 256
_NEEDED: Final = frozenset({"server", "api", "engine", "worker"})
"""Roles of processes that an engine cannot do without."""
CALM: Final = frozenset({"shutdown_requested", "bounded_warmup_growth", "request_too_long"})
"""What happens to a healthy server: no incident."""

Raise = Callable[[Trigger, float, dict[str, Any] | None], None]
"""What takes a trigger, seen at a monotonic time, with the diagnosis if there is one already."""


@dataclasses.dataclass(slots=True)
class _Log:
    """When to judge an engine's log next, and what was told already."""

    due: float | None = None
    judged: float = float("-inf")
    done: float = float("-inf")
    """When it was judged last and what that found was handed on."""
    quiet: int = 0
    told: dict[tuple[Any, ...], None] = dataclasses.field(default_factory=dict)
    failed: int = 0
    """How often in a row it could not be judged."""


@dataclasses.dataclass(slots=True)
class _End:
    """Processes of one start that ended, to be judged together."""

    engine: WatchedEngine
    seen: float
    """When the first of them was seen to end, in monotonic time."""
    exits: list[tuple[EngineExit, int]] = dataclasses.field(default_factory=list)
    """Of those that the engine cannot do without, but for the server itself."""
    due: float = float("-inf")
    """Not before this monotonic time, since it could not be judged."""
    failed: int = 0
    """How often that was so."""


class Failures:
    """All of it belongs to the detector's thread."""

    def __init__(
        self,
        table: EngineTable,
        explain: Callable[..., Diagnosis],
        raise_trigger: Raise,
        failing_since: Callable[[str], float | None],
        settle: Callable[[WatchedEngine], None],
        *,
        logs_read_at: Callable[[], float],
        wall: Callable[[], float],
        started_at: float,
    ) -> None:
        """`explain` judges a list of starts, also without how their processes ended.

        `failing_since`: when a failure of an engine began that is not over; `settle` is told of
        starts whose end was judged.

        `logs_read_at`: up to when all logs are read, in monotonic time. `wall` is the clock of
        epoch time, `started_at` when the agent was started by it.
        """
        self._table = table
        self._explain = explain
        self._raise = raise_trigger
        self._failing_since = failing_since
        self._settle = settle
        self._logs_read_at = logs_read_at
        self._wall = wall
        self._started_at = started_at
        self._logs: dict[str, _Log] = collections.defaultdict(_Log)
        self._ends: dict[int, _End] = {}

    # ---------------------------------------------------------------- what happened
    def telling_lines(self, engine_id: str, now: float) -> None:
        """Telling lines came in a log of an engine: judge it soon."""
        log = self._logs[engine_id]
        wait = _QUIET_SECONDS[min(log.quiet, len(_QUIET_SECONDS)) - 1] if log.quiet else 0.0
        due = max(now + _SETTLE_SECONDS, log.judged + wait)
        log.due = due if log.due is None else min(log.due, due)

    def ended(self, engine: WatchedEngine, message: ProcessEnded) -> None:
        """A process of this start of an engine has ended."""
        ended = message.ended
        end = EngineExit(
            engine=engine.id,
            where=_place(ended),
            at=ended.at,
            exit_code=ended.exit_code,
            signal=ended.signal,
            oom_killed=ended.oom_killed,
            detail=ended.detail,
        )
        if end not in engine.exits:  # else it is told again
            engine.exits.append(end)
        is_root = ended.pid == engine.root[0]
        failed = bool(ended.oom_killed) or is_abnormal(end)
        if is_root:
            engine.ended_at = ended.at
        elif failed and ended.role in _NEEDED:
            engine.crippled = True
        judged = self._judge_soon(engine, message.now)
        if ended.oom_killed:
            trigger = self._exit_trigger("cgroup_oom", engine, end, ended.pid)
            self._raise(trigger, message.now, None)
        elif not is_root and engine.crippled and failed:
            judged.exits.append((end, ended.pid))

    def came(self, engine: WatchedEngine, at: float, now: float, rule: RestartLoop) -> None:
        """A search has found a new start."""
        failing_since = self._failing_since(engine.id)
        if failing_since is None:
            return
        starts = self._table.starts_since(engine.id, at - rule.window_seconds)
        again = self._table.starts_since(engine.id, failing_since)
        # The start that failed first counts, but not those before it: they served.
        if starts >= rule.starts and again >= rule.starts - 1:
            span = rule.window_seconds
            text = f"{engine.id} was started {starts} times in {format_duration(span)} and fails "
            trigger = Trigger(
                "restart_loop",
                at,
                engine.id,
                text=f"{text}each time",
                values={"starts": starts, "window_seconds": span},
            )
            self._raise(trigger, now, None)

    def gone(self, engine: WatchedEngine, at: float, now: float) -> None:
        """A search does not find this start any more; nobody saw it end."""
        if engine.ended_at is None and engine.found.members:
            engine.ended_at = at
            self._judge_soon(engine, now)

    def _is_failing(self, engine: WatchedEngine) -> bool:
        return self._failing_since(engine.id) is not None

    def _judge_soon(self, engine: WatchedEngine, now: float) -> _End:
        return self._ends.setdefault(id(engine), _End(engine, now))

    # ---------------------------------------------------------------- what is due
    @property
    def is_waiting(self) -> bool:
        """Whether something is to be judged in a moment."""
        return bool(self._ends) or any(log.due is not None for log in self._logs.values())

    def tick(self, now: float) -> None:
        """Judge what is due."""
        for engine_id, log in list(self._logs.items()):
            is_due = log.due is not None and log.due <= now
            # What has just ended is judged with its last words, which may still come.
            if is_due and id(self._table.get(engine_id)) not in self._ends:
                log.due = None
                try:
                    self._judge_log(engine_id, log, now)
                except Exception:  # noqa: BLE001 - what an engine said must not be lost
                    log.due = self._again_at(log, engine_id, now)
                else:
                    log.failed = 0
        read_at = self._logs_read_at()
        for key, end in list(self._ends.items()):
            is_read = read_at >= end.seen + _LAST_WORDS_SECONDS or now >= end.seen + _END_SECONDS
            if is_read and now >= end.due:
                self._end(key, end, now)

    def _end(self, key: int, end: _End, now: float) -> None:
        del self._ends[key]
        try:
            diagnosis = self._diagnose(end.engine)
        except Exception:  # noqa: BLE001 - that an engine has ended must not be lost
            due = self._again_at(end, end.engine.id, now)
            if due is not None:
                end.due = due
                self._ends[key] = end
                return
            diagnosis = Diagnosis("unknown", self._wall())
        self._judge_end(end, diagnosis, now)

    @staticmethod
    def _again_at(what: _Log | _End, engine_id: str, now: float) -> float | None:
        """When to try again what could not be judged; None after too many times."""
        if what.failed < len(_RETRY_SECONDS):
            due = now + _RETRY_SECONDS[what.failed]
            what.failed += 1
            _LOG.exception("%s could not be judged; it is tried again", engine_id)
            return due
        what.failed = 0
        _LOG.exception("%s could not be judged", engine_id)
        return None

    def _judge_log(self, engine_id: str, log: _Log, now: float) -> None:
        """Ask the judge whether the telling lines tell of a failure that is new."""
        engine = self._table.get(engine_id)
        if engine is None:
            del self._logs[engine_id]
            return
        log.judged = now
        diagnosis = self._diagnose(engine)
        _LOG.debug("%s judged: %s", engine_id, diagnosis.verdict)
        fresh = self._fresh(engine, diagnosis)
        log.quiet = 0 if fresh else log.quiet + 1
        for place, finding in reversed(fresh):  # oldest first
            self._tell(engine, diagnosis, place, finding, now)
        log.done = now

    def judged_at(self, engine_id: str) -> float:
        """When all was told that the log of an engine held at that monotonic time. Any thread."""
        log = self._logs.get(engine_id)
        return float("-inf") if log is None else log.done

    def _diagnose(self, engine: WatchedEngine) -> Diagnosis:
        """What happened to this start; a server that stops on request may kill its workers."""
        diagnosis = self._explain([engine])
        lead = diagnosis.incidents[0].finding if diagnosis.incidents else None
        if lead is not None and all(item.source == "process" for item in lead.evidence):
            said = self._explain([engine], with_exits=False)
            if said.incidents and said.incidents[0].finding.cause == "shutdown_requested":
                return said
        return diagnosis

    def _fresh(self, engine: WatchedEngine, diagnosis: Diagnosis) -> list[tuple[int, Finding]]:
        """Failures that were not told yet and are not from before our time; newest first."""
        told = self._logs[engine.id].told
        fresh = []
        for place, incident in enumerate(diagnosis.incidents):
            finding = incident.finding
            where = finding.evidence[0].where if finding.evidence else ""
            key = (finding.cause, where, finding.at)
            if key in told:
                continue
            told[key] = None
            if len(told) > _MOST_TOLD:
                del told[next(iter(told))]
            old = finding.at is not None and finding.at < self._started_at - _OLD_SECONDS
            if finding.cause not in CALM and (not old or _saw(engine, where)):
                fresh.append((place, finding))
        return fresh

    def _tell(
        self, engine: WatchedEngine, diagnosis: Diagnosis, place: int, finding: Finding, now: float
    ) -> None:
        trigger = Trigger(
            "log_failure",
            plausible_time(finding.at, self._wall()),
            engine.id,
            text=finding.summary,
            values={"cause": finding.cause, "class": finding.cls},
            evidence=finding.evidence[:8],
        )
        self._raise(trigger, now, as_json(diagnosis, only=place))

    def _judge_end(self, end: _End, diagnosis: Diagnosis, now: float) -> None:
        """Whether the engine failed, or did as it was asked."""
        engine = end.engine
        fresh = self._fresh(engine, diagnosis)
        for place, finding in reversed(fresh):
            self._tell(engine, diagnosis, place, finding, now)
        lead = diagnosis.incidents[0].finding if diagnosis.incidents else None
        calm = lead is not None and lead.cause in CALM
        told = as_json(diagnosis, only=0) if lead is not None and not calm else None
        if not calm or self._is_failing(engine):
            for one, pid in end.exits:
                self._raise(self._exit_trigger("process_exit", engine, one, pid), now, told)
        if engine.ended_at is None or engine.settled:
            return
        self._settle(engine)
        engine.settled = True
        pid = engine.root[0]
        last = next(
            (one for one in engine.exits if one.where.startswith(f"process {pid} ")),
            EngineExit(engine.id, f"process {pid}", at=engine.ended_at),
        )
        is_known = last.exit_code is not None or last.signal is not None
        clean = calm or (is_known and not is_abnormal(last))
        if not clean or self._is_failing(engine):
            self._raise(self._exit_trigger("process_exit", engine, last, pid), now, told)

    def _exit_trigger(
        self, kind: TriggerKind, engine: WatchedEngine, end: EngineExit, pid: int
    ) -> Trigger:
        text = f"{end.where} of {engine.id} ended"
        if end.oom_killed:
            text += ": the kernel killed it for memory"
        elif end.signal is not None:
            text += f" by signal {end.signal}"
        elif end.exit_code is not None:
            text += f" with status {end.exit_code}"
        at = plausible_time(end.at, self._wall())
        evidence = (Evidence("process", end.where, at=at, text=text),)
        return Trigger(kind, at, engine.id, pid=pid, text=text, evidence=evidence)


def plausible_time(at: float | None, wall: float) -> float:
    """The time of something that was just read; now, if its clock is that of another zone."""
    return at if at is not None and wall - _OLD_SECONDS <= at <= wall + 1 else wall


def _saw(engine: WatchedEngine, where: str) -> bool:
    """Whether a line was written while we were there, whatever zone its clock is of."""
    name, _, number = where.rpartition(":")
    return number.isdecimal() and any(
        tail.name == name and tail.saw(int(number)) for tail in engine.tails
    )


def _place(ended: Ended) -> str:
    return f"process {ended.pid} ({ended.name or ended.role or 'engine'})"
