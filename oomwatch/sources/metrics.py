"""Reads the metrics page of vLLM or SGLang, and turns two readings into rates.

A page holds one or more engines (data-parallel ranks, Ray replicas). What a page does not say is
None, never 0: a metric that was renamed, or switched off, is listed in `absent`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from oomwatch.engines.metrics import MetricTable
from oomwatch.engines.sglang.metrics import TABLE as SGLANG
from oomwatch.engines.vllm.metrics import TABLE as VLLM
from oomwatch.errors import NoDataError
from oomwatch.records import EngineSample
from oomwatch.sources.metrics_fetch import is_url, metrics_url, read_file, read_url, shown_url
from oomwatch.sources.metrics_layout import Layout, Row, wanted_names
from oomwatch.sources.metrics_text import Page
from oomwatch.sources.regular_file import changed_at

MAX_PAGE_BYTES: Final = 32 * 1024**2
_MOST_KEPT: Final = 2**20
"""Characters of a page whose form is kept for the next one: it takes as much memory again."""

_TABLES: Final = (VLLM, SGLANG)
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
        at = changed_at(Path(source).stat())
    page = parse_metrics(data, source=shown, at=at)
    if page.engine is None:
        raise no_figures(shown)
    return page


def no_figures(shown: str) -> NoDataError:
    """What to raise for a page that is of no engine."""
    return NoDataError(
        f"{shown}: no vLLM or SGLang figures; vLLM hides them with --disable-log-stats, "
        "SGLang shows them with --enable-metrics"
    )


def parse_metrics(
    page: str | bytes, *, source: str = "metrics", at: float | None = None
) -> MetricsPage:
    """As `PageReader.read`, for a page that is read once."""
    return PageReader(source).read(page, at=at)


class PageReader:
    """Reads the pages of one server, one after another; what does not change is kept."""

    def __init__(self, source: str = "metrics") -> None:
        self._source = source
        self._form: _Form | None = None

    def read(self, page: str | bytes, *, at: float | None = None) -> MetricsPage:
        """Read the text of a page; one without figures of a known engine has `engine` None."""
        text = page.decode("utf-8", "replace") if isinstance(page, bytes) else page
        values = None if self._form is None else self._form.page.read(text)
        form = self._form
        if form is None or values is None:
            form = _Form(text)
            values = form.page.values
            self._form = form if len(text) <= _MOST_KEPT else None
        at = time.time() if at is None else at
        reading = form.layout.read(values)
        samples = reading.samples(at)
        return MetricsPage(
            source=self._source,
            at=at,
            engine=form.table.engine if form.layout.labels else None,
            model_name=form.model_name,
            samples=samples,
            cache_config=form.layout.cache_config,
            kv_tokens=reading.kv_tokens,
            gpu_memory_utilization=form.layout.gpu_memory_utilization,
            max_model_len=reading.max_model_len,
            absent=_absent(form.table, samples) if form.layout.labels else (),
            unknown=form.unknown,
            problems=form.problems,
        )


class _Form:
    """All of a page but its values: whose it is, and which figures it has."""

    def __init__(self, text: str) -> None:
        wanted = wanted_names(_TABLES)
        self.page = Page(text, wanted)
        found: dict[str, list[Row]] = {}
        for index, series in enumerate(self.page.series):
            want = wanted[series.name]
            found.setdefault(want.table.engine, []).append(Row(want, series, index))
        self.table = max(_TABLES, key=lambda table: len(found.get(table.engine, ())))
        rows = found.get(self.table.engine, [])
        self.layout = Layout(self.table, rows)
        names = (row.series.labels.get("model_name") for row in rows)
        self.model_name = next((name for name in names if name), None)
        self.unknown = _unknown(self.table, self.page.families) if rows else ()
        notes = []
        if self.page.unreadable:
            notes.append(f"{self.page.unreadable} lines could not be read")
        if len(found) > 1:
            notes.append(
                "figures of vLLM and SGLang on one page; the engine with more of them was read"
            )
        self.problems = tuple(notes)


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


def _absent(table: MetricTable, samples: Iterable[EngineSample]) -> tuple[str, ...]:
    return tuple(
        field
        for field in table.expected
        if all(getattr(sample, field) is None for sample in samples)
    )


def _unknown(table: MetricTable, families: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    known = {metric.name for metric in table.metrics} | table.others
    bare = {name.removesuffix("_total") for name in known} | known
    unknown = set[str]()
    for family, _kind in families:
        prefix = next((prefix for prefix in table.prefixes if family.startswith(prefix)), None)
        name = family[len(prefix) :] if prefix else ""
        # `_created` families repeat the start time of a counter; they are not read.
        if name and not name.endswith("_created") and name not in bare:
            unknown.add(name)
    return tuple(sorted(unknown))[:100]
