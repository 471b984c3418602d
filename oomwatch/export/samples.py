"""The samples of one moment, by metric."""

from __future__ import annotations

from collections.abc import Iterator

from oomwatch.export.labels import Labels
from oomwatch.export.metrics import METRICS, Metric

Sample = tuple[Labels, float]


class Samples:
    """Samples by the name of their metric; no figure, no sample."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Sample]] = {name: [] for name in METRICS}

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add a sample; None and NaN are unknown, and add nothing. KeyError for no metric."""
        if value is not None and value == value:  # noqa: PLR0124 - only NaN is not itself
            self._by_name[name].append((labels, value))

    def __iter__(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """The metrics that have samples, in the order of the table."""
        return ((METRICS[name], found) for name, found in self._by_name.items() if found)
