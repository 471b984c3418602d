"""Reads the metrics page of vLLM or SGLang, and turns two readings into rates.

A page holds one or more engines (data-parallel ranks, Ray replicas). What a page does not say is
None, never 0: a metric that was renamed, or switched off, is listed in `absent`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from oomwatch.engines.metrics import Metric, MetricTable
from oomwatch.engines.sglang.metrics import TABLE as SGLANG
from oomwatch.engines.vllm.metrics import TABLE as VLLM
from oomwatch.errors import NoDataError
from oomwatch.records import EngineSample
from oomwatch.sources.metrics_fetch import is_url, metrics_url, read_file, read_url, shown_url
from oomwatch.sources.metrics_text import PageProblems, Series, parse_families, parse_series

MAX_PAGE_BYTES: Final = 32 * 1024**2
MAX_ENGINES: Final = 1024
_MAX_TOKENS: Final = 2**53  # what a page says beyond this is no count

_TABLES: Final = (VLLM, SGLANG)
_HISTOGRAM_SUFFIXES: Final = ("_bucket", "_sum", "_count")
_SHARED: Final = "all"
"""The engine of series that name none on a page with several."""
_COUNTER_FIELDS: Final = tuple(
    field.name
    for field in dataclasses.fields(EngineSample)
    if field.name.endswith("_total") and field.name != "kv_blocks_total"
)


@dataclasses.dataclass(frozen=True, slots=True)
class MetricsPage:
    """What one page says. Mappings are by engine label: the data-parallel rank, else ``0``."""

    source: str
    at: float
    engine: str | None
    model_name: str | None
    samples: tuple[EngineSample, ...]
    cache_config: Mapping[str, Mapping[str, str]]
    """Labels of vLLM's or SGLang's ``cache_config_info``, as printed; ``None`` is left out."""
    kv_tokens: Mapping[str, int]
    gpu_memory_utilization: float | None
    max_model_len: int | None
    absent: tuple[str, ...]
    """Fields of `EngineSample` that this engine publishes and the page lacks."""
    unknown: tuple[str, ...]
    """Families with the engine's prefix that no known version has."""
    problems: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Growth per second between two samples of one engine, by name without ``_total``."""

    engine: str
    seconds: float
    restarted: bool
    """A counter went back: the figures are those since the restart, a lower bound."""
    per_second: Mapping[str, float]


def read_metrics(
    source: str, *, timeout_seconds: float = 10, max_bytes: int = MAX_PAGE_BYTES
) -> MetricsPage:
    """Read the page at an address (``/metrics`` is added where it has no path) or in a file.

    Raises:
        NoDataError: it has no figures of a known engine.
        SourceUnavailable: no answer, or cut short; trying again may help.
        PermissionDeniedError: the file or the server refuses.
        SourceError: too large, damaged, or a redirect.
        UsageError: the address makes no sense.

    """
    if is_url(source):
        url = metrics_url(source)
        shown, at = shown_url(url), time.time()
        data = read_url(url, timeout_seconds=timeout_seconds, max_bytes=max_bytes)
    else:
        shown = source
        data = read_file(source, max_bytes)
        at = Path(source).stat().st_mtime
    page = parse_metrics(data, source=shown, at=at)
    if page.engine is None:
        raise NoDataError(
            f"{shown}: no vLLM or SGLang figures; vLLM hides them with --disable-log-stats, "
            "SGLang shows them with --enable-metrics"
        )
    return page


def parse_metrics(
    page: str | bytes, *, source: str = "metrics", at: float | None = None
) -> MetricsPage:
    """Read the text of a page; one without figures of a known engine has `engine` None."""
    text = page.decode("utf-8", "replace") if isinstance(page, bytes) else page
    problems = PageProblems()
    found: dict[str, list[tuple[_Wanted, Series]]] = {}
    wanted = _wanted_names()
    for series in parse_series(text, wanted, problems):
        want = wanted[series.name]
        found.setdefault(want.table.engine, []).append((want, series))
    notes = [f"{problems.unreadable} lines could not be read"] if problems.unreadable else []
    if len(found) > 1:
        notes.append(
            "figures of vLLM and SGLang on one page; the engine with more of them was read"
        )
    table = max(_TABLES, key=lambda table: len(found.get(table.engine, ())))
    rows = found.get(table.engine, [])
    reading = _Reading(table, rows)
    samples = reading.samples(time.time() if at is None else at)
    return MetricsPage(
        source=source,
        at=time.time() if at is None else at,
        engine=table.engine if rows else None,
        model_name=next((name for _, one in rows if (name := one.labels.get("model_name"))), None),
        samples=samples,
        cache_config=reading.cache_config,
        kv_tokens=reading.kv_tokens,
        gpu_memory_utilization=reading.gpu_memory_utilization,
        max_model_len=reading.max_model_len,
        absent=_absent(table, samples) if rows else (),
        unknown=_unknown(table, text) if rows else (),
        problems=tuple(notes),
    )


def rates(earlier: EngineSample, later: EngineSample) -> Rates | None:
    """Growth of every counter that both samples have; None if no time lies between them."""
    seconds = later.at - earlier.at
    if seconds <= 0:
        return None
    before, after = _counters(earlier), _counters(later)
    both = [name for name in after if name in before]
    # The counters of a process start together: one that fell tells that all began again.
    restarted = any(after[name] < before[name] for name in both)
    return Rates(
        engine=later.engine,
        seconds=seconds,
        restarted=restarted,
        per_second={
            name.removesuffix("_total"): (after[name] - (0 if restarted else before[name]))
            / seconds
            for name in both
        },
    )


def _counters(sample: EngineSample) -> dict[str, float]:
    counters = {
        name: value for name in _COUNTER_FIELDS if (value := getattr(sample, name)) is not None
    }
    counters.update(
        (name, value)
        for name, value in sample.extra.items()
        if name.endswith(("_total", "_sum", "_count"))
    )
    return counters


# ---------------------------------------------------------------- names
@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """What a name on the wire stands for."""

    table: MetricTable
    metric: Metric
    suffix: str = ""


@functools.cache
def _wanted_names() -> Mapping[str, _Wanted]:
    names: dict[str, _Wanted] = {}
    for table in _TABLES:
        for metric in table.metrics:
            for prefix in table.prefixes:
                full = prefix + metric.name
                if metric.type == "histogram":
                    for suffix in _HISTOGRAM_SUFFIXES:
                        names[full + suffix] = _Wanted(table, metric, suffix)
                    continue
                names[full] = _Wanted(table, metric)
                if metric.type == "counter" and prefix.startswith("ray_"):
                    # Ray prints counters as gauges, without the suffix that Prometheus adds.
                    names[full.removesuffix("_total")] = _Wanted(table, metric)
    return names


def _absent(table: MetricTable, samples: Iterable[EngineSample]) -> tuple[str, ...]:
    return tuple(
        field
        for field in table.expected
        if all(getattr(sample, field) is None for sample in samples)
    )


def _unknown(table: MetricTable, text: str) -> tuple[str, ...]:
    known = {metric.name for metric in table.metrics} | table.others
    bare = {name.removesuffix("_total") for name in known} | known
    unknown = set[str]()
    for family, _kind in parse_families(text):
        prefix = next((prefix for prefix in table.prefixes if family.startswith(prefix)), None)
        name = family[len(prefix) :] if prefix else ""
        # `_created` families repeat the start time of a counter; they are not read.
        if name and not name.endswith("_created") and name not in bare:
            unknown.add(name)
    return tuple(sorted(unknown))[:100]


# ---------------------------------------------------------------- values
class _Reading:
    """The series of one engine's table, gathered by engine label."""

    def __init__(self, table: MetricTable, rows: list[tuple[_Wanted, Series]]) -> None:
        self._table = table
        # engine label -> metric name with suffix -> (metric, series)
        self._engines: dict[str, dict[str, tuple[_Wanted, list[Series]]]] = {}
        for label, want, series in self._labelled(rows):
            names = self._engines.get(label)
            if names is None:
                if len(self._engines) == MAX_ENGINES:
                    continue
                names = self._engines[label] = {}
            key = want.metric.name + want.suffix
            names.setdefault(key, (want, []))[1].append(series)
        self.cache_config = {
            label: {
                name: value
                for name, value in names["cache_config_info"][1][-1].labels.items()
                if value != "None"
            }
            for label, names in self._engines.items()
            if "cache_config_info" in names
        }
        self._values = {label: self._read(names) for label, names in self._engines.items()}
        self._add_blocks()
        self.kv_tokens = {
            label: tokens for label in self._engines if (tokens := self._kv_tokens(label))
        }
        shares = (
            _positive(config.get("gpu_memory_utilization")) for config in self.cache_config.values()
        )
        self.gpu_memory_utilization = next((share for share in shares if share), None)
        self.max_model_len = self._max_model_len()

    def samples(self, at: float) -> tuple[EngineSample, ...]:
        """One sample an engine label, numbers in order."""
        fields = {metric.field for metric in self._table.metrics if metric.field} | {
            "kv_blocks_total",
            "block_size_tokens",
        }
        labels = sorted(self._values, key=lambda label: (not label.isdecimal(), len(label), label))
        return tuple(
            EngineSample(
                at=at,
                engine=label,
                extra={name: value for name, value in values.items() if name not in fields},
                **{name: value for name, value in values.items() if name in fields},
            )
            for label in labels
            if (values := self._values[label])
        )

    def _labelled(
        self, rows: list[tuple[_Wanted, Series]]
    ) -> Iterable[tuple[str, _Wanted, Series]]:
        labelled = [(self._label(series), want, series) for want, series in rows]
        labels = {label for label, _, _ in labelled if label is not None}
        rest = _SHARED if len(labels) > 1 else next(iter(labels), "0")
        return [(label or rest, want, series) for label, want, series in labelled]

    def _label(self, series: Series) -> str | None:
        """The engine a series belongs to; on a page of Ray, the replica too."""
        labels = series.labels
        rank = next((labels[name] for name in self._table.replica_labels if labels.get(name)), None)
        if series.name.startswith("ray_"):
            replica = labels.get("ReplicaId") or labels.get("replica") or labels.get("WorkerId")
            if replica:
                return f"{replica}/{rank or 0}"
        return rank

    def _read(self, names: Mapping[str, tuple[_Wanted, list[Series]]]) -> dict[str, float]:
        values: dict[str, float] = {}
        # In the table's order: the first name that is there fills a field.
        for metric in self._table.metrics:
            if metric.type == "info":
                continue
            if metric.type == "histogram":
                values.update(_histogram(metric, names))
                continue
            _, series = names.get(metric.name, (None, []))
            if metric.split_by is not None:
                for choice in metric.split_values:
                    part = [one for one in series if one.labels.get(metric.split_by) == choice]
                    _put(values, f"{metric.name}_{choice}", self._combine(metric, part))
            else:
                _put(values, metric.field or metric.name, self._combine(metric, series))
        return values

    def _combine(self, metric: Metric, series: list[Series]) -> float | None:
        """Ranks repeat one figure: the largest counts once; other series add up or compete."""
        parts: dict[frozenset[tuple[str, str]], float] = {}
        for one in series:
            if not math.isfinite(one.value) or one.value < 0:  # -1 says "switched off"
                continue
            key = frozenset(
                item for item in one.labels.items() if item[0] not in self._table.rank_labels
            )
            parts[key] = max(one.value, parts.get(key, 0))
        if not parts:
            return None
        value = max(parts.values()) if metric.combine == "max" else sum(parts.values())
        return value if math.isfinite(value) else None

    def _add_blocks(self) -> None:
        for label, config in self.cache_config.items():
            values = self._values[label]
            _put(values, "kv_blocks_total", _positive(config.get("num_gpu_blocks")))
            _put(values, "kv_blocks_total", _positive(config.get("num_pages")))
            _put(values, "block_size_tokens", _positive(config.get("block_size")))
            _put(values, "block_size_tokens", _positive(config.get("page_size")))
            # With data parallelism vLLM prints the blocks of all ranks, and the tokens of one.
            blocks, size = values.get("kv_blocks_total"), values.get("block_size_tokens")
            tokens, ranks = _positive(config.get("kv_cache_size_tokens")), len(self.cache_config)
            if blocks and size and tokens and ranks > 1 and blocks * size == tokens * ranks:
                values["kv_blocks_total"] = blocks / ranks

    def _kv_tokens(self, label: str) -> int | None:
        """What the engine says (vLLM 0.24, SGLang 0.5.6), else blocks times their size."""
        values = self._values[label]
        said = _positive(self.cache_config.get(label, {}).get("kv_cache_size_tokens"))
        said = said or values.get("max_total_num_tokens")
        blocks, size = values.get("kv_blocks_total"), values.get("block_size_tokens")
        tokens = said or (blocks * size if blocks and size else None)
        return round(tokens) if tokens and tokens < _MAX_TOKENS else None

    def _max_model_len(self) -> int | None:
        """SGLang says it; vLLM's capacity in tokens and in full-length requests gives it."""
        for label, values in self._values.items():
            if (length := values.get("context_len")) and length < _MAX_TOKENS:
                return round(length)
            config = self.cache_config.get(label, {})
            tokens = _positive(config.get("kv_cache_size_tokens"))
            requests = _positive(config.get("kv_cache_max_concurrency"))
            if tokens and requests and tokens / requests < _MAX_TOKENS:
                # Tokens are rounded down, so the length is the whole number just above.
                return math.ceil(tokens / requests - 1e-6)
        return None


