"""Counts the OOM kills of memory cgroups as they happen.

Version 2: ``memory.events`` (``oom_kill 1``), which counts the cgroup and all below it, and wakes
who waits for it (POLLPRI). Version 1: ``memory.oom_control`` (``oom_kill 1``), of that cgroup
alone, and ``memory.failcnt``, how often the limit was hit; neither wakes anybody, so they are read
when asked. The files go with their cgroup, often within a moment of the kill: then the parent's
count tells, less what its other cgroups had. No privileges are needed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from oomwatch.sources.cgroup import CGROUP_ROOT

_READ_BYTES: Final = 4096
_CLAIM_SECONDS: Final = 30.0
"""A process with much memory takes a while to end after the kernel has chosen it."""
_MOST_KILLS: Final = 1000


@dataclasses.dataclass(slots=True)
class _Group:
    """One watched cgroup; `kills` is the count at the last look."""

    path: str
    folder: Path
    version: int
    descriptor: int | None
    kills: int
    limit_hits: int | None = None


class MemoryEvents:
    """The kills in the cgroups that it was told to watch. Safe for several threads."""

    def __init__(self, *, root: str = CGROUP_ROOT) -> None:
        self._root = Path(root)
        self._groups: dict[str, _Group] = {}
        self._parents: dict[Path, int] = {}
        self._pending: dict[str, int] = {}
        self._unclaimed: dict[str, collections.deque[float]] = {}
        self._lock = threading.Lock()

    def watch(self, paths: Mapping[str, str]) -> str | None:
        """Watch the memory cgroup that `parse_proc_cgroup` found; its path, None if none counts.

        A cgroup that is watched already goes on being watched.
        """
        found = self._find(paths)
        if found is None:
            return None
        path, folder, version = found
        with self._lock:
            if path in self._groups:
                return path
            group = _open(path, folder, version)
            if group is None:
                return None
            self._groups[path] = group
            self._unclaimed[path] = collections.deque(maxlen=_MOST_KILLS)
            if version == 2 and folder.parent not in self._parents:
                parent = _kills(folder.parent / "memory.events")
                if parent is not None:
                    self._parents[folder.parent] = parent
        return path

    def forget(self, path: str) -> None:
        """Watch it no longer."""
        with self._lock:
            self._drop(path)
            self._unclaimed.pop(path, None)

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            for path in list(self._groups):
                self._drop(path)
            self._unclaimed.clear()

    @property
    def groups(self) -> tuple[str, ...]:
        """Paths of the cgroups that are watched now."""
        with self._lock:
            return tuple(self._groups)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What to poll for POLLPRI: one that is ready says that `poll` has something new."""
        with self._lock:
            return tuple(
                group.descriptor
                for group in self._groups.values()
                if group.version == 2 and group.descriptor is not None
            )

    def limit_hits(self, path: str) -> int | None:
        """How often a version 1 cgroup ran into its limit, as of the last look."""
        with self._lock:
            group = self._groups.get(path)
            return None if group is None else group.limit_hits

    def poll(self, timeout_seconds: float = 0.0) -> list[tuple[str, int]]:
        """Cgroups with kills since the last call, and how many; waits for version 2 ones only.

        A cgroup that is gone is told of a last time, and then watched no longer.
        """
        if timeout_seconds > 0:
            waiting = select.poll()
            for descriptor in self.descriptors:
                waiting.register(descriptor, select.POLLPRI)
            waiting.poll(timeout_seconds * 1000)
        with self._lock:
            self._look()
            found, self._pending = self._pending, {}
            return list(found.items())

    def look(self) -> bool:
        """Read the counts now; whether something is new, which is kept for `poll`."""
        with self._lock:
            self._look()
            return bool(self._pending)

    def claim(self, path: str | None) -> bool | None:
        """Whether the kernel killed something in the cgroup just now that nobody has claimed yet.

        Each kill is given once, to the first who asks within 30 s. None where kills of that cgroup
        are not counted, or its count went with it.
        """
        if path is None:
            return None
        with self._lock:
            self._look()
            kills = self._unclaimed.get(path)
            if kills is None:
                return None
            oldest = time.monotonic() - _CLAIM_SECONDS
            while kills:
                if kills.popleft() >= oldest:
                    return True
            return False if path in self._groups else None

    def _look(self) -> None:
        told: dict[Path, int] = {}  # kills below a parent that cgroups of it account for
        gone: list[_Group] = []
        for group in self._groups.values():
            now = _read_kills(group)
            if now is None:
                gone.append(group)
                continue
            grown, group.kills = max(0, now - group.kills), now
            self._note(group.path, grown)
            told[group.folder.parent] = told.get(group.folder.parent, 0) + grown
        growth = {folder: self._parent_growth(folder) for folder in list(self._parents)}
        for group in gone:
            parent = group.folder.parent
            self._note(group.path, growth.get(parent, 0) - told.get(parent, 0))
            growth[parent] = 0
            self._drop(group.path)
        oldest = time.monotonic() - _CLAIM_SECONDS
        for path, kills in list(self._unclaimed.items()):
            if path not in self._groups and not (kills and kills[-1] >= oldest):
                del self._unclaimed[path]

    def _note(self, path: str, kills: int) -> None:
        if kills > 0:
            self._pending[path] = self._pending.get(path, 0) + kills
            self._unclaimed[path].extend([time.monotonic()] * min(kills, _MOST_KILLS))

    def _parent_growth(self, folder: Path) -> int:
        now = _kills(folder / "memory.events")
        if now is None:
            return 0
        grown, self._parents[folder] = now - self._parents[folder], now
        return max(0, grown)

    def _find(self, paths: Mapping[str, str]) -> tuple[str, Path, int] | None:
        """Path, folder and version of the cgroup that counts memory."""
        if "memory" in paths and (self._root / "memory").is_dir():
            tree, path, version = self._root / "memory", paths["memory"], 1
        elif "" in paths:
            unified = self._root / "unified"
            tree, path, version = unified if unified.is_dir() else self._root, paths[""], 2
        else:
            return None
        parts = [part for part in path.split("/") if part]
        return None if ".." in parts else (path, tree.joinpath(*parts), version)

    def _drop(self, path: str) -> None:
        group = self._groups.pop(path, None)
        if group is None:
            return
        if group.descriptor is not None:
            os.close(group.descriptor)
        parent = group.folder.parent
        if not any(other.folder.parent == parent for other in self._groups.values()):
            self._parents.pop(parent, None)


