"""Reading of everything `diagnose` was pointed at; each source ends as a line of `sources`.

One source that cannot be read never stops the others. No input at all is an error of its own.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from oomwatch.cli.options import Options
from oomwatch.cli.window import Window
from oomwatch.diagnose.inputs import Inputs, KernelInput, LogInput, Orphan, PageInput
from oomwatch.errors import NoInputError, OomwatchError, UsageError
from oomwatch.records import (
    EngineExit,
    Gpu,
    LogLine,
    RecordedEngine,
    Series,
    SourceStatus,
    Trigger,
)

if TYPE_CHECKING:
    from oomwatch.sources.ended import EndedEngine
    from oomwatch.sources.logfile import OpenedLog
    from oomwatch.sources.metrics import MetricsPage

_OPEN_LOGS: Final = 16


class Gatherer:
    """Collects inputs and how reading each of them went."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.logs: list[LogInput] = []
        self.pages: list[PageInput] = []
        self.kernel: list[KernelInput] = []
        self.engines: list[RecordedEngine] = []
        self.gpus: list[Gpu] = []
        self.series = Series()
        self.sources: list[SourceStatus] = []
        self.host: str | None = None
        self.orphans: list[Orphan] = []
        self.exits: list[EngineExit] = []
        self.noticed: list[Trigger] = []
        self._notes: list[tuple[str, list[str]]] = []
        self._failures: list[str] = []
        self.read = 0
        self.live = False

    def gather(self) -> Inputs:
        """Read every input.

        Raises:
            NoInputError: not one of several inputs could be read.
            UsageError: the model configuration cannot be read, or is none.

        """
        options = self.options
        config = self._model_config()
        for path in options.recordings:
            self._try(path, self._recording)
        for incident in options.incidents:
            self._try(f"incident {incident}", self._incident, incident)
        if options.store is not None and not options.incidents:
            self._try("store", self._history)
        for path in options.logs:
            self._try(path, self._log)
        for unit in options.units:
            self._try(f"unit {unit}", self._unit, unit)
        for container in options.containers:
            self._try(f"container {container}", self._container, container)
        for pod in options.pods:
            self._try(f"pod {pod}", self._pod, pod)
        for source in options.metrics:
            self._try(source, self._metrics)
        for path in options.kernel_logs:
            self._try(path, self._kernel)
        if options.live or options.pids or not options.names_inputs:
            self._live()
        if self.read == 0 and (options.names_inputs or options.pids):
            raise NoInputError(
                "; ".join(self._failures or [s.detail or s.name for s in self.sources])
                or "no input could be read"
            )
        return self.inputs(config)

    def inputs(self, config: dict[str, Any] | None = None) -> Inputs:
        """What has been read so far."""
        options = self.options
        return Inputs(
            generated_at=time.time(),
            host=self.host or os.uname().nodename,
            logs=tuple(self.logs),
            pages=tuple(self.pages),
            kernel=tuple(self.kernel),
            series=self.series,
            engines=tuple(self.engines),
            gpus=tuple(self.gpus),
            command=options.command,
            model_config=config,
            engine=options.engine,
            version=options.engine_version,
            sources=tuple(self.sources),
            orphans=tuple(self.orphans),
            exits=tuple(self.exits),
            noticed=tuple(self.noticed),
            live=self.live,
        )

    # ------------------------------------------------------------------ files
    def _try(self, name: str, reader: Callable[[str], None], argument: str | None = None) -> None:
        try:
            reader(argument if argument is not None else name)
        except OomwatchError as error:
            self._failures.append(str(error))
            detail = str(error).removeprefix(f"{name}: ")
            self.sources.append(SourceStatus(_shown(name), "error", detail))
        else:
            self.read += 1
            if all(s.name != _shown(name) for s in self.sources):
                self.sources.append(SourceStatus(_shown(name), "ok", None))

    def _model_config(self) -> dict[str, Any] | None:
        path = self.options.model_config
        if path is None:
            return None
        from oomwatch.memory.config_source import config_file, read_config

        try:
            data = dict(read_config(config_file(Path(path).expanduser())))
        except UsageError as error:
            raise UsageError(f"--model-config {error}") from error
        nested = data.get("text_config")
        return {**data, **nested} if isinstance(nested, dict) else data

    def _log(self, path: str) -> None:
        self.add_log_file(path, None)
        if path != "-" and Path(path).is_file():  # a pipe can be read once only
            from oomwatch.sources.kernel import read_kernel_lines_of_log

            try:
                events = read_kernel_lines_of_log(path)
            except OomwatchError:  # the log's own reader says what is wrong with the file
                events = []
            if events:
                self.kernel.append(KernelInput(path, tuple(events)))

    def add_log_file(self, path: str, engine_id: str | None) -> None:
        """Read a log file; `-` is standard input."""
        from oomwatch.sources.logfile import read_log

        notes: list[str] = []
        options = self.options
        lines = read_log(
            path,
            full=options.full,
            progress=options.progress,
            note=notes.append,
            aside=self.has_many_logs,
        )
        self.add_log(path, lines, notes, engine_id)

    def add_log(
        self, name: str, lines: Iterator[LogLine], notes: list[str], engine_id: str | None = None
    ) -> None:
        """Add a log whose first line was read, so that an unreadable one fails here."""
        first = next(lines, None)
        if first is None:
            self.sources.append(
                SourceStatus(
                    _shown(name), "warning", "; ".join(notes) or "nothing was written to it"
                )
            )
            return
        lines = _chain(first, lines)
        if self.options.since is not None or self.options.until is not None:
            window = Window(lines, self.options.since, self.options.until)
            lines = iter(window)
            first = next(lines, None)
            if first is None:
                self.sources.append(SourceStatus(_shown(name), "warning", window.missed))
                return
            lines = _chain(first, lines)
        self.logs.append(LogInput(name, lines, engine_id))
        self._notes.append((name, notes))

    def add_series(self, series: Series) -> None:
        """Add samples to those that are there, in order of time."""
        self.series = Series(
            **{
                field.name: tuple(
                    sorted(
                        (*getattr(self.series, field.name), *getattr(series, field.name)),
                        key=lambda sample: sample.at,
                    )
                )
                for field in dataclasses.fields(Series)
            }
        )

    @property
    def has_many_logs(self) -> bool:
        """Whether a further log is to be closed until it is read: each may hold some MiB."""
        return len(self.logs) >= _OPEN_LOGS

    def late_notes(self) -> tuple[SourceStatus, ...]:
        """What reading the logs had to say, known only once they are read to the end."""
        return tuple(
            SourceStatus(_shown(name), "warning" if _is_damage(notes) else "ok", "; ".join(notes))
            for name, notes in self._notes
            if notes
        )

    def _kernel(self, path: str) -> None:
        from oomwatch.sources.kernel import has_kernel_lines, read_kernel_log

        events = tuple(read_kernel_log(path))
        if not events and Path(path).is_file() and not has_kernel_lines(path):
            detail = "no line in it is a kernel's: give the output of dmesg or journalctl -k"
            self.sources.append(SourceStatus(path, "warning", detail))
            return
        self.kernel.append(KernelInput(path, events))

    def _metrics(self, source: str) -> None:
        from oomwatch.sources.metrics import read_metrics

        self.add_page(read_metrics(source), None)

    def add_page(self, page: MetricsPage, engine_id: str | None) -> None:
        """Add a metrics page; what it lacks is said, since absent is not 0."""
        self.pages.append(
            PageInput(
                source=page.source,
                engine=page.engine,
                samples=page.samples,
                model_name=page.model_name,
                kv_tokens={str(k): v for k, v in page.kv_tokens.items()},
                gpu_memory_utilization=page.gpu_memory_utilization,
                max_model_len=page.max_model_len,
                engine_id=engine_id,
            )
        )
        if page.absent and all(s.name != page.source for s in self.sources):
            absent = ", ".join(page.absent[:6])
            self.sources.append(
                SourceStatus(
                    page.source, "warning", f"not on the page, so unknown rather than 0: {absent}"
                )
            )

    def _unit(self, unit: str) -> None:
        from oomwatch.sources.ended import find_units

        name = unit if unit.endswith(".service") else f"{unit}.service"
        ended = find_units(self.options.places.systemd_root, [])
        self._named(next((one for one in ended if one.name == name), None), self.add_unit, unit)

    def add_unit(self, unit: str, engine_id: str | None, *, starts: int = 1) -> None:
        """Read the journal of a unit, its last starts."""
        from oomwatch.sources.journal import read_unit

        since, until = self.options.since, self.options.until
        self._add_opened(
            "unit", read_unit(unit, since=since, until=until, starts=starts), engine_id
        )

    def _container(self, name: str) -> None:
        from oomwatch.sources.ended import find_containers

        ended = find_containers(self.options.places.docker_root, [])
        self._named(
            next((one for one in ended if one.name == name), None), self.add_container, name
        )

    def add_container(self, name: str, engine_id: str | None, *, last_start: bool = True) -> None:
        """Read a container's log."""
        from oomwatch.sources.containers import read_container

        root = self.options.places.docker_root
        log = read_container(name, last_start=last_start, docker_root=root)
        self._add_opened("container", log, engine_id)

    def _named(
        self, ended: EndedEngine | None, add: Callable[[str, str | None], None], name: str
    ) -> None:
        """A log by the name of its keeper, with the keeper's word on the end, if it has ended."""
        add(name, ended.exit.engine if ended and ended.exit else None)
        if ended is not None:
            self.add_end(ended)

    def add_ended(self, ended: EndedEngine) -> None:
        """Read what is left of an engine that is gone.

        Raises OomwatchError where its log cannot be read; how it ended is known even then.
        """
        engine_id = self.add_end(ended)
        if ended.kind == "container":
            self.add_container(ended.name, engine_id)
        elif ended.kind == "unit":
            self.add_unit(ended.name, engine_id)
        else:
            self.add_log_file(ended.name, engine_id)

    def add_end(self, ended: EndedEngine) -> str:
        """Add an engine that is gone, and how it ended where that is known; its id."""
        if ended.exit is not None:
            self.exits.append(ended.exit)
        self.engines.append(
            RecordedEngine(
                id=ended.id,
                engine=ended.engine,
                version=ended.version,
                command=ended.command,
                pids=ended.pids,
                started_at=ended.started_at,
                ended=True,
            )
        )
        return ended.id

    def _pod(self, name: str) -> None:
        self.add_pod(name, None)

    def add_pod(self, name: str, engine_id: str | None) -> None:
        """Read a pod's log."""
        from oomwatch.sources.containers import read_pod

        self._add_opened("pod", read_pod(name), engine_id)

    def _add_opened(self, kind: str, log: OpenedLog, engine_id: str | None) -> None:
        if log.command and self.options.command is None and engine_id is None:
            self.options.command = shlex.join(log.command)
        zone = (
            f"times are {log.zone}" if log.zone else "times without a zone are taken as this host's"
        )
        self.add_log(
            f"{kind} {log.name}", log.lines, [f"from {log.origin}", zone, *log.notes], engine_id
        )

    def _recording(self, path: str) -> None:
        from oomwatch.cli.recorded import gather_recording

        gather_recording(self, path)

    def _incident(self, identity: str) -> None:
        from oomwatch.cli.history import gather_incident

        gather_incident(self, identity)

    def _history(self, _name: str) -> None:
        from oomwatch.cli.history import gather_window

        gather_window(self)

    # ------------------------------------------------------------------ this host
    def _live(self) -> None:
        from oomwatch.cli.history import note_open_incidents
        from oomwatch.cli.live import gather_live

        gather_live(self)
        if not self.options.pids:
            note_open_incidents(self)


def _shown(name: str) -> str:
    return "standard input" if name == "-" else name


def _is_damage(notes: list[str]) -> bool:
    return any(word in note for note in notes for word in ("cut", "damaged", "skipped"))


def _chain(first: LogLine, rest: Iterator[LogLine]) -> Iterator[LogLine]:
    yield first
    yield from rest
