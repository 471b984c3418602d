"""Reads an engine's log: one pass, bounded memory, any size and any wrapper.

The stages, each in its own module: bytes (`logformat_archive`), the parts of a large file that are
worth it (`scan`), lines (`logformat_lines`), journal records (`logformat_export`), wrappers
(`logformat`), engine prefixes (`logformat_prefix`). Here they are put in a row, and the parts of a
line are told apart: progress bars redraw their line with a carriage return, and a record may follow
a bar without a line feed.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import itertools
import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final

from oomwatch.errors import NoDataError, PermissionDeniedError, SourceError, SourceUnavailable
from oomwatch.records import LogLine
from oomwatch.sources.logformat import MAX_TEXT, Envelope, Unwrapper, strip_repeat
from oomwatch.sources.logformat_archive import Blocks
from oomwatch.sources.logformat_export import ExportParser, Record, is_export
from oomwatch.sources.logformat_lines import Piece, RawLine, split_lines
from oomwatch.sources.logformat_prefix import Header, take_prefix
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.regular_file import changed_at, hole_bytes
from oomwatch.sources.scan import SMALL, choose_pieces

Progress = Callable[[int, int | None], None]


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedLog:
    """The log of a unit, a container or a pod, and what its runtime knows about the program."""

    name: str
    lines: Iterator[LogLine]
    origin: str
    """Where the lines come from: a file, ``the journal``, ``docker logs``."""
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    zone: str | None = None
    """The zone of its times: ``UTC`` where the runtime writes them, None: assumed local."""
    notes: tuple[str, ...] = ()
    """What a report should say about the reading."""


_PROGRESS_STEP: Final = 4 << 20

# tqdm ends a bar with its rate; a process that logs meanwhile writes right behind it.
_BAR: Final = re.compile(
    r"[^'\"{}\[\]]{0,200}\d{1,3}%[^'\"{}\[\]]{0,200}\[[^'\"{}\[\]]{0,80}(?:it/s|s/it)"
    r"(?:, est\. speed[^'\"{}\[\]]{0,80}toks/s)?\]"
)
_PARTS: Final = re.compile(r"[\r\n]+")


def read_log(
    path: str,
    *,
    name: str | None = None,
    full: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    zone: datetime.tzinfo | None = None,
    written_at: float | None = None,
    aside: bool = False,
) -> Iterator[LogLine]:
    """The lines of a log file; ``-`` is standard input.

    `name` is what evidence cites (default: the path). Files over 16 MiB are read in full only with
    `full`: else their beginning, their end, and what surrounds telling lines. `progress` is called
    with the bytes read and the file's size, None if unknown. `note` hears what a report should say
    about the reading. Times without an offset are taken to be in `zone` (default: this machine's);
    a missing year follows from `written_at` (default: the file's last change). What is wrong with
    an archive is known, and noted, once its last line was given. With `aside`, for one of many
    files, it is closed between its first line and the rest: neither it nor its first MiBs are held.

    Raises SourceUnavailable, PermissionDeniedError or NoDataError at once, before the first line.
    """
    stream, size, changed_at = _open(path)
    clock = Clock(zone, written_at if written_at is not None else changed_at)
    lines = read_stream(
        stream, name or path, clock=clock, size=size, full=full, progress=progress, note=note
    )
    if not aside or size is None:  # what is no file can be read once only
        return lines
    again = functools.partial(
        read_log,
        path,
        name=name,
        full=full,
        progress=progress,
        note=note,
        zone=zone,
        written_at=written_at,
    )
    return _in_two(lines, again, note)


def _in_two(
    lines: Iterator[LogLine],
    again: Callable[[], Iterator[LogLine]],
    note: Callable[[str], None] | None,
) -> Iterator[LogLine]:
    first = next(lines, None)
    del lines  # closes the file
    if first is None:
        return
    yield first
    try:
        rest = again()
    except SourceError as error:  # it went away meanwhile
        if note is not None:
            note(str(error))
        return
    yield from itertools.islice(rest, 1, None)


def read_stream(
    stream: BinaryIO,
    name: str,
    *,
    clock: Clock,
    size: int | None = None,
    full: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Iterator[LogLine]:
    """The lines of an open stream, which is closed at the end; arguments as for `read_log`."""
    with stream:
        try:
            blocks = Blocks(stream)
        except OSError as error:
            reason = error.strerror or "input/output error"
            raise SourceUnavailable(f"{name}: cannot be read ({reason})") from None
        if note is not None and not full and size is not None and size > SMALL and not blocks.kind:
            note("large, so read at its ends and around telling lines")
        pieces = choose_pieces(_reported(blocks, size, progress), full=full)
        yield from read_pieces(pieces, name, clock)
        if blocks.damage is not None and note is not None:
            note(f"{blocks.damage}; read as far as it goes")


def _reported(blocks: Blocks, size: int | None, progress: Progress | None) -> Iterator[bytes]:
    """The blocks, with a call of `progress` every few MiB."""
    reported = 0
    for block in blocks:
        yield block
        if progress is not None and blocks.consumed_bytes - reported >= _PROGRESS_STEP:
            reported = blocks.consumed_bytes
            progress(reported, size)
    if progress is not None:
        progress(blocks.consumed_bytes, size)


def read_pieces(pieces: Iterable[Piece], name: str, clock: Clock) -> Iterator[LogLine]:
    """The lines of chosen parts of a log, without their wrappers."""
    iterator = iter(pieces)
    first = next(iterator, None)
    if first is None:
        return
    whole = _chain(first, iterator)
    unwrapper = Unwrapper(clock)
    if is_export(first.data[:4096]):
        yield from _read_export(split_lines(whole, bars=False), name, unwrapper, clock)
        return
    last = Envelope()
    for raw in split_lines(whole):
        if raw.gap:
            yield from _flush(unwrapper, name, clock)
        text = raw.data.decode("utf-8", "replace").rstrip("\r")
        unwrapped = unwrapper.unwrap(raw.number, text)
        if unwrapped is None:
            continue
        number, text, envelope = unwrapped
        if raw.continued and envelope.at is None:
            envelope = last  # later bars of a line stand behind its first one's wrapper
        last = envelope
        yield from _parts(name, number, text, envelope, clock)
    yield from _flush(unwrapper, name, clock)


def _chain(first: Piece, rest: Iterator[Piece]) -> Iterator[Piece]:
    yield first
    yield from rest


def _flush(unwrapper: Unwrapper, name: str, clock: Clock) -> Iterator[LogLine]:
    for number, text, envelope in unwrapper.flush():
        yield from _parts(name, number, text, envelope, clock)


def _read_export(
    lines: Iterable[RawLine], name: str, unwrapper: Unwrapper, clock: Clock
) -> Iterator[LogLine]:
    parser = ExportParser()
    for raw in lines:
        if raw.gap:
            parser.reset()
        for record in parser.feed(raw.number, raw.data, raw.size):
            yield from _journal_lines(record, name, unwrapper, clock)
    for record in parser.finish():
        yield from _journal_lines(record, name, unwrapper, clock)


def _journal_lines(
    record: Record, name: str, unwrapper: Unwrapper, clock: Clock
) -> Iterator[LogLine]:
    stamp, pid = record.fields.get(b"__REALTIME_TIMESTAMP", b""), record.fields.get(b"_PID", b"")
    at = int(stamp) / 1e6 if stamp.isdigit() and len(stamp) <= 20 else None
    if at is not None:
        clock.note(at)
    writer = record.fields.get(b"SYSLOG_IDENTIFIER") or record.fields.get(b"_COMM") or b""
    for number, data in record.messages:
        text = data.decode("utf-8", "replace").rstrip("\r")
        unwrapped = unwrapper.unwrap(number, text)
        if unwrapped is None:
            continue
        first, text, envelope = unwrapped
        envelope.at = at if at is not None else envelope.at
        envelope.pid = envelope.pid or (int(pid) if pid.isdigit() and len(pid) < 12 else None)
        envelope.process = envelope.process or writer.decode("utf-8", "replace") or None
        yield from _parts(name, first, text, envelope, clock)


def _parts(
    name: str, number: int, text: str, envelope: Envelope, clock: Clock
) -> Iterator[LogLine]:
    """A log line for each carriage-return part of a line, and for what follows a bar directly."""
    if "\r" not in text and "\n" not in text:
        parts = [text]
    else:
        parts = [part for part in _PARTS.split(text) if part] or [""]
    for part in parts:
        rest: str | None = part
        while rest is not None:
            rest, header = take_prefix(rest, clock)
            bar = None if header.record or "%" not in rest else _BAR.match(rest)
            behind = rest[bar.end() :] if bar is not None else ""
            if bar is not None and behind.strip():
                yield _line(name, number, bar.group(), header, envelope)
                rest = behind
            else:
                yield _line(name, number, rest, header, envelope)
                rest = None


def _line(name: str, number: int, text: str, header: Header, envelope: Envelope) -> LogLine:
    return LogLine(
        source=name,
        number=number,
        text=strip_repeat(text[:MAX_TEXT]).rstrip(),
        at=envelope.at if envelope.at is not None else header.at,
        level=header.level or envelope.level,
        process=header.process or envelope.process,
        pid=header.pid if header.pid is not None else envelope.pid,
        rank=header.rank,
        origin=header.origin or envelope.origin,
        stream=envelope.stream,
        container=envelope.container,
        prefixed=header.prefixed or envelope.prefixed,
    )


def _open(path: str) -> tuple[BinaryIO, int | None, float]:
    """The stream, its size if known, and when it was last written."""
    if path == "-":
        try:
            handle = io.FileIO(sys.stdin.fileno(), closefd=False)
        except (AttributeError, OSError, ValueError):  # closed, or not a file at all
            raise SourceUnavailable("standard input cannot be read") from None
        return io.BufferedReader(handle), None, time.time()
    try:
        stream = Path(path).open("rb")  # noqa: SIM115 - closed by read_stream
        status = os.fstat(stream.fileno())
    except FileNotFoundError:
        raise SourceUnavailable(f"{path}: no such file") from None
    except IsADirectoryError:
        raise NoDataError(f"{path} is a directory: name the log file in it") from None
    except PermissionError:
        raise PermissionDeniedError(
            f"{path}: no permission to read; try sudo, or join its group"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise SourceUnavailable(f"{path!a}: cannot be read ({reason})") from None
    if _is_endless(status, stream):
        stream.close()
        raise NoDataError(f"{path} is a device: name a log file, or a pipe")
    regular = stat.S_ISREG(status.st_mode)
    if regular and (hole := hole_bytes(stream.fileno())):
        stream.seek(hole)
    written_at = changed_at(status) if regular else time.time()
    return stream, status.st_size if regular else None, written_at


def _is_endless(status: os.stat_result, stream: BinaryIO) -> bool:
    """Whether it is a disk or a device without an end; terminals and ``/dev/null`` have one."""
    if stat.S_ISBLK(status.st_mode):
        return True
    is_null = status.st_rdev == os.makedev(1, 3)
    return stat.S_ISCHR(status.st_mode) and not is_null and not stream.isatty()
