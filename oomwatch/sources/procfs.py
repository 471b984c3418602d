"""Processes and host memory, read from /proc: who runs, since when, with how much memory.

The root is a setting. A process may end between two reads, and with ``hidepid`` those of others
cannot be seen or only in part: what is missing is None, a process that is gone is None or left out.
Facts of the files: kernel documentation, filesystems/proc.rst.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from oomwatch.records import HostSample, ProcessSample
from oomwatch.sources.cgroup import CgroupIdentity, identify, owner_path, parse_proc_cgroup

PROC_ROOT: Final = "/proc"

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h
_PIECE_BYTES: Final = 1 << 16  # most files at one read
_MOST_BYTES: Final = 8 << 20
_LARGEST_CMDLINE_BYTES: Final = 1 << 20

# The name may hold blanks and parentheses; no field after it does.
_STAT: Final = re.compile(
    r"\((?P<comm>.*)\) (?P<state>\S) (?P<ppid>[0-9]+) (?:\S+ ){4}(?P<flags>[0-9]+) "
    r"(?:\S+ ){12}(?P<start_ticks>[0-9]+)",
    re.DOTALL,
)
# Of the many lines of these files only those that are wanted.
_STATUS: Final = re.compile(r"\n(Uid|VmRSS|RssFile|RssShmem|VmSwap):\s+([0-9]+)")
_MEMINFO: Final = re.compile(r"\n(MemTotal|MemAvailable|SwapTotal|SwapFree):\s+([0-9]+)")
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One process. `cmdline` has no control characters and no padding; () for kernel threads.

    `shared_bytes` is the part of `rss_bytes` backed by files or shared memory.
    """

    pid: int
    ppid: int | None = None
    comm: str | None = None
    cmdline: tuple[str, ...] | None = None
    state: str | None = None  # R, S, D, Z, T, …
    started_at: float | None = None
    start_ticks: int | None = None
    """With the pid, what tells a process from a later one of the same number."""
    uid: int | None = None
    rss_bytes: int | None = None
    shared_bytes: int | None = None
    swap_bytes: int | None = None
    cgroup_paths: tuple[tuple[str, str], ...] = ()
    identity: CgroupIdentity | None = None

    @property
    def title(self) -> str:
        """The command line as `ps` shows it, or the name."""
        return " ".join(self.cmdline or ()) or self.comm or ""

    def sample(self, at: float) -> ProcessSample:
        """The plain record of one moment."""
        owner = self.identity
        return ProcessSample(
            at=at,
            pid=self.pid,
            ppid=self.ppid,
            name=self.comm,
            cmdline=self.cmdline,
            rss_bytes=self.rss_bytes,
            shared_bytes=self.shared_bytes,
            swap_bytes=self.swap_bytes,
            cgroup=owner.path if owner else None,
            unit=owner.unit if owner else None,
            container=owner.container if owner else None,
            state=self.state,
        )


class ProcessTree:
    """Processes by pid, with who started whom."""

    def __init__(self, processes: Iterable[ProcessInfo]) -> None:
        self._by_pid = {process.pid: process for process in processes}
        self._children: dict[int, list[int]] = {}
        for process in self._by_pid.values():
            if process.ppid is not None:
                self._children.setdefault(process.ppid, []).append(process.pid)

    def __iter__(self) -> Iterator[ProcessInfo]:
        return iter(self._by_pid.values())

    def get(self, pid: int | None) -> ProcessInfo | None:
        """The process, if it was there."""
        return None if pid is None else self._by_pid.get(pid)

    def children(self, pid: int) -> list[ProcessInfo]:
        """The processes that it started, by pid."""
        return [self._by_pid[child] for child in sorted(self._children.get(pid, ()))]

    def descendants(self, pid: int) -> list[ProcessInfo]:
        """All processes below it, nearest first."""
        found: list[ProcessInfo] = []
        seen = {pid}
        queue = self.children(pid)
        while queue:
            process = queue.pop(0)
            if process.pid in seen:
                continue  # a pid was reused while we read
            seen.add(process.pid)
            found.append(process)
            queue.extend(self.children(process.pid))
        return found

    def ancestors(self, pid: int) -> list[ProcessInfo]:
        """Its parent, the parent's parent, and so on."""
        found: list[ProcessInfo] = []
        process = self.get(pid)
        while process is not None and len(found) < len(self._by_pid):
            process = self.get(process.ppid)
            if process is not None:
                found.append(process)
        return found


