"""The kernel log: OOM kills, Xids and driver errors, from a file, the journal or /dev/kmsg."""

from __future__ import annotations

import datetime
import gzip
import itertools
import lzma
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Final, cast

from oomwatch.errors import (
    NoDataError,
    OomwatchError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
)
from oomwatch.records import KernelEvent
from oomwatch.sources.kernel_events import (
    INTERESTING,
    LONGEST_MESSAGE,
    Assembler,
    normalize_pci,
)
from oomwatch.sources.kernel_format import KernelLine, Unwrapper
from oomwatch.sources.regular_file import changed_at

__all__ = [
    "has_kernel_lines",
    "iterate_kernel_events",
    "normalize_pci",
    "parse_kernel_lines",
    "probe_journal",
    "read_journal",
    "read_kernel_log",
    "read_kmsg",
    "read_live_kernel_log",
]

_LONGEST_LINE_BYTES: Final = 1 << 16
_LARGEST_KMSG_RECORD_BYTES: Final = 8192  # the kernel answers EINVAL to smaller buffers
_JOURNAL_TIMEOUT_SECONDS: Final = 30.0
_JOURNAL_DENIED: Final = (
    "the journal may not be read: join the group systemd-journal, or run as root"
)


def iterate_kernel_events(
    lines: Iterable[tuple[int, str]],
    *,
    zone: datetime.tzinfo = datetime.UTC,
    now: float | None = None,
) -> Iterator[KernelEvent]:
    """Events of numbered lines, in order. Any text is accepted; what is no kernel line is skipped.

    `zone` is assumed for times that name none; `now` dates times without a year.
    """
    unwrapper, assembler = Unwrapper(zone=zone, now=now), Assembler()
    number = 0
    for number, raw in lines:
        line = unwrapper.line(raw)
        if line is not None and _is_wanted(line):
            yield from assembler.feed(number, line)
    last = unwrapper.finish()
    if last is not None and _is_wanted(last):
        yield from assembler.feed(number, last)
    yield from assembler.finish()


def _is_wanted(line: KernelLine) -> bool:
    return len(line.text) <= LONGEST_MESSAGE and INTERESTING.search(line.text) is not None


def parse_kernel_lines(
    lines: Iterable[tuple[int, str]],
    *,
    zone: datetime.tzinfo = datetime.UTC,
    now: float | None = None,
) -> list[KernelEvent]:
    """`iterate_kernel_events` as a list."""
    return list(iterate_kernel_events(lines, zone=zone, now=now))


def read_kernel_log(path: str, *, zone: datetime.tzinfo = datetime.UTC) -> Iterator[KernelEvent]:
    """Events of a file: dmesg, kmsg, syslog or journal text; plain, gz, xz or zst.

    Of the device ``/dev/kmsg``, what is in it now. Raises `NoDataError` if there is no such file,
    `PermissionDeniedError`, or `SourceUnavailable`.
    """
    try:
        if Path(path).is_char_device() and Path(path).samefile("/dev/kmsg"):
            yield from read_kmsg()  # as a file it would never end
            return
        with Path(path).open("rb") as stream, _decompressed(stream) as text:
            modified = changed_at(Path(path).stat())
            yield from iterate_kernel_events(_numbered(text), zone=zone, now=modified)
    except _zstd_errors() as error:
        raise _as_source_error(path, error) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _as_source_error(path, error) from error


def has_kernel_lines(path: str) -> bool:
    """Whether any line of a file is wrapped as a kernel's are. Raises as `read_kernel_log`."""
    unwrapper = Unwrapper()
    try:
        with Path(path).open("rb") as stream, _decompressed(stream) as text:
            lines = (unwrapper.line(raw) for _, raw in _numbered(text))
            return any(
                line is not None and (line.at is not None or line.monotonic_seconds is not None)
                for line in lines
            )
    except _zstd_errors() as error:
        raise _as_source_error(path, error) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _as_source_error(path, error) from error


_DMESG: Final = re.compile(
    r"(?:<\d{1,3}>|[a-z]{2,8}\s*:[a-z]{2,6}\s*: )?"
    r"\[(?:[ \d]{1,12}\.\d{3,9}"
    r"|\S{1,6} (?:[A-Z][a-z]{2}|\d{1,2}月)\s+\d{1,2} \d\d:\d\d:\d\d \d{4})\](?:\[\s*[TC]\d+\])? "
    r"|kernel: "
)
_SYSLOG: Final = re.compile(
    r"(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})?|\d{4}-\d\d-\d\dT[\d:.,+Z-]{8,24})"
    r" \S{1,80} "
)
_FIRST_LINES: Final = 20


