"""Host memory that ran out while an engine started, told by the start's own words.

No kernel line is needed: Ray's monitor, the build of a kernel, the allocator of the host and the
paravirtual driver of Windows each say it in their way.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.endings import endings
from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.rules.findings import ARITHMETIC, KERNEL, NAMED_CHECK, STAGE, Rule, found
from oomwatch.records import Evidence, Finding
from oomwatch.units import format_bytes

_BUILD_LINES: Final = 60
"""Lines within which the words of a failed build stand."""
_DRY: Final = 0.02
"""Under this share of the host's memory the next page brings the OOM killer."""

_COMPILER_KILLED: Final = re.compile(
    r"(?m)^Killed$|Killed signal terminated program|internal compiler error: Killed|(?:cicc|nvcc|cc1plus|ptxas|c\+\+).{0,80}(?:out of memory|died due to signal 9|signal 9)|virtual memory exhausted|cannot allocate memory",
    re.IGNORECASE,
)
"""What make, ninja, nvcc and gcc print when the kernel killed a compiler or memory was refused."""


def node_monitor(facts: Facts) -> Finding | None:
    """Ray ended a worker because the node was low on memory; its name for that is OutOfMemoryError."""
    hit = facts.failing("host.ray_monitor")
    if hit is None:
        return None
    failure, _ = hit
    starting = not facts.served and any(
        event.pattern.kind in ("identity", "stage", "capacity")
        for event in (facts.run.events if facts.run else ())
    )
    return found(
        facts,
        "host_oom_load" if starting else "host_oom_kill",
        0.88,
        "Ray's monitor ended a worker because the host, not the GPU, was low on memory.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={"stage": "load" if starting else "serving"},
    )


def refused_for_host(facts: Facts) -> Finding | None:
    """Ollama compared what a model needs with the host's free memory, and refused to load it."""
    hit = facts.failing("ollama.host_short")
    event = facts.said("ollama.host_short")
    if hit is None and event is None:
        return None
    fields = hit[1] if hit is not None else event.fields if event is not None else {}
    needed, there = fields.get("needed_bytes"), fields.get("available_bytes")
    line = hit[0].line if hit is not None else event.line if event is not None else None
    return found(
        facts,
        "host_oom_load",
        0.85,
        f"The model needs {format_bytes(needed)} of host memory and {format_bytes(there)} are available, so it was not loaded.",
        [cite(line)] if line is not None else [],
        strength=NAMED_CHECK,
        order=hit[0].order if hit is not None else event.order if event is not None else None,
        values={"stage": "load", "host_free_bytes": there},
    )


def compiler_killed(facts: Facts) -> Finding | None:
    """A build at start failed because its compilers were killed, not because of its code."""
    hit = facts.failing("jit.build")
    if hit is None:
        return None
    failure, _ = hit
    text = "\n".join((failure.message, *(line.text for line in failure.details)))
    killed = facts.said("exit.killed")
    within = killed is not None and 0 < killed.order - failure.order < _BUILD_LINES
    if not within and not _COMPILER_KILLED.search(text):
        return None
    return found(
        facts,
        "host_oom_jit",
        0.85,
        "A compiler that builds kernels at start was killed: many of them at once used up the host's memory, the GPU is not"
        " involved.",
        cite_failure(failure),
        strength=ARITHMETIC,
        order=failure.order,
        values={"stage": "compile"},
        unseen=() if facts.has_kernel else ("The kernel's own line: `journalctl -k` or `dmesg`.",),
    )


def residency_refused(facts: Facts) -> Finding | None:
    """Windows' paravirtual driver could not make GPU memory resident (``dxgkio_make_resident: -12``)."""
    lines = [c for c in facts.kernel if "dxgkio" in c.event.text]
    if not lines or facts.served or not (facts.failures or facts.messengers):
        return None
    failure = facts.failures[0] if facts.failures else None
    return found(
        facts,
        "wsl_alloc_limit",
        0.82,
        "The virtualised Windows driver could not make GPU memory resident, although the card may count enough as free:"
        " a limit of the virtual machine, not of the card.",
        [
            *(c.evidence() for c in lines[:2]),
            *(cite_failure(failure) if failure is not None else ()),
        ],
        strength=KERNEL,
        values={"stage": facts.run.stage if facts.run else "init"},
        at=lines[0].event.at,
    )


def killed_in_build(facts: Facts) -> Finding | None:
    """Killed without a word while kernels were built: as many compilers as cores take the host's memory."""
    run = facts.run
    if run is None or facts.failures or facts.kernel or facts.served or facts.ready:
        return None
    step = run.find_last("jit.step")
    killed = [e for e in endings(run.events, facts.messengers) if e.killed]
    if step is None or not killed or killed[-1].order < step.order:
        return None
    return found(
        facts,
        "host_oom_jit",
        0.63,
        "The process was killed (SIGKILL) while it built kernels and printed no error of its own: the compilers most likely"
        " used up the container's memory limit or the host's memory.",
        [cite(step.line), cite(killed[-1].line)],
        strength=STAGE,
        order=killed[-1].order,
        values={"stage": "compile", "exit_code": killed[-1].exit_code},
        unseen=("Who sent the signal: the kernel log (`journalctl -k`, `dmesg`).",),
    )


def vanished_while_loading(facts: Facts) -> Finding | None:
    """The engine's processes are gone in the middle of a load, and the host had nothing left just before."""
    run, series = facts.run, facts.series
    total, available = series.host_total_bytes, series.available
    if (
        run is None
        or run.stage not in ("init", "load", "loaded")
        or facts.failures
        or facts.unified
    ):
        return None
    if total is None or available is None or available.low > _DRY * total or not facts.tree_pids:
        return None
    mine = [p for p in series.processes if p.pid in facts.tree_pids]
    if not mine or series.ended_at is None or max(p.last_seen for p in mine) >= series.ended_at:
        return None
    largest = max(mine, key=lambda p: p.rss.high)
    return found(
        facts,
        "host_oom_load",
        0.7,
        f"The engine's processes vanished while weights were read; {largest.name} (PID {largest.pid}) held"
        f" {format_bytes(largest.rss.high)} and {format_bytes(available.low)} of the host's {format_bytes(total)} were left.",
        [
            Evidence(
                "process",
                "MemAvailable",
                text=f"host memory available {format_bytes(available.first)} to {format_bytes(available.low)}",
                value=round(available.low),
                unit="bytes",
            )
        ],
        strength=STAGE,
        values={
            "stage": run.stage,
            "host_total_bytes": total,
            "host_free_bytes": round(available.low),
            "own_bytes": round(largest.rss.high),
        },
        at=largest.last_seen,
        unseen=("The kernel's own line: `journalctl -k` or `dmesg`.",),
    )


RULES: Final[tuple[Rule, ...]] = (
    node_monitor,
    refused_for_host,
    compiler_killed,
    killed_in_build,
    vanished_while_loading,
    residency_refused,
)
