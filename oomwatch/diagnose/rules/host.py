"""The host side: the kernel killed something, the driver could not allocate, the GPU broke.

The kernel's word outranks every message of the engine. Who died need not be who grew: the victim
is named, and the largest resident processes beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from oomwatch.diagnose.endings import Ending, endings
from oomwatch.diagnose.facts import Facts, KernelCitation, cite
from oomwatch.diagnose.kills import Tie
from oomwatch.diagnose.rules import host_serving, unified
from oomwatch.diagnose.rules.findings import (
    COUNTERS,
    KERNEL,
    STAGE,
    Rule,
    found,
)
from oomwatch.diagnose.rules.host_evidence import KILLED_FOR_MEMORY, available, growers, last_words
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, format_bytes

_CONFIDENCE: Final[Mapping[Tie, float]] = {
    Tie.OWN: 0.93,
    Tie.LIKELY: 0.88,
    Tie.COMPILER: 0.75,
    Tie.POSSIBLE: 0.65,
    Tie.NEIGHBOUR: 0.75,
}
_MOMENT: Final = 5.0
"""Seconds between the clocks of the kernel's log and the engine's that mean nothing."""


def kernel_kill(facts: Facts) -> Finding | None:
    """The kernel's OOM killer ended a process."""
    kills = [c for c in facts.kernel if c.event.kind == "oom_kill"]
    if not kills:
        return None
    victim = _victim(facts, kills)
    if victim is None:
        return None
    fields = victim.event.fields
    comm, pid = str(fields.get("comm") or "?"), fields.get("pid")
    memcg = fields.get("scope") == "cgroup" or str(fields.get("constraint") or "").endswith("MEMCG")
    rss = (
        (fields.get("anon_rss_bytes") or 0)
        + (fields.get("shmem_rss_bytes") or 0)
        + (fields.get("file_rss_bytes") or 0)
    )
    where = "its own memory limit (cgroup)" if memcg else "the whole host's memory"
    values = {
        "pid": pid,
        "process_name": comm,
        "constraint": "memcg" if memcg else "host",
        "own_bytes": rss or None,
        "limit_bytes": fields.get("limit_bytes"),
        "host_total_bytes": facts.series.host_total_bytes,
        "stage": _stage(facts),
    }
    limited = fields.get("oom_memcg") if memcg else None
    evidence = [victim.evidence(), *growers(facts, pid, limited), *last_words(facts)]
    cause, why = _kill_cause(facts, victim)
    holding = f" ({format_bytes(rss)} resident)" if rss else ""
    return found(
        facts,
        cause,
        _CONFIDENCE[victim.tie],
        f"The kernel killed {comm}{f' (PID {pid})' if pid else ''}{holding}: {where} was used up{why}.",
        evidence,
        strength=KERNEL,
        values=values,
        at=victim.event.at,
        unseen=()
        if facts.series.processes
        else (
            "Which process grew: resident memory over time was not recorded; the victim need not be the one that grew.",
        ),
    )


def _victim(facts: Facts, kills: Sequence[KernelCitation]) -> KernelCitation | None:
    """The kill that concerns this engine, the last of the surest kind."""
    own = [c for c in kills if c.tie is Tie.OWN]
    if own:
        return own[-1]
    kills = [c for c in kills if not _outlived(facts, c)]
    named = [c for c in kills if c.tie >= Tie.POSSIBLE]
    if not named and facts.served and not _in_trouble(facts):
        return None
    building = [c for c in kills if c.tie is Tie.COMPILER]
    if building and facts.has_log and not facts.served and not facts.ready:
        return building[-1]
    if facts.has_log:
        # Nothing but a name, or a short host, ties the victim to this log: the log must allow it.
        sure = [c for c in named if c.tie is Tie.LIKELY]
        if sure and _ended_badly(facts) and not _refused_on_gpu(facts):
            return sure[-1]
        if named and _ended_badly(facts) and not facts.failures:
            return named[-1]
        # A helper beside the engine was the victim, and the engine hangs or dies for want of it.
        wide = [c for c in kills if c.event.fields.get("scope") == "host"]
        return wide[-1] if wide and _in_trouble(facts) and not facts.failures else None
    return next(reversed(named or kills), None)


def _refused_on_gpu(facts: Facts) -> bool:
    """Whether the log of an engine that names no processes tells of memory that a GPU refused."""
    pids = facts.tree_pids or (facts.run.pids if facts.run else ())
    return not pids and any(failure.oom is not None for failure in facts.failures)


