"""Follows the kernel's messages as they are written: /dev/kmsg, else ``journalctl -kf``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Final

from oomwatch.errors import NoDataError, PermissionDeniedError, SourceUnavailable
from oomwatch.records import KernelEvent
from oomwatch.sources.follow_program import CURSOR, ProgramFollower
from oomwatch.sources.kernel import kmsg_records
from oomwatch.sources.kernel_events import Assembler
from oomwatch.sources.kernel_format import Unwrapper

_LOOK_SECONDS: Final = 0.2
_IDLE_SECONDS: Final = 0.4
"""Between two looks at whether to stop, while no report has begun."""
_WHOLE_SECONDS: Final = 0.5
"""The kernel writes the report of a kill in one go."""
_JOURNALCTL: Final = (
    "journalctl",
    "--no-pager",
    "--quiet",
    "--dmesg",
    "--follow",
    "--output=json",
    "--lines=0",
)


def follow_kernel(stop: threading.Event, *, path: str = "/dev/kmsg") -> Iterator[KernelEvent]:
    """Events from now on, until told to stop.

    Raises:
        SourceError: the kernel's messages may not be read, or there is no way to.

    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        yield from _follow_journal(stop, error)
        return
    try:
        with contextlib.suppress(OSError):  # a pipe or a plain file in place of the device
            os.lseek(handle, 0, os.SEEK_END)
        yield from _follow_device(handle, stop)
    finally:
        os.close(handle)


def _follow_device(handle: int, stop: threading.Event) -> Iterator[KernelEvent]:
    parser = _Parser()
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not stop.is_set():
        if not poll.poll(1000 * (_LOOK_SECONDS if parser.has_begun else _IDLE_SECONDS)):
            yield from parser.quiet()
            continue
        before, taken = time.monotonic(), 0
        try:
            for record in kmsg_records(handle):
                taken += 1
                yield from parser.take(record)
        except OSError as error:
            raise SourceUnavailable(f"/dev/kmsg cannot be read ({error.strerror})") from None
        if not taken:
            yield from parser.quiet()
        if time.monotonic() - before < _LOOK_SECONDS / 10:
            stop.wait(_LOOK_SECONDS / 10)  # a device that is always ready must not spin


def _follow_journal(stop: threading.Event, refused: OSError) -> Iterator[KernelEvent]:
    from oomwatch.sources.kernel import probe_journal  # noqa: PLC0415 - runs a program

    try:
        probe_journal()
    except PermissionDeniedError:
        raise PermissionDeniedError(
            f"/dev/kmsg: {refused.strerror}; and the journal may not be read: add CAP_SYSLOG "
            "(oomwatch service install --with kernel-log), or the group systemd-journal"
        ) from None
    except NoDataError as error:
        raise NoDataError(f"/dev/kmsg: {refused.strerror}; and {error}") from None
    follower = ProgramFollower(
        lambda cursor: (*_JOURNALCTL, *([f"--after-cursor={cursor}"] if cursor else [])), CURSOR
    )
    parser = _Parser()
    try:
        while not stop.wait(_LOOK_SECONDS):
            for chunk in follower.read():
                for line in chunk.data.decode("utf-8", "replace").splitlines():
                    yield from parser.take(line)
            yield from parser.quiet()
    finally:
        follower.close()


class _Parser:
    """Lines to events; a report of several lines is complete once nothing follows it."""

    def __init__(self) -> None:
        self._unwrapper = Unwrapper()
        self._assembler = Assembler()
        self._last: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a report may go on."""
        return self._last is not None

    def take(self, raw: str) -> Iterator[KernelEvent]:
        line = self._unwrapper.line(raw)
        if line is not None:
            self._last = time.monotonic()
            yield from map(self._timed, self._assembler.feed(0, line))

    def quiet(self) -> Iterator[KernelEvent]:
        if self._last is not None and time.monotonic() - self._last >= _WHOLE_SECONDS:
            self._last = None
            line = self._unwrapper.finish()
            if line is not None:
                yield from map(self._timed, self._assembler.feed(0, line))
            yield from map(self._timed, self._assembler.finish())

    @staticmethod
    def _timed(event: KernelEvent) -> KernelEvent:
        # The kernel's own clock stands still while the host sleeps; what is followed is of now.
        return event if event.at is not None else dataclasses.replace(event, at=time.time())
