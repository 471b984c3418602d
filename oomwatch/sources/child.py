"""Runs a program as if we were not there, and keeps a copy of what it prints.

The program shares our terminal, process group and input: it can ask questions, and Ctrl-C and
Ctrl-Z reach it from the terminal. Only its output takes a way round: where ours is a terminal it
gets a terminal (a pty that changes no byte), else a pipe, one for each stream. Signals that are
sent to us alone (``kill``, ``docker stop``) are passed on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import pty
import signal
import struct
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from oomwatch.errors import UsageError
from oomwatch.sources.log_copy import LogCopy

_READ_BYTES: Final = 64 * 1024
_SI_KERNEL: Final = 0x80  # the terminal sent it, to the program as well
_WINDOW: Final = struct.Struct("HHHH")
# Workers that outlive the server hold its output open; their last words are waited for this long.
_DRAIN_SECONDS: Final = 3.0
_PASSED_ON: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_STOPS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})


@dataclasses.dataclass(frozen=True, slots=True)
class ChildEnd:
    """How the program ended."""

    pid: int
    status: int
    """As a shell tells it: the exit status, or 128 + the number of the signal."""
    signal: int | None
    stop_requested: bool
    """Somebody asked it to stop: Ctrl-C, or a signal that was passed on."""


class CommandNotStartedError(UsageError):
    """The program is not there (status 127) or may not be run (126), as in a shell."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run_child(
    command: Sequence[str], copy: LogCopy, *, env: Mapping[str, str] | None = None
) -> ChildEnd:
    """Run a program until it ends. Call from the main thread: signals are taken over meanwhile.

    Raises:
        CommandNotStartedError: no such program, or it may not be run.

    """
    _fill_standard_descriptors()
    # What is ignored (SIGHUP under nohup) stays so, for the program too.
    watched = {number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    watched |= {signal.SIGCHLD, signal.SIGWINCH}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    chld_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored one loses the status
    try:
        with _open_outputs() as outputs:
            pid = _spawn(command, outputs, mask, env)
            pumps = [_start_pump(output, copy) for output in outputs]
            status, stopped = _wait(pid, outputs, watched)
            deadline = time.monotonic() + _DRAIN_SECONDS
            for pump in pumps:
                pump.join(max(0.0, deadline - time.monotonic()))
    finally:
        while signal.sigtimedwait(watched, 0):  # a second Ctrl-C was for the program, too
            pass
        signal.signal(signal.SIGCHLD, chld_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    code = os.waitstatus_to_exitcode(status)
    return ChildEnd(
        pid=pid,
        status=code if code >= 0 else 128 - code,
        signal=-code if code < 0 else None,
        stop_requested=stopped,
    )


def _fill_standard_descriptors() -> None:
    """Give closed ones a harmless target, lest a pipe of ours takes their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


# ---------------------------------------------------------------- outputs
@dataclasses.dataclass(slots=True)
class _Output:
    """The way of one or both of our output streams."""

    name: str
    targets: tuple[int, ...]  # descriptors of ours: 1, 2 or both
    reader: int
    writer: int
    terminal: bool


@contextlib.contextmanager
def _open_outputs() -> Iterator[list[_Output]]:
    outputs: list[_Output] = []
    try:
        if _same_file(1, 2):
            # Joined streams (a terminal, or 2>&1) share one way, so that their order is kept.
            outputs.append(_open_output("output", (1, 2)))
        else:
            outputs.append(_open_output("stdout", (1,)))
            outputs.append(_open_output("stderr", (2,)))
        yield outputs
    finally:
        for output in outputs:
            if output.writer >= 0:  # not handed to a pump
                os.close(output.writer)
                os.close(output.reader)


def _same_file(first: int, second: int) -> bool:
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return False


def _open_output(name: str, targets: tuple[int, ...]) -> _Output:
    if not os.isatty(targets[0]):
        reader, writer = os.pipe()
        return _Output(name, targets, reader, writer, terminal=False)
    reader, writer = pty.openpty()
    with contextlib.suppress(termios.error):
        mode = termios.tcgetattr(targets[0])
        mode[1] &= ~termios.OPOST  # the real terminal does that, once
        termios.tcsetattr(writer, termios.TCSANOW, mode)
    output = _Output(name, targets, reader, writer, terminal=True)
    _copy_window(output)
    return output


def _copy_window(output: _Output) -> None:
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(output.targets[0], termios.TIOCGWINSZ, bytes(_WINDOW.size))
        fcntl.ioctl(output.reader, termios.TIOCSWINSZ, size)


def _start_pump(output: _Output, copy: LogCopy) -> threading.Thread:
    # The program holds the only writing end now: its last closing is our end of file.
    os.close(output.writer)
    output.writer = -1
    pump = threading.Thread(target=_pump, args=(output, copy), daemon=True)
    pump.start()
    return pump


def _pump(output: _Output, copy: LogCopy) -> None:
    """Pass bytes on until the end. If nobody reads ours, nobody reads the program's either."""
    try:
        while data := _read(output.reader):
            copy.write(output.name, data)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(output.targets[0], rest) :]
    except OSError:  # our reader has gone: the program learns it the usual way, by SIGPIPE
        pass
    finally:
        os.close(output.reader)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _READ_BYTES)
    except OSError as error:
        if error.errno == errno.EIO:  # a pty says so when its last writer has closed
            return b""
        raise


# ---------------------------------------------------------------- the program
def _spawn(
    command: Sequence[str],
    outputs: Sequence[_Output],
    mask: set[signal.Signals] | set[int],
    env: Mapping[str, str] | None,
) -> int:
    actions: list[tuple[int, int] | tuple[int, int, int]] = [
        (os.POSIX_SPAWN_DUP2, output.writer, target)
        for output in outputs
        for target in output.targets
    ]
    name = command[0]
    try:
        return os.posix_spawnp(
            name,
            list(command),
            os.environ if env is None else env,
            file_actions=actions,
            setsigmask=mask,
            # Python ignores these; programs expect the default.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except FileNotFoundError:
        raise CommandNotStartedError(f"{name}: command not found", 127) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CommandNotStartedError(f"{name}: cannot be started: {reason}", 126) from None


def _wait(pid: int, outputs: Sequence[_Output], watched: set[signal.Signals]) -> tuple[int, bool]:
    """The wait status of the program, and whether somebody asked it to stop."""
    stopped = False
    while True:
        # The signal of its end may have been merged with another's: look each time.
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status, stopped
        info = signal.sigwaitinfo(watched)
        if info.si_signo == signal.SIGWINCH:
            for output in outputs:
                if output.terminal:
                    _copy_window(output)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGWINCH)  # it may have looked before the size was copied
        elif info.si_signo in _PASSED_ON:
            stopped = stopped or info.si_signo in _STOPS
            if info.si_code != _SI_KERNEL:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, info.si_signo)
