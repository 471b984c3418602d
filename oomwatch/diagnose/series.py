"""What samples say over time: slopes, plateaus, peaks, and who holds what.

A leak is growth without a plateau; a warm-up is growth that ends. Slopes are Theil-Sen medians of
pairwise slopes, which single outliers do not move.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from oomwatch.records import EngineSample, HostSample, ProcessSample, Series
from oomwatch.units import GIB, MIB

_POINTS: Final = 64
"""Points a trend is fitted on; longer series are thinned."""
_COMPILERS: Final = re.compile(
    r"^(?:cicc|nvcc|ptxas|cc1plus|ninja|fatbinary|cudafe\+\+|c\+\+|g\+\+|clang\S*)$"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Trend:
    """How one quantity went over the window."""

    first: float
    last: float
    low: float
    high: float
    seconds: float
    points: int
    slope_per_second: float
    late_slope_per_second: float
    """Slope over the last 40 % of the window: near zero where the growth has ended."""
    early_slope_per_second: float
    floor_grown: float = 0.0
    """How far the low level of the last third lies above that of the first: waves do not count."""
    spread: float = 0.0
    """Between the levels that a twentieth of the values lie below and above: no single peaks."""

    @property
    def grown(self) -> float:
        """Last level minus first, by medians of the ends."""
        return self.last - self.first


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessTrend:
    """Resident memory of one process over the window."""

    pid: int
    ppid: int | None
    name: str
    rss: Trend
    last_seen: float
    cmdline: tuple[str, ...] | None = None
    shared_bytes: int | None = None
    state: str | None = None
    """Of the kernel's states the one it was in at the first and at the last reading."""
    cgroup: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HolderTrend:
    """GPU memory of one process over the window."""

    gpu: int
    pid: int
    name: str
    used: Trend
    last_seen: float