def list_processes(*, proc_root: str = PROC_ROOT) -> ProcessTree:
    """All processes that this user may see, without kernel threads; their memory is not read."""
    try:
        pids = [int(name) for name in os.listdir(proc_root) if name.isdigit()]  # noqa: PTH208 - names
    except OSError:
        pids = []
    return ProcessTree(filter(None, (_listed(pid, proc_root) for pid in pids)))


def glance_at(pid: int, *, proc_root: str = PROC_ROOT) -> ProcessInfo | None:
    """What one process calls itself and who started it; None if it is gone or invisible."""
    folder = f"{proc_root}/{pid}/"
    stat = _read_stat(folder)
    return None if stat is None else _describe(pid, proc_root, stat, _cmdline(folder), {})


def read_process(pid: int, *, proc_root: str = PROC_ROOT) -> ProcessInfo | None:
    """One process with its cgroup and memory; None if it is gone or invisible."""
    folder = f"{proc_root}/{pid}/"
    stat = _read_stat(folder)
    if stat is None:
        return None
    return _describe(pid, proc_root, stat, _cmdline(folder), _owner(folder) | _memory(folder))


def look_again(known: ProcessInfo, *, proc_root: str = PROC_ROOT) -> ProcessInfo | None:
    """The same process with its memory of now; None if it is gone, or its number is another's.

    Its cgroup is taken to be what it was, and its command line for as long as its name is the same:
    a process seldom changes them, and a search reads them.
    """
    folder = f"{proc_root}/{known.pid}/"
    stat = _read_stat(folder)
    if stat is None or stat.start_ticks != known.start_ticks:
        return None
    cmdline = known.cmdline if stat.comm == known.comm else _cmdline(folder)
    owner = {"cgroup_paths": known.cgroup_paths, "identity": known.identity}
    return _describe(known.pid, proc_root, stat, cmdline, owner | _memory(folder))


class _Stat(NamedTuple):
    comm: str | None
    state: str
    ppid: int
    flags: int
    start_ticks: int


def _listed(pid: int, proc_root: str) -> ProcessInfo | None:
    folder = f"{proc_root}/{pid}/"
    stat = _read_stat(folder)
    if stat is None or stat.flags & _PF_KTHREAD:
        return None  # half of the processes of an idle host: their other files need no reading
    cmdline = _cmdline(folder)
    if cmdline == () and (pid == 2 or stat.ppid in (0, 2)):
        return None
    return _describe(pid, proc_root, stat, cmdline, _owner(folder))


def _describe(
    pid: int,
    proc_root: str,
    stat: _Stat,
    cmdline: tuple[str, ...] | None,
    more: Mapping[str, Any],
) -> ProcessInfo:
    boot = _boot_time(proc_root, int(time.monotonic()))
    return ProcessInfo(
        pid=pid,
        ppid=stat.ppid,
        comm=stat.comm,
        cmdline=cmdline,
        state=stat.state,
        started_at=None if boot is None else boot + stat.start_ticks / _TICKS_PER_SECOND,
        start_ticks=stat.start_ticks,
        **more,
    )


def read_comm(pid: int, *, proc_root: str = PROC_ROOT) -> str | None:
    """The name alone, where nothing else is needed."""
    return clean(_read(f"{proc_root}/{pid}/comm") or "").strip() or None


def read_environment(pid: int, *, proc_root: str = PROC_ROOT) -> dict[str, str] | None:
    """Variables that a process was started with; None where this user may not see them."""
    text = _read(f"{proc_root}/{pid}/environ")
    if text is None:
        return None
    pairs = (item.partition("=") for item in text.split("\0"))
    return {name: value for name, equals, value in pairs if name and equals}


