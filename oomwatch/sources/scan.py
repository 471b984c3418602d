"""Chooses which parts of a log are worth reading line by line.

Up to 16 MiB: all. Larger ones: the first and the last MiBs, and around each telling line
(`engines/literals`) the block it stands in and its neighbours. Blocks are looked at whole, in C:
with the ``fast`` extra by one hyperscan database, else by `bytes.find` for each word once the
access lines are dropped. A log that is nothing but telling lines would be read in full: after
`FULL_WINDOWS` bytes only the telling lines and what directly follows them are.

Memory is bounded by the tail that is held back. Line numbers stay those of the file: the line feeds
of what is skipped are counted.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from oomwatch.engines.literals import ACCESS_END, CLIENT_MARKS, LITERALS
from oomwatch.sources.logformat_lines import Piece

SMALL: Final = 16 << 20
HEAD: Final = 1 << 20
TAIL: Final = 2 << 20
FULL_WINDOWS: Final = 64 << 20
BEHIND_BYTES: Final = (
    8 << 10
)  # bytes read after a telling line once windows are used up: a traceback
_ALONE_PER_BLOCK: Final = 8  # statistics lines of a saturated server, one in ten seconds each
_OVERLAP: Final = 64  # no word is longer
_BEGINNING: Final = 512  # bytes of a line within which it says that it is a request's

Look = Callable[[bytes], bool]
"""Whether a block may hold a telling line: never wrongly no."""


@dataclasses.dataclass(slots=True)
class _Block:
    number: int
    data: bytes
    whole: bool = False
    """To be read whole: it holds a telling line or is next to one."""
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Else the parts of it to be read."""


def choose_pieces(
    blocks: Iterable[bytes],
    *,
    full: bool = False,
    look: Look | None = None,
    small: int = SMALL,
    head: int = HEAD,
    tail: int = TAIL,
    windows: int = FULL_WINDOWS,
) -> Iterator[Piece]:
    """The parts of a log to be read, in order, each with the number of its first line."""
    iterator = iter(blocks)
    if full:
        yield from _all(iterator)
        return
    first: list[bytes] = []
    size = 0
    for block in iterator:
        first.append(block)
        size += len(block)
        if size > small:
            break
    else:
        yield from _all(iter(first))
        return
    rest = _chain(first, iterator)
    yield from _choose(rest, look or best_look(), head, tail, windows)


def _all(blocks: Iterable[bytes]) -> Iterator[Piece]:
    number = 1
    for block in blocks:
        yield Piece(number, block)
        number += block.count(b"\n")


