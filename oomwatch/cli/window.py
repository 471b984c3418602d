"""A span of time, as the command line gives it, and the lines of a log that are from it.

A line without a time (of a traceback, of a banner) is of the time of the line before it, the first
ones of that of the first line that has one. A log without any time is taken whole.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Iterator
from typing import Final

from oomwatch.errors import UsageError
from oomwatch.records import LogLine
from oomwatch.units import format_rfc3339

_MAX_HELD: Final = 10_000
"""Lines that may come before the first time; a log with more of them is taken to have none."""
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)")
_SECONDS: Final = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def parse_time(text: str | None, now: float) -> float | None:
    """Epoch seconds of a time or of a span before now; local time unless it names a zone.

    Raises:
        UsageError: it is neither.

    """
    if text is None:
        return None
    span = _DURATION.fullmatch(text.strip())
    if span is not None:
        return now - float(span[1]) * _SECONDS[span[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"'{text[:60]}' is no time: write 2h, 30min or 2026-11-29T03:00") from None


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
