"""Cuts a stream of bytes into lines: numbered, bounded in length, at line feeds only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

MAX_LINE: Final = 256 << 10
"""Bytes of one line that are kept: Docker writes 16 KiB pieces, six times that when escaped."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the file; lines between two pieces that are not `joined` were left out."""

    number: int
    """Of the line that the first byte belongs to, from 1."""
    data: bytes
    joined: bool = True
    """Whether it goes on where the piece before ended."""


class RawLine(NamedTuple):
    """One line, or a part of a very long one."""

    number: int
    data: bytes
    size: int
    """Its length in the file, without the line feed; more than len(data) where it was cut."""
    continued: bool = False
    """Whether it goes on a line of which a part was given before."""
    gap: bool = False
    """Whether lines before it were left out."""


def split_lines(pieces: Iterable[Piece], *, bars: bool = True) -> Iterator[RawLine]:
    """The lines of the pieces, each cut at `MAX_LINE`, the rest skipped without being kept.

    With `bars`, a line of carriage-return parts may be as long as it likes: it is given in parts.
    """
    rest, number, size, continued, gap = b"", 1, 0, False, False
    for piece in pieces:
        if not piece.joined:
            if size:
                yield RawLine(number, rest, size, continued, gap)
            rest, number, size, continued, gap = b"", piece.number, 0, False, True
        head, *lines = piece.data.split(b"\n")
        size += len(head)
        rest = _extend(rest, head, size, bars=bars)
        for line in lines:
            yield RawLine(number, rest, size, continued, gap)
            number, size, continued, gap = number + 1, len(line), False, False
            rest = _extend(b"", line, size, bars=bars)
        if bars and len(rest) >= MAX_LINE and (end := rest.rfind(b"\r")) >= 0:
            yield RawLine(number, rest[:end], end, continued, gap)
            rest, size, continued, gap = rest[end + 1 :], size - end - 1, True, False
    if size:
        yield RawLine(number, rest, size, continued, gap)


def _extend(rest: bytes, data: bytes, size: int, *, bars: bool) -> bytes:
    """`rest` with `data` appended, as far as the bound allows."""
    if not rest and bars:
        # copytruncate leaves a file that starts with zero bytes, often many megabytes of them.
        data = data.lstrip(b"\0")
    if size <= MAX_LINE:
        return rest + data if rest else data
    # A line of bars may outgrow the bound within one block: its parts are cut one by one later.
    room = MAX_LINE if b"\r" not in data else MAX_LINE + len(data)
    return (rest + data)[:room] if len(rest) < MAX_LINE or b"\r" in data else rest