def _chain(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    first.reverse()
    while first:  # each block is let go of as it is taken
        yield first.pop()
    yield from rest


def _choose(
    blocks: Iterator[bytes], look: Look, head: int, tail: int, windows: int
) -> Iterator[Piece]:
    held: collections.deque[_Block] = collections.deque()
    cutter = _Cutter()
    held_size, seen, number, end, begun = 0, 0, 1, b"", b""
    spread = False  # whether the block before asked for its neighbours
    for data in blocks:
        block = _Block(number, data, whole=seen < head or spread)
        number += data.count(b"\n")
        seen += len(data)
        spread = False
        if look(data) or look(end + data[:_OVERLAP]):
            block.spans, wide = telling_spans(data, end, begun)
            if wide and windows > 0:
                spread = block.whole = True
                windows -= len(data)
                if held:
                    held[-1].whole = True
        end = data[-_OVERLAP:]
        line_feed = data.rfind(b"\n")
        begun = (begun + data if line_feed < 0 else data[line_feed + 1 :])[:_BEGINNING]
        held.append(block)
        held_size += len(data)
        while len(held) > 1 and held_size - len(held[0].data) >= tail:
            oldest = held.popleft()
            held_size -= len(oldest.data)
            yield from cutter.cut(oldest, held[0])
    while held:
        oldest = held.popleft()
        oldest.whole = True
        yield from cutter.cut(oldest, None)


class _Cutter:
    """Cuts whole lines out of blocks, in order."""

    def __init__(self) -> None:
        self._joined = True  # whether all was given up to here
        self._at_line_start = True

    def cut(self, block: _Block, following: _Block | None) -> Iterator[Piece]:
        """The chosen parts of a block; has `following` complete a line that this one begins.

        A line whose beginning was left out is not given: what is in its middle may be a client's.
        """
        data, stop = block.data, 0
        for start, stop in [(0, len(data))] if block.whole else block.spans:
            joined = self._joined and start == 0
            if not joined and start == 0 and not self._at_line_start:
                start = line_end(data, 0)  # noqa: PLW2901 - the rest of the span counts
            self._joined = start < stop
            if self._joined:
                number = block.number + data.count(b"\n", 0, start)
                yield Piece(number, data[start:stop], joined=joined)
        self._joined = self._joined and stop == len(data)
        self._at_line_start = data.endswith(b"\n")
        if self._joined and not self._at_line_start and following is not None:
            following.spans = merge_spans([(0, line_end(following.data, 0)), *following.spans])


def telling_spans(
    data: bytes, before: bytes = b"", begun: bytes = b""
) -> tuple[list[tuple[int, int]], bool]:
    """Where a block is telling, as spans of whole lines, and whether its neighbours matter too.

    `before` is the end of the block before, for words that lie across the border; `begun` is the
    beginning of the line that goes on from there.
    """
    client = holds_mark(begun + data[:_OVERLAP])
    spans: list[tuple[int, int]] = []
    wide, alone = False, 0
    border = before + data[:_OVERLAP]
    for text, confirm, by_itself in _CONFIRMS:
        at = border.find(text, max(0, len(before) - len(text) + 1))
        if 0 <= at < len(before) and not client and (confirm is None or confirm.match(border, at)):
            spans.append((0, line_end(data, 0)))
            wide = True  # its line begins in the block before
        at = data.find(text)
        while at >= 0:
            start, end = data.rfind(b"\n", 0, at) + 1, line_end(data, at)
            quoted = (start == 0 and client) or holds_mark(data, start, end)
            if not quoted and (confirm is None or confirm.match(data, at)):
                if by_itself:
                    alone += 1
                else:
                    wide = True
                    end = line_end(data, min(at + BEHIND_BYTES, len(data) - 1))
                if not by_itself or alone <= _ALONE_PER_BLOCK:
                    spans.append((start, end))
            at = data.find(text, end)
    return merge_spans(spans), wide


def holds_mark(data: bytes, start: int = 0, end: int | None = None) -> bool:
    """Whether a line holds what a client sent."""
    return any(data.find(mark, start, end) >= 0 for mark in CLIENT_MARKS)


def line_end(data: bytes, at: int) -> int:
    """Where the line ends that holds this place, behind its line feed."""
    end = data.find(b"\n", at)
    return len(data) if end < 0 else end + 1


def merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same in order, without overlaps."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def look_with_find(data: bytes) -> bool:
    """The look of the base installation."""
    lines = [line for line in data.split(b"\n") if not line.endswith(ACCESS_END)]
    kept = b"\n".join(lines)
    for text, confirm, _ in _CONFIRMS:
        at = kept.find(text)
        while at >= 0:
            if confirm is None or confirm.match(kept, at):
                return True
            at = kept.find(text, at + len(text))
    return False


def best_look() -> Look:
    """The fastest look there is: hyperscan's if the ``fast`` extra is installed and works here."""
    return hyperscan_look() or look_with_find


def hyperscan_look() -> Look | None:
    """A look through one hyperscan database; None without the ``fast`` extra."""
    try:
        import hyperscan  # noqa: PLC0415 - an extra
    except (ImportError, OSError):
        return None
    patterns = [literal.confirm or re.escape(literal.text) for literal in LITERALS]
    try:
        database = hyperscan.Database(mode=hyperscan.HS_MODE_BLOCK)
        database.compile(
            expressions=patterns,
            ids=list(range(len(patterns))),
            elements=len(patterns),
            flags=[hyperscan.HS_FLAG_SINGLEMATCH] * len(patterns),
        )
    except hyperscan.error:  # an old processor, a broken build
        return None

    def look(data: bytes) -> bool:
        found: list[int] = []

        def stop(identity: int, *_: object) -> bool:
            found.append(identity)
            return True

        try:
            database.scan(data, match_event_handler=stop)
        except hyperscan.ScanTerminated:
            return True
        return bool(found)

    return look


_CONFIRMS: Final = tuple(
    (entry.text, re.compile(entry.confirm) if entry.confirm else None, entry.alone)
    for entry in LITERALS
)
