"""Which engines run on this host, and where their GPUs, metrics and logs are.

Found by what processes call themselves and by how they were started, with or without NVML; joined
by parentage: a server, the engine cores and workers that it started, and the GPUs that they hold.
What cannot be known says why. Nothing is changed and no engine is spoken to.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import time
from collections.abc import Mapping
from typing import Final

from oomwatch.engines.commandline import ServerCommand, parse_command
from oomwatch.engines.endpoints import metrics_endpoint
from oomwatch.engines.processes import (
    HolderKind,
    Role,
    holder_kind,
    is_ray_worker,
    read_launch,
    read_title,
)
from oomwatch.records import GpuProcessSample, RecordedEngine
from oomwatch.sources.descriptors import Listening, gpu_nodes, own_address
from oomwatch.sources.installed import installed_version
from oomwatch.sources.nvml import NvmlReading, Roots, read_gpus
from oomwatch.sources.output import LogLocation, find_logs
from oomwatch.sources.procfs import (
    ProcessInfo,
    ProcessTree,
    hidepid,
    list_processes,
    look_again,
    read_environment,
)

__all__ = ["DiscoveredEngine", "Discovery", "EngineMember", "GpuHolder", "discover", "holder_kind"]


@dataclasses.dataclass(frozen=True, slots=True)
class EngineMember:
    """One process of an engine: `role` as in `engines.processes`, `rank` as logs print it."""

    process: ProcessInfo
    role: Role
    rank: str | None = None
    gpus: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class DiscoveredEngine:
    """A running engine. With `orphan` its server is gone and the rest still holds memory."""

    recorded: RecordedEngine
    members: tuple[EngineMember, ...]
    logs: tuple[LogLocation, ...]
    metrics_reason: str | None = None
    """Why there is no metrics address, or what is uncertain about it."""
    orphan: bool = False
    unit: str | None = None
    container: str | None = None
    pod_uid: str | None = None
    started_at: float | None = None
    model: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GpuHolder:
    """A process that holds GPU memory, and whose it is; `engine` is the id of a found engine."""

    sample: GpuProcessSample
    kind: HolderKind | None = None
    title: str | None = None
    engine: str | None = None
    unit: str | None = None
    container: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Discovery:
    """All that was found at one moment; `notes` say what could not be seen."""

    at: float
    engines: tuple[DiscoveredEngine, ...]
    holders: tuple[GpuHolder, ...]
    nvml: NvmlReading
    processes: ProcessTree
    notes: tuple[str, ...] = ()


_PACKAGES: Final = {"vllm": "vllm", "sglang": "sglang", "lmdeploy": "lmdeploy"}

# Variables that engines, PyTorch and CUDA read; others, and all secrets, are left where they are.
_TELLING_VARIABLE: Final = re.compile(
    r"(?:VLLM|SGLANG|SGL|PYTORCH|TORCH|CUDA|NCCL|NVIDIA|HF_HUB_OFFLINE|OMP|RAY|TRITON|LMCACHE"
    r"|FLASHINFER|LD_PRELOAD|MALLOC)(?:_\w+)?"
)
_SECRET: Final = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)

# Processes that have ended: nothing is left of them but the number.
_ENDED: Final = frozenset("ZXx")

# Those who take over children whose parent has died.
_REAPERS: Final = re.compile(
    r"systemd|init|tini|dumb-init|docker-init|catatonit|s6-\w+|runsv|supervisord|conmon"
    r"|containerd-shim.*|pause|(?:ba|da|z|k)?sh"
)


def discover(
    *, roots: Roots | None = None, nvml: NvmlReading | None = None, var_root: str = "/var"
) -> Discovery:
    """Everything that runs here. `nvml` is a reading to use instead of a new one."""
    roots = roots or Roots()
    reading = read_gpus(roots=roots) if nvml is None else nvml
    tree = ProcessTree(p for p in list_processes(proc_root=roots.proc) if p.state not in _ENDED)
    held: dict[int, set[int]] = {}
    for sample in reading.processes:
        held.setdefault(sample.pid, set()).add(sample.gpu)
    finder = _Finder(tree, held, roots.proc, var_root)
    engines = finder.engines()
    notes = []
    option = hidepid(proc_root=roots.proc)
    if option:
        notes.append(f"/proc is mounted with hidepid={option}: processes of others are hidden")
    unseen = [pid for pid in held if tree.get(pid) is None]
    if unseen:
        notes.append(
            f"{len(unseen)} processes on the GPUs cannot be seen from here (another pid namespace, "
            "or hidden); run on the host, or with its pid namespace"
        )
    return Discovery(
        at=time.time(),
        engines=engines,
        holders=tuple(_holder(sample, tree, engines) for sample in reading.processes),
        nvml=reading,
        processes=tree,
        notes=tuple(notes),
    )


def may_be_of_engine(process: ProcessInfo) -> bool:
    """Whether a search would look at it by what it calls itself or how it was started."""
    return (
        read_title(process.comm, process.cmdline) is not None
        or read_launch(process.cmdline) is not None
    )


@dataclasses.dataclass(slots=True)
class _Group:
    """One engine in the making: the process to read flags and output from, and all of it."""

    engine: str
    root: ProcessInfo
    command: ServerCommand | None = None
    orphan: bool = False
    members: list[tuple[ProcessInfo, Role, str | None]] = dataclasses.field(default_factory=list)


class _Finder:
    def __init__(
        self, tree: ProcessTree, held: Mapping[int, set[int]], proc_root: str, var_root: str
    ) -> None:
        self._tree = tree
        self._held = held
        self._proc_root = proc_root
        self._var_root = var_root
        self._listening = Listening(proc_root)

    def engines(self) -> tuple[DiscoveredEngine, ...]:
        """All engines, servers first, by the time of their start."""
        groups = self._servers()
        taken = {process.pid for group in groups for process, _, _ in group.members}
        groups += self._without_server(taken)
        self._join_ray(groups)
        groups.sort(key=lambda group: (group.orphan, group.root.started_at or 0, group.root.pid))
        found: list[DiscoveredEngine] = []
        ids: set[str] = set()
        for group in groups:
            engine = self._describe(group, ids)
            ids.add(engine.recorded.id)
            found.append(engine)
        return tuple(found)

    def _servers(self) -> list[_Group]:
        """Processes that were started as servers, with all that they started in turn."""
        launched = {
            process.pid: launch.engine
            for process in self._tree
            if process.pid != os.getpid()
            and (launch := read_launch(process.cmdline))
            and read_title(None, process.cmdline) is None
        }
        groups = []
        for pid, engine in launched.items():
            # Children that were forked keep the command line; launchers start servers of their own.
            if any(ancestor.pid in launched for ancestor in self._tree.ancestors(pid)):
                continue
            root = self._tree.get(pid)
            if root is None:
                continue
            group = _Group(engine, root, parse_command(root.cmdline or ()))
            group.members = [(root, "server", None)]
            for process in self._tree.descendants(pid):
                group.members.append(_member(process))
            groups.append(group)
        return groups

    def _without_server(self, taken: set[int]) -> list[_Group]:
        """Engine processes under a script of the user's own, or whose server is gone."""
        groups: dict[int, _Group] = {}
        for process in self._tree:
            title = read_title(process.comm, process.cmdline)
            if title is None or process.pid in taken:
                continue
            if is_ray_worker(process.comm, process.cmdline):
                continue
            top = self._topmost(process)
            parent = self._tree.get(top.ppid)
            alone = top.ppid in (0, 1) or (
                parent is not None and bool(_REAPERS.fullmatch(parent.comm or ""))
            )
            # A server that renamed itself hides its flags; it is no orphan.
            top_title = read_title(top.comm, top.cmdline)
            is_server = top_title is not None and top_title.role == "api"
            orphan = alone and not is_server
            root = top if alone or is_server or parent is None else parent
            if root.pid in groups:
                continue
            group = groups[root.pid] = _Group(title.engine, root, orphan=orphan)
            if root is not top:
                group.members.append((root, "script", None))
                if read_launch(root.cmdline):
                    group.command = parse_command(root.cmdline or ())
            else:
                group.members.append(_member(top))
            group.members += [_member(child) for child in self._tree.descendants(root.pid)]
        return _merge_orphans(list(groups.values()))

    def _topmost(self, process: ProcessInfo) -> ProcessInfo:
        """The highest engine process above, itself included."""
        top = process
        for ancestor in self._tree.ancestors(process.pid):
            if read_title(ancestor.comm, ancestor.cmdline) is None:
                break
            top = ancestor
        return top

    def _join_ray(self, groups: list[_Group]) -> None:
        """Workers that Ray started belong to the only engine that asked for Ray, if it is one."""
        servers = [
            group
            for group in groups
            if group.command
            and group.command.arguments.get("--distributed-executor-backend") == "ray"
        ]
        if len(servers) != 1:
            return
        known = {process.pid for group in groups for process, _, _ in group.members}
        servers[0].members += [
            (process, "worker", None)
            for process in self._tree
            if process.pid not in known and is_ray_worker(process.comm, process.cmdline)
        ]

    def _describe(self, group: _Group, ids: set[str]) -> DiscoveredEngine:
        processes = [  # only of these somebody asks for the memory
            look_again(process, proc_root=self._proc_root) or process
            for process, _, _ in group.members
        ]
        members = tuple(
            EngineMember(process, role, rank, tuple(sorted(self._held.get(process.pid, ()))))
            for process, (_, role, rank) in zip(processes, group.members, strict=True)
        )
        gpus = {gpu for member in members for gpu in member.gpus}
        if not gpus:
            nodes = (gpu_nodes(process.pid, proc_root=self._proc_root) for process in processes)
            gpus = set(itertools.chain.from_iterable(nodes))
        env = _telling(read_environment(group.root.pid, proc_root=self._proc_root) or {})
        if group.command is not None:
            group.command = parse_command(group.root.cmdline or (), env=env)
        url, port, reason = self._metrics(group)
        logs = find_logs(group.root, self._tree, proc_root=self._proc_root, var_root=self._var_root)
        command, owner = group.command, group.root.identity
        package = _PACKAGES.get(group.engine)
        version = package and installed_version(processes, package, proc_root=self._proc_root)
        recorded = RecordedEngine(
            id=_unique(f"{group.engine}-{port or group.root.pid}", ids),
            engine=group.engine,
            version=version or (command.version if command else None),
            command=group.root.cmdline if command else None,
            env=env,
            pids=tuple(process.pid for process in processes),
            gpus=tuple(sorted(gpus)),
            log=next((log.path for log in logs if log.path), None),
            metrics_url=url,
            started_at=group.root.started_at,
            ended=group.orphan,
        )
        return DiscoveredEngine(
            recorded=recorded,
            members=members,
            logs=logs,
            metrics_reason=reason,
            orphan=group.orphan,
            unit=owner.unit if owner else None,
            container=owner.container if owner else None,
            pod_uid=owner.pod_uid if owner else None,
            started_at=group.root.started_at,
            model=command.model if command else None,
        )

    def _metrics(self, group: _Group) -> tuple[str | None, int | None, str | None]:
        """Address of the metrics page, port, and why there is none (or what is uncertain)."""
        if group.orphan:
            return None, None, "its server is gone"
        # Engine cores and workers listen too, for each other.
        listening = [
            listener
            for process, role, _ in group.members
            if role in ("server", "api", "script")
            for listener in self._listening.of(process.pid)
        ]
        arguments = group.command.arguments if group.command else None
        endpoint = metrics_endpoint(group.engine, arguments, listening)
        address = own_address(group.root.pid, proc_root=self._proc_root)
        return endpoint.url(address=address), endpoint.port, endpoint.reason


