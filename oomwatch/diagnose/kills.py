"""What ties a kill of the kernel's OOM killer to one start of an engine.

A host runs more than its engines, and a kernel log reaches further back than a start. A process is
an engine's by its number, its cgroup or its name, if it was killed while that start lived; a name
that any program may have ("python") counts only with a size that an engine can have.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterable
from typing import Final

from oomwatch.records import KernelEvent, ProcessSample
from oomwatch.units import GIB, MIB

_ENGINE: Final = re.compile(
    r"(?i)^(?:vllm|sglang|sgl|ray::|llama|ollama|text-gener|tgi|lmdeploy|worker|enginecore|api_server|trtllm)"
)
_ANY_PROGRAM: Final = re.compile(r"(?i)^(?:python|pt_main|uvicorn)")
_COMPILER: Final = re.compile(r"^(?:cicc|nvcc|ptxas|cc1plus|ninja|c\+\+|g\+\+|clang)")
_OWN_GROUP: Final = re.compile(
    r"/(?!user@)[^/]+\.service(?:/|$)|(?:docker|libpod|crio|cri-containerd|kubepods|lxc)"
)
"""Cgroups that hold one service; a login session or a root holds whatever somebody starts."""
_SLICE: Final = re.compile(r"^/(?:[\w-]+\.slice|kubepods|docker|libpod|machine|lxc)(?:/|$)")
_LEAST_VIRTUAL: Final = GIB
"""PyTorch and CUDA's libraries alone map more than that."""
_LEAST_RESIDENT: Final = 128 * MIB
_LEAST_LIMIT: Final = 256 * MIB
_ZONE: Final = 1800.0
"""Seconds between the zones of two clocks that do not name them: whole half hours."""
_FARTHEST_ZONE: Final = 14 * 3600.0
_MOMENT: Final = 60.0
_DRIFT: Final = 120.0
"""Seconds by which the kernel's clock, counted from the boot, may be off."""
_SILENCE: Final = 3600.0
"""Longest time without a line of a start that goes on."""


class Tie(enum.IntEnum):
    """How surely a killed process belongs to a start; the higher the surer."""

    STRANGER = 0
    NEIGHBOUR = 1
    """Another program, killed because the whole host had no memory left."""
    COMPILER = 2
    """A program that engines start while they start themselves."""
    POSSIBLE = 3
    """A name that any program may have, and nothing that speaks against it."""
    LIKELY = 4
    """A name that only engines give their processes."""
    OWN = 5
    """One of its process numbers, or its cgroup."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traces:
    """What is known of the processes of one start, and of the time in which it lived."""

    known: bool = False
    """Whether there is an engine at all, rather than a kernel log alone."""
    pids: frozenset[int] = frozenset()
    processes: tuple[ProcessSample, ...] = ()
    """Samples of its processes, for their cgroups."""
    began_at: float | None = None
    ended_at: float | None = None
    """When it was gone at the latest."""
    last_at: float | None = None
    """The last time in its log."""
    one_clock: bool = False
    """Whether its times and the kernel's are of one host, so that they can be compared exactly."""
    watched: bool = False
    """Whether a host was looked at, rather than a kernel log given as the thing to judge."""


def tie(kill: KernelEvent, traces: Traces) -> Tie:
    """How surely this kill ended a process of that start."""
    fields = kill.fields
    name = str(fields.get("comm") or "")
    if not in_its_life(kill.at, traces):
        return Tie.STRANGER
    group = _same_group(kill, traces.processes)
    if group or (fields.get("pid") in traces.pids and not _too_small(kill)):
        return Tie.OWN
    whole_host = fields.get("scope") == "host"
    concerns_all = whole_host if traces.known else not traces.watched
    other = Tie.NEIGHBOUR if concerns_all else Tie.STRANGER
    if group is False and not whole_host:
        return Tie.STRANGER
    if _COMPILER.match(name):
        return Tie.COMPILER
    if _too_small(kill):
        return other if whole_host else Tie.STRANGER
    if _ENGINE.match(name):
        return Tie.LIKELY
    if not name or _ANY_PROGRAM.match(name):
        return Tie.POSSIBLE if _not_long_after(kill.at, traces) else other
    return other


def in_its_life(at: float | None, traces: Traces) -> bool:
    """Whether the start lived at that time of the kernel's clock; true where nobody can tell."""
    if at is None:
        return True
    slack = 1.0 if traces.one_clock else _DRIFT
    began, ended = traces.began_at, traces.ended_at
    if (began is None or at >= began - slack) and (ended is None or at <= ended + slack):
        return True
    return not traces.one_clock and _in_another_zone(at, traces.last_at)


def lived_at(at: float | None, traces: Traces) -> bool:
    """Whether the start is known to have lived at that time, if the clocks are of one zone."""
    began, ended = traces.began_at, traces.ended_at
    if at is None or began is None:
        return False
    return began <= at and (ended is None or at <= ended)


def _not_long_after(at: float | None, traces: Traces) -> bool:
    last = traces.last_at
    if at is None or last is None or at <= last + _SILENCE:
        return True
    return not traces.one_clock and _in_another_zone(at, last)


def _in_another_zone(at: float, last: float | None) -> bool:
    """Whether a kill coincides with the last line, but for whole half hours between two zones."""
    if last is None or abs(at - last) > _FARTHEST_ZONE + _MOMENT:
        return False
    apart = at - last
    return abs(apart - round(apart / _ZONE) * _ZONE) <= _MOMENT


def _too_small(kill: KernelEvent) -> bool:
    """Whether no process of an engine can be as small, or live under so low a limit."""
    fields = kill.fields
    limit, virtual = fields.get("limit_bytes"), fields.get("total_vm_bytes")
    if limit is not None and limit < _LEAST_LIMIT:
        return True
    if virtual is not None:
        return bool(virtual < _LEAST_VIRTUAL)
    resident = [fields.get(f"{kind}_rss_bytes") for kind in ("anon", "file", "shmem")]
    known = [size for size in resident if size is not None]
    return bool(known) and sum(known) < _LEAST_RESIDENT


def _same_group(kill: KernelEvent, processes: Iterable[ProcessSample]) -> bool | None:
    """Whether it was killed in the cgroup of one of these; None where that cannot be compared."""
    path, container = kill.fields.get("task_memcg"), kill.fields.get("container")
    answers: set[bool | None] = set()
    for process in processes:
        if container and process.container:
            answers.add(container == process.container)
        elif path and process.cgroup and _SLICE.match(path) and _SLICE.match(process.cgroup):
            shared = _is_within(path, process.cgroup)
            answers.add(shared and (True if _OWN_GROUP.search(process.cgroup) else None))
    return next((answer for answer in (True, None, False) if answer in answers), None)


def _is_within(path: str, cgroup: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{cgroup.rstrip('/')}/")
