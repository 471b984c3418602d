"""Follows a log file as it grows, through every way of rotating it, and knows where it stopped.

Rotation by renaming (then the old file is read to its end first), by copying and truncating, with
compression, several times between two looks; truncation; deletion and creation anew. Files are told
apart by device, inode and the bytes before the place where reading stopped: an inode alone may
have been given to another file, a size alone may have been reached again.
"""

from __future__ import annotations

import collections
import contextlib
import gzip
import lzma
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from oomwatch.sources.regular_file import hole_bytes, open_regular

READ_BYTES: Final = 1 << 20
MAX_PARTIAL: Final = 1 << 20
"""An unfinished line longer than that is given in parts."""
_TAIL_BYTES: Final = 64
_MAX_MOVED: Final = 32
_LINGER_LOOKS: Final = 3
"""Looks at the end of a renamed file before it is let go: its writer may still have it open."""
_STALE_PARTIAL_SECONDS: Final = 1.0
_ROTATED: Final = re.compile(r"\.(\d{1,5})(?:\.\w+)?$")
_OPEN_ERRORS: Final = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Chunk(NamedTuple):
    """Whole lines of one file, in order."""

    data: bytes
    number: int
    """Of its first line in its file, from 1."""
    fresh: bool
    """Whether it is the beginning of a file."""


