"""Follows a log that only a program can read: ``journalctl -f``, ``docker logs -f``.

The program is started again when it ends (the journal daemon or the container was restarted), a
little later each time, from the last line that came: by the journal's cursor, or by the time that
the container's runtime puts before each line.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from oomwatch.sources.follow import READ_BYTES, Chunk

_MAX_PARTIAL: Final = 1 << 20
_LAST_BYTES: Final = 64 << 10
"""Of a block, the part that the last place is looked for in."""
_RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
CURSOR: Final = re.compile(rb'"__CURSOR"\s*:\s*"([^"\\]{1,512})"')
_STAMP: Final = re.compile(
    rb"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)(?= |$)", re.MULTILINE
)

Moment = tuple[float, int]
"""Epoch seconds and nanoseconds."""
Command = Callable[[str | None], Sequence[str]]
"""The command line that goes on after a place; None: from the beginning that is wanted."""


class ProgramFollower:
    """Reads what a program prints, without waiting for it. Not for several threads at once."""

    def __init__(
        self, command: Command, place: re.Pattern[bytes], position: Mapping[str, Any] | None = None
    ) -> None:
        self._command = command
        self._place_pattern = place
        value = (position or {}).get("place")
        self._place: str | None = value if isinstance(value, str) else None
        self._child: subprocess.Popen[bytes] | None = None
        self._partial = b""
        self._number = 1
        self._failures = 0
        self._retry_at = 0.0
        self._complaint: str | None = None
        self._known: Moment | None = None
        """The place until which lines are not new."""
        self.missed: str | None = None
        """Why nothing can be read, or lines may be missing."""

    @property
    def position(self) -> Mapping[str, Any] | None:
        """The place of the last whole line."""
        return None if self._place is None else {"place": self._place}

    def read(self, *, limit: int = READ_BYTES, now: float | None = None) -> Iterator[Chunk]:
        """What is new since the last call, about `limit` bytes of it."""
        now = time.monotonic() if now is None else now
        if self._child is None and not self._start(now):
            return
        while limit > 0 and self._child is not None:
            assert self._child.stdout is not None  # noqa: S101 - a pipe was asked for
            try:
                data = os.read(self._child.stdout.fileno(), min(limit, READ_BYTES))
            except BlockingIOError:
                return
            if not data:
                yield from self._ended(now)
                return
            limit -= len(data)
            yield from self._take(data)

    def close(self) -> None:
        """End the program."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(OSError):
                if child.stdout is not None:
                    child.stdout.close()
            child.wait()

    # ---------------------------------------------------------------- the program
    def _start(self, now: float) -> bool:
        if now < self._retry_at:
            return False
        command = list(self._command(self._place))
        try:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if command[0] != "journalctl" else subprocess.DEVNULL,
                env={**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": ""},
            )
        except OSError as error:
            self.missed = f"{command[0]} cannot be run ({error.strerror})"
            self._wait(now)
            return False
        assert self._child.stdout is not None  # noqa: S101 - a pipe was asked for
        os.set_blocking(self._child.stdout.fileno(), False)
        self._partial, self._complaint = b"", None
        self._known = _moment(self._place) if self._stamped else None
        return True

    def _ended(self, now: float) -> Iterator[Chunk]:
        child = self._child
        self.close()
        status = child.returncode if child is not None else None
        if status == 0 and self._stamped and self._partial:  # a container's last words
            yield from self._take(b"\n")
        said = self._complaint or f"ended with status {status}"
        self.missed = f"the program that reads the log: {said}"
        self._wait(now)

    def _wait(self, now: float) -> None:
        self._retry_at = now + _RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS) - 1)]
        self._failures += 1

    # ---------------------------------------------------------------- its lines
    @property
    def _stamped(self) -> bool:
        return self._place_pattern is _STAMP

    def _take(self, data: bytes) -> Iterator[Chunk]:
        data = self._partial + data
        end = data.rfind(b"\n") + 1
        if not end and len(data) > _MAX_PARTIAL:
            end = len(data)
        self._partial = data[end:]
        whole = data[:end]
        if self._stamped and whole:
            whole = self._new_lines(whole)
        if not whole:
            return
        self._failures, self.missed = 0, None
        for found in self._place_pattern.finditer(whole, max(0, len(whole) - _LAST_BYTES)):
            self._place = found[0 if self._stamped else 1].decode("ascii", "replace")
        yield Chunk(whole, self._number, self._number == 1)
        self._number += whole.count(b"\n")

    def _new_lines(self, data: bytes) -> bytes:
        """Lines after the known place: the runtime gives those of the same moment again.

        What has no time at all before the first that has is a complaint of the program's.
        """
        if self._known is None and _STAMP.match(data):
            return data
        begin = 0
        for line in data.splitlines(keepends=True):
            stamp = _STAMP.match(line)
            if stamp is None and self._place is None:
                self._complaint = line.decode("utf-8", "replace").strip()[:200]
            elif stamp is not None and (self._known is None or _moment_of(stamp) > self._known):
                self._known = None
                return data[begin:]
            begin += len(line)
        return b""


def _moment(stamp: str | None) -> Moment | None:
    found = _STAMP.match(stamp.encode()) if stamp else None
    return _moment_of(found) if found else None


def _moment_of(stamp: re.Match[bytes]) -> Moment:
    """Comparable also where zones and numbers of digits differ, as Podman's do."""
    seconds = datetime.datetime.fromisoformat((stamp[1] + stamp[3]).decode()).timestamp()
    return seconds, int((stamp[2] or b"").ljust(9, b"0"))


def follow_unit(
    unit: str,
    position: Mapping[str, Any] | None = None,
    *,
    since: float | None = None,
    directory: str | None = None,
) -> ProgramFollower:
    """The journal of a unit; without a position from `since` (epoch) on, else its last lines."""

    def command(cursor: str | None) -> list[str]:
        place = (
            [f"--after-cursor={cursor}"]
            if cursor is not None
            else [f"--since=@{since:.3f}"]
            if since is not None
            else ["--lines=1000"]
        )
        where = [f"--directory={directory}"] if directory else []
        # --lines=all: --follow alone shows ten lines only.
        lines = [] if "--lines=1000" in place else ["--lines=all"]
        return [
            "journalctl",
            "--no-pager",
            "--follow",
            "--output=json",
            f"--unit={unit}",
            *lines,
            *place,
            *where,
        ]

    return ProgramFollower(command, CURSOR, position)


def follow_container(
    container: str,
    position: Mapping[str, Any] | None = None,
    *,
    since: float | None = None,
    program: str = "docker",
) -> ProgramFollower:
    """The log of a container through its runtime; without a position from `since` (epoch) on."""

    def command(stamp: str | None) -> list[str]:
        if stamp is None and since is not None:
            begin = datetime.datetime.fromtimestamp(since, datetime.UTC)
            stamp = begin.strftime("%Y-%m-%dT%H:%M:%SZ")
        begins = [] if stamp is None else [f"--since={stamp}"]
        return [program, "logs", "--follow", "--timestamps", *begins, container]

    return ProgramFollower(command, _STAMP, position)
