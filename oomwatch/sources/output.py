"""Where the output of a process can be read: a file, the journal, a container's log, or why not."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from pathlib import Path
from typing import Final, Literal

from oomwatch.sources.cgroup import CgroupIdentity
from oomwatch.sources.descriptors import Target, open_files, pipe_inodes, read_target
from oomwatch.sources.procfs import PROC_ROOT, ProcessInfo, ProcessTree, read_environment

LogKind = Literal["file", "unit", "container", "pod", "none"]

# Programs that write what they read into the files that they have open.
_LOG_WRITERS: Final = frozenset(
    {"tee", "rotatelogs", "cronolog", "svlogd", "s6-log", "multilog", "logsave", "ts"}
)
_JOURNAL_WRITERS: Final = frozenset({"systemd-cat", "logger"})
_CONTAINER_RUNTIMES: Final = re.compile(r"containerd-shim.*|dockerd|conmon|crio.*|containerd")


@dataclasses.dataclass(frozen=True, slots=True)
class LogLocation:
    """One place of a process's output.

    `name` is the unit, the container's id or ``namespace/pod``; `path` a file that can be opened
    from here. With kind ``none``, and where something is worth knowing, `reason` says it.
    """

    kind: LogKind
    name: str | None = None
    path: str | None = None
    reason: str | None = None


def find_logs(
    process: ProcessInfo,
    tree: ProcessTree,
    *,
    proc_root: str = PROC_ROOT,
    var_root: str = "/var",
) -> tuple[LogLocation, ...]:
    """Where standard output and standard error of a process go; each place once, best first.

    The answer is never empty: where nothing can be read, one location says why.
    """
    found: list[LogLocation] = []
    for descriptor in (1, 2):
        target = read_target(process.pid, descriptor, proc_root=proc_root)
        location = _locate(target, process, tree, proc_root, var_root)
        if location is not None and location not in found:
            found.append(location)
    readable = [location for location in found if location.kind != "none"]
    if readable:
        return tuple(sorted(readable, key=lambda location: location.path is None))
    return tuple(found[:1]) or (LogLocation("none", reason="its output goes to /dev/null"),)


def _locate(
    target: Target, process: ProcessInfo, tree: ProcessTree, proc_root: str, var_root: str
) -> LogLocation | None:
    owner = process.identity or CgroupIdentity("/")
    if target.kind == "null":
        return None
    if target.kind == "file":
        return LogLocation("file", path=target.path)
    if target.kind == "deleted":
        note = "the file was deleted; it is read through the process, as long as that runs"
        return LogLocation("file", path=target.path, reason=note)
    if target.kind == "gone":
        return LogLocation("none", reason="the process has ended")
    if owner.container:
        return _container(owner, var_root)
    if target.kind in ("terminal", "pipe"):
        for ancestor in tree.ancestors(process.pid)[:2]:
            if copy := _kept_copy(ancestor, proc_root):
                return LogLocation("file", path=copy)
    if target.kind == "terminal":
        return LogLocation("none", reason=f"its output goes to a terminal ({target.path})")
    if target.kind == "socket":
        return _socket(target, process, owner, proc_root)
    if target.kind == "pipe":
        return _pipe(target, process, tree, owner, proc_root)
    if target.kind == "forbidden":
        if owner.unit and owner.unit.endswith(".service"):
            note = "assumed: its descriptors may not be seen by this user"
            return LogLocation("unit", owner.unit, reason=note)
        return LogLocation(
            "none", reason="its descriptors may not be seen: run as root or as its user"
        )
    return LogLocation("none", reason="its output goes to something that is no file")


def _kept_copy(runner: ProcessInfo, proc_root: str) -> str | None:
    """The file in which `oomwatch run` keeps what the server that it started prints."""
    words = [word.rsplit("/", 1)[-1] for word in (runner.cmdline or ())[:5]]
    if "oomwatch" not in words or "run" not in words[words.index("oomwatch") :]:
        return None
    files = open_files(runner.pid, writing=True, proc_root=proc_root)
    return files[-1] if files else None


def _container(owner: CgroupIdentity, var_root: str) -> LogLocation:
    """The runtime's own file of a container's output, if this host has it in the usual place."""
    identity = owner.container or ""
    links = _glob(Path(var_root, "log/containers"), f"*-{identity}.log")
    if links:
        # The kubelet names the link <pod>_<namespace>_<container>-<id>.log.
        pod, _, rest = links[-1].name.partition("_")
        namespace = rest.partition("_")[0]
        return LogLocation("pod", f"{namespace}/{pod}", *_readable(links[-1]))
    if owner.pod_uid:
        logs = _glob(Path(var_root, "log/pods"), f"*_{owner.pod_uid}/*/*.log")
        logs.sort(key=_modified)
        if logs:
            namespace, _, rest = logs[-1].parent.parent.name.partition("_")
            name = f"{namespace}/{rest.partition('_')[0]}"
            return LogLocation("pod", name, *_readable(logs[-1]))
    places = (
        f"lib/docker/containers/{identity}/{identity}-json.log",
        f"lib/containers/storage/overlay-containers/{identity}/userdata/ctr.log",
    )
    for place in places:
        path = Path(var_root, place)
        try:
            path.stat()
        except PermissionError:
            return LogLocation("container", identity, reason=f"{path} may not be read by this user")
        except OSError:
            continue
        return LogLocation("container", identity, *_readable(path))
    if owner.unit:
        # Podman in a unit of systemd hands the output to that unit's journal by default.
        return LogLocation("unit", owner.unit, reason="assumed, of a container run by a unit")
    return LogLocation("container", identity, reason="its runtime keeps the log elsewhere")


def _socket(
    target: Target, process: ProcessInfo, owner: CgroupIdentity, proc_root: str
) -> LogLocation:
    """A service's output is a socket of the journal, which tells it so in JOURNAL_STREAM."""
    stream = (read_environment(process.pid, proc_root=proc_root) or {}).get("JOURNAL_STREAM", "")
    is_journal = stream.endswith(f":{target.inode}")
    if owner.unit and (is_journal or owner.unit.endswith(".service")):
        return LogLocation("unit", owner.unit)
    return LogLocation("none", reason="its output goes to a socket of an unknown reader")