@dataclasses.dataclass(frozen=True, slots=True)
class SeriesFacts:
    """The summary that rules read; all parts empty without samples."""

    gpus: Mapping[int, Trend] = dataclasses.field(default_factory=dict)
    gpu_totals: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gpu_free: Mapping[int, Trend] = dataclasses.field(default_factory=dict)
    holders: tuple[HolderTrend, ...] = ()
    processes: tuple[ProcessTrend, ...] = ()
    compilers: tuple[ProcessTrend, ...] = ()
    available: Trend | None = None
    """Host memory available."""
    host_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    oom_kills: int = 0
    """Kills the cgroup counted within the window."""
    engine: tuple[EngineSample, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None

    @property
    def seconds(self) -> float:
        """Length of the window."""
        if self.started_at is None or self.ended_at is None:
            return 0.0
        return self.ended_at - self.started_at

    def holder(self, pids: Iterable[int]) -> HolderTrend | None:
        """The process among these that holds most GPU memory."""
        wanted = set(pids)
        mine = [holder for holder in self.holders if holder.pid in wanted]
        return max(mine, key=lambda holder: holder.used.last, default=None)


def fit_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """The trend of (time, value) points in order of time; None under four points or no time."""
    if len(points) < 4 or points[-1][0] <= points[0][0]:
        return None
    thin = _thinned(points)
    edge = max(1, len(points) // 12)
    values = [value for _, value in points]
    begin, end = points[0][0], points[-1][0]
    late = [p for p in thin if p[0] >= begin + 0.6 * (end - begin)]
    early = [p for p in thin if p[0] <= begin + 0.4 * (end - begin)]
    return Trend(
        first=statistics.median(values[:edge]),
        last=statistics.median(values[-edge:]),
        low=min(values),
        high=max(values),
        seconds=end - begin,
        points=len(points),
        slope_per_second=_slope(thin),
        late_slope_per_second=_slope(late),
        early_slope_per_second=_slope(early),
        floor_grown=_floor(values[-(len(values) // 3 or 1) :])
        - _floor(values[: len(values) // 3 or 1]),
        spread=_spread(values),
    )


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    """At most `_POINTS` of them, evenly, the first and the last included: pairs grow by square."""
    if len(points) <= _POINTS:
        return points
    step = (len(points) - 1) / (_POINTS - 1)
    return [points[round(place * step)] for place in range(_POINTS)]


def _spread(values: Sequence[float]) -> float:
    ranked = sorted(values)
    edge = len(ranked) // 20
    return ranked[-1 - edge] - ranked[edge]


def _floor(values: Sequence[float]) -> float:
    """The level that a tenth of the values lie below."""
    return sorted(values)[len(values) // 10]


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """The median slope of all pairs; 0 under two points."""
    slopes = [
        (b[1] - a[1]) / (b[0] - a[0])
        for index, a in enumerate(points)
        for b in points[index + 1 :]
        if b[0] > a[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def summarise(series: Series) -> SeriesFacts:
    """The facts of all samples, but those of engines: `with_engine` adds the samples of one."""
    times = [s.at for s in (*series.gpus[:1], *series.gpus[-1:])]
    times += [s.at for s in (*series.hosts[:1], *series.hosts[-1:])]
    times += [s.at for s in (*series.processes[:1], *series.processes[-1:])]
    gpus: dict[int, list[tuple[float, float]]] = defaultdict(list)
    free: dict[int, list[tuple[float, float]]] = defaultdict(list)
    totals: dict[int, int] = {}
    for gpu in series.gpus:
        if gpu.used_bytes is not None:
            gpus[gpu.gpu].append((gpu.at, gpu.used_bytes))
        if gpu.free_bytes is not None:
            free[gpu.gpu].append((gpu.at, gpu.free_bytes))
        if gpu.total_bytes is not None:
            totals[gpu.gpu] = gpu.total_bytes
    holders: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    names: dict[int, str] = {}
    for holder in series.gpu_processes:
        names[holder.pid] = holder.name or names.get(holder.pid, "?")
        if holder.used_bytes is not None:
            holders[holder.gpu, holder.pid].append((holder.at, holder.used_bytes))
    processes = _processes(series.processes)
    hosts = series.hosts
    return SeriesFacts(
        gpus={key: trend for key, value in gpus.items() if (trend := fit_trend(value))},
        gpu_free={key: trend for key, value in free.items() if (trend := fit_trend(value))},
        gpu_totals=totals,
        holders=tuple(
            HolderTrend(gpu, pid, names[pid], trend, points[-1][0])
            for (gpu, pid), points in holders.items()
            if (trend := fit_trend(points) or _still(points))
        ),
        processes=tuple(p for p in processes if not _COMPILERS.match(p.name)),
        compilers=tuple(p for p in processes if _COMPILERS.match(p.name)),
        available=fit_trend(
            [(h.at, h.mem_available_bytes) for h in hosts if h.mem_available_bytes is not None]
        ),
        host_total_bytes=next(
            (h.mem_total_bytes for h in reversed(hosts) if h.mem_total_bytes), None
        ),
        swap_used_bytes=next(
            (h.swap_used_bytes for h in reversed(hosts) if h.swap_used_bytes is not None), None
        ),
        oom_kills=_kills(hosts),
        started_at=min(times, default=None),
        ended_at=max(times, default=None),
    )


def with_engine(facts: SeriesFacts, samples: Iterable[EngineSample]) -> SeriesFacts:
    """The facts with the samples of an engine."""
    ordered = tuple(sorted(samples, key=lambda sample: sample.at))
    times = [sample.at for sample in (*ordered[:1], *ordered[-1:])]
    times += [at for at in (facts.started_at, facts.ended_at) if at is not None]
    return dataclasses.replace(
        facts,
        engine=ordered,
        started_at=min(times, default=None),
        ended_at=max(times, default=None),
    )


def _still(points: Sequence[tuple[float, float]]) -> Trend | None:
    """A trend of too few points to fit: its level only."""
    if not points:
        return None
    values = [value for _, value in points]
    return Trend(
        values[0],
        values[-1],
        min(values),
        max(values),
        points[-1][0] - points[0][0],
        len(points),
        0.0,
        0.0,
        0.0,
    )


def _processes(samples: Sequence[ProcessSample]) -> list[ProcessTrend]:
    points: dict[int, list[tuple[float, float]]] = defaultdict(list)
    last: dict[int, ProcessSample] = {}
    states: dict[int, str | None] = {}
    cmdlines: dict[int, tuple[str, ...]] = {}
    for sample in samples:
        last[sample.pid] = sample
        states.setdefault(sample.pid, sample.state)
        if sample.cmdline:
            cmdlines[sample.pid] = sample.cmdline
        if sample.rss_bytes is not None:
            points[sample.pid].append((sample.at, sample.rss_bytes))
    found = []
    for pid, series in points.items():
        trend = fit_trend(series) or _still(series)
        if trend is not None:
            sample = last[pid]
            found.append(
                ProcessTrend(
                    pid,
                    sample.ppid,
                    sample.name or "?",
                    trend,
                    series[-1][0],
                    cmdlines.get(pid),
                    sample.shared_bytes,
                    sample.state if sample.state == states[pid] else None,
                    sample.cgroup,
                )
            )
    return found


def _kills(hosts: Sequence[HostSample]) -> int:
    counts = [h.cgroup_oom_kills for h in hosts if h.cgroup_oom_kills is not None]
    return max(0, counts[-1] - counts[0]) if len(counts) > 1 else 0


def is_growing(trend: Trend, *, least_bytes: float = 256 * MIB, least_share: float = 0.02) -> bool:
    """Whether a level rises without a plateau, by enough to matter and all along.

    `least_share` is the share of the level it must have grown by. The rise must show in both the
    early and the late part, and in the level between the waves of the load, so that a warm-up, a
    single step, a last peak or the rising half of a wave is not taken for one.
    """
    # Even growth lifts the floor of the last third by two thirds of the whole.
    grown = max(trend.grown, 1.5 * trend.floor_grown)
    if trend.points < 8 or grown < least_bytes or grown < least_share * max(trend.first, GIB / 4):
        return False
    even = grown / trend.seconds
    return (
        trend.floor_grown > 0.45 * grown
        and grown > 0.2 * trend.spread
        and trend.slope_per_second > 0.4 * even
        and trend.late_slope_per_second > 0.35 * even
        and trend.early_slope_per_second > 0.3 * even
    )


def has_settled(trend: Trend, *, least_bytes: float = 256 * MIB) -> bool:
    """Whether a level rose by at least so much and then stayed."""
    if trend.points < 8 or trend.grown < least_bytes:
        return False
    even = trend.grown / trend.seconds
    # The low level must have risen too: noise moves the ends alone.
    return (
        trend.floor_grown > 0.4 * trend.grown
        and trend.late_slope_per_second < 0.1 * even
        and trend.early_slope_per_second > even
    )