def _member(process: ProcessInfo) -> tuple[ProcessInfo, Role, str | None]:
    title = read_title(process.comm, process.cmdline)
    return (process, title.role, title.rank) if title else (process, "helper", None)


def _merge_orphans(groups: list[_Group]) -> list[_Group]:
    """Orphans of one server (several cores, each with its workers) as one engine.

    They started within a minute, in one cgroup.
    """
    merged: list[_Group] = []
    for group in sorted(groups, key=lambda group: (group.root.started_at or 0, group.root.pid)):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.orphan
            and group.orphan
            and (last.engine, _cgroup(last.root)) == (group.engine, _cgroup(group.root))
            and abs((last.root.started_at or 0) - (group.root.started_at or 0)) < 60
        ):
            last.members += group.members
        else:
            merged.append(group)
    return merged


def _cgroup(process: ProcessInfo) -> str | None:
    return process.identity.path if process.identity else None


def _holder(
    sample: GpuProcessSample, tree: ProcessTree, engines: tuple[DiscoveredEngine, ...]
) -> GpuHolder:
    process = tree.get(sample.pid)
    engine = next((e.recorded.id for e in engines if sample.pid in e.recorded.pids), None)
    if process is None:
        kind = "engine" if engine else holder_kind(sample.name)
        return GpuHolder(sample, kind, sample.name, engine)
    kind = "engine" if engine else holder_kind(process.comm, process.cmdline)
    owner = process.identity
    return GpuHolder(
        sample,
        kind,
        process.title[:200],
        engine,
        owner.unit if owner else None,
        owner.container if owner else None,
    )


def _telling(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(environment.items())
        if _TELLING_VARIABLE.fullmatch(name) and not _SECRET.search(name) and value.isprintable()
    }


def _unique(name: str, ids: set[str]) -> str:
    """`name`, or the first of ``name-2``, ``name-3``, … that is free."""
    if name not in ids:
        return name
    return next(f"{name}-{n}" for n in itertools.count(2) if f"{name}-{n}" not in ids)
