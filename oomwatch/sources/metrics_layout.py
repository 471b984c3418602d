"""Which figures of which engine the series of a page are, worked out once, and then their values.

Ranks repeat one figure, several series add up to one or compete, and the bucket that fills last
tells the largest value seen: what goes where depends on names and labels alone, so a page like the
one before costs its numbers only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from oomwatch.engines.metrics import Metric, MetricTable
from oomwatch.records import EngineSample
from oomwatch.sources.metrics_text import Series

MAX_ENGINES: Final = 1024
_MAX_TOKENS: Final = 2**53  # what a page says beyond this is no count
_HISTOGRAM_SUFFIXES: Final = ("_bucket", "_sum", "_count")
_SHARED: Final = "all"
"""The engine of series that name none on a page with several."""


class Wanted(NamedTuple):
    """What a name on the wire stands for."""

    table: MetricTable
    metric: Metric
    suffix: str = ""


class Row(NamedTuple):
    """A wanted series, and the place of its value among those of the page."""

    want: Wanted
    series: Series
    place: int


@functools.cache
def wanted_names(tables: tuple[MetricTable, ...]) -> Mapping[str, Wanted]:
    """All names on the wire that are read."""
    names: dict[str, Wanted] = {}
    for table in tables:
        for metric in table.metrics:
            for prefix in table.prefixes:
                full = prefix + metric.name
                if metric.type == "histogram":
                    for suffix in _HISTOGRAM_SUFFIXES:
                        names[full + suffix] = Wanted(table, metric, suffix)
                    continue
                names[full] = Wanted(table, metric)
                if metric.type == "counter" and prefix.startswith("ray_"):
                    # Ray prints counters as gauges, without the suffix that Prometheus adds.
                    names[full.removesuffix("_total")] = Wanted(table, metric)
    return names


class Layout:
    """The figures of one engine's table on a page. Mappings are by engine label, in page order."""

    def __init__(self, table: MetricTable, rows: Sequence[Row]) -> None:
        engines: dict[str, dict[str, list[Row]]] = {}
        for label, row in _labelled(table, rows):
            names = engines.get(label)
            if names is None:
                if len(engines) == MAX_ENGINES:
                    continue
                names = engines[label] = {}
            names.setdefault(row.want.metric.name + row.want.suffix, []).append(row)
        self._figures = {label: _Figures(table, names) for label, names in engines.items()}
        self._fields = frozenset(metric.field for metric in table.metrics if metric.field) | {
            "kv_blocks_total",
            "block_size_tokens",
        }
        self.labels = tuple(engines)
        self.cache_config = {
            label: {
                name: value
                for name, value in names["cache_config_info"][-1].series.labels.items()
                if value != "None"
            }
            for label, names in engines.items()
            if "cache_config_info" in names
        }
        shares = (
            _positive(config.get("gpu_memory_utilization")) for config in self.cache_config.values()
        )
        self.gpu_memory_utilization = next((share for share in shares if share), None)

    def read(self, numbers: Sequence[float]) -> Reading:
        """The figures, of the values of all series of the page."""
        values = {label: figures.read(numbers) for label, figures in self._figures.items()}
        return Reading(self.cache_config, self._fields, values)


class Reading:
    """The figures of one page, by engine label."""

    def __init__(
        self,
        cache_config: Mapping[str, Mapping[str, str]],
        fields: frozenset[str],
        values: Mapping[str, dict[str, float]],
    ) -> None:
        self._cache_config = cache_config
        self._fields = fields
        self._values = values
        self._add_blocks()
        self.kv_tokens = {label: tokens for label in values if (tokens := self._kv_tokens(label))}
        self.max_model_len = self._max_model_len()

    def samples(self, at: float) -> tuple[EngineSample, ...]:
        """One sample an engine label, numbers in order."""
        labels = sorted(self._values, key=lambda label: (not label.isdecimal(), len(label), label))
        return tuple(self._sample(at, label) for label in labels if self._values[label])

    def _sample(self, at: float, label: str) -> EngineSample:
        extra, fields = dict[str, float](), dict[str, float]()
        for name, value in self._values[label].items():
            (fields if name in self._fields else extra)[name] = value
        return EngineSample(at=at, engine=label, extra=extra, **fields)

    def _add_blocks(self) -> None:
        for label, config in self._cache_config.items():
            values = self._values[label]
            _put(values, "kv_blocks_total", _positive(config.get("num_gpu_blocks")))
            _put(values, "kv_blocks_total", _positive(config.get("num_pages")))
            _put(values, "block_size_tokens", _positive(config.get("block_size")))
            _put(values, "block_size_tokens", _positive(config.get("page_size")))
            # With data parallelism vLLM prints the blocks of all ranks, and the tokens of one.
            blocks, size = values.get("kv_blocks_total"), values.get("block_size_tokens")
            tokens, ranks = _positive(config.get("kv_cache_size_tokens")), len(self._cache_config)
            if blocks and size and tokens and ranks > 1 and blocks * size == tokens * ranks:
                values["kv_blocks_total"] = blocks / ranks

    def _kv_tokens(self, label: str) -> int | None:
        """What the engine says (vLLM 0.24, SGLang 0.5.6), else blocks times their size."""
        values = self._values[label]
        said = _positive(self._cache_config.get(label, {}).get("kv_cache_size_tokens"))
        said = said or values.get("max_total_num_tokens")
        blocks, size = values.get("kv_blocks_total"), values.get("block_size_tokens")
        tokens = said or (blocks * size if blocks and size else None)
        return round(tokens) if tokens and tokens < _MAX_TOKENS else None

    def _max_model_len(self) -> int | None:
        """SGLang says it; vLLM's capacity in tokens and in full-length requests gives it."""
        for label, values in self._values.items():
            if (length := values.get("context_len")) and length < _MAX_TOKENS:
                return round(length)
            config = self._cache_config.get(label, {})
            tokens = _positive(config.get("kv_cache_size_tokens"))
            requests = _positive(config.get("kv_cache_max_concurrency"))
            if tokens and requests and tokens / requests < _MAX_TOKENS:
                # Tokens are rounded down, so the length is the whole number just above.
                return math.ceil(tokens / requests - 1e-6)
        return None


