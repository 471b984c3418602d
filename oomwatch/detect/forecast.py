"""When a quantity will reach its limit, if it goes on like this; None if that can't be said.

The trend is the median of pairwise slopes (Theil-Sen) over the highest values of short spans, its
band the rank interval of the same slopes (Sen 1968): single outliers move neither. Three things
that look like a leak are none: growth that flattens (a warm-up), teeth of a saw that fell back
before (normal load), and a slope that noise explains as well.

All of it is relative: neither the unit nor the zero of the values or of the times matters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Final

from oomwatch.detect.points import Point

_SPANS: Final = (40, 20)
"""Teeth about as long as two or three spans are seen in part only: then wider spans see none."""
_LEAST_SPANS: Final = 8
_FLATTENED: Final = 0.5
"""Share of the whole slope that the last third must still have."""
_FALL: Final = 0.4
"""Share of its rise that a tooth must fall by to count as one."""
_REACH: Final = 4.0
"""Trends are extended by at most so many times the time they were seen for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """`eta_seconds` from the last point on, and the band it lies in."""

    eta_seconds: float
    eta_low_seconds: float
    eta_high_seconds: float
    slope_per_second: float
    level: float
    limit: float
    seen_seconds: float

    def after(self, seconds: float) -> Forecast:
        """The same, told so much later."""
        return dataclasses.replace(
            self,
            eta_seconds=max(0.0, self.eta_seconds - seconds),
            eta_low_seconds=max(0.0, self.eta_low_seconds - seconds),
            eta_high_seconds=max(0.0, self.eta_high_seconds - seconds),
        )


def forecast(
    points: Sequence[Point],
    limit: float,
    *,
    least_seconds: float,
    confidence: float = 0.95,
    earlier_peak: float | None = None,
) -> Forecast | None:
    """When the values reach `limit`; None without a trend that lasted `least_seconds`.

    `points` are (seconds, value) in order of time; values rise towards the limit. The band of the
    slope holds the true one with this `confidence`; a band that reaches zero is no trend.
    `earlier_peak` is the highest value from before the points, from which it fell back since.
    """
    if len(points) < _LEAST_SPANS or points[-1][1] >= limit:
        return None
    z = statistics.NormalDist().inv_cdf(0.5 + min(max(confidence, 0.5), 0.999) / 2)
    for spans in _SPANS:
        tops = _tops(points, spans)
        ahead = _forecast(tops, points[-1], limit, least_seconds, z, earlier_peak=earlier_peak)
        if ahead is not None:
            return ahead
    return None


def _forecast(
    tops: Sequence[Point],
    last: Point,
    limit: float,
    least_seconds: float,
    z: float,
    *,
    earlier_peak: float | None,
) -> Forecast | None:
    """What the tops of equal spans say, before the last reading."""
    peaks, ramp = _teeth(tops)
    climbing = _extend(peaks, last[0], limit, least_seconds, z, least_points=4)
    if climbing is not None:
        return climbing
    known = [value for _, value in peaks]
    if earlier_peak is not None:
        known.append(earlier_peak)
    if known and last[1] <= max(known):
        return None  # no more than the load has done before
    if _flattens(ramp, limit, z):
        return None
    return _extend(ramp, last[0], limit, least_seconds, z, least_points=_LEAST_SPANS)


def _extend(
    basis: Sequence[Point],
    now: float,
    limit: float,
    least_seconds: float,
    z: float,
    *,
    least_points: int,
) -> Forecast | None:
    """Extend the trend of these points to the limit, if they have one."""
    if len(basis) < least_points:
        return None
    seen = basis[-1][0] - basis[0][0]
    if seen < least_seconds:
        return None
    slope, low, high = _slopes(basis, z)
    if low <= 0 or _late_slope(basis) < _FLATTENED * slope:
        return None
    left, since = limit - basis[-1][1], now - basis[-1][0]
    eta = left / slope - since
    if not 0 < eta <= _REACH * seen:  # a time that has passed without it is no forecast
        return None
    return Forecast(
        eta_seconds=eta,
        eta_low_seconds=max(0.0, left / high - since),
        eta_high_seconds=max(0.0, left / low - since),
        slope_per_second=slope,
        level=basis[-1][1],
        limit=limit,
        seen_seconds=seen,
    )


def _flattens(ramp: Sequence[Point], limit: float, z: float) -> bool:
    """Whether growth slows down so much that it ends below the limit.

    What approaches a level loses the same share of its slope in each equal time: the slopes of two
    halves give the level. Only halves whose bands lie apart count as different.
    """
    half = len(ramp) // 2
    if half < _LEAST_SPANS // 2:
        return False
    early, early_low, _ = _slopes(ramp[: half + 1], z)
    late, _, late_high = _slopes(ramp[-half - 1 :], z)
    if early <= 0 or late_high >= early_low:
        return False
    kept = max(0.0, late / early)
    risen = ramp[-1][1] - ramp[-half - 1][1]
    return ramp[-1][1] + risen * kept / (1 - kept) < limit


def _tops(points: Sequence[Point], spans: int) -> list[Point]:
    """The highest point of each of so many equal spans of time that has any."""
    begin, end = points[0][0], points[-1][0]
    width = (end - begin) / spans
    if width <= 0:
        return [points[-1]]
    best: dict[int, Point] = {}
    for at, value in points:
        span = min(spans - 1, int((at - begin) / width))
        if span not in best or value > best[span][1]:
            best[span] = (at, value)
    return [best[span] for span in sorted(best)]


def _teeth(tops: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Peaks that were followed by a fall, and the points since the last fall's bottom."""
    peaks: list[Point] = []
    floor = peak = tops[0]
    whole = max(value for _, value in tops) - min(value for _, value in tops)
    start = bottom = 0
    falling = False
    for index, point in enumerate(tops):
        if falling:
            if point[1] < tops[bottom][1]:
                bottom = index
            elif point[1] > tops[bottom][1]:
                falling, start, floor, peak = False, bottom, tops[bottom], point
        elif point[1] >= peak[1]:
            peak = point
        elif peak[1] - point[1] > _FALL * (peak[1] - floor[1] or whole) > 0:  # a rise not seen
            peaks.append(peak)
            falling, bottom = True, index
    return peaks, list(tops[bottom if falling else start :])


def _slopes(points: Sequence[Point], z: float) -> tuple[float, float, float]:
    """The median pairwise slope with its rank interval of `z` standard deviations."""
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2) if b[0] > a[0]
    )
    count, n = len(slopes), len(points)
    spread = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, math.floor((count - spread) / 2))
    high = min(count - 1, math.ceil((count + spread) / 2))
    return statistics.median(slopes), slopes[low], slopes[high]


def _late_slope(points: Sequence[Point]) -> float:
    late = points[-max(3, len(points) // 3) :]
    slopes = sorted(
        (b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(late, 2) if b[0] > a[0]
    )
    return statistics.median(slopes) if slopes else 0.0
