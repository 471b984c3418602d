"""A stored incident as a recording: its window at full rate, and what its engine said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomwatch.cli.history import gpus_of, read_case, window_of
from oomwatch.records import Gpu, KernelEvent, RecordedEngine

if TYPE_CHECKING:
    from pathlib import Path

    from sqlalchemy import Connection

    from oomwatch.records import StoredIncident
    from oomwatch.sources.recording_write import RecordingWriter

_PIECE_SECONDS: Final = 120.0
"""Read at once, so that memory stays small however long an incident lasted."""


def write_incident(
    connection: Connection, incident: StoredIncident, writer: RecordingWriter
) -> Path:
    """Write the window of an incident; where it is.

    Raises:
        OomwatchError: it cannot be written; nothing is left of it then.

    """
    from oomwatch.sources.log_render import kernel_line
    from oomwatch.store.queries import read_events

    begin, end = window_of(incident)
    case = read_case(connection, incident)
    gpus, engines = _write_samples(connection, incident.host, (begin, end), writer)
    for _, event in read_events(connection, begin, end, host=incident.host):
        if isinstance(event, KernelEvent):
            writer.add_kernel_line(kernel_line(event))
    for name, lines in case.lines.items():
        writer.add_lines(writer.log_name(name), lines)
    known = {engine.id for engine in case.engines}
    others = (RecordedEngine(name) for name in (*case.lines, *engines) if name not in known)
    return writer.finish(
        host=incident.host,
        started_at=begin,
        ended_at=end,
        engines=(*case.engines, *{engine.id: engine for engine in others}.values()),
        gpus=case.gpus or gpus,
        exits=case.exits,
        incident=incident.id,
    )


def _write_samples(
    connection: Connection,
    host: str | None,
    window: tuple[float, float],
    writer: RecordingWriter,
) -> tuple[list[Gpu], list[str]]:
    """The GPUs and the engines that there were samples of."""
    from oomwatch.store.queries import read_window

    begin, end = window
    gpus: dict[int | None, Gpu] = {}
    engines: dict[str, None] = {}
    while begin <= end:
        until = min(begin + _PIECE_SECONDS, end)
        series = read_window(connection, begin, until - 0.001, host=host, step=0)
        for samples in (
            series.gpus,
            series.gpu_processes,
            series.processes,
            series.hosts,
            series.engines,
        ):
            writer.add_samples(samples)
        gpus.update((gpu.index, gpu) for gpu in gpus_of(series.gpus))
        engines.update(dict.fromkeys(sample.engine for sample in series.engines))
        if until >= end:
            break
        begin = until
    return list(gpus.values()), list(engines)
