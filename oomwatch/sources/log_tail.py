"""What a diagnosis needs of a log that is being followed: its beginning, and what tells.

The memory of it is bounded: the first `HEAD_BYTES` of each start (versions, flags, the memory that
was found) are read whole, after that only telling lines (`engines/literals`) and what follows them.
Blocks are looked at whole, so that a flood of ordinary lines costs little.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from oomwatch.engines.client_text import is_client_text
from oomwatch.engines.literals import BANNERS
from oomwatch.records import LogLine
from oomwatch.sources.follow import READ_BYTES, Chunk, FileFollower, FilePosition
from oomwatch.sources.logfile import read_pieces
from oomwatch.sources.logformat_lines import Piece
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.regular_file import hole_bytes, open_regular
from oomwatch.sources.scan import (
    BEHIND_BYTES,
    best_look,
    holds_mark,
    line_end,
    merge_spans,
    telling_spans,
)

HEAD_BYTES: Final = 1 << 20
LATE_BYTES: Final = 8 << 20
"""Of a log that is longer when it is first seen, the beginning and so much of the end is read."""
_HEAD_LINES: Final = 3000
_TELLING_LINES: Final = 2000
_STARTS: Final = 3
_FEW_LINES: Final = 150
_LOOK_BYTES: Final = 4 << 20


class Follower(Protocol):
    """What gives the new lines of a log: of a file, or of a program that reads it."""

    missed: str | None

    @property
    def position(self) -> FilePosition | Mapping[str, Any] | None:
        """Where to go on from."""

    def read(self, *, limit: int = READ_BYTES, now: float | None = None) -> Iterator[Chunk]:
        """What is new."""

    def close(self) -> None:
        """Let go of everything."""


class _Start:
    """What is kept of one start of the server."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._clock = Clock()
        self._lock = threading.Lock()
        self._head: list[LogLine] = []
        self._unparsed: collections.deque[tuple[float, Piece]] = collections.deque()
        self._head_lines = 0
        self.head_left = HEAD_BYTES
        self.telling: collections.deque[LogLine] = collections.deque(maxlen=_TELLING_LINES)

    @property
    def wants_head(self) -> bool:
        return self.head_left > 0 and self._head_lines < _HEAD_LINES

    @property
    def begun(self) -> bool:
        return self.head_left < HEAD_BYTES

    @property
    def head(self) -> list[LogLine]:
        """Its first lines; those that trickle in are parsed once they are asked for."""
        self._parse()
        return self._head

    def add_to_head(self, number: int, data: bytes, at: float) -> None:
        """Keep lines, the first of this number, that were read at this time."""
        lines = max(data.count(b"\n"), data.count(b"\r"))
        self._head_lines += lines
        self.head_left -= len(data)
        self._unparsed.append((at, Piece(number, data, joined=False)))
        if lines > _FEW_LINES:  # a judgement would have to wait for so many
            self._parse()

    def _parse(self) -> None:
        with self._lock:
            while self._unparsed:
                at, piece = self._unparsed.popleft()
                self._clock.note(at)
                self._head += read_pieces([piece], self._name, self._clock)


