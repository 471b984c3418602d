"""Reads the log that another program prints: `journalctl`, `docker logs`, `kubectl logs`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import IO, BinaryIO, cast

from oomwatch.errors import SourceUnavailable
from oomwatch.records import LogLine
from oomwatch.sources.logfile import read_stream
from oomwatch.sources.logformat_time import Clock

_ANSWER_SECONDS = 20


class Failed(Exception):  # noqa: N818 - it carries what the program said
    """The program complained and printed no line of a log."""


def read_child(
    command: Sequence[str], name: str, clock: Clock, *, full: bool = False, errors_too: bool = False
) -> Iterator[LogLine] | None:
    """The lines that a program prints; None if it prints nothing at all.

    The program is started at once, and ended when the lines are no longer wanted. With
    `errors_too` its standard error is part of the log, as `docker logs` prints the container's.

    Raises Failed with the program's last words, SourceUnavailable where there is no such program.
    """
    complaint = tempfile.TemporaryFile()  # noqa: SIM115 - closed below, or by the lines' end
    child = _start(command, subprocess.STDOUT if errors_too else complaint)
    assert child.stdout is not None  # noqa: S101 - a pipe was asked for
    if child.stdout.peek(1):  # type: ignore[attr-defined]
        return _lines(child, name, clock, complaint, full=full)
    child.stdout.close()
    status = child.wait()
    complaint.seek(0)
    said = complaint.read(4096).decode("utf-8", "replace").strip()
    complaint.close()
    if status or said:  # journalctl says "insufficient permissions" with status 0 as well
        raise Failed(_last_line(said) or f"{command[0]} ended with status {status}")
    return None


def ask_child(command: Sequence[str]) -> str:
    """What a program prints, within 20 seconds. Raises as `read_child` does."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ANSWER_SECONDS,
            env=_environment(),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{command[0]} did not answer within {_ANSWER_SECONDS} s") from None
    except OSError as error:
        raise SourceUnavailable(f"{command[0]} cannot be run ({error.strerror})") from None
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace")
        raise Failed(_last_line(said) or f"{command[0]} ended with status {done.returncode}")
    return done.stdout.decode("utf-8", "replace")


def _start(command: Sequence[str], errors: int | IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=_environment(),
        )
    except OSError as error:
        raise SourceUnavailable(f"{command[0]} cannot be run ({error.strerror})") from None


def _lines(
    child: subprocess.Popen[bytes], name: str, clock: Clock, complaint: BinaryIO, *, full: bool
) -> Iterator[LogLine]:
    try:
        stream = cast("BinaryIO", child.stdout)
        yield from read_stream(stream, name, clock=clock, full=full)
    finally:
        child.kill()  # no harm if it has ended
        child.wait()
        complaint.close()


def _environment() -> dict[str, str]:
    """Plain English and no pager: the messages are told apart by their words."""
    return {**os.environ, "LC_ALL": "C.UTF-8", "SYSTEMD_PAGER": "", "SYSTEMD_COLORS": "0"}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "".join(c if c.isprintable() else " " for c in lines[-1])[:300] if lines else ""
