"""Load over time from whatever tells it: the engine's counters, a metrics page, or load lines."""

from __future__ import annotations

import dataclasses

from oomwatch.diagnose.facts import Facts, cite
from oomwatch.records import EngineSample, Evidence
from oomwatch.units import format_share


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """Load at one moment, and where it stands."""

    at: float | None
    evidence: Evidence
    running: float | None = None
    waiting: float | None = None
    swapped: float | None = None
    kv: float | None = None
    preemptions_total: float | None = None
    generated_total: float | None = None
    prompt_rate: float | None = None


def points_of(facts: Facts) -> list[Point]:
    """The load of the engine in order of time; with the log where it is denser than the counters."""
    sampled = [_from_sample(sample) for sample in facts.series.engine if _tells_load(sample)]
    logged = [
        Point(
            at=load.line.at,
            evidence=cite(load.line),
            running=load.running,
            waiting=load.waiting,
            swapped=load.swapped,
            kv=load.kv_usage_ratio,
            prompt_rate=load.prompt_rate,
        )
        for load in facts.loads
    ]
    if len(sampled) >= len(logged):
        return sampled
    if any(point.at is None for point in (*sampled, *logged)):
        return logged
    return sorted((*logged, *sampled), key=_time)


def _time(point: Point) -> float:
    return point.at or 0.0


def _tells_load(sample: EngineSample) -> bool:
    return sample.running is not None or sample.kv_usage_ratio is not None


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:g}"


def _from_sample(sample: EngineSample) -> Point:
    usage = sample.kv_usage_ratio
    text = ", ".join(
        f"{name} {value}"
        for name, value in (
            ("running", _count(sample.running)),
            ("waiting", _count(sample.waiting)),
            ("KV usage", None if usage is None else format_share(usage)),
            ("preemptions", _count(sample.preemptions_total)),
        )
        if value is not None
    )
    return Point(
        at=sample.at or None,
        evidence=Evidence(
            source="metrics",
            where=f"{sample.engine}: kv_usage_ratio, running, waiting",
            at=sample.at or None,
            text=text,
            value=usage,
            unit="ratio" if usage is not None else None,
        ),
        running=sample.running,
        waiting=sample.waiting,
        swapped=sample.swapped,
        kv=usage,
        preemptions_total=sample.preemptions_total,
        generated_total=sample.generation_tokens_total,
    )