class FilePosition(NamedTuple):
    """Where a follower stopped: all that is needed to go on in another process."""

    device: int
    inode: int
    offset: int
    number: int
    tail: bytes
    """The last bytes before `offset`."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {**self._asdict(), "tail": self.tail.hex()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> FilePosition | None:
        """Of a JSON object; None for what is no position."""
        try:
            return cls(
                device=int(value["device"]),
                inode=int(value["inode"]),
                offset=int(value["offset"]),
                number=int(value["number"]),
                tail=bytes.fromhex(value["tail"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


class FileFollower:
    """Reads what is new in a file, each time it is asked. Not for several threads at once."""

    def __init__(self, path: str, position: FilePosition | None = None) -> None:
        self.path = path
        self.missed: str | None = None
        """Why lines may be missing since the last look; cleared by `read`."""
        self._current: _Source | None = None
        self._queue: collections.deque[_Source] = collections.deque()
        self._unended = b""
        """The last line of the file before, which never got its line feed."""
        self._resume = position
        self._idle_looks = 0

    @property
    def position(self) -> FilePosition | None:
        """Behind the last whole line that was given; None before the first look at a file."""
        return self._current.position() if self._current is not None else self._resume

    def skip_to(self, offset: int) -> None:
        """Begin at the first whole line behind `offset` instead of at the beginning of the file."""
        if self._current is None:
            self._open_current()
        if self._current is not None:
            self._current.seek(offset)

    def read(self, *, limit: int = READ_BYTES, now: float | None = None) -> Iterator[Chunk]:
        """What is new since the last call, about `limit` bytes of it; nothing if nothing is.

        Raises:
            OSError: the file is there but cannot be read.

        """
        self.missed = None
        if self._current is None:
            self._open_current()
        now = time.monotonic() if now is None else now
        while limit > 0 and self._current is not None:
            if self._unended:
                data, self._unended = self._unended + b"\n", b""
                yield Chunk(data, 1, fresh=False)
            room = min(limit, READ_BYTES)
            added = self._current.read(room)
            if added is None:
                self._start_over()
                continue
            chunk = self._current.take(added, now)
            if chunk is not None:
                self._idle_looks = 0
                limit -= len(chunk.data)
                if chunk.data:
                    yield chunk
                if self._queue or len(added) == room:  # there may be more, also since then
                    continue
            if not self._next():
                return

    def close(self) -> None:
        """Let go of all files."""
        for source in (self._current, *self._queue):
            if source is not None:
                source.close()
        self._current = None
        self._queue.clear()

    # ---------------------------------------------------------------- which file
    def _open_current(self) -> None:
        """Open where reading stopped, and queue what was written since; else the file itself."""
        found = None if self._resume is None else self._find(self._resume)
        self._current = found or self._open(Path(self.path))
        if self._current is None:
            return
        if found is None and self._resume is not None:
            self.missed = "the file was rotated away since the last run; what was between is lost"
        self._resume = None

    def _find(self, position: FilePosition) -> _Source | None:
        """The file that holds a position, under whatever name it has now."""
        for path in (Path(self.path), *self._siblings()):
            source = self._open(path)
            if source is None:
                continue
            if source.holds(position):
                source.go_to(position)
                return source
            source.close()
        return None

    def _siblings(self) -> list[Path]:
        """Files that this one was rotated to, the newest first."""
        path = Path(self.path)
        found: list[tuple[int, int, Path]] = []
        with contextlib.suppress(OSError):
            for entry in os.scandir(path.parent):
                if entry.name != path.name and entry.name.startswith((path.name, path.stem + "-")):
                    with contextlib.suppress(OSError):
                        status = entry.stat()
                        if stat.S_ISREG(status.st_mode):
                            # Times are coarse: of two files of one moment .1 is newer than .2.
                            number = _ROTATED.search(entry.name)
                            order = -int(number[1]) if number else 0
                            found.append((status.st_mtime_ns, order, Path(entry.path)))
        found.sort(reverse=True)
        return [path for *_, path in found[:_MAX_MOVED]]

    def _open(self, path: Path) -> _Source | None:
        try:
            return _Source.open(path)
        except FileNotFoundError:
            return None
        except _OPEN_ERRORS as error:
            if path == Path(self.path) and isinstance(error, OSError):
                raise
            return None

    def _start_over(self) -> None:
        """The file was truncated: what a copy of it still holds comes first."""
        current = self._current
        assert current is not None  # noqa: S101 - called with one
        stopped = current.position()
        for path in self._siblings():
            copy = self._open(path)
            if copy is None:
                continue
            if copy.holds(stopped) and not copy.is_same_file(current):
                copy.go_to(stopped)
                current.rewind()
                self._queue.appendleft(current)
                self._current = copy
                return
            copy.close()
        current.rewind()

    def _next(self) -> bool:
        """At the end of the file: whether to go on with another one."""
        current = self._current
        assert current is not None  # noqa: S101 - called with one
        if self._queue:
            current.close()
            self._current = self._queue.popleft()
            return True
        try:
            there = os.stat(self.path)  # noqa: PTH116 - several times a second
        except OSError:
            return False
        if current.is_at(there):
            return False
        self._idle_looks += 1
        return self._idle_looks >= _LINGER_LOOKS and self._go_on_after(current)

    def _go_on_after(self, old: _Source) -> bool:
        """Open the files that followed a renamed one, oldest first."""
        later: list[_Source] = []
        reached = False
        for path in self._siblings():
            source = self._open(path)
            if source is None:
                continue
            if source.is_same_file(old) or source.holds(old.position()):
                source.close()
                reached = True
                break
            later.append(source)
        newest = self._open(Path(self.path))
        if newest is None or not reached:  # deleted and made anew: what lies around is older
            while later:
                later.pop().close()
        if newest is None:
            return False
        self._queue.extend([*reversed(later), newest])
        self._unended = old.take_partial()
        self._idle_looks = 0
        old.close()
        self._current = self._queue.popleft()
        return True


class _Source:
    """One open file, plain or compressed."""

    def __init__(self, stream: BinaryIO, status: os.stat_result, *, packed: bool) -> None:
        self._stream = stream
        self._identity = (status.st_dev, status.st_ino)
        self._packed = packed
        self._offset = 0
        self._number = 1
        self._partial = b""
        self._partial_since: float | None = None
        self._tail = b""
        self._fresh = True
        self._skip_first = False

    @classmethod
    def open(cls, path: Path) -> _Source:
        """Open a file; compressed ones by the ending of their name."""
        stream = open_regular(path)
        status = os.fstat(stream.fileno())
        if path.suffix == ".gz":
            return cls(gzip.GzipFile(fileobj=stream), status, packed=True)  # type: ignore[arg-type]
        if path.suffix == ".xz":
            return cls(lzma.LZMAFile(stream), status, packed=True)  # type: ignore[arg-type]
        return cls(stream, status, packed=False)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            raw = getattr(self._stream, "fileobj", None)
            self._stream.close()
            if raw is not None:
                raw.close()

    # ---------------------------------------------------------------- where it is
    def position(self) -> FilePosition:
        given = self._offset - len(self._partial)
        tail = self._tail
        if self._partial:
            tail = tail[: -len(self._partial)] if len(self._partial) < len(tail) else b""
        if not tail and given:
            tail = self._bytes_before(given)
        return FilePosition(*self._identity, given, self._number, tail[-_TAIL_BYTES:])

    def _bytes_before(self, offset: int) -> bytes:
        begin = max(0, offset - _TAIL_BYTES)
        try:
            if not self._packed:
                return os.pread(self._stream.fileno(), offset - begin, begin)
            self._stream.seek(begin)
            found = self._stream.read(offset - begin)
            self._stream.seek(self._offset)
        except _OPEN_ERRORS:
            return b""
        return found

    def holds(self, position: FilePosition) -> bool:
        """Whether this is the file, or a copy of it, that a position was taken in."""
        if position.offset == 0:
            return (position.device, position.inode) == self._identity and not self._packed
        if not self._packed and self._size() < position.offset:
            return False
        return bool(position.tail) and self._bytes_before(position.offset).endswith(position.tail)

    def go_to(self, position: FilePosition) -> None:
        self._offset, self._number = position.offset, position.number
        self._tail, self._fresh = position.tail, position.offset == 0
        if self._packed:
            self._stream.seek(position.offset)

    def seek(self, offset: int) -> None:
        """Begin in the middle; the line there is left out."""
        if offset > self._offset:
            self._offset, self._fresh, self._skip_first = offset, False, True
            self._partial, self._tail = b"", b""

    def rewind(self) -> None:
        self._offset, self._number = 0, 1
        self._partial, self._tail, self._fresh = b"", b"", True

    def is_at(self, status: os.stat_result) -> bool:
        return (status.st_dev, status.st_ino) == self._identity

    def is_same_file(self, other: _Source) -> bool:
        return self._identity == other._identity

    def _size(self) -> int:
        return os.fstat(self._stream.fileno()).st_size

    # ---------------------------------------------------------------- its lines
    def read(self, limit: int) -> bytes | None:
        """What was added; None if the file was truncated, and perhaps written anew, since then."""
        if self._packed:
            try:
                return self._stream.read(limit)
            except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
                return b""
        self._offset = self._offset or hole_bytes(self._stream.fileno())
        there = self._size() - self._offset
        if there <= 0:
            return b"" if there == 0 else None
        # The end of what is known is read with it: in a file that was written anew it differs.
        # A read of as much as there may be makes room for a megabyte, many times a second.
        tail = self._tail
        size = len(tail) + min(limit, there)
        data = os.pread(self._stream.fileno(), size, self._offset - len(tail))
        return data[len(tail) :] if data.startswith(tail) else None

    def take_partial(self) -> bytes:
        partial, self._partial = self._partial, b""
        return partial

    def take(self, data: bytes, now: float) -> Chunk | None:
        """The lines that are whole with what was added; None if it is nothing."""
        if not data:
            return self._stale(now)
        self._offset += len(data)
        self._tail = (self._tail + data[-_TAIL_BYTES:])[-_TAIL_BYTES:]
        if self._skip_first:
            line_feed = data.find(b"\n")
            self._skip_first = line_feed < 0
            data = data[line_feed + 1 :] if line_feed >= 0 else b""
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > MAX_PARTIAL:
            end = len(data)
        self._partial = data[end:]
        self._partial_since = now if self._partial else None
        return self._chunk(data[:end])

    def _stale(self, now: float) -> Chunk | None:
        """A line without an end is given once nothing was added to it: a crash ends like that."""
        since = self._partial_since
        if not self._partial or since is None or now - since < _STALE_PARTIAL_SECONDS:
            return None
        self._partial_since = None
        return self._chunk(self.take_partial())

    def _chunk(self, data: bytes) -> Chunk:
        chunk = Chunk(data, self._number, self._fresh)
        self._number += data.count(b"\n")
        self._fresh = self._fresh and not data
        return chunk
