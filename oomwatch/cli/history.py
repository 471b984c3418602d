"""Reading of what the agent has stored: an incident, or any window of its history.

Both are judged by today's rules, on the samples of the store; a better rule improves old incidents.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from oomwatch.diagnose.inputs import KernelInput, LogInput, PageInput
from oomwatch.errors import NoInputError, OomwatchError
from oomwatch.records import (
    EngineSample,
    Gpu,
    GpuSample,
    IncidentExcerpt,
    KernelEvent,
    LogLine,
    RecordedEngine,
    SourceStatus,
)

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from oomwatch.cli.gather import Gatherer
    from oomwatch.records import Series, StoredIncident

DEFAULT_SECONDS: Final = 3600.0
"""How much of the history is read where neither --since nor --until is given."""
_MOST_OPEN: Final = 1000
_FRESH_SECONDS: Final = 30.0
"""Between the last reading of an engine and the end of a window in which it still served."""


def gather_incident(gatherer: Gatherer, identity: str) -> None:
    """Add a stored incident: its samples at full rate, its excerpt, the kernel's events.

    Raises:
        NoInputError: there is none of that name.
        StoreError: the store cannot be read.

    """
    from oomwatch.cli.stored import find_incident, opened

    with opened(gatherer.options.store) as connection:
        incident = find_incident(connection, identity)
        begin, end = window_of(incident)
        lines = read_case(connection, incident)
        _add_window(gatherer, connection, (begin, end), incident.host, lines, step=0)
    gatherer.host = incident.host
    gatherer.noticed += incident.triggers
    name = f"incident {incident.id}"
    if lines.engines or lines.lines:
        gatherer.sources.append(SourceStatus(name, "ok", None))
    else:
        gatherer.sources.append(
            SourceStatus(name, "warning", "nothing of its engine's log was stored with it")
        )


def gather_window(gatherer: Gatherer) -> None:
    """Add what the store holds from --since to --until, by default of the last hour.

    Raises:
        NoInputError: it holds nothing of then.
        StoreError: the store cannot be read.

    """
    from oomwatch.cli.stored import opened
    from oomwatch.store.excerpts import read_excerpt
    from oomwatch.store.incidents import list_incidents

    options = gatherer.options
    end = time.time() if options.until is None else options.until
    begin = end - DEFAULT_SECONDS if options.since is None else options.since
    with opened(options.store) as connection:
        case = IncidentExcerpt("")
        # Who the engines were, from the incidents of then; the newest start of each stands.
        for incident in list_incidents(connection, since=begin, until=end, limit=20):
            excerpt = read_excerpt(connection, incident.id)
            if excerpt is not None:
                case = _joined(case, excerpt)
        _add_window(gatherer, connection, (begin, end), None, case, step=None)
    if not any(getattr(gatherer.series, field) for field in gatherer.series.__slots__) and not (
        gatherer.logs or gatherer.kernel
    ):
        raise NoInputError("the store holds nothing of that time; see `oomwatch db stats`")


def note_open_incidents(gatherer: Gatherer) -> None:
    """Point to what the agent of this host, if there is one, has seen and this moment hides."""
    from oomwatch.cli.db import find_store
    from oomwatch.store.database import open_reader
    from oomwatch.store.incidents import list_incidents

    host = socket.gethostname()
    try:
        with open_reader(find_store(gatherer.options.places.store)) as connection:
            found = list_incidents(connection, state="open", limit=_MOST_OPEN)
    except NoInputError:
        return
    except OomwatchError as error:
        gatherer.sources.append(SourceStatus("agent", "not_available", str(error)))
        return
    count = sum(incident.host in {None, host} for incident in found)
    if count:
        told = f"the agent has {count} open incident{'s' if count > 1 else ''}"
        command = "oomwatch incidents list --open"
        gatherer.sources.append(SourceStatus("agent", "warning", f"{told}: {command}"))


def window_of(incident: StoredIncident) -> tuple[float, float]:
    """From when to when an incident's samples are kept."""
    begin = incident.window_from if incident.window_from is not None else incident.opened_at - 600
    end = incident.window_to if incident.window_to is not None else incident.opened_at + 120
    return begin, min(end, time.time() + 1)


