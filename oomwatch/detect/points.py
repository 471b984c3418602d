"""Readings of one quantity over time, kept as plain numbers.

Thousands of small objects that live for minutes among others that live for milliseconds leave
memory in holes: the agent would grow by megabytes a day without holding anything more.
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Sequence
from typing import Final, overload

Point = tuple[float, float]
"""A time and a value."""

_LEAST_WASTE: Final = 256


class Points(Sequence[Point]):
    """A queue of points: added at the end, taken from the front; the oldest of too many go."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._times = array.array("d")
        self._values = array.array("d")
        self._begin = 0
        """Where the first point is; what is before it was taken."""

    def __len__(self) -> int:
        return len(self._times) - self._begin

    def __iter__(self) -> Iterator[Point]:
        for index in range(self._begin, len(self._times)):
            yield self._times[index], self._values[index]

    @overload
    def __getitem__(self, index: int) -> Point: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Point]: ...

    def __getitem__(self, index: int | slice) -> Point | Sequence[Point]:
        if isinstance(index, slice):
            return list(self)[index]
        place = index + (self._begin if index >= 0 else len(self._times))
        if not self._begin <= place < len(self._times):
            raise IndexError("there is no such point")
        return self._times[place], self._values[place]

    def append(self, at: float, value: float) -> None:
        """Add a point."""
        if len(self) >= self._most:
            self.popleft()
        self._times.append(at)
        self._values.append(value)

    def popleft(self) -> None:
        """Take the first point away."""
        if not self:
            raise IndexError("there is no point")
        self._begin += 1
        if self._begin >= _LEAST_WASTE and 2 * self._begin > len(self._times):
            del self._times[: self._begin]
            del self._values[: self._begin]
            self._begin = 0

    def raise_last(self, value: float) -> None:
        """Let the last value be at least this."""
        self._values[-1] = max(self._values[-1], value)

    def clear(self) -> None:
        """Take all away."""
        del self._times[:]
        del self._values[:]
        self._begin = 0