def _pipe(
    target: Target,
    process: ProcessInfo,
    tree: ProcessTree,
    owner: CgroupIdentity,
    proc_root: str,
) -> LogLocation:
    reader = _reader(target, process, tree, proc_root)
    if reader is None:
        return LogLocation("none", reason="its output goes to a pipe whose reader cannot be seen")
    if copy := _kept_copy(reader, proc_root):
        return LogLocation("file", path=copy)
    program = reader.comm or ""
    if program in _LOG_WRITERS:
        files = open_files(reader.pid, writing=True, proc_root=proc_root)
        if files:
            return LogLocation("file", path=files[-1])
    if program in _JOURNAL_WRITERS and owner.unit:
        return LogLocation("unit", owner.unit)
    if _CONTAINER_RUNTIMES.fullmatch(program):
        return LogLocation("none", reason=f"its output goes to {program}, in no container we know")
    return LogLocation("none", reason=f"its output is piped to {program} (pid {reader.pid})")


def _reader(
    target: Target, process: ProcessInfo, tree: ProcessTree, proc_root: str
) -> ProcessInfo | None:
    """Who else has the pipe open; near relatives are asked first."""
    own = {process.pid, *(child.pid for child in tree.descendants(process.pid))}
    siblings = tree.children(process.ppid) if process.ppid else []
    ancestors = tree.ancestors(process.pid)
    asked = set(own)
    for other in itertools.chain(siblings, ancestors, tree):
        if other.pid in asked:
            continue
        asked.add(other.pid)
        if target.inode in pipe_inodes(other.pid, writing=False, proc_root=proc_root):
            return other
    return None


def _readable(path: Path) -> tuple[str | None, str | None]:
    """The path, and None; or None and why it cannot be opened by this user."""
    if os.access(path, os.R_OK):
        return str(path), None
    return None, f"{path} may not be read by this user"


def _glob(folder: Path, pattern: str) -> list[Path]:
    try:
        return sorted(folder.glob(pattern))
    except OSError:  # may not be read
        return []


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