def _put(values: dict[str, float], name: str, value: float | None) -> None:
    if value is not None:
        values.setdefault(name, value)


def _positive(text: str | None) -> float | None:
    try:
        value = float(text) if text else 0.0
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def _histogram(
    metric: Metric, names: Mapping[str, tuple[_Wanted, list[Series]]]
) -> dict[str, float]:
    """Sum and count, and the bound of the highest bucket in use: the largest value seen, about."""
    values: dict[str, float] = {}
    for suffix in ("_sum", "_count"):
        _, series = names.get(metric.name + suffix, (None, []))
        finite = [one.value for one in series if math.isfinite(one.value)]
        if finite and math.isfinite(total := sum(finite)):
            values[metric.name + suffix] = total
    cumulative: dict[float, float] = {}
    for one in names.get(metric.name + "_bucket", (None, []))[1]:
        try:
            bound = float(one.labels.get("le", ""))
        except ValueError:
            continue
        if not math.isnan(bound) and math.isfinite(one.value):
            cumulative[bound] = cumulative.get(bound, 0) + one.value
    total = max(cumulative.values(), default=0)
    if total > 0:
        top = min(bound for bound, value in cumulative.items() if value == total)
        if math.isfinite(top):
            values[metric.name + "_highest_bucket"] = top
    return values
