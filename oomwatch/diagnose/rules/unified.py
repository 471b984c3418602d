"""Boards on which GPU and host share one memory: what runs out has no allocator of its own."""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.rules.findings import ARITHMETIC, KERNEL, STAGE, Rule, found
from oomwatch.diagnose.rules.host_evidence import available, last_words
from oomwatch.records import Finding
from oomwatch.units import format_bytes


def driver_no_memory(facts: Facts) -> Finding | None:
    """The driver itself could not allocate: on a shared-memory board the host is full."""
    lines = [c for c in facts.kernel if "NV_ERR_NO_MEMORY" in c.event.text]
    starting = facts.run is None or not (facts.run.served or facts.run.reached("ready"))
    silent = (
        facts.unified
        and facts.run is not None
        and not facts.failures
        and facts.said("exit.killed") is not None
    )
    if not lines and not silent:
        return None
    if lines and not facts.unified and facts.gpu_names:
        return None
    evidence = (
        [lines[0].evidence(), lines[-1].evidence()]
        if len(lines) > 1
        else [c.evidence() for c in lines]
    )
    evidence += [*available(facts), *last_words(facts)]
    if not evidence:
        return None
    if not starting:
        return found(
            facts,
            "unified_memory_prefill_growth",
            0.7,
            "GPU and host share one memory on this board, and a growing context used it up; no allocation failed by name.",
            evidence,
            strength=KERNEL if lines else STAGE,
            values={"stage": "serving"},
        )
    return found(
        facts,
        "unified_memory",
        0.85 if facts.unified else 0.65,
        "The driver could not get memory from the host: "
        + ("on this board" if facts.unified else "as happens where")
        + " GPU and host share one memory, and together they ran out while the engine started.",
        evidence,
        strength=KERNEL if lines else STAGE,
        values={
            "stage": facts.run.stage if facts.run else "init",
            "host_total_bytes": facts.series.host_total_bytes,
            "speculative": facts.speculative or None,
        },
    )


def _is_hang(failure: Failure) -> bool:
    """Whether a failure only says that another process stopped answering."""
    causes = {pattern.cause for pattern, _ in failure.matches if pattern.cause}
    return bool(causes) and causes <= {"rpc_timeout_hang", "nccl_watchdog"}


def silent_unified_growth(facts: Facts) -> Finding | None:
    """On a shared-memory board the host ran dry while serving, and the worker is gone without a word."""
    trend = facts.series.available
    total = facts.series.host_total_bytes
    if (
        not facts.unified
        or trend is None
        or not total
        or any(not _is_hang(failure) for failure in facts.failures)
        or not (facts.served or facts.series.engine)
    ):
        return None
    # The start takes most of such a board at once; only what falls on while requests run counts.
    falling = -trend.late_slope_per_second * 0.4 * trend.seconds
    if trend.low > 0.08 * total or trend.first - trend.low < 0.05 * total or falling < 0.02 * total:
        return None
    return found(
        facts,
        "unified_memory_prefill_growth",
        0.7,
        f"Available memory fell to {format_bytes(trend.low)} of {format_bytes(total)} while requests ran; GPU and host share it on this board.",
        available(facts),
        strength=ARITHMETIC,
        values={"host_total_bytes": total, "host_free_bytes": round(trend.low), "stage": "serving"},
    )


RULES: Final[tuple[Rule, ...]] = (driver_no_memory, silent_unified_growth)