def _outlived(facts: Facts, kill: KernelCitation) -> bool:
    """Whether the engine went on after a process of some other group was killed, as if nothing was."""
    running = facts.live and facts.tree_pids and not facts.ended
    if running and not facts.failures and not facts.messengers:
        return True  # it was found running, with nothing amiss
    comm = str(kill.event.fields.get("comm") or "")
    run = facts.run
    if run is None or kill.event.at is None or _in_trouble(facts) or not comm.startswith("python"):
        return False
    alive = [load.line.at for load in facts.loads if (load.generation_rate or 0) > 0]
    return any(at is not None and at > kill.event.at + _MOMENT for at in alive[-3:])


def _in_trouble(facts: Facts) -> bool:
    """Whether the log shows an engine that hangs, fails or was ended."""
    return bool(facts.messengers or facts.failures) or (
        facts.run is not None
        and (facts.run.ended is not None or facts.said("vllm.shm_wait") is not None)
    )


def _ended_badly(facts: Facts) -> bool:
    run = facts.run
    return run is not None and (
        run.ended is None
        or not run.ended.pattern.id.startswith("shutdown.requested")
        or bool(facts.messengers)
    )


def _stage(facts: Facts) -> str:
    run = facts.run
    if run is None or not _tells_of_start(facts):
        return "serving"
    return "serving" if run.served or run.reached("ready") else run.stage


def _tells_of_start(facts: Facts) -> bool:
    """Whether the log holds lines of an engine, beside what the kernel said below them."""
    return facts.run is not None and any(
        event.pattern.kind in ("identity", "stage", "capacity") for event in facts.run.events
    )


def _kill_cause(facts: Facts, victim: KernelCitation) -> tuple[str, str]:
    if victim.tie is Tie.COMPILER or _compiling(facts):
        return "host_oom_jit", " while kernels were being compiled"
    run = facts.run
    if run is None or run.served or run.reached("ready") or not _tells_of_start(facts):
        return "host_oom_kill", ""
    shmem = victim.event.fields.get("shmem_rss_bytes") or 0
    if (
        run.find("vllm.shards_loaded") is not None
        and not run.reached("profile")
        and shmem > 4 * GIB
    ):
        return (
            "host_oom_repack",
            f" while loaded weights were repacked with {format_bytes(shmem)} of them kept in host memory",
        )
    return "host_oom_load", " while the engine started"


def _compiling(facts: Facts) -> bool:
    compilers = facts.series.compilers
    return len(compilers) >= 2 and sum(c.rss.last for c in compilers) > 2 * GIB


def killed_while_compiling(facts: Facts) -> Finding | None:
    """Host memory ran out under many compilers; the kernel's line itself is not in the input."""
    if not _compiling(facts) or any(c.event.kind == "oom_kill" for c in facts.kernel):
        return None
    compilers = facts.series.compilers
    total = sum(c.rss.last for c in compilers)
    dead = facts.series.oom_kills > 0 or _killed_line(facts) is not None
    if not dead:
        return None
    evidence = [
        Evidence(
            "process",
            str(c.pid),
            at=c.last_seen,
            text=f"{c.name} (PID {c.pid}) resident {format_bytes(c.rss.last)}",
            value=round(c.rss.last),
            unit="bytes",
        )
        for c in sorted(compilers, key=lambda c: -c.rss.last)[:3]
    ]
    return found(
        facts,
        "host_oom_jit",
        0.9,
        f"{len(compilers)} compiler processes held {format_bytes(total)} of host memory when the start was killed; the GPU is not involved.",
        [*evidence, *available(facts), *last_words(facts)],
        strength=KERNEL,
        values={
            "host_total_bytes": facts.series.host_total_bytes,
            "host_free_bytes": _number(
                facts.series.available.last if facts.series.available else None
            ),
            "processes": len(compilers),
            "stage": "compile",
        },
        unseen=("The kernel's own line: `journalctl -k` or `dmesg`.",),
    )


def _number(value: float | None) -> int | None:
    return round(value) if value else None


def _killed_line(facts: Facts) -> Ending | None:
    """The last line that says that a process was ended by SIGKILL."""
    events = facts.run.events if facts.run else ()
    return next((e for e in reversed(endings(events, facts.messengers)) if e.killed), None)


