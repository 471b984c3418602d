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
from collections.abc import Iterable, Iterator
from typing import Final

from oomwatch.records import HostSample, ProcessSample
from oomwatch.sources.cgroup import CgroupIdentity, identify, owner_path, parse_proc_cgroup

PROC_ROOT: Final = "/proc"

_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_PF_KTHREAD: Final = 0x00200000  # include/linux/sched.h
_LARGEST_CMDLINE_BYTES: Final = 1 << 20
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
    """All processes that this user may see, without kernel threads."""
    try:
        pids = [int(name) for name in os.listdir(proc_root) if name.isdigit()]  # noqa: PTH208 - names
    except OSError:
        pids = []
    found = (_read_process(pid, proc_root, with_kernel=False) for pid in pids)
    return ProcessTree(process for process in found if process and not _is_kernel_thread(process))


def read_process(pid: int, *, proc_root: str = PROC_ROOT) -> ProcessInfo | None:
    """One process; None if it is gone or invisible."""
    return _read_process(pid, proc_root, with_kernel=True)


def _read_process(pid: int, proc_root: str, *, with_kernel: bool) -> ProcessInfo | None:
    folder = f"{proc_root}/{pid}/"
    stat = _read(folder + "stat")
    comm, fields = _stat(stat or "")
    flags = fields[6] if len(fields) > 6 else ""
    if not with_kernel and flags.isdigit() and int(flags) & _PF_KTHREAD:
        return None  # half of the processes of an idle host: its other files need no reading
    status = _status(_read(folder + "status"))
    if stat is None and not status:
        return None
    ticks = int(fields[19]) if len(fields) > 19 and fields[19].isdigit() else None
    boot = _boot_time(proc_root, int(time.monotonic()))
    cgroup_paths, identity = _owner(_read(folder + "cgroup") or "")
    shared = [status.get("RssFile"), status.get("RssShmem")]
    ppid = fields[1] if len(fields) > 1 else status.get("PPid", "")
    return ProcessInfo(
        pid=pid,
        ppid=int(ppid) if ppid.isdigit() else None,
        comm=comm or clean(status.get("Name", "")) or None,
        cmdline=_cmdline(folder),
        state=(fields[0] if fields else status.get("State", "")[:1]) or None,
        started_at=None if ticks is None or boot is None else boot + ticks / _TICKS_PER_SECOND,
        start_ticks=ticks,
        uid=_first_number(status.get("Uid")),
        rss_bytes=_kib(status.get("VmRSS")),
        shared_bytes=None if None in shared else sum(_kib(part) or 0 for part in shared),
        swap_bytes=_kib(status.get("VmSwap")),
        cgroup_paths=cgroup_paths,
        identity=identity,
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
    meminfo = _status(_read(f"{proc_root}/meminfo"))
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
    for line in (_read(f"{proc_root}/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        if right.startswith("proc ") and left.split()[4:5] == [PROC_ROOT]:
            match = re.search(r"\bhidepid=(\w+)", line)
            hides = match is not None and match[1] not in ("0", "off")
            return match[1] if match and hides and os.geteuid() != 0 else None
    return None


def clean(text: str) -> str:
    """Text without control characters: names and arguments are chosen by whoever runs a process."""
    return _CONTROLS.sub(" ", text)


@functools.lru_cache(maxsize=128)
def _owner(text: str) -> tuple[tuple[tuple[str, str], ...], CgroupIdentity | None]:
    """What a ``cgroup`` file says; all processes of a unit or container say the same."""
    paths = parse_proc_cgroup(text)
    owner = owner_path(paths)
    return tuple(paths.items()), None if owner is None else identify(owner)


def _cmdline(folder: str) -> tuple[str, ...] | None:
    """Arguments, without padding.

    A title that the process set itself stands in one argument, and is padded with blanks or NULs
    up to the length of the command line that it replaced.
    """
    text = _read(folder + "cmdline", _LARGEST_CMDLINE_BYTES)
    if text is None:
        return None
    arguments = [clean(part) for part in text.rstrip("\0 ").split("\0")]
    return () if arguments == [""] else tuple(arguments)


def _stat(text: str) -> tuple[str, list[str]]:
    """Name and the fields behind it; the name may hold blanks and parentheses."""
    opening, closing = text.find("("), text.rfind(")")
    if opening < 0 or closing < opening:
        return "", []
    return clean(text[opening + 1 : closing]), text[closing + 1 :].split()


def _status(text: str | None) -> dict[str, str]:
    """A file of ``Name:   value`` lines."""
    pairs = (line.partition(":") for line in (text or "").splitlines())
    return {name: value.strip() for name, colon, value in pairs if colon}


def _kib(text: str | None) -> int | None:
    number = _first_number(text)
    return None if number is None else number * 1024


def _first_number(text: str | None) -> int | None:
    word = (text or "").split(maxsplit=1)[:1]
    return int(word[0]) if word and word[0].isascii() and word[0].isdigit() else None


def _is_kernel_thread(process: ProcessInfo) -> bool:
    return process.cmdline == () and (process.pid == 2 or process.ppid in (0, 2))


@functools.lru_cache(maxsize=4)
def _boot_time(proc_root: str, _second: int) -> float | None:
    """Read once a second at most: it is a long file on a host with many cores."""
    for line in (_read(f"{proc_root}/stat") or "").splitlines():
        if line.startswith("btime "):
            return _first_number(line[6:])
    return None


def _read(path: str, size: int = -1) -> str | None:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - hundreds of them in a search
            return file.read(size).decode("utf-8", "replace")
    except (OSError, ValueError):
        return None  # gone, forbidden, or not of this kernel