def _open(path: str, folder: Path, version: int) -> _Group | None:
    name = "memory.events" if version == 2 else "memory.oom_control"
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    group = _Group(path, folder, version, descriptor, 0)
    kills = _read_kills(group)
    if kills is None:  # a kernel before 4.13 counts no kills
        os.close(descriptor)
        return None
    group.kills = kills
    return group


def _read_kills(group: _Group) -> int | None:
    """The count, through the open file: a new cgroup of the same name is another one."""
    if group.descriptor is None:
        return None
    try:
        if os.fstat(group.descriptor).st_nlink == 0:  # removed, and not on the kernel's own tree
            return None
        text = os.pread(group.descriptor, _READ_BYTES, 0)
    except OSError:  # ENODEV: the cgroup was removed
        return None
    if group.version == 1:
        with contextlib.suppress(OSError, ValueError):
            group.limit_hits = int((group.folder / "memory.failcnt").read_bytes())
    return _oom_kill(text)


def _kills(path: Path) -> int | None:
    try:
        return _oom_kill(path.read_bytes())
    except OSError:
        return None


def _oom_kill(text: bytes) -> int | None:
    """The number in the line ``oom_kill 1``."""
    for line in text.splitlines():
        name, _, value = line.partition(b" ")
        if name == b"oom_kill" and value.isdigit():
            return int(value)
    return None
