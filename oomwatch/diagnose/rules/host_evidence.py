"""What the host's side shows beside a kill: who grew, what was left, and the last words of the log."""

from __future__ import annotations

from typing import Any, Final

from oomwatch.diagnose.facts import Facts, cite
from oomwatch.diagnose.series import ProcessTrend
from oomwatch.records import Evidence
from oomwatch.units import GIB, format_bytes

KILLED_FOR_MEMORY: Final = (
    "exit.systemd_oom",
    "exit.oom_result",
    "exit.oom_reason",
    "exit.oom_container",
)
"""Lines of those that keep the server: it was ended for want of host memory."""


def growers(facts: Facts, victim: Any, limited: str | None = None) -> list[Evidence]:
    """The processes whose resident memory grew most, or is largest.

    `limited` is the cgroup that ran into its limit: what runs elsewhere took nothing of it.
    """
    processes = list(facts.series.processes)
    if limited and any(p.pid == victim and _is_within(p, limited) for p in processes):
        processes = [p for p in processes if p.cgroup is None or _is_within(p, limited)]
    ranked = sorted(
        processes,
        key=lambda p: -(p.rss.grown if p.rss.grown > 0.5 * GIB else 0) - p.rss.last / 1e3,
    )
    return [
        Evidence(
            "process",
            str(p.pid),
            at=p.last_seen,
            text=f"{p.name} (PID {p.pid}) resident {format_bytes(p.rss.first)} to {format_bytes(p.rss.last)}",
            value=round(p.rss.last),
            unit="bytes",
        )
        for p in ranked[:3]
        if p.pid != victim or p.rss.grown > 0.5 * GIB
    ]


def _is_within(process: ProcessTrend, cgroup: str) -> bool:
    return f"{process.cgroup}/".startswith(f"{cgroup.rstrip('/')}/")


def last_words(facts: Facts) -> list[Evidence]:
    """The line that says how a process ended, if there is one."""
    run = facts.run
    if run is None:
        return []
    event = run.find_last(
        "exit.killed",
        "exit.code",
        "vllm.worker_died",
        "vllm.worker_died_v0",
        "sglang.child_died",
        *KILLED_FOR_MEMORY,
    )
    return [cite(event.line)] if event else []


def available(facts: Facts) -> list[Evidence]:
    """How much host memory was left over the window."""
    trend = facts.series.available
    if trend is None:
        return []
    return [
        Evidence(
            "process",
            "MemAvailable",
            at=facts.series.ended_at,
            text=f"host memory available {format_bytes(trend.first)} to {format_bytes(trend.last)}",
            value=round(trend.last),
            unit="bytes",
        )
    ]
