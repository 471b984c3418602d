"""Control groups: whose they are (unit, container, pod), memory limits, usage and OOM counts.

Version 2 (one tree), version 1 (``memory`` has a tree of its own) and both mounted at once. The
root is a setting, so that a host's tree mounted elsewhere, or a test's, reads the same. No
privileges are needed. Facts of the files: kernel documentation, cgroup-v2.rst and
cgroup-v1/memory.rst.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

CGROUP_ROOT: Final = "/sys/fs/cgroup"
_NO_LIMIT_V1: Final = 2**60  # version 1 says "none" with 2^63 less one page

# The name before the id tells the runtime: docker-<id>.scope, libpod-payload-<id>, /docker/<id>.
_CONTAINER: Final = re.compile(
    r"(?:(?P<prefix>docker|libpod(?:-payload|-conmon)?|cri-containerd|containerd|nerdctl|crio)[-:/])?"
    r"(?P<id>[0-9a-f]{64})(?:\.scope)?"
)
_POD: Final = re.compile(
    r"pod([0-9a-f]{8}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{4}[-_][0-9a-f]{12}|[0-9a-f]{32})"
)
_RUNTIMES: Final = {
    "docker": "docker",
    "libpod": "podman",
    "libpod-payload": "podman",
    "cri-containerd": "containerd",
    "containerd": "containerd",
    "nerdctl": "containerd",
    "crio": "cri-o",
}


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupIdentity:
    """What a cgroup path says about its owner; `container` is the full id of 64 hex digits."""

    path: str
    unit: str | None = None
    runtime: str | None = None  # docker, podman, containerd, cri-o; None where the path hides it
    container: str | None = None
    pod_uid: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure stall information: shares of time (0 to 1) in which some or all tasks waited."""

    some_10s_ratio: float | None = None
    some_60s_ratio: float | None = None
    full_10s_ratio: float | None = None
    full_60s_ratio: float | None = None
    some_total_seconds: float | None = None
    full_total_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CgroupMemory:
    """One reading of one cgroup. `limit_bytes` is the tightest of it and its ancestors.

    `usage_bytes` has page cache in it, which the kernel gives back under pressure; what it cannot
    give back is anonymous and shared memory. `oom_kills` counts the cgroup and everything below.
    """

    path: str
    version: int
    limit_bytes: int | None = None
    limit_path: str | None = None
    high_bytes: int | None = None
    usage_bytes: int | None = None
    peak_bytes: int | None = None
    anon_bytes: int | None = None
    file_bytes: int | None = None
    shmem_bytes: int | None = None
    inactive_file_bytes: int | None = None
    swap_bytes: int | None = None
    swap_limit_bytes: int | None = None
    oom_events: int | None = None
    oom_kills: int | None = None
    oom_group: bool | None = None
    pressure: Pressure | None = None


def identify(path: str) -> CgroupIdentity:
    """The owner of a cgroup, from its path alone; of nested containers the innermost."""
    unit = runtime = container = pod_uid = None
    user_manager = None
    parts = [part for part in path.split("/") if part]
    for position, part in enumerate(parts):
        if match := _POD.search(part):
            pod_uid = match[1].replace("_", "-")
        matches = [match for match in _CONTAINER.finditer(part) if match[0]]
        if matches:
            match = matches[-1]
            container = match["id"]
            # cgroupfs layouts have the runtime as the folder above: /docker/<id>.
            above = parts[position - 1] if position else ""
            runtime = _RUNTIMES.get(match["prefix"] or above, runtime)
        elif part.endswith((".service", ".scope", ".socket", ".mount")):
            if re.fullmatch(r"user@\d+\.service", part):
                user_manager = part
            else:
                unit = part
    if pod_uid and unit in ("containerd.service", "crio.service", "kubelet.service"):
        unit = None  # the runtime's own unit, where its containers live inside it
    if not container:
        unit = unit or user_manager
    return CgroupIdentity(path, unit, runtime, container, pod_uid)


def parse_proc_cgroup(text: str) -> dict[str, str]:
    """Controller to path, of ``/proc/PID/cgroup``; the unified tree is under ``""``.

    Lines: ``0::/system.slice/a.service``, ``4:memory:/docker/…``, ``1:name=systemd:/…``.
    """
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, first_colon, rest = line.partition(":")
        controllers, second_colon, path = rest.partition(":")
        if first_colon and second_colon and path.startswith("/"):
            for controller in controllers.split(","):
                paths[controller] = path.removesuffix(" (deleted)")
    return paths


def owner_path(paths: Mapping[str, str]) -> str | None:
    """The path that tells most about the owner, of several hierarchies."""
    candidates = [paths[name] for name in ("name=systemd", "", "memory") if name in paths]
    candidates += paths.values()
    telling = [path for path in candidates if path != "/"]
    return next(iter(telling or candidates), None)