def counted_kill(facts: Facts) -> Finding | None:
    """The cgroup counted an OOM kill, or the unit was killed for memory, without a kernel line."""
    said = facts.said(*KILLED_FOR_MEMORY)
    if (
        (facts.series.oom_kills <= 0 and said is None)
        or any(c.event.kind == "oom_kill" for c in facts.kernel)
        or _compiling(facts)
    ):
        return None
    evidence: list[Evidence] = [cite(said.line)] if said else []
    if facts.series.oom_kills > 0:
        evidence.append(
            Evidence(
                "process",
                "memory.events oom_kill",
                at=facts.series.ended_at,
                text=f"{facts.series.oom_kills} OOM kills counted in the window",
                value=facts.series.oom_kills,
                unit="kills",
            )
        )
    stage = _stage(facts)
    starting = facts.run is not None and facts.has_log and stage not in ("serving", "ready")
    return found(
        facts,
        "host_oom_load" if starting else "host_oom_kill",
        0.85,
        "The memory limit of the service's cgroup was reached and the kernel killed a process of it.",
        [*evidence, *growers(facts, None), *available(facts), *last_words(facts)],
        strength=KERNEL,
        values={
            "constraint": "memcg",
            "host_total_bytes": facts.series.host_total_bytes,
            "stage": stage,
        },
        unseen=("Which process the kernel chose: `journalctl -k` or `dmesg`.",),
    )


def killed_while_loading(facts: Facts) -> Finding | None:
    """Killed without a word while weights were being read: nearly always host memory."""
    run = facts.run
    if run is None or run.served or facts.kernel:
        return None
    ending = _killed_line(facts)
    if ending is None or any(failure.order < ending.order for failure in facts.failures):
        return None
    if run.stage not in ("load", "loaded") or run.reached("profile"):
        return None
    repack = (
        run.stage == "loaded"
        and run.find("vllm.weights_v0", "vllm.weights_v1", "sglang.load_end") is None
    )
    return found(
        facts,
        "host_oom_repack" if repack and _offloads(facts) else "host_oom_load",
        0.6,
        "The process was killed (SIGKILL) while the model was being loaded and printed no error of its own: the container's memory limit or the host's memory most likely ran out.",
        [cite(ending.line), *available(facts)],
        strength=STAGE,
        order=ending.order,
        values={
            "stage": run.stage,
            "host_total_bytes": facts.series.host_total_bytes,
            "exit_code": ending.exit_code,
        },
        unseen=(
            "Who sent the signal: the kernel log (`journalctl -k`, `dmesg`) or the cgroup's memory.events.",
        ),
    )


def _offloads(facts: Facts) -> bool:
    return bool(facts.argument("--cpu-offload-gb", "--offload-backend"))


def orphans(facts: Facts) -> Finding | None:
    """Processes of an engine whose server is gone still hold memory: the next start will miss it."""
    if not facts.orphans:
        return None
    held = sum(orphan.held_bytes or 0 for orphan in facts.orphans)
    names = ", ".join(f"{orphan.name} (PID {orphan.pid})" for orphan in facts.orphans[:4])
    where = "GPU memory" if any(orphan.on_gpu for orphan in facts.orphans) else "host memory"
    holding = (
        f" and {'hold' if len(facts.orphans) > 1 else 'holds'} {format_bytes(held)} of {where}"
    )
    holding = holding if held else ""
    pids = " ".join(str(orphan.pid) for orphan in facts.orphans[:16])
    return found(
        facts,
        "gpu_busy_other_process",
        0.9,
        f"The server of {names} is gone, but {'they live' if len(facts.orphans) > 1 else 'it lives'} on{holding}: the next start will find it taken. `kill {pids}` ends {'them' if len(facts.orphans) > 1 else 'it'}.",
        [
            Evidence(
                "process",
                str(o.pid),
                text=f"{o.name} holds {format_bytes(o.held_bytes)}",
                value=o.held_bytes,
                unit="bytes",
            )
            for o in facts.orphans[:4]
        ],
        strength=COUNTERS,
        risk=True,
        values={
            "orphan": True,
            "other_pids": [o.pid for o in facts.orphans],
            "other_process_bytes": held,
            "process_name": facts.orphans[0].name,
        },
    )


RULES: Final[tuple[Rule, ...]] = (
    *host_serving.RULES,
    *unified.RULES,
    orphans,
    kernel_kill,
    killed_while_compiling,
    counted_kill,
    killed_while_loading,
)