class LogTail:
    """One followed log file; `poll` belongs to one thread, the rest to any."""

    def __init__(
        self,
        follower: Follower,
        name: str,
        *,
        size: int = 0,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`size`: of the file when it is first seen; of a large one the middle is left out."""
        self.name = name
        self.follower = follower
        self._wall = wall
        self._polled_at = wall()
        self._clock = Clock()
        self._look = best_look()
        self._starts = collections.deque([_Start(name)], maxlen=_STARTS)
        self._late = size - LATE_BYTES if size > HEAD_BYTES + LATE_BYTES else 0
        self._behind = 0
        """Bytes that are read after a telling line, also if they come later: its traceback."""
        self.tells = False
        """Whether what the last `poll` gave may tell of a failure, rather than of load alone."""
        self._live_from: int | None = None
        """The number of the first line that was written before our eyes."""
        place = follower.position
        self._resumes = isinstance(place, FilePosition) and place.offset > 0
        self._number = place.number if isinstance(place, FilePosition) else 1

    def _read_beginning(self, path: str) -> None:
        """Going on in the middle: what the server said at its start is read again, and not told."""
        with contextlib.suppress(OSError), open_regular(path) as file:
            data = os.pread(file.fileno(), HEAD_BYTES, hole_bytes(file.fileno()))
            self._take(1, data[: data.rfind(b"\n") + 1])
            self._starts[-1].head_left = 0

    def poll(self) -> Iterator[LogLine]:
        """Read what is new; the telling lines of it, in order.

        Raises:
            OSError: the file cannot be read.

        """
        self._polled_at = self._wall()
        self._clock.note(self._polled_at)
        self.tells = False
        if self._resumes:
            self._resumes = False
            self._read_beginning(self.name)
        room = _LOOK_BYTES
        for chunk in self.follower.read(limit=room):
            room -= len(chunk.data)
            self._number = chunk.number + chunk.data.count(b"\n")
            if chunk.fresh and self._live_from is not None:
                self._live_from = chunk.number
            late = self._late and not self._starts[-1].wants_head
            if late and isinstance(self.follower, FileFollower):
                self.follower.skip_to(self._late)
                self._late = 0
                return
            yield from self._take(chunk.number, chunk.data)
        if self._live_from is None and room > 0:
            self._live_from = self._number

    def saw(self, number: int) -> bool:
        """Whether the line of this number was written while the log was followed.

        What its own clock says cannot tell: a container's is often that of another zone.
        """
        return self._live_from is not None and number >= self._live_from

    def lines(self) -> list[LogLine]:
        """What is kept of the last starts, in order."""
        return [line for start in list(self._starts) for line in (*start.head, *start.telling)]

    @property
    def last_at(self) -> float | None:
        """When the last of these lines was written, by its own clock."""
        return next((line.at for line in reversed(self.lines()) if line.at is not None), None)

    def excerpt(self, max_bytes: int) -> list[LogLine]:
        """Of the last starts what there is room for, without what clients sent.

        The last start comes first; where even that is too long, its middle is left out.
        """
        kept: list[LogLine] = []
        for start in reversed(list(self._starts)):
            lines = [line for line in (*start.head, *start.telling) if not is_client_text(line)]
            size = sum(map(_size, lines))
            if size > max_bytes:
                return [*_both_ends(lines, max_bytes), *kept]
            max_bytes -= size
            kept = [*lines, *kept]
        return kept

    def _take(self, number: int, data: bytes) -> list[LogLine]:
        """Keep lines, the first of this number; the telling ones of them."""
        told = []
        begin = 0
        for end in (*_banners(data), len(data)):
            if begin < end:
                told += self._read(number, data[begin:end])
                number += data.count(b"\n", begin, end)
            if end < len(data) and self._starts[-1].begun:
                self._starts.append(_Start(self.name))
                self._behind = 0
            begin = end
        return told

    def _read(self, number: int, data: bytes) -> list[LogLine]:
        start = self._starts[-1]
        telling = self._look(data)
        if start.wants_head:
            known = len(start.head) if telling else 0
            start.add_to_head(number, data, self._polled_at)
            return self._telling_of(start.head[known:], number, data) if telling else []
        if not telling and not self._behind:
            return []
        spans = [(0, line_end(data, self._behind))] if self._behind else []
        self.tells |= bool(spans)
        self._behind = max(0, self._behind - len(data))
        if telling:
            found, wide = telling_spans(data)
            self.tells |= wide
            spans = merge_spans([*spans, *found])
            if wide and spans[-1][1] == len(data):  # what follows it comes with the next look
                self._behind = BEHIND_BYTES
        pieces = [
            Piece(number + data.count(b"\n", 0, begin), data[begin:end], joined=False)
            for begin, end in spans
        ]
        told = list(read_pieces(pieces, self.name, self._clock))
        start.telling += told
        return told

    def _telling_of(self, lines: list[LogLine], number: int, data: bytes) -> list[LogLine]:
        """Of the lines of a start's head all, if they are few; in a flood what tells."""
        found, wide = telling_spans(data)
        self.tells |= wide
        if len(lines) <= _FEW_LINES:
            return lines
        told = [
            range(number + data.count(b"\n", 0, a), number + data.count(b"\n", 0, b) + 1)
            for a, b in found
        ]
        return [line for line in lines if any(line.number in span for span in told)]


def _banners(data: bytes) -> list[int]:
    """Where lines begin with which a server begins its log; not those that a client has sent."""
    if not any(map(data.__contains__, BANNERS)):
        return []
    found: set[int] = set()
    for text in BANNERS:
        at = data.find(text)
        while at >= 0:
            begin, end = data.rfind(b"\n", 0, at) + 1, line_end(data, at)
            if not holds_mark(data, begin, end):
                found.add(begin)
            at = data.find(text, end)
    return sorted(found)


def _size(line: LogLine) -> int:
    """About the bytes that a line takes with its prefix."""
    return len(line.text) + 80


def _both_ends(lines: list[LogLine], max_bytes: int) -> list[LogLine]:
    """Half of the room for the first lines, the rest for the last ones."""
    head: list[LogLine] = []
    room = max_bytes // 2
    for line in lines:
        room -= _size(line)
        if room < 0:
            break
        head.append(line)
    tail: list[LogLine] = []
    room = max_bytes - sum(map(_size, head))
    for line in reversed(lines[len(head) :]):
        room -= _size(line)
        if room < 0:
            break
        tail.append(line)
    return [*head, *reversed(tail)]