# ---------------------------------------------------------------- which engine
def _labelled(table: MetricTable, rows: Sequence[Row]) -> Iterable[tuple[str, Row]]:
    labelled = [(_label(table, row.series), row) for row in rows]
    labels = {label for label, _ in labelled if label is not None}
    rest = _SHARED if len(labels) > 1 else next(iter(labels), "0")
    return [(label or rest, row) for label, row in labelled]


def _label(table: MetricTable, series: Series) -> str | None:
    """The engine a series belongs to; on a page of Ray, the replica too."""
    labels = series.labels
    rank = next((labels[name] for name in table.replica_labels if labels.get(name)), None)
    if series.name.startswith("ray_"):
        replica = labels.get("ReplicaId") or labels.get("replica") or labels.get("WorkerId")
        if replica:
            return f"{replica}/{rank or 0}"
    return rank


# ---------------------------------------------------------------- figures of one engine
class _Figures:
    """Every figure of one engine of a page, in the table's order: the first fills a field."""

    def __init__(self, table: MetricTable, names: Mapping[str, list[Row]]) -> None:
        self._plain: list[_Plain] = []
        self._histograms: list[_Histogram] = []
        for metric in table.metrics:
            rows = names.get(metric.name, [])
            if metric.type == "histogram":
                self._histograms.append(_Histogram(metric, names))
            elif metric.split_by is not None:
                for choice in metric.split_values:
                    part = [row for row in rows if row.series.labels.get(metric.split_by) == choice]
                    self._plain.append(_Plain(table, metric, part, f"{metric.name}_{choice}"))
            elif metric.type != "info" and rows:
                self._plain.append(_Plain(table, metric, rows, metric.field or metric.name))

    def read(self, numbers: Sequence[float]) -> dict[str, float]:
        """What the page says, by field or name."""
        values: dict[str, float] = {}
        for figure in self._plain:
            _put(values, figure.name, figure.value(numbers))
        for histogram in self._histograms:
            values.update(histogram.values(numbers))
        return values


class _Plain:
    """A gauge or counter: ranks repeat it, and the largest counts; other series are combined."""

    def __init__(self, table: MetricTable, metric: Metric, rows: Iterable[Row], name: str) -> None:
        self.name = name
        parts: dict[frozenset[tuple[str, str]], list[int]] = {}
        for row in rows:
            labels = row.series.labels.items()
            key = frozenset(item for item in labels if item[0] not in table.rank_labels)
            parts.setdefault(key, []).append(row.place)
        self._parts = list(parts.values())
        self._combine: Callable[[list[float]], float] = max if metric.combine == "max" else sum

    def value(self, numbers: Sequence[float]) -> float | None:
        """What it is; None where no series has a number. -1 says "switched off"."""
        found = [
            max(told)
            for part in self._parts
            if (told := [n for index in part if 0 <= (n := numbers[index]) < math.inf])
        ]
        value = self._combine(found) if found else None
        return None if value is None or not math.isfinite(value) else value


class _Histogram:
    """Sum and count, and the bound of the highest bucket in use: the largest value seen, about."""

    def __init__(self, metric: Metric, names: Mapping[str, list[Row]]) -> None:
        self._name = metric.name
        self._totals = [
            (metric.name + suffix, [row.place for row in names.get(metric.name + suffix, ())])
            for suffix in ("_sum", "_count")
        ]
        buckets: dict[float, list[int]] = {}
        for row in names.get(metric.name + "_bucket", ()):
            try:
                bound = float(row.series.labels.get("le", ""))
            except ValueError:
                continue
            if not math.isnan(bound):
                buckets.setdefault(bound, []).append(row.place)
        self._bounds = sorted(buckets)
        self._buckets = [buckets[bound] for bound in self._bounds]
        self._shared = any(len(series) > 1 for series in self._buckets)

    def values(self, numbers: Sequence[float]) -> dict[str, float]:
        """What it says, by name."""
        values: dict[str, float] = {}
        for name, series in self._totals:
            finite = _finite(numbers, series)
            if finite and math.isfinite(total := sum(finite)):
                values[name] = total
        if self._bounds:
            filled = [numbers[series[0]] for series in self._buckets]
            if self._shared or not math.isfinite(sum(filled)):
                filled = [sum(_finite(numbers, series)) for series in self._buckets]
            top = self._bounds[filled.index(most)] if (most := max(filled)) > 0 else math.inf
            if math.isfinite(top):
                values[self._name + "_highest_bucket"] = top
        return values


def _finite(numbers: Sequence[float], series: Iterable[int]) -> list[float]:
    return [number for index in series if math.isfinite(number := numbers[index])]


def _put(values: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        values.setdefault(name, value)


def _positive(text: str | None) -> float | None:
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