def read_host(*, proc_root: str = PROC_ROOT, at: float | None = None) -> HostSample:
    """Memory of the host, from ``meminfo``."""
    meminfo = dict(_MEMINFO.findall(f"\n{_read(f'{proc_root}/meminfo')}"))
    swap_total, swap_free = _kib(meminfo.get("SwapTotal")), _kib(meminfo.get("SwapFree"))
    return HostSample(
        at=time.time() if at is None else at,
        mem_total_bytes=_kib(meminfo.get("MemTotal")),
        mem_available_bytes=_kib(meminfo.get("MemAvailable")),
        swap_used_bytes=(
            None if swap_total is None or swap_free is None else swap_total - swap_free
        ),
    )


def hidepid(*, proc_root: str = PROC_ROOT) -> str | None:
    """The ``hidepid`` option of the mount, if it hides processes from this user; else None."""
    try:
        lines = Path(proc_root, "self/mountinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        if right.startswith("proc ") and left.split()[4:5] == [PROC_ROOT]:
            match = re.search(r"\bhidepid=(\w+)", line)
            hides = match is not None and match[1] not in ("0", "off")
            return match[1] if match and hides and os.geteuid() != 0 else None
    return None


def clean(text: str) -> str:
    """Text without control characters: names and arguments are chosen by whoever runs a process."""
    return _CONTROLS.sub(" ", text)


def _owner(folder: str) -> dict[str, Any]:
    return _said_of_owner(_read(folder + "cgroup") or "")


@functools.lru_cache(maxsize=128)
def _said_of_owner(text: str) -> dict[str, Any]:
    """What a ``cgroup`` file says; all processes of a unit or container say the same."""
    paths = parse_proc_cgroup(text)
    owner = owner_path(paths)
    return {
        "cgroup_paths": tuple(paths.items()),
        "identity": None if owner is None else identify(owner),
    }


def _cmdline(folder: str) -> tuple[str, ...] | None:
    """Arguments, without padding.

    A title that the process set itself stands in one argument, and is padded with blanks or NULs
    up to the length of the command line that it replaced.
    """
    text = _read(folder + "cmdline", _LARGEST_CMDLINE_BYTES)
    if text is None:
        return None
    text = text.rstrip("\0 ")
    return tuple(map(clean, text.split("\0"))) if text else ()


def _read_stat(folder: str) -> _Stat | None:
    match = _STAT.search(_read(folder + "stat") or "")
    if match is None:
        return None
    comm, state, ppid, flags, start_ticks = match.groups()
    return _Stat(clean(comm) or None, state, int(ppid), int(flags), int(start_ticks))


def _memory(folder: str) -> dict[str, int | None]:
    """What ``status`` says of the owner and of memory; a process that has ended has none."""
    status = dict(_STATUS.findall(_read(folder + "status") or ""))
    file, shmem = _kib(status.get("RssFile")), _kib(status.get("RssShmem"))
    return {
        "uid": int(status["Uid"]) if "Uid" in status else None,
        "rss_bytes": _kib(status.get("VmRSS")),
        "shared_bytes": None if file is None or shmem is None else file + shmem,
        "swap_bytes": _kib(status.get("VmSwap")),
    }


def _kib(number: str | None) -> int | None:
    return None if number is None else int(number) * 1024


@functools.lru_cache(maxsize=4)
def _boot_time(proc_root: str, _second: int) -> int | None:
    """Read once a second at most: it is a long file on a host with many cores."""
    match = re.search(r"^btime ([0-9]+)", _read(f"{proc_root}/stat") or "", re.MULTILINE)
    return None if match is None else int(match[1])


def _read(path: str, most: int = _MOST_BYTES) -> str | None:
    """A file that the kernel makes at one read; None if it is gone, forbidden or not there."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        text = piece = os.read(descriptor, _PIECE_BYTES)
        while len(piece) == _PIECE_BYTES and len(text) < most:
            piece = os.read(descriptor, _PIECE_BYTES)
            text += piece
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return text.decode("utf-8", "replace")