def read_kernel_lines_of_log(path: str) -> list[KernelEvent]:
    """What the kernel says in a log of the system: all of a dmesg, of a journal only its own lines.

    A server's log holds none, whatever words of the kernel a prompt in it quotes. Raises as
    `read_kernel_log`.
    """
    try:
        with Path(path).open("rb") as stream, _decompressed(stream) as text:
            lines = _numbered(text)
            head = [line for _, line in zip(range(_FIRST_LINES), lines, strict=False)]
            begins = [line for _, line in head if line.strip() and not line[:1].isspace()]
            if begins and all(_DMESG.match(line) for line in begins):
                chosen: Iterable[tuple[int, str]] = itertools.chain(head, lines)
            elif begins and all(_SYSLOG.match(line) for line in begins[:1]):
                chosen = (
                    (number, line)
                    for number, line in itertools.chain(head, lines)
                    if (header := _SYSLOG.match(line)) and line.startswith("kernel:", header.end())
                )
            else:
                return []
            return parse_kernel_lines(chosen, now=changed_at(Path(path).stat()))
    except _zstd_errors() as error:
        raise _as_source_error(path, error) from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise _as_source_error(path, error) from error


def read_kmsg(path: str = "/dev/kmsg", *, boot_time: float | None = None) -> list[KernelEvent]:
    """Events that are in the kernel's ring buffer now. Reading it needs CAP_SYSLOG.

    `boot_time` (epoch seconds) turns the kernel's clock into times; by default this host's.
    """
    started = _started(boot_time)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise _as_source_error(path, error) from error
    try:
        events = parse_kernel_lines((0, record) for record in kmsg_records(handle))
    except OSError as error:
        raise _as_source_error(path, error) from error
    finally:
        os.close(handle)
    if started is None:
        return events
    return [with_time(event, started) for event in events]


def read_journal(
    *, since: str | None = None, directory: str | None = None, lines: int | None = None
) -> list[KernelEvent]:
    """Events of the journal's kernel messages of this boot (`since` looks further back).

    `directory` reads another journal than this host's. Raises as `read_kernel_log`.
    """
    command = ["journalctl", "--no-pager", "--quiet", "--all", "-o", "json"]
    # Messages of systemd about its units' kills are no kernel messages: both are asked for.
    command += ["_TRANSPORT=kernel", "+", "_COMM=systemd", "MESSAGE_ID=" + _UNIT_OOM_MESSAGE_ID]
    if directory is None and since is None:
        command.append("--boot")
    command += [] if since is None else ["--since", since]
    command += [] if directory is None else ["-D", directory]
    command += [] if lines is None else ["--lines", str(lines)]
    try:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except FileNotFoundError as error:
        raise NoDataError("no journalctl on this host") from error
    # Killing the child ends the reading below, however long the journal is.
    deadline = threading.Timer(_JOURNAL_TIMEOUT_SECONDS, child.kill)
    deadline.start()
    count = 0

    def numbered() -> Iterator[tuple[int, str]]:
        nonlocal count
        for line in cast("IO[bytes]", child.stdout):
            count += 1
            yield 0, line.decode("utf-8", "replace")

    with child:
        events = parse_kernel_lines(numbered())
        complaint = cast("IO[bytes]", child.stderr).read().decode("utf-8", "replace")
    deadline.cancel()
    if child.returncode == -signal.SIGKILL:
        raise SourceUnavailable(f"journalctl did not end within {_JOURNAL_TIMEOUT_SECONDS:.0f} s")
    if not count and "permission" in complaint.lower():
        raise PermissionDeniedError(_JOURNAL_DENIED)
    if not count:
        # A kernel that booted has said something: this journal does not collect it.
        raise NoDataError("no kernel messages in the journal")
    return events