def read_pressure(path: str | Path) -> Pressure | None:
    """A pressure file, such as ``/proc/pressure/memory``; None where the kernel has none."""
    values: dict[str, dict[str, float]] = {}
    for line in (_text(Path(path)) or "").splitlines():
        kind, *pairs = line.split() or [""]
        values[kind] = {}
        for pair in pairs:
            name, _, number = pair.partition("=")
            try:
                values[kind][name] = float(number)
            except ValueError:
                continue
    if not values.get("some"):
        return None

    def ratio(kind: str, name: str) -> float | None:
        percent = values.get(kind, {}).get(name)
        return None if percent is None else percent / 100

    def seconds(kind: str) -> float | None:
        microseconds = values.get(kind, {}).get("total")
        return None if microseconds is None else microseconds / 1e6

    return Pressure(
        some_10s_ratio=ratio("some", "avg10"),
        some_60s_ratio=ratio("some", "avg60"),
        full_10s_ratio=ratio("full", "avg10"),
        full_60s_ratio=ratio("full", "avg60"),
        some_total_seconds=seconds("some"),
        full_total_seconds=seconds("full"),
    )


def read_memory(paths: Mapping[str, str], *, root: str = CGROUP_ROOT) -> CgroupMemory | None:
    """Memory of the cgroup that `parse_proc_cgroup` found; None where no tree has it.

    A container that sees its own cgroup as the root, or the host's path without the host's tree,
    gets the root of what is mounted.
    """
    base = Path(root)
    if "memory" in paths and (base / "memory").is_dir():
        tree, path = base / "memory", paths["memory"]
        return _read_v1(tree, path if _within(tree, path).is_dir() else "/")
    if "" not in paths:
        return None
    tree = base / "unified" if (base / "unified").is_dir() else base
    path = paths[""] if _within(tree, paths[""]).is_dir() else "/"
    folder = _within(tree, path)
    if not any((folder / name).is_file() for name in ("memory.current", "memory.max")):
        return None
    return _read_v2(tree, path)


def _read_v2(tree: Path, path: str) -> CgroupMemory:
    folder = _within(tree, path)
    limit, limit_path = _tightest(tree, path, "memory.max")
    events = _table(folder / "memory.events")
    stat = _table(folder / "memory.stat")
    group = _number(folder / "memory.oom.group")
    return CgroupMemory(
        path=path,
        version=2,
        limit_bytes=limit,
        limit_path=limit_path,
        high_bytes=_number(folder / "memory.high"),
        usage_bytes=_number(folder / "memory.current"),
        peak_bytes=_number(folder / "memory.peak"),
        anon_bytes=stat.get("anon"),
        file_bytes=stat.get("file"),
        shmem_bytes=stat.get("shmem"),
        inactive_file_bytes=stat.get("inactive_file"),
        swap_bytes=_number(folder / "memory.swap.current"),
        swap_limit_bytes=_number(folder / "memory.swap.max"),
        oom_events=events.get("oom"),
        oom_kills=events.get("oom_kill"),
        oom_group=None if group is None else bool(group),
        pressure=read_pressure(folder / "memory.pressure"),
    )


def _read_v1(tree: Path, path: str) -> CgroupMemory:
    folder = _within(tree, path)
    limit, limit_path = _tightest(tree, path, "memory.limit_in_bytes")
    control = _table(folder / "memory.oom_control")
    stat = _table(folder / "memory.stat")
    return CgroupMemory(
        path=path,
        version=1,
        limit_bytes=limit,
        limit_path=limit_path,
        usage_bytes=_number(folder / "memory.usage_in_bytes"),
        peak_bytes=_number(folder / "memory.max_usage_in_bytes"),
        anon_bytes=stat.get("total_rss", stat.get("rss")),
        file_bytes=stat.get("total_cache", stat.get("cache")),
        shmem_bytes=stat.get("total_shmem", stat.get("shmem")),
        inactive_file_bytes=stat.get("total_inactive_file", stat.get("inactive_file")),
        swap_bytes=stat.get("total_swap", stat.get("swap")),
        oom_kills=control.get("oom_kill"),
    )


def _tightest(tree: Path, path: str, name: str) -> tuple[int | None, str | None]:
    """The smallest limit on the way from the cgroup to the root, and the path that sets it."""
    best: tuple[int | None, str | None] = (None, None)
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        ancestor = "/" + "/".join(parts[:depth])
        limit = _number(_within(tree, ancestor) / name)
        if limit is not None and limit < _NO_LIMIT_V1 and (best[0] is None or limit < best[0]):
            best = (limit, ancestor)
    return best


def _within(tree: Path, path: str) -> Path:
    """`path` below `tree`; a path with ``..`` (from outside a cgroup namespace) is the root."""
    parts = [part for part in path.split("/") if part]
    return tree if ".." in parts else tree.joinpath(*parts)


def _text(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _number(path: Path) -> int | None:
    """A file of one number; None for ``max`` and for files that are missing or unreadable."""
    text = (_text(path) or "").strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 25 else None


def _table(path: Path) -> dict[str, int]:
    """A file of ``name value`` lines."""
    table: dict[str, int] = {}
    for line in (_text(path) or "").splitlines():
        name, _, value = line.partition(" ")
        if value.isascii() and value.isdigit():
            table[name] = int(value)
    return table
