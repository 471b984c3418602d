"""The course of one quantity: its readings of a window, and when it will reach its limit."""

from __future__ import annotations

import math
from typing import Final

from oomwatch.detect.forecast import Forecast, forecast
from oomwatch.detect.points import Points

_MOST_POINTS: Final = 4096
_PEAK_SECONDS: Final = 60.0
_MOST_PEAKS: Final = 360
"""Six hours: the load of a working day has slow waves."""


class Track:
    """Readings of the last `window_seconds`, and the peaks of some hours before.

    Times are monotonic seconds. Rising values approach the limit. Fed by one thread; `last` may be
    read by any.
    """

    def __init__(self, window_seconds: float, least_seconds: float, confidence: float) -> None:
        """`least_seconds`: for so long a trend must be seen, or for half of a short window."""
        self._window = window_seconds
        self._least = min(least_seconds, window_seconds / 2)
        self._confidence = confidence
        self._points = Points(_MOST_POINTS)
        self._peaks = Points(_MOST_PEAKS)
        self.last: float | None = None
        """The last reading; None before the first."""

    def __len__(self) -> int:
        return len(self._points)

    def add(self, now: float, value: float) -> None:
        """Take a reading."""
        self.last = value
        self._points.append(now, value)
        while now - self._points[0][0] > self._window:
            self._points.popleft()
        if self._peaks and now - self._peaks[-1][0] < _PEAK_SECONDS:
            self._peaks.raise_last(value)
        else:
            self._peaks.append(now, value)

    def clear(self) -> None:
        """Forget all: what was seen before is no trend."""
        self.last = None
        self._points.clear()
        self._peaks.clear()

    def pace(self, readings: int) -> float | None:
        """How fast it rose over the last so many readings, per second; None if it did not."""
        if len(self._points) < 2:
            return None
        (then, before), (now, value) = (
            self._points[-min(readings, len(self._points))],
            (self._points[-1]),
        )
        return (value - before) / (now - then) if now > then and value > before else None

    def forecast(self, now: float, limit: float) -> Forecast | None:
        """When it will be at `limit`, from `now` on; None also if it was not read lately."""
        if not self._points:
            return None
        since = now - self._points[-1][0]
        if since > self._least:
            return None
        begin = self._points[0][0]
        before = [value for at, value in self._peaks if at + _PEAK_SECONDS <= begin]
        lowest = min(value for _, value in self._points)
        earlier = max(before, default=-math.inf)
        ahead = forecast(
            self._points,
            limit,
            least_seconds=self._least,
            confidence=self._confidence,
            earlier_peak=earlier if earlier > lowest else None,
        )
        return ahead if ahead is None else ahead.after(since)
