"""The lines of a log that are from a span of time.

A line without a time (of a traceback, of a banner) is of the time of the line before it, the first
ones of that of the first line that has one. A log without any time is taken whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from oomwatch.records import LogLine
from oomwatch.units import format_rfc3339

_MAX_HELD: Final = 10_000
"""Lines that may come before the first time; a log with more of them is taken to have none."""


class Window:
    """Iterates once over the lines from `since` to `until`, and knows what the log held."""

    def __init__(self, lines: Iterable[LogLine], since: float | None, until: float | None) -> None:
        self._lines = lines
        self._since, self._until = since, until
        self._first: float | None = None
        self._last: float | None = None

    def __iter__(self) -> Iterator[LogLine]:
        held: list[LogLine] = []
        inside: bool | None = None
        for line in self._lines:
            if line.at is not None:
                self._first = line.at if self._first is None else self._first
                self._last = line.at
                inside = self._holds(line.at)
            elif inside is None and len(held) < _MAX_HELD:
                held.append(line)
                continue
            if inside is not False:
                yield from held
                yield line
            held = []
        yield from held

    def _holds(self, at: float) -> bool:
        return (self._since is None or at >= self._since) and (
            self._until is None or at <= self._until
        )

    @property
    def missed(self) -> str:
        """Why nothing was in it."""
        if self._first is None or self._last is None:
            return "none of its lines has a time"
        return (
            "nothing in it is from the time asked for: its lines are of "
            f"{format_rfc3339(self._first)} to {format_rfc3339(self._last)}"
        )
