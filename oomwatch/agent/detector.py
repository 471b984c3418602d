"""The one thread that judges: readings to triggers, triggers to incidents, incidents explained.

Failures are told by the judge itself, on the lines that are kept of a followed log: telling lines
only say when to ask it. Readings go through the conditions of `detect`.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from oomwatch.agent.engines import EngineTable, WatchedEngine, is_abnormal
from oomwatch.agent.explain import Explainer, as_json
from oomwatch.agent.messages import (
    Discovered,
    GpusSwept,
    HostRead,
    KernelSaid,
    Message,
    PageRead,
    ProcessEnded,
    Seen,
    TellingLines,
)
from oomwatch.config.schema import Config
from oomwatch.detect.gpu import GpuWatch, lost
from oomwatch.detect.host import HostWatch
from oomwatch.detect.incidents import IncidentBook, family
from oomwatch.engines.secrets import hide_words
from oomwatch.records import (
    Diagnosis,
    EngineExit,
    Evidence,
    Finding,
    GpuSample,
    KernelEvent,
    StoredIncident,
    Trigger,
)

_LOG = logging.getLogger(__name__)

_SETTLE_SECONDS: Final = 0.3
"""A traceback is written in one go; ranks write theirs within a moment."""
_END_SECONDS: Final = 0.6
"""The last lines of a process come a moment after its end."""
_QUIET_SECONDS: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Between two judgements of a log that tells nothing new, time and again."""
_AGAIN_SECONDS: Final = 5.0
_OLD_SECONDS: Final = 600.0
_KERNEL_KEPT: Final = 256
_NEEDED: Final = frozenset({"server", "api", "engine", "worker"})
"""Roles of processes that an engine cannot do without."""
_CALM: Final = frozenset({"shutdown_requested", "bounded_warmup_growth", "request_too_long"})
"""What happens to a healthy server: no incident."""


class Recorder(Protocol):
    """Where incidents and their evidence are kept."""

    def save_incident(self, incident: StoredIncident) -> None:
        """Store an incident, or what changed about it."""


@dataclasses.dataclass(slots=True)
class _Log:
    """When to judge an engine's log next, and what was told already."""

    due: float | None = None
    judged: float = -1e9
    quiet: int = 0
    told: set[tuple[Any, ...]] = dataclasses.field(default_factory=set)


