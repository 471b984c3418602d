"""Process descriptors (pidfd): a process that cannot be taken for another one, and how it ended.

A descriptor becomes readable when its process ends, whoever is the parent (Linux 5.3). How it ended
is told by two places, to anybody who may look:

* ``/proc/PID/stat`` of a process that its parent has not fetched yet: the field
  ``exit_code``, as wait(2) gives it; printed as 0 to those who may not trace the process;
* the ioctl ``PIDFD_GET_INFO`` once the parent has fetched it (Linux 6.15), for as long as the
  descriptor is open; no privilege is needed.

Facts: pidfd_open(2), proc_pid_stat(5), ``include/uapi/linux/pidfd.h``.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from oomwatch.sources.cgroup import parse_proc_cgroup
from oomwatch.sources.procfs import PROC_ROOT

_GET_INFO: Final = 0xC040FF0B  # _IOWR(0xFF, 11, 64 bytes)
_INFO: Final = struct.Struct("=QQ11Ii")  # mask, cgroup id, 3 ids of process, 8 of users, exit code
_WITH_EXIT: Final = 1 << 3
_CORE_DUMPED: Final = 0x80
_ENDED_STATES: Final = frozenset("ZXx")


class ProcessState(NamedTuple):
    """What ``/proc/PID/stat`` says: enough to tell whether a process is still the same one."""

    start_ticks: int
    ended: bool
    """Nothing is left of it but its status, which the parent has not fetched."""
    wait_status: int | None = None
    """As wait(2) gives it; None while it lives, and for those who may not see it."""


class ExitStatus(NamedTuple):
    """How a process ended. `code` is as a shell tells it: 128 + the signal if one ended it."""

    code: int
    signal: int | None


def read_state(pid: int, *, proc_root: str = PROC_ROOT) -> ProcessState | None:
    """The process that has this number now; None if none has, or it is hidden from this user.

    Raises:
        OSError: that cannot be seen now, as with too many open files.

    """
    folder = Path(proc_root, str(pid))
    try:
        with (folder / "stat").open("rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rfind(b")") + 1 :].split()
    if len(fields) < 20:
        raise OSError(f"{folder}/stat cannot be read")
    # A first thread that has ended shows as a zombie for as long as other threads run.
    ended = fields[0].decode("ascii", "replace") in _ENDED_STATES and int(fields[17]) <= 1
    status = int(fields[49]) if ended and len(fields) > 49 else None
    if status == 0 and not _may_trace(folder):
        status = None
    return ProcessState(int(fields[19]), ended, status)


def _may_trace(folder: Path) -> bool:
    """Whether a 0 is meant: the link to the program asks for the same right.

    That of a process that has ended leads nowhere, for those who may follow it.
    """
    try:
        (folder / "exe").readlink()
    except PermissionError:
        return False
    except OSError:
        return folder.exists()  # else it went meanwhile, and nothing was asked
    return True


def read_cgroup_paths(pid: int, *, proc_root: str = PROC_ROOT) -> dict[str, str]:
    """Its cgroups by controller, as `parse_proc_cgroup` gives them; none if it is gone."""
    try:
        return parse_proc_cgroup(Path(proc_root, str(pid), "cgroup").read_text("utf-8", "replace"))
    except OSError:
        return {}


def open_pidfd(pid: int) -> int | None:
    """A descriptor of the process; None where this kernel or sandbox has none, or none is left.

    Raises:
        ProcessLookupError: there is no such process.

    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # ENOSYS, EPERM of a seccomp filter, EMFILE
        return None


def read_exit(descriptor: int) -> ExitStatus | None:
    """How the process ended, once its parent has fetched the status; None where it is not told."""
    answer = bytearray(_INFO.size)
    _INFO.pack_into(answer, 0, _WITH_EXIT, *[0] * 13)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, answer)
    except OSError:  # kernel before 6.13, or a process of an outer pid namespace
        return None
    mask, *_, status = _INFO.unpack(answer)
    return exit_status(status) if mask & _WITH_EXIT else None


def exit_status(wait_status: int) -> ExitStatus:
    """The status of wait(2), taken apart."""
    signal = wait_status & ~_CORE_DUMPED & 0xFF
    if signal:
        return ExitStatus(128 + signal, signal)
    return ExitStatus(wait_status >> 8 & 0xFF, None)
