"""Opens a log: plain, gzip, zstd or xz by its first bytes, UTF-16 and UTF-32 by their mark.

Archives may have several members, and may be cut off or damaged: they are read as far as they go.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol, cast

if TYPE_CHECKING:
    import zstandard

BLOCK: Final = 128 << 10
"""Small enough to stay in a processor's cache while it is looked at several times."""

_MARKS: Final = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class Blocks:
    """Iterates over the decompressed bytes of a stream, in blocks of about 128 KiB, as UTF-8.

    Bytes of unknown encodings pass as they are. The stream is not closed. Raises OSError at once if
    not even its first bytes can be read.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._head = _read_at_least(stream, 6)
        self._source: _Counted | None = None
        self.kind = archive_kind(self._head)
        """``gzip``, ``zstd``, ``xz``; None for a plain file."""
        self.consumed_bytes = len(self._head)
        """Bytes taken from the stream so far, before decompression."""
        self.damage: str | None = None
        """Why reading ended before the end, for a person."""

    def __iter__(self) -> Iterator[bytes]:
        blocks = self._plain() if self.kind is None else self._archive(_OPENERS[self.kind])
        first = next(blocks, b"")
        encoding = next((name for mark, name in _MARKS if first.startswith(mark)), None)
        if encoding is None:
            yield first.removeprefix(codecs.BOM_UTF8)
            yield from blocks
            return
        decoder = codecs.getincrementaldecoder(encoding)("replace")
        yield decoder.decode(first).encode("utf-8", "replace")
        for block in blocks:
            yield decoder.decode(block).encode("utf-8", "replace")
        yield decoder.decode(b"", final=True).encode("utf-8", "replace")

    def _plain(self) -> Iterator[bytes]:
        block = self._head
        while block:
            yield block
            try:
                block = self._stream.read(BLOCK)
            except OSError as error:  # a failing disk, a stale network mount
                self.damage = f"reading failed ({error.strerror or 'input/output error'})"
                return
            self.consumed_bytes += len(block)

    def _archive(self, opener: Callable[[BinaryIO], _Archive]) -> Iterator[bytes]:
        counted = _Counted(self._head, self._stream)
        parts: list[bytes] = []
        size = 0
        try:
            archive = opener(cast("BinaryIO", io.BufferedReader(counted, BLOCK)))
            # read1 hands out what one step gave, so that nothing before a damage is lost.
            while part := archive.read1(BLOCK):
                parts.append(part)
                size += len(part)
                if size >= BLOCK:
                    self.consumed_bytes = counted.count
                    yield b"".join(parts)
                    parts, size = [], 0
        except _archive_errors() as error:
            cut = isinstance(error, EOFError)
            self.damage = f"the {self.kind} archive is {'cut off' if cut else 'damaged'}"
        self.consumed_bytes = counted.count
        if parts:
            yield b"".join(parts)


class _Archive(Protocol):
    """What reads one kind of archive."""

    def read1(self, size: int, /) -> bytes:
        """Some decompressed bytes, at most `size` where that can be asked for; none at the end."""


class _Counted(io.RawIOBase):
    """A stream with its first bytes put back, counting what is read."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        super().__init__()
        self._head, self._stream, self.count = head, stream, len(head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        size = len(buffer)
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
        else:
            data = self._stream.read(size)
            self.count += len(data)
        buffer[: len(data)] = data
        return len(data)


def archive_kind(head: bytes) -> str | None:
    """What the first bytes say the file is."""
    return next((kind for kind, magic in _MAGIC.items() if head.startswith(magic)), None)


class _ZstdReader:
    """Reads frame after frame; zstandard's own reader takes a cut-off frame for a whole one."""

    _STEP: Final = (
        1024  # compressed bytes: a block of one repeated byte takes 4 of them for 128 KiB
    )

    def __init__(self, stream: BinaryIO) -> None:
        import zstandard  # noqa: PLC0415 - 20 ms that plain logs need not pay

        self._stream, self._new = stream, zstandard.ZstdDecompressor().decompressobj
        self._frame: zstandard.ZstdDecompressionObj | None = None

    def read1(self, _size: int) -> bytes:
        """Some decompressed bytes; none at the end. Raises EOFError within a frame."""
        while True:
            left = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = left or self._stream.read(self._STEP)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError
                return b""
            if self._frame is None or self._frame.eof:
                self._frame = self._new()
            if part := self._frame.decompress(data):
                return part


def _archive_errors() -> tuple[type[Exception], ...]:
    """What the decompressors in use raise on bytes that are cut off or damaged."""
    zstandard = sys.modules.get("zstandard")
    known = (EOFError, OSError, lzma.LZMAError, zlib.error)
    return known if zstandard is None else (*known, zstandard.ZstdError)


def _open_gzip(stream: BinaryIO) -> _Archive:
    return gzip.GzipFile(fileobj=stream)


def _open_xz(stream: BinaryIO) -> _Archive:
    return lzma.LZMAFile(stream)


def _read_at_least(stream: BinaryIO, size: int) -> bytes:
    """The first block of a stream; a pipe may give its first bytes one by one."""
    head = b""
    while len(head) < size and (more := stream.read(BLOCK if not head else size)):
        head += more
    return head


_MAGIC: Final = {"gzip": b"\x1f\x8b", "zstd": b"\x28\xb5\x2f\xfd", "xz": b"\xfd7zXZ\x00"}
_OPENERS: Final[dict[str, Callable[[BinaryIO], _Archive]]] = {
    "gzip": _open_gzip,
    "xz": _open_xz,
    "zstd": _ZstdReader,
}
