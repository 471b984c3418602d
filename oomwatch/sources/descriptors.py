"""Open files of a process: where its output goes, and on which ports it listens."""

from __future__ import annotations

import dataclasses
import itertools
import re
import stat
from pathlib import Path
from typing import Final, Literal, NamedTuple

from oomwatch.sources.procfs import PROC_ROOT

TargetKind = Literal[
    "file", "deleted", "pipe", "socket", "terminal", "null", "other", "forbidden", "gone"
]

_LISTEN: Final = "0A"  # state of a listening socket in net/tcp
_INODE: Final = re.compile(r"(pipe|socket):\[(\d+)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """What a descriptor is open on. `path` can be opened from here (for a file)."""

    kind: TargetKind
    path: str | None = None
    inode: int | None = None


class Listener(NamedTuple):
    """A listening TCP socket; `host` is an address, ``0.0.0.0`` or ``::`` for all of them."""

    host: str
    port: int


def read_target(pid: int, descriptor: int, *, proc_root: str = PROC_ROOT) -> Target:
    """Where a descriptor of a process leads.

    A deleted file, and one that only the process's container can see, are still readable through
    the descriptor's own entry, so `path` is that entry then.
    """
    entry = Path(proc_root, str(pid), "fd", str(descriptor))
    try:
        name = str(entry.readlink())
    except FileNotFoundError:
        return Target("gone")
    except OSError:
        return Target("forbidden")
    if match := _INODE.fullmatch(name):
        return Target("pipe" if match[1] == "pipe" else "socket", inode=int(match[2]))
    if name == "/dev/null":
        return Target("null")
    if re.fullmatch(r"/dev/(?:pts/\d+|tty\w*|console|ptmx)", name):
        return Target("terminal", name)
    if not name.startswith("/"):
        return Target("other")
    if name.endswith(" (deleted)"):
        return Target("deleted", str(entry))
    return _file(entry, name)


def _file(entry: Path, name: str) -> Target:
    try:
        opened = entry.stat()
    except OSError:
        return Target("other", name)
    if not stat.S_ISREG(opened.st_mode):
        return Target("other", name)
    try:
        here = Path(name).stat()
        same = (here.st_dev, here.st_ino) == (opened.st_dev, opened.st_ino)
    except OSError:
        same = False
    return Target("file", name if same else str(entry), opened.st_ino)


def socket_inodes(pid: int, *, proc_root: str = PROC_ROOT) -> set[int]:
    """Inodes of the sockets that a process has open; empty where this user may not see them."""
    return {inode for kind, inode, _ in _inodes(pid, proc_root) if kind == "socket"}


def pipe_inodes(pid: int, *, writing: bool | None = None, proc_root: str = PROC_ROOT) -> set[int]:
    """Inodes of the pipes that a process has open; `writing` asks for one side only."""
    return {
        inode
        for kind, inode, mode in _inodes(pid, proc_root)
        if kind == "pipe" and (writing is None or mode is None or mode == writing)
    }


def open_files(pid: int, *, writing: bool = False, proc_root: str = PROC_ROOT) -> list[str]:
    """Regular files that a process has open (for writing), by descriptor, as paths from here."""
    found = []
    for descriptor, entry in sorted(_entries(pid, proc_root).items()):
        target = read_target(pid, descriptor, proc_root=proc_root)
        if target.kind == "file" and target.path and not (writing and not _writes(entry)):
            found.append(target.path)
    return found


def gpu_nodes(pid: int, *, proc_root: str = PROC_ROOT) -> tuple[int, ...]:
    """Numbers of the /dev/nvidiaN that a process has open; CUDA opens all that it may use."""
    found = set()
    for entry in _entries(pid, proc_root).values():
        try:
            match = re.fullmatch(r"/dev/nvidia(\d+)", str(entry.readlink()))
        except OSError:
            continue
        if match:
            found.add(int(match[1]))
    return tuple(sorted(found))


def listeners(pid: int, *, proc_root: str = PROC_ROOT) -> list[Listener]:
    """TCP sockets on which a process listens, in its own network namespace, by port."""
    return Listening(proc_root).of(pid)


class Listening:
    """Listening sockets of several processes; a namespace's table, which may be long, once."""

    def __init__(self, proc_root: str = PROC_ROOT) -> None:
        self._proc_root = proc_root
        self._tables: dict[str, dict[int, Listener]] = {}

    def of(self, pid: int) -> list[Listener]:
        """As `listeners`."""
        folder = Path(self._proc_root, str(pid))
        try:
            namespace = str((folder / "ns/net").readlink())
        except OSError:
            namespace = str(folder)
        if namespace not in self._tables:
            self._tables[namespace] = _listening(folder / "net")
        table = self._tables[namespace]
        found = {
            table[inode] for inode in socket_inodes(pid, proc_root=self._proc_root) & table.keys()
        }
        return sorted(found, key=lambda listener: (listener.port, listener.host))


def _listening(folder: Path) -> dict[int, Listener]:
    """By inode, what a ``net`` folder says."""
    found = {}
    for name in ("tcp", "tcp6"):
        try:
            lines = (folder / name).read_text("ascii", "replace")
        except OSError:
            continue
        for line in lines.splitlines()[1:]:
            fields = line.split(None, 10)
            if len(fields) < 10 or fields[3] != _LISTEN or not fields[9].isdigit():
                continue
            if listener := _listener(fields[1]):
                found[int(fields[9])] = listener
    return found


def _listener(text: str) -> Listener | None:
    """An address as in net/tcp: ``0100007F:1F40``, words in the byte order of the machine."""
    import ipaddress  # noqa: PLC0415 - only where sockets are looked up
    import sys  # noqa: PLC0415 - as above

    address, _, port = text.partition(":")
    try:
        words = [bytes.fromhex(address[at : at + 8]) for at in range(0, len(address), 8)]
        if sys.byteorder == "little":
            words = [word[::-1] for word in words]
        return Listener(str(ipaddress.ip_address(b"".join(words))), int(port, 16))
    except ValueError:
        return None


def own_address(pid: int, *, proc_root: str = PROC_ROOT) -> str | None:
    """An address at which a process in another network namespace can be reached from here.

    None if it shares ours (then the loopback address serves), or if it has no address of its own.
    """
    try:
        theirs = Path(proc_root, str(pid), "ns/net").readlink()
        ours = Path(proc_root, "self/ns/net").readlink()
    except OSError:
        return None
    return None if theirs == ours else _first_address(Path(proc_root, str(pid), "net/fib_trie"))


def _first_address(path: Path) -> str | None:
    """The first local address that is no loopback; each stands a line above ``host LOCAL``."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    for above, line in itertools.pairwise(lines):
        if "host LOCAL" in line:
            address = above.split()[-1]
            if re.fullmatch(r"\d+(?:\.\d+){3}", address) and not address.startswith("127."):
                return address
    return None


def _entries(pid: int, proc_root: str) -> dict[int, Path]:
    try:
        entries = list(Path(proc_root, str(pid), "fd").iterdir())
    except OSError:
        return {}
    return {int(entry.name): entry for entry in entries if entry.name.isdigit()}


def _inodes(pid: int, proc_root: str) -> list[tuple[str, int, bool | None]]:
    """Kind and inode of pipes and sockets, and whether the descriptor writes (None: unknown)."""
    found = []
    for entry in _entries(pid, proc_root).values():
        try:
            match = _INODE.fullmatch(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
        if match:
            found.append((match[1], int(match[2]), _writes(entry)))
    return found


def _writes(entry: Path) -> bool | None:
    """Whether a descriptor is open for writing, from the mode of its entry (lr-x or l-wx)."""
    try:
        return bool(entry.lstat().st_mode & stat.S_IWUSR)
    except OSError:
        return None