def probe_journal() -> None:
    """Look whether this user may read the journal of the system; raises as `read_journal` if not.

    Without the right, journalctl shows the user's own messages and says that others are missing.
    """
    command = ["journalctl", "--no-pager", "--system", "--lines", "1", "-o", "cat"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_JOURNAL_TIMEOUT_SECONDS,
        )
    except FileNotFoundError as error:
        raise NoDataError("no journalctl on this host") from error
    except subprocess.TimeoutExpired as error:
        raise SourceUnavailable(
            f"journalctl did not end within {_JOURNAL_TIMEOUT_SECONDS:.0f} s"
        ) from error
    complaint = done.stderr.lower()
    if "permission" in complaint or "not seeing messages" in complaint:
        raise PermissionDeniedError(_JOURNAL_DENIED)
    if "no journal files" in complaint or not done.stdout.strip():
        raise NoDataError("no journal is kept on this host")


def read_live_kernel_log() -> tuple[list[KernelEvent], str]:
    """Events of this host and where they were read: the journal, else /dev/kmsg.

    Raises the error of /dev/kmsg's if neither can be read; its message says what to allow.
    """
    try:
        return read_journal(), "journal"
    except SourceError as journal_error:
        try:
            return read_kmsg(), "/dev/kmsg"
        except SourceError as kmsg_error:
            if isinstance(journal_error, PermissionDeniedError):
                raise journal_error from kmsg_error
            raise


# systemd's catalogue id of "A process of this unit has been killed by the OOM killer".
_UNIT_OOM_MESSAGE_ID: Final = "fe6faa94e7774663a0da52717891d8ef"


def _started(given: float | None) -> float | None:
    return boot_time() if given is None else given


def with_time(event: KernelEvent, started: float) -> KernelEvent:
    """The event with a time, if it has only the kernel's own; `started`: when that began."""
    if event.monotonic_seconds is None or event.at is not None:
        return event
    return KernelEvent(
        event.kind,
        event.text,
        event.number,
        started + event.monotonic_seconds,
        event.monotonic_seconds,
        event.fields,
    )


def boot_time() -> float | None:
    """When this host's kernel was started, epoch seconds."""
    try:
        for line in Path("/proc/stat").read_text("ascii", "replace").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def kmsg_records(handle: int) -> Iterator[str]:
    """The records that can be read from the open device without waiting."""
    while True:
        try:
            record = os.read(handle, _LARGEST_KMSG_RECORD_BYTES)
        except BlockingIOError:
            return  # the end of what is there
        except BrokenPipeError:
            continue  # records were overwritten while we read: go on with the oldest there is
        if not record:
            return
        # The device gives one record a read, with its fields on lines that start with a blank.
        yield from (
            line for line in record.decode("utf-8", "replace").split("\n") if line[:1] != " "
        )


def _decompressed(stream: IO[bytes]) -> IO[bytes]:
    magic = stream.read(6) if stream.seekable() else b""
    if magic:
        stream.seek(0)
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if magic == b"\xfd7zXZ\x00":
        return cast("IO[bytes]", lzma.LZMAFile(stream))
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        import io  # noqa: PLC0415 - with zstandard, only where needed

        import zstandard  # noqa: PLC0415 - heavy, and seldom needed

        reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return cast("IO[bytes]", io.BufferedReader(cast("io.RawIOBase", reader)))
    return stream


def _zstd_errors() -> tuple[type[Exception], ...]:
    """The error of zstandard, if that was needed at all."""
    module = sys.modules.get("zstandard")
    return () if module is None else (module.ZstdError,)


def _numbered(stream: IO[bytes]) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; what is beyond 64 KiB of a line is dropped."""
    number = 0
    while line := stream.readline(_LONGEST_LINE_BYTES):
        number += 1
        whole = line.endswith(b"\n")
        yield number, line.decode("utf-8", "replace")
        while not whole:
            rest = stream.readline(_LONGEST_LINE_BYTES)
            whole = not rest or rest.endswith(b"\n")


def _as_source_error(path: str, error: BaseException) -> OomwatchError:
    if isinstance(error, PermissionError):
        hint = (
            "run as root, or allow CAP_SYSLOG" if path == "/dev/kmsg" else "read it as another user"
        )
        return PermissionDeniedError(f"{path} may not be read: {hint}")
    if isinstance(error, FileNotFoundError):
        return NoDataError(f"{path}: no such file")
    reason = error.strerror if isinstance(error, OSError) else None
    return SourceUnavailable(f"{path}: {reason or 'damaged or cut short'}")