class Detector:
    """Takes messages one by one; `tick` does what is due. All of it in one thread."""

    def __init__(
        self,
        config: Config,
        table: EngineTable,
        explainer: Explainer,
        recorder: Recorder,
        book: IncidentBook,
        *,
        on_incident: Callable[[StoredIncident], None] = lambda _incident: None,
        started_at: float | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._explainer = explainer
        self._recorder = recorder
        self.book = book
        self._on_incident = on_incident
        self._started_at = time.time() if started_at is None else started_at
        self._gpus: dict[int, GpuWatch] = {}
        self._last_gpus: dict[int, GpuSample] = {}
        self._lost: set[int] = set()
        self.host = HostWatch(config.detect, config.forecast)
        self._logs: dict[str, _Log] = collections.defaultdict(_Log)
        self._ends: dict[tuple[str, tuple[int, int | None]], float] = {}
        self._kernel: collections.deque[KernelEvent] = collections.deque(maxlen=_KERNEL_KEPT)
        self._again: dict[str, list[float]] = {}
        self._subjects: dict[str, WatchedEngine] = {}
        """By incident: the start of the engine that it happened to."""
        self._predicted: dict[tuple[str, str], float] = {}
        self._forecast_due = 0.0
        self.triggers_total: collections.Counter[str] = collections.Counter()
        self.explained_total = 0

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on; conditions begin anew. From any thread."""
        self._config = config
        self._gpus = {}
        self.host = HostWatch(config.detect, config.forecast)
        self.book.reconfigure(config.incidents)

    def headroom_lasts_seconds(self) -> float | None:
        """The least time that any GPU's headroom lasts at its present pace."""
        lasts = [watch.lasts_seconds() for watch in list(self._gpus.values())]
        return min((seconds for seconds in lasts if seconds is not None), default=None)

    def opened_lately(self, seconds: float) -> bool:
        """Whether an incident was opened within this time."""
        at = time.time()
        return any(at - incident.opened_at < seconds for incident in self.book.open)

    # ---------------------------------------------------------------- messages
    def handle(self, message: Message) -> None:
        """Take a message."""
        match message:
            case GpusSwept():
                self._swept(message)
            case PageRead():
                self._page(message)
            case HostRead():
                for trigger in self.host.feed(message.sample, message.now):
                    self._raise(trigger, message.now)
            case TellingLines():
                self._look_at_log(message.engine_id, message.now)
            case ProcessEnded():
                self._ended(message)
            case KernelSaid():
                self._kernel_said(message)
            case Discovered():
                self._discovered(message)
            case Seen():
                self._raise(message.trigger, message.now)

    def _swept(self, message: GpusSwept) -> None:
        holders = collections.defaultdict(list)
        for process in message.processes:
            holders[process.gpu].append(process)
        live = self._table.live_pids()
        for sample in message.gpus:
            self._last_gpus[sample.gpu] = sample
            for trigger in self._gpu(sample.gpu).feed(
                sample,
                holders[sample.gpu],
                message.now,
                engine_pids=live,
                dead=self._table.orphans,
            ):
                self._raise(trigger, message.now)
        for gpu, detail in message.lost.items():
            if gpu not in self._lost:
                self._raise(lost(gpu, time.time(), detail), message.now)
        self._lost = set(message.lost)

    def _gpu(self, index: int) -> GpuWatch:
        if index not in self._gpus:
            self._gpus[index] = GpuWatch(index, self._config.detect, self._config.forecast)
        return self._gpus[index]

    def _page(self, message: PageRead) -> None:
        engine = self._table.get(message.engine_id)
        if engine is None or engine.ended_at is not None or not message.samples:
            return
        if engine.serving_since is None:
            engine.serving_since = message.samples[0].at
        for sample in message.samples[:1]:
            engine.load = sample
            for trigger in engine.watch.feed(sample, message.now):
                self._raise(trigger, message.now)

    def _look_at_log(self, engine_id: str, now: float) -> None:
        log = self._logs[engine_id]
        wait = _QUIET_SECONDS[min(log.quiet, len(_QUIET_SECONDS) - 1)] if log.quiet else 0.0
        due = max(now + _SETTLE_SECONDS, log.judged + wait)
        log.due = due if log.due is None else min(log.due, due)

    def _ended(self, message: ProcessEnded) -> None:
        ended = message.ended
        engine = self._table.by_pid(ended.pid) or self._table.get(ended.engine_id)
        if engine is None:
            return
        is_root = ended.pid == engine.root[0]
        engine.exits.append(
            EngineExit(
                engine=engine.id,
                where=f"process {ended.pid} ({ended.name or ended.role or 'engine'})",
                at=ended.at,
                exit_code=ended.exit_code,
                signal=ended.signal,
                oom_killed=ended.oom_killed,
                detail=ended.detail,
            )
        )
        if is_root:
            engine.ended_at = ended.at
            for gpu in engine.found.recorded.gpus:
                self._gpu(gpu).restart()
        end = engine.exits[-1]
        if ended.oom_killed:
            self._raise(self._kill(engine, end, "cgroup_oom"), message.now)
        elif not is_root and ended.role in _NEEDED and is_abnormal(end):
            self._raise(self._kill(engine, end, "process_exit"), message.now)
        self._ends.setdefault((engine.id, engine.root), message.now + _END_SECONDS)

    def _kill(self, engine: WatchedEngine, end: EngineExit, kind: Any) -> Trigger:
        text = f"{end.where} of {engine.id} ended"
        if end.oom_killed:
            text += ": the kernel killed it for memory"
        elif end.signal is not None:
            text += f" by signal {end.signal}"
        elif end.exit_code is not None:
            text += f" with status {end.exit_code}"
        at = time.time() if end.at is None else end.at
        evidence = (Evidence("process", end.where, at=at, text=text),)
        return Trigger(kind, at, engine.id, text=text, evidence=evidence)

    def _kernel_said(self, message: KernelSaid) -> None:
        event = message.event
        self._kernel.append(event)
        engine = self._table.by_pid(event.fields.get("pid"))
        if not event.kind.startswith("oom") or engine is None:
            return
        self._raise(
            Trigger(
                "kernel_oom",
                event.at if event.at is not None else time.time(),
                engine.id,
                pid=event.fields.get("pid"),
                text=event.text[:500],
                evidence=(Evidence("kernel", "kernel log", event.at, event.text[:500]),),
            ),
            message.now,
        )

    def _discovered(self, message: Discovered) -> None:
        came, went = self._table.update(message.discovery, message.now)
        for engine in (*came, *went):
            for gpu in engine.found.recorded.gpus:
                self._gpu(gpu).restart()
        for engine in went:
            if engine.ended_at is None:  # nobody saw it end
                engine.ended_at = message.discovery.at
                self._ends.setdefault((engine.id, engine.root), message.now + _END_SECONDS)
        rule = self._config.detect.restart_loop
        for engine in came:
            at = message.discovery.at
            starts = self._table.starts_within(engine.id, rule.window_seconds, at)
            failing = any(
                i.engine_id == engine.id and family(i) == "failure" for i in self.book.open
            )
            if starts >= rule.starts and failing:
                text = f"{engine.id} was started {starts} times lately and fails again and again"
                self._raise(
                    Trigger("restart_loop", at, engine.id, text=text, values={"starts": starts}),
                    message.now,
                )

    # ---------------------------------------------------------------- what is due
    def tick(self, now: float) -> None:
        """Do what is due at monotonic time `now`; to be called a few times a second."""
        for engine_id, log in list(self._logs.items()):
            if log.due is not None and log.due <= now:
                log.due = None
                self._judge(engine_id, now)
        for key, due in list(self._ends.items()):
            if due <= now:
                del self._ends[key]
                self._judge_end(key, now)
        for incident_id, times in list(self._again.items()):
            if times and times[0] <= now:
                times.pop(0)
                self._explain_again(incident_id)
            if not times:
                del self._again[incident_id]
                self._subjects.pop(incident_id, None)
        if now >= self._forecast_due:
            self._forecast_due = now + self._config.forecast.interval_seconds
            self._predict(now)
        self._close_what_is_over(now)

    def _judge(self, engine_id: str, now: float) -> None:
        """Ask the judge whether the telling lines tell of a failure that is new."""
        engine = self._table.get(engine_id)
        if engine is None:
            return
        log = self._logs[engine_id]
        log.judged = now
        diagnosis = self._explain([engine])
        _LOG.debug("%s judged: %s", engine_id, diagnosis.verdict)
        fresh = self._fresh(engine, diagnosis)
        log.quiet = 0 if fresh else log.quiet + 1
        for place, finding in reversed(fresh):  # oldest first
            self._failed(engine, diagnosis, place, finding, now)

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
            told.add(key)
            old = finding.at is not None and finding.at < self._started_at - _OLD_SECONDS
            if finding.cause not in _CALM and not old:
                fresh.append((place, finding))
        return fresh

    def _failed(
        self, engine: WatchedEngine, diagnosis: Diagnosis, place: int, finding: Finding, now: float
    ) -> None:
        wall = time.time()
        at = finding.at if finding.at is not None else wall
        if not wall - _OLD_SECONDS <= at <= wall + 1:
            at = wall  # a log with times of another zone
        trigger = Trigger(
            "log_failure",
            at,
            engine.id,
            text=finding.summary,
            values={"cause": finding.cause, "class": finding.cls},
            evidence=finding.evidence[:8],
        )
        self._raise(trigger, now, as_json(diagnosis, only=place))

    def _judge_end(self, key: tuple[str, tuple[int, int | None]], now: float) -> None:
        """A process of an engine has ended: judge whether it failed, or did as it was asked."""
        engine = self._table.get(key[0])
        if engine is None or engine.root != key[1]:
            return
        diagnosis = self._explain([engine])
        for place, finding in reversed(self._fresh(engine, diagnosis)):
            self._failed(engine, diagnosis, place, finding, now)
        if engine.ended_at is None or engine.settled:
            return
        engine.settled = True
        lead = diagnosis.incidents[0].finding if diagnosis.incidents else None
        clean = (lead is not None and lead.cause in _CALM) or any(
            e.exit_code == 0 for e in engine.exits if e.where.startswith(f"process {key[1][0]} ")
        )
        open_failure = any(
            i.engine_id == engine.id and family(i) == "failure" for i in self.book.open
        )
        if not clean or open_failure:
            end = next(
                (e for e in engine.exits if e.where.startswith(f"process {key[1][0]} ")),
                EngineExit(engine.id, f"process {key[1][0]}", at=engine.ended_at),
            )
            self._raise(self._kill(engine, end, "process_exit"), now, as_json(diagnosis, only=0))

    def _explain(
        self, engines: list[WatchedEngine], window: tuple[float, float] | None = None
    ) -> Diagnosis:
        self.explained_total += 1
        return self._explainer.explain(
            engines,
            kernel=[event for event in self._kernel if self._concerns(event, engines)],
            gpus=self._last_gpus.values(),
            window=window,
        )

    def _concerns(self, event: KernelEvent, engines: list[WatchedEngine]) -> bool:
        """Whether the kernel speaks of one of these engines, or of the host and its GPUs."""
        if not event.kind.startswith("oom") or event.fields.get("scope") in {None, "host"}:
            return True
        victim = event.fields.get("pid")
        return any(victim in engine.pids for engine in engines)

    def _explain_again(self, incident_id: str) -> None:
        """With the samples around it, once they are stored."""
        incident = self.book.get(incident_id)
        if incident is None or incident.window_from is None:
            return
        engine = self._subjects.get(incident_id)
        engines = [engine] if engine is not None else list(self._table)
        end = min(time.time(), incident.window_to or time.time())
        diagnosis = self._explain(engines, (incident.window_from, end))
        if not diagnosis.incidents and not diagnosis.risks and incident.diagnosis is not None:
            return  # nothing better than what was said at once
        only = 0 if family(incident) == "failure" else None
        self._keep(dataclasses.replace(incident, diagnosis=as_json(diagnosis, only=only)))

    # ---------------------------------------------------------------- forecasts
    def _predict(self, now: float) -> None:
        wall = time.time()
        found: list[Trigger | None] = [self.host.predict(wall)]
        warm_up = self._config.forecast.warm_up_seconds
        settling = any(
            engine.starting or now - engine.seen_monotonic < warm_up for engine in self._table
        )
        found += [
            engine.watch.predict(engine.load)
            for engine in self._table
            if engine.load is not None and engine.ended_at is None
        ]
        if not settling:
            found += [gpu.predict(wall) for gpu in self._gpus.values()]
        for trigger in found:
            if trigger is None:
                continue
            key = (trigger.kind, trigger.engine_id or f"gpu{trigger.gpu}")
            before = self._predicted.get(key)
            self._predicted[key] = now
            # One forecast may be noise; the next one, made of new readings too, confirms it.
            if before is not None and now - before < 3 * self._config.forecast.interval_seconds:
                self._raise(trigger, now)

    def _is_held(self, incident: StoredIncident, now: float) -> bool:
        kind = family(incident)
        engine = self._table.get(incident.engine_id)
        if engine is not None and engine.ended_at is None and kind in engine.watch.held(now):
            return True
        gpus = {trigger.gpu for trigger in incident.triggers}
        if any(kind in watch.held(now) for gpu, watch in self._gpus.items() if gpu in gpus):
            return True
        recent = 4 * self._config.forecast.interval_seconds
        forecast = any(
            now - at < recent and (name, who) == (t.kind, t.engine_id or f"gpu{t.gpu}")
            for (name, who), at in self._predicted.items()
            for t in incident.triggers
        )
        return (
            forecast or kind in self.host.held(now) or (kind == "gpu" and bool(gpus & self._lost))
        )

    # ---------------------------------------------------------------- incidents
    def _raise(self, trigger: Trigger, now: float, diagnosis: dict[str, Any] | None = None) -> None:
        mode = getattr(self._config.detect, trigger.kind).mode
        if mode == "off" or not self._config.detect.enabled:
            return
        self.triggers_total[trigger.kind] += 1
        if mode == "observe":
            _LOG.info("observed only: %s: %s", trigger.kind, trigger.text)
            return
        incident = self.book.take(trigger)
        if incident is None:
            return
        is_new = len(incident.triggers) == 1
        engine = self._table.get(incident.engine_id)
        if is_new and engine is not None:
            self._subjects[incident.id] = engine
        if diagnosis is not None:
            incident = dataclasses.replace(incident, diagnosis=diagnosis)
        elif is_new:
            engines = [engine] if engine is not None else list(self._table)
            found = self._explain(engines)
            if found.incidents or found.risks:
                incident = dataclasses.replace(incident, diagnosis=as_json(found))
        self._keep(incident)
        if is_new:
            after = self._config.incidents.window_after_seconds
            self._again[incident.id] = [now + _AGAIN_SECONDS, now + after + _AGAIN_SECONDS]
        log = _LOG.warning if is_new else _LOG.info
        log("%s %s: %s", incident.id, trigger.kind, trigger.text)

    def _keep(self, incident: StoredIncident) -> None:
        self.book.put(incident)
        self._recorder.save_incident(incident)
        self._on_incident(incident)

    def _close_what_is_over(self, now: float) -> None:
        wall = time.time()
        closed: list[StoredIncident] = []
        for engine in self._table:
            if engine.ended_at is None and engine.serving_since is not None:
                closed += self.book.served(engine.id, engine.serving_since, wall)
        closed += self.book.calm(wall, lambda incident: self._is_held(incident, now))
        for incident in closed:
            self._keep(dataclasses.replace(incident, diagnosis=self._resolved(incident, wall)))
            _LOG.info("%s closed", incident.id)

    def _resolved(self, incident: StoredIncident, wall: float) -> dict[str, Any] | None:
        """The diagnosis with what is different now: the proof that it was the cure, or not."""
        engine = self._table.get(incident.engine_id)
        if incident.diagnosis is None or engine is None:
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
                "command_changed": bool(before and after and list(before) != list(after)),
                "command": list(after) if after else None,
            },
        }
