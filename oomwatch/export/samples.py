"""The samples of one moment, by metric."""

from __future__ import annotations

from collections.abc import Iterator

from oomwatch.export.labels import Labels
from oomwatch.export.metrics import METRICS, Metric

Sample = tuple[Labels, float]


class Samples:
    """Samples by the name of their metric; no figure, no sample."""

    def __init__(self) -> None:
        self._by_name: dict[str, list[Sample]] = {}

    def add(self, name: str, labels: Labels, value: float | None) -> None:
        """Add a sample; None and NaN are unknown, and add nothing. KeyError for no metric."""
        if value is not None and value == value:  # noqa: PLR0124 - only NaN is not itself
            found = self._by_name.get(name)
            if found is None:
                found = self._by_name[METRICS[name].name] = []
            found.append((labels, value))

    def __iter__(self) -> Iterator[tuple[Metric, list[Sample]]]:
        """The metrics that have samples, in the order of the table."""
        return (
            (metric, found)
            for name, metric in METRICS.items()
            if (found := self._by_name.get(name)) is not None
        )
