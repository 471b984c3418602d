"""The engines of a diagnosis in a line each, told apart where there are several."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.records import Diagnosis, EngineFacts
from oomwatch.report.phrases import engine_line
from oomwatch.report.sanitize import clean


def engine_lines(
    diagnosis: Diagnosis, texts: Mapping[str, str], *, running: bool = False
) -> list[str]:
    """A line for each start of each engine; only for those that run, if `running`."""
    return [
        " · ".join([*told_apart(diagnosis, engine), engine_line(engine, texts)])
        for engine in diagnosis.engines
        if engine.load is not None or not running
    ]


def told_apart(diagnosis: Diagnosis, engine: EngineFacts | None) -> list[str]:
    """Which of several engines it is: its id, as `oomwatch check` has it, and its first process."""
    servers = {one.id.partition("#")[0] for one in diagnosis.engines}
    if engine is None or len(servers) < 2:
        return []
    return [clean(engine.id, 60), *(f"PID {pid}" for pid in engine.pids[:1])]
