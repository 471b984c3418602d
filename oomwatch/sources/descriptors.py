"""Open files of a process: where its output goes, and on which ports it listens."""

from __future__ import annotations

import dataclasses
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
    return {inode for kind, inode in _inodes(pid, proc_root) if kind == "socket"}


def pipe_inodes(pid: int, *, proc_root: str = PROC_ROOT) -> set[int]:
    """Inodes of the pipes that a process has open."""
    return {inode for kind, inode in _inodes(pid, proc_root) if kind == "pipe"}


def listeners(pid: int, *, proc_root: str = PROC_ROOT) -> list[Listener]:
    """TCP sockets on which a process listens, in its own network namespace, by port."""
    inodes = socket_inodes(pid, proc_root=proc_root)
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = Path(proc_root, str(pid), "net", name).read_text("ascii", "replace")
        except OSError:
            continue
        for line in lines.splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != _LISTEN or not fields[9].isdigit():
                continue
            if int(fields[9]) in inodes and (listener := _listener(fields[1])):
                found.add(listener)
    return sorted(found, key=lambda listener: (listener.port, listener.host))


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


def _inodes(pid: int, proc_root: str) -> list[tuple[str, int]]:
    folder = Path(proc_root, str(pid), "fd")
    found = []
    try:
        entries = list(folder.iterdir())
    except OSError:
        return []
    for entry in entries:
        try:
            match = _INODE.fullmatch(str(entry.readlink()))
        except OSError:
            continue  # closed meanwhile
        if match:
            found.append((match[1], int(match[2])))
    return found
