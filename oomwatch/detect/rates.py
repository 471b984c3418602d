"""Figures over a window: rates of counters, peaks of gauges. What is absent is not zero."""

from __future__ import annotations

import collections


class WindowedRate:
    """How fast a counter rose over the last `seconds`; None until half of them were seen.

    Resets of the counter are seen.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._points: collections.deque[tuple[float, float]] = collections.deque()
        self._last: float | None = None
        self._risen = 0.0

    def feed(self, now: float, value: float | None) -> float | None:
        """Take a reading (monotonic seconds); the rate per second, or None where it isn't known."""
        if value is None:
            return None
        if self._last is not None:
            # A counter that fell was restarted: what it shows now rose since.
            self._risen += value - self._last if value >= self._last else value
        self._last = value
        self._points.append((now, self._risen))
        while len(self._points) > 2 and now - self._points[1][0] >= self._seconds:
            self._points.popleft()
        first_at, first = self._points[0]
        elapsed = now - first_at
        if elapsed < self._seconds / 2:
            return None
        return (self._risen - first) / elapsed


class WindowedPeak:
    """The highest reading of the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._falling: collections.deque[tuple[float, float]] = collections.deque()
        """Readings that no later one has reached."""

    def feed(self, now: float, value: float) -> float:
        """Take a reading (monotonic seconds); the peak, which may be this one."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while now - self._falling[0][0] > self._seconds:
            self._falling.popleft()
        return self._falling[0][1]
