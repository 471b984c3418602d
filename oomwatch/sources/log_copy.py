"""A bounded copy of what a program prints: its beginning and its end, in one private file.

The beginning of a server's output holds its version, flags and memory figures, the end its death;
what lies between is the same line many times. Two streams are joined by whole lines.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

HEAD_BYTES: Final = 8 * 1024**2
TAIL_BYTES: Final = 24 * 1024**2
_MAX_PENDING_BYTES: Final = 256 * 1024
_BLOCK_BYTES: Final = 1024 * 1024


class LogCopy:
    """Keeps the first `head_bytes` and about the last `tail_bytes` of several streams.

    The head goes to the file at once, so that a copy is there even if we are killed; the tail is
    kept in two unnamed files in turn and appended by `close`.
    """

    def __init__(
        self, path: Path | None, *, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES
    ) -> None:
        """Open the copy, readable by this user only; None: a new file for temporary data.

        Raises:
            OSError: the file cannot be written.

        """
        if path is None:
            descriptor, name = tempfile.mkstemp(prefix="oomwatch-run-", suffix=".log")
            self.path = Path(name)
        else:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.fchmod(descriptor, 0o600)
            self.path = path
        self._file: IO[bytes] = os.fdopen(descriptor, "wb", buffering=0)
        self._head_left = head_bytes
        self._segment_bytes = tail_bytes // 2
        self._older: IO[bytes] | None = None
        self._newer: IO[bytes] | None = None
        self._newer_bytes = 0
        self._pending: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self.left_out_bytes = 0
        self.error: OSError | None = None
        """Why the copy is not complete: a full disk must not stop the server's output."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, stream: str, data: bytes) -> None:
        """Take bytes of one stream; a line is kept once it is complete."""
        with self._lock:
            if self._file.closed:  # a worker that outlives the server still prints
                return
            data = self._pending.pop(stream, b"") + data
            end = data.rfind(b"\n") + 1
            if len(data) - end > _MAX_PENDING_BYTES:
                end = len(data)
            if end < len(data):
                self._pending[stream] = data[end:]
            self._guarded_keep(data[:end])

    def close(self) -> None:
        """Finish the file: unfinished lines, then a note of what was left out, then the tail."""
        with self._lock:
            if self._file.closed:
                return
            for data in self._pending.values():
                self._guarded_keep(data + b"\n")
            self._pending.clear()
            try:
                self._append_tail()
            except OSError as error:
                self.error = self.error or error
            self._file.close()

    def _guarded_keep(self, data: bytes) -> None:
        if not data or self.error is not None:
            return
        try:
            self._keep(data)
        except OSError as error:
            self.error = error

    def _keep(self, data: bytes) -> None:
        if self._newer is None:
            if len(data) <= self._head_left:
                self._file.write(data)
                self._head_left -= len(data)
                return
            self._newer = tempfile.TemporaryFile()  # noqa: SIM115 - lives until close
        if self._newer_bytes + len(data) > self._segment_bytes and self._newer_bytes:
            if self._older is not None:
                self.left_out_bytes += self._older.tell()
                self._older.close()
            self._older, self._newer = self._newer, tempfile.TemporaryFile()  # noqa: SIM115
            self._newer_bytes = 0
        self._newer.write(data)
        self._newer_bytes += len(data)

    def _append_tail(self) -> None:
        if self.left_out_bytes:
            note = f"oomwatch: {self.left_out_bytes} bytes of output are left out here\n"
            self._file.write(note.encode())
        for segment in (self._older, self._newer):
            if segment is None:
                continue
            with segment:
                segment.seek(0)
                while block := segment.read(_BLOCK_BYTES):
                    self._file.write(block)
        self._older = self._newer = None