def read_case(connection: Connection, incident: StoredIncident) -> IncidentExcerpt:
    """The excerpt of an incident; of one without, the lines of its window."""
    from oomwatch.store.excerpts import read_excerpt
    from oomwatch.store.queries import read_events

    excerpt = read_excerpt(connection, incident.id) or IncidentExcerpt(incident.id)
    if excerpt.lines:
        return excerpt
    begin, end = window_of(incident)
    found: dict[str, list[LogLine]] = {}
    for engine, event in read_events(connection, begin, end, host=incident.host):
        if isinstance(event, LogLine) and engine in {incident.engine_id, None}:
            found.setdefault(engine or "log", []).append(event)
    lines = {name: tuple(each) for name, each in found.items()}
    return dataclasses.replace(excerpt, lines=lines)


def _joined(first: IncidentExcerpt, second: IncidentExcerpt) -> IncidentExcerpt:
    """Two excerpts as one; of an engine in both, what the first says stands."""
    known = {engine.id for engine in first.engines}
    return IncidentExcerpt(
        incident_id="",
        engines=(*first.engines, *(e for e in second.engines if e.id not in known)),
        exits=(*first.exits, *(e for e in second.exits if e.engine not in known)),
        gpus=first.gpus or second.gpus,
        lines={**second.lines, **first.lines},
    )


def _add_window(
    gatherer: Gatherer,
    connection: Connection,
    window: tuple[float, float],
    host: str | None,
    case: IncidentExcerpt,
    *,
    step: int | None,
) -> None:
    from oomwatch.store.queries import read_events, read_window

    begin, end = window
    series = read_window(connection, begin, end, host=host, step=step)
    events = list(read_events(connection, begin, end, host=host))
    kernel = tuple(event for _, event in events if isinstance(event, KernelEvent))
    lines = dict(case.lines)
    for name, event in events:
        if isinstance(event, LogLine) and name is not None and name not in case.lines:
            lines[name] = (*lines.get(name, ()), event)
    gatherer.add_series(series)
    gatherer.exits += case.exits
    gatherer.engines += case.engines
    gatherer.engines += _others(case, [*lines, *(sample.engine for sample in series.engines)])
    gatherer.gpus += case.gpus or gpus_of(series.gpus)
    gatherer.logs += [
        LogInput(each[0].source, iter(each), name) for name, each in lines.items() if each
    ]
    if kernel:
        gatherer.kernel.append(KernelInput("kernel log", kernel))
    gatherer.pages += _pages(series, case, end)


def _others(case: IncidentExcerpt, names: Iterable[str]) -> list[RecordedEngine]:
    """Engines that have samples or lines and no description."""
    known = {engine.id for engine in case.engines}
    return [
        RecordedEngine(name)
        for name in dict.fromkeys(names)
        if name not in known and name.partition("/")[0] not in known
    ]


def _pages(series: Series, case: IncidentExcerpt, end: float) -> list[PageInput]:
    """The last readings of engines that served to the end."""
    gone = {engine.id for engine in case.engines if engine.ended}
    kinds = {engine.id: engine.engine for engine in case.engines}
    last: dict[str, EngineSample] = {sample.engine: sample for sample in series.engines}
    return [
        PageInput(f"{name} metrics", kinds.get(name), (sample,))
        for name, sample in last.items()
        if name not in gone and end - sample.at < _FRESH_SECONDS
    ]


def gpus_of(samples: Iterable[GpuSample]) -> list[Gpu]:
    """The GPUs of these samples, as they were last."""
    last = {(sample.gpu, sample.uuid): sample for sample in samples}
    return [
        Gpu(
            index=sample.gpu,
            uuid=sample.uuid,
            name=sample.name,
            total_bytes=sample.total_bytes,
            used_bytes=sample.used_bytes,
            free_bytes=sample.free_bytes,
            reserved_bytes=sample.reserved_bytes,
        )
        for sample in last.values()
    ]
