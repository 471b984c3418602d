"""Reading of a recording: its samples, its logs, what the kernel said, and who was there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomwatch.diagnose.inputs import KernelInput
from oomwatch.records import SourceStatus

if TYPE_CHECKING:
    from collections.abc import Iterable

    from oomwatch.cli.gather import Gatherer
    from oomwatch.records import KernelEvent
    from oomwatch.sources.recording import Recording

_DRIFT: Final = 60.0
"""Seconds by which the kernel's clock, counted from the boot, may be off."""


def gather_recording(gatherer: Gatherer, path: str) -> None:
    """Add everything that a recording holds.

    Raises:
        SourceError: it cannot be read, or is none.

    """
    from oomwatch.sources.kernel import read_kernel_log
    from oomwatch.sources.logfile import read_log
    from oomwatch.sources.recording import read_recording

    recording = read_recording(path)
    gatherer.host = recording.host
    gatherer.engines += recording.engines
    gatherer.gpus += recording.gpus
    gatherer.exits += recording.exits
    gatherer.add_series(recording.series)
    known = {engine.id for engine in recording.engines}
    for engine_id, log_path in recording.logs.items():
        name = recording.cite(log_path)
        lines = read_log(
            log_path,
            name=name,
            full=gatherer.options.full,
            written_at=recording.ended_at,
            aside=gatherer.has_many_logs,
        )
        gatherer.add_log(name, lines, [], engine_id if engine_id in known else None)
    if recording.kernel_log:
        events = _about(recording, read_kernel_log(recording.kernel_log))
        gatherer.kernel.append(KernelInput(recording.cite(recording.kernel_log), events))
    if recording.problems:
        gatherer.sources.append(SourceStatus(path, "warning", "; ".join(recording.problems[:5])))


def _about(recording: Recording, events: Iterable[KernelEvent]) -> tuple[KernelEvent, ...]:
    """What the kernel said since the recording began; before, only of processes that are in it."""
    begun = recording.started_at
    pids = {pid for engine in recording.engines for pid in engine.pids}
    pids |= {process.pid for process in recording.series.processes}
    return tuple(
        event
        for event in events
        if begun is None
        or event.at is None
        or event.at >= begun - _DRIFT
        or event.fields.get("pid") in pids
    )
