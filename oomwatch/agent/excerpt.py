"""What is stored beside an incident, so that it can be judged again when its logs are gone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from oomwatch.agent.engines import WatchedEngine
from oomwatch.agent.explain import gpu_of
from oomwatch.records import GpuSample, IncidentExcerpt


def excerpt_of(
    incident_id: str, engines: Sequence[WatchedEngine], gpus: Iterable[GpuSample], max_bytes: int
) -> IncidentExcerpt:
    """The engines, how they ended, and `max_bytes` of their logs."""
    tails = [(engine.id, tail) for engine in engines for tail in engine.tails]
    room = max_bytes // max(1, len(tails))
    lines = {
        engine.id: tuple(
            line for name, tail in tails if name == engine.id for line in tail.excerpt(room)
        )
        for engine in engines
    }
    return IncidentExcerpt(
        incident_id=incident_id,
        engines=tuple(
            dataclasses.replace(engine.found.recorded, ended=engine.broken) for engine in engines
        ),
        exits=tuple(each for engine in engines for each in engine.exits),
        gpus=tuple(gpu_of(sample) for sample in gpus),
        lines={name: found for name, found in lines.items() if found},
    )
