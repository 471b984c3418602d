"""What one row of an engine's table of metrics says. The tables are `vllm.metrics`, `sglang.metrics`.

Names are those on the wire without the engine's prefix, so counters end in ``_total``. Versions are
those of the engine: the first that publishes the name, and the last (None: the newest known one).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

MetricType = Literal["gauge", "counter", "histogram", "info"]
Combine = Literal["sum", "max"]


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One metric name of one engine.

    Where several names carry the same field, the first of the table that a page has is taken.
    """

    name: str
    type: MetricType
    unit: str
    since: str
    until: str | None
    sample: str
    """A line as the engine prints it."""
    field: str | None = None
    """The field of `records.EngineSample` it fills; None: it goes to `extra` by its name."""
    combine: Combine = "sum"
    """How series that differ in further labels, such as a finish reason, become one value."""
    split_by: str | None = None
    """A label whose values are kept apart, as ``name_value`` in `extra`."""
    split_values: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class MetricTable:
    """The metrics of one engine, and how its pages spell names and tell replicas apart."""

    engine: str
    prefixes: tuple[str, ...]
    """Spellings of the prefix; Ray and OpenTelemetry replace the colon."""
    replica_labels: tuple[str, ...]
    """The first of these labels that a series has says which engine of the page it belongs to."""
    rank_labels: frozenset[str]
    """Labels that only tell ranks of one engine apart: their series repeat the same figure."""
    metrics: tuple[Metric, ...]
    expected: tuple[str, ...]
    """Fields that every known version publishes: absent means renamed or switched off."""
    others: frozenset[str]
    """Further families that are known and not read; anything else is new to us."""
