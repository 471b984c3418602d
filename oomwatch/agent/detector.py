"""The one thread that judges: messages to triggers, triggers to incidents, incidents explained."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from oomwatch.agent.conditions import Conditions
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.excerpt import excerpt_of
from oomwatch.agent.explain import Explainer
from oomwatch.agent.failures import Failures, plausible_time
from oomwatch.agent.judged import explained, part_for
from oomwatch.agent.messages import (
    Discovered,
    GpusSwept,
    HostRead,
    KernelSaid,
    Message,
    PageRead,
    ProcessEnded,
    Reconfigured,
    Seen,
    TellingLines,
)
from oomwatch.agent.settled import Settled
from oomwatch.config.schema import Config
from oomwatch.detect.forecast import Forecast
from oomwatch.detect.incidents import IncidentBook, family
from oomwatch.engines.secrets import hide_words
from oomwatch.records import (
    Diagnosis,
    Evidence,
    IncidentExcerpt,
    KernelEvent,
    StoredIncident,
    Trigger,
)

_LOG = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 5.0
_SOON_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 0.4
"""Between two looks at what is due while no failure is to be judged."""
_CLOSE_LOOK_SECONDS: Final = 1.0
_KERNEL_KEPT: Final = 256
_KERNEL_SECONDS: Final = 3600.0
"""What the kernel said before explains nothing that happens now."""
_ABANDONED_SECONDS: Final = 86_400.0
"""The failure of an engine that nobody starts again is let be after a day."""
_MOST_OPEN: Final = 128
_ENGINES_OWN: Final = frozenset({"failure", "zombie", "stuck_request"})
"""Families that are over once the engine works again."""


class Recorder(Protocol):
    """Where incidents and their evidence are kept."""

    def save_incident(self, incident: StoredIncident) -> None:
        """Store an incident, or what changed about it."""

    def save_excerpt(self, excerpt: IncidentExcerpt) -> None:
        """Store what it can be judged again by, in place of an earlier excerpt."""


class Detector:
    """Takes messages one by one; `tick` does what is due. All of it in one thread.

    Only `headroom_lasts_seconds`, `forecasts`, `opened_lately`, `judged_at` and what the book says
    of its incidents are for other threads too.
    """

    def __init__(
        self,
        config: Config,
        table: EngineTable,
        explainer: Explainer,
        recorder: Recorder,
        book: IncidentBook,
        *,
        on_incident: Callable[[StoredIncident], None] = lambda _incident: None,
        logs_read_at: Callable[[], float] = lambda: float("-inf"),
        started_at: float | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`logs_read_at`: up to when all logs are read, in monotonic time, where that is known.

        `wall` is the clock of epoch time; a replay has one of its own.
        """
        self._config = config
        self._table = table
        self._explainer = explainer
        self._recorder = recorder
        self.book = book
        self._on_incident = on_incident
        self._wall = wall
        self._conditions = Conditions(config, table, wall)
        self._settled = Settled()
        self._failures = Failures(
            table,
            self._explain,
            self._raise,
            book.failing_since,
            self._settled.settle,
            logs_read_at=logs_read_at,
            wall=wall,
            started_at=wall() if started_at is None else started_at,
        )
        self._kernel: collections.deque[tuple[float, KernelEvent]] = collections.deque(
            maxlen=_KERNEL_KEPT
        )
        self._now = 0.0
        self._again: dict[str, list[float]] = {}
        self._subjects: dict[str, WatchedEngine] = {}
        """By incident: the start of the engine that it happened to."""
        self._opened_at = float("-inf")
        self._forecast_due = 0.0
        self._close_due = 0.0
        self.triggers_total: collections.Counter[str] = collections.Counter()
        self.explained_total = 0
        self.in_hurry = False
        """Whether a failure is to be judged as soon as what is written of it was read."""

    def headroom_lasts_seconds(self) -> float | None:
        """The least time that any GPU's headroom lasts at its present pace."""
        return self._conditions.headroom_lasts_seconds()

    def forecasts(self) -> Mapping[tuple[str, str], Forecast]:
        """The last forecasts, near or far, by resource and its name."""
        return self._conditions.forecasts

    def opened_lately(self, seconds: float, now: float) -> bool:
        """Whether an incident was opened within this time before monotonic time `now`."""
        return now - self._opened_at < seconds

    def judged_at(self, engine_id: str) -> float:
        """When all was told that the log of an engine held at that monotonic time."""
        return self._failures.judged_at(engine_id)

    # ---------------------------------------------------------------- messages
    def handle(self, message: Message) -> None:
        """Take a message."""
        self._now = max(self._now, message.now)
        match message:
            case GpusSwept():
                self._raise_all(self._conditions.swept(message), message.now)
            case PageRead():
                engine = self._table.get(message.engine_id)
                if engine is not None and engine.ended_at is None and message.samples:
                    self._raise_all(self._conditions.page(engine, message), message.now)
            case HostRead():
                self._raise_all(self._conditions.host(message), message.now)
            case TellingLines():
                self._failures.telling_lines(message.engine_id, message.now)
            case ProcessEnded():
                self._ended(message)
            case KernelSaid():
                self._kernel_said(message)
            case Discovered():
                self._discovered(message)
            case Reconfigured():
                self._config = message.config
                self._conditions.reconfigure(message.config)
                self.book.reconfigure(message.config.incidents)
            case Seen():
                self._raise(message.trigger, message.now)

    def _ended(self, message: ProcessEnded) -> None:
        ended = message.ended
        engine = self._table.of_process(ended.pid, ended.engine_id)
        if engine is None:
            return
        self._failures.ended(engine, message)
        if engine.ended_at is not None:
            self._conditions.restart(engine.found.recorded.gpus)

    def _kernel_said(self, message: KernelSaid) -> None:
        event = message.event
        if (message.now, event) not in self._kernel:  # else it is tried again
            self._kernel.append((message.now, event))
        pid = event.fields.get("pid")
        engine = self._table.of_process(pid) if isinstance(pid, int) else None
        if not event.kind.startswith("oom") or engine is None:
            return
        at, text = plausible_time(event.at, self._wall()), event.text[:500]
        evidence = (Evidence("kernel", "kernel log", at, text),)
        self._raise(
            Trigger("kernel_oom", at, engine.id, pid=pid, text=text, evidence=evidence), message.now
        )

    def _discovered(self, message: Discovered) -> None:
        at = message.discovery.at
        came, went = self._table.update(message.discovery, message.now)
        for engine in (*came, *went):
            self._conditions.restart(engine.found.recorded.gpus)
        for engine in went:
            if not self._table.is_alive(engine):  # else it is only called otherwise now
                self._failures.gone(engine, at, message.now)
        for engine in came:
            self._failures.came(engine, at, message.now, self._config.detect.restart_loop)

    # ---------------------------------------------------------------- what is due
    def pause_seconds(self) -> float:
        """How long what is due next can wait."""
        self.in_hurry = self._failures.is_waiting
        return _SOON_SECONDS if self.in_hurry else _IDLE_SECONDS

    def tick(self, now: float) -> None:
        """Do what is due at monotonic time `now`."""
        self._now = max(self._now, now)
        self._failures.tick(now)
        for incident_id, times in list(self._again.items()):
            if times[0] > now:
                continue
            times.pop(0)
            if not times:
                del self._again[incident_id]
            try:
                self._explain_again(incident_id)
            except Exception:  # noqa: BLE001 - what is known of it stays
                _LOG.exception("%s could not be explained again", incident_id)
            if not times:
                self._subjects.pop(incident_id, None)
        if now >= self._forecast_due:
            self._forecast_due = now + self._config.forecast.interval_seconds
            self._raise_all(self._conditions.predict(now), now)
        if now >= self._close_due:
            self._close_due = now + _CLOSE_LOOK_SECONDS
            self._close_what_is_over(now)

    # ---------------------------------------------------------------- explanations
    def _explain(
        self,
        engines: list[WatchedEngine],
        window: tuple[float, float] | None = None,
        *,
        noticed: Sequence[Trigger] = (),
        with_exits: bool = True,
    ) -> Diagnosis:
        self.explained_total += 1
        diagnosis = self._explainer.explain(
            engines,
            kernel=[
                event
                for seen, event in self._kernel
                if self._now - seen < _KERNEL_SECONDS and _concerns(event, engines)
            ],
            gpus=self._conditions.last_gpus.values(),
            window=window,
            noticed=noticed,
            with_exits=with_exits,
        )
        return self._settled.own(engines[0], diagnosis) if len(engines) == 1 else diagnosis

    def _explain_again(self, incident_id: str) -> None:
        """With the samples around it, once they are stored."""
        incident = self.book.get(incident_id)
        if incident is None or incident.window_from is None or incident.state == "closed":
            return  # what a closed one says includes how it ended
        engines = self._engines_of(incident)
        wall = self._wall()
        diagnosis = self._explain(
            engines,
            (incident.window_from, min(wall, incident.window_to or wall)),
            noticed=incident.triggers,
        )
        self._save_excerpt(incident_id, engines)
        found = part_for(incident, diagnosis)
        if found is not None:
            self._keep(explained(incident, found))

    def _engines_of(self, incident: StoredIncident) -> list[WatchedEngine]:
        """The start that it happened to; without a name, all engines that run."""
        engine = self._subjects.get(incident.id) or self._table.get(incident.engine_id)
        return [engine] if engine is not None else list(self._table)

    def _save_excerpt(self, incident_id: str, engines: list[WatchedEngine]) -> None:
        room = self._config.incidents.log_excerpt_bytes
        gpus = self._conditions.last_gpus.values()
        self._recorder.save_excerpt(excerpt_of(incident_id, engines, gpus, room))

    # ---------------------------------------------------------------- incidents
    def _raise_all(self, triggers: Iterable[Trigger], now: float) -> None:
        for trigger in triggers:
            self._raise(trigger, now)

    def _raise(
        self, trigger: Trigger, now: float, diagnosis: Mapping[str, Any] | None = None
    ) -> None:
        mode = getattr(self._config.detect, trigger.kind).mode
        if mode == "off" or not self._config.detect.enabled:
            return
        self.triggers_total[trigger.kind] += 1
        if mode == "observe":
            _LOG.info("observed only: %s: %s", trigger.kind, trigger.text)
            return
        # A new start's log often begins with the end of the last one.
        incident = self.book.take(trigger, now - max(0.0, self._wall() - trigger.at))
        if incident is None:
            return
        is_new = len(incident.triggers) == 1
        if is_new:
            self._opened_at = now
            engine = self._table.get(incident.engine_id)
            if engine is not None:
                self._subjects[incident.id] = engine
        if diagnosis is None and is_new:
            diagnosis = self._first_diagnosis(incident)
        if diagnosis is not None:
            incident = explained(incident, diagnosis)
        self._keep(incident)
        if is_new:
            after = self._config.incidents.window_after_seconds
            self._again[incident.id] = [now + _AGAIN_SECONDS, now + after + _AGAIN_SECONDS]
            self._save_excerpt(incident.id, self._engines_of(incident))
        log = _LOG.warning if is_new else _LOG.info
        log("%s %s: %s", incident.id, trigger.kind, trigger.text)

    def _first_diagnosis(self, incident: StoredIncident) -> dict[str, Any] | None:
        """None too where judging fails: what set an incident off is told all the same."""
        try:
            engines = self._engines_of(incident)
            return part_for(incident, self._explain(engines, noticed=incident.triggers))
        except Exception:  # noqa: BLE001 - it is explained again in a moment
            _LOG.exception("%s has no diagnosis yet; it is tried again", incident.id)
            return None

    def _keep(self, incident: StoredIncident) -> None:
        self.book.put(incident)
        self._recorder.save_incident(incident)
        self._on_incident(incident)

    def _close_what_is_over(self, now: float) -> None:
        incidents = self.book.open
        over = [
            i for n, i in enumerate(reversed(incidents)) if n >= _MOST_OPEN or self._is_over(i, now)
        ]
        for incident in over:
            wall = self._wall()
            closed = self.book.close(incident, wall)
            self._keep(dataclasses.replace(closed, diagnosis=self._resolved(incident, wall)))
            _LOG.info("%s closed", incident.id)

    def _is_over(self, incident: StoredIncident, now: float) -> bool:
        """Healthy for long enough: a start after it serves, or the one it happened to works on."""
        touched, quiet = self.book.touched(incident), self._config.incidents.close_after_seconds
        engine = self._table.get(incident.engine_id)
        if family(incident) in _ENGINES_OWN and engine is not None and not engine.broken:
            up, worked = engine.up_monotonic, engine.worked_monotonic
            if self.book.is_from_before(incident):
                last = max(trigger.at for trigger in incident.triggers)
                is_later = (engine.found.started_at or 0.0) > last
            else:
                is_later = engine.seen_monotonic > touched
            if is_later and up is not None and now - up >= quiet:
                return True
            if not is_later and worked is not None and worked - touched >= quiet:
                return True
        if now - touched <= quiet:
            return False
        if family(incident) == "failure":
            is_here = engine is not None and engine.ended_at is None
            return not is_here and now - touched > _ABANDONED_SECONDS
        return not self._conditions.hold(incident, touched, now)

    def _resolved(self, incident: StoredIncident, wall: float) -> dict[str, Any] | None:
        """The diagnosis, and of an engine that serves what is different: whether it was cured."""
        engine = self._table.get(incident.engine_id)
        if incident.diagnosis is None or engine is None or engine.broken:
            return None if incident.diagnosis is None else dict(incident.diagnosis)
        before = next(
            (e.get("command") for e in incident.diagnosis.get("engines", ()) if e.get("command")),
            None,
        )
        words = engine.found.recorded.command
        after = hide_words(words) if words else None  # as a diagnosis shows it
        return {
            **incident.diagnosis,
            "resolution": {
                "at": wall,
                "serving_since": engine.serving_since,
                "restarted": (engine.serving_since or 0.0) > incident.opened_at,
                "command_changed": bool(before and after and list(before) != list(after)),
                "command": list(after) if after else None,
            },
        }


def _concerns(event: KernelEvent, engines: list[WatchedEngine]) -> bool:
    """Whether the kernel speaks of one of these engines, or of the host and its GPUs."""
    if not event.kind.startswith("oom") or event.fields.get("scope") in {None, "host"}:
        return True
    victim = event.fields.get("pid")
    return any(victim in engine.pids for engine in engines)
