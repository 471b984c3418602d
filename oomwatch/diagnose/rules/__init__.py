"""The rules: pure functions from `Facts` to a `Finding` or None, one file per kind of cause."""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.rules import (
    endings,
    gpu_faults,
    hangs,
    host,
    host_start,
    kv_checks,
    lookalikes,
    nccl,
    peaks,
    pools,
    pressure,
    processes,
    sglang_checks,
    startup_allocations,
    startup_checks,
    trends,
    unplaced,
)
from oomwatch.diagnose.rules.findings import Rule

RULES: Final[tuple[Rule, ...]] = (
    *host.RULES,
    *gpu_faults.RULES,
    *host_start.RULES,
    *processes.RULES,
    *startup_checks.RULES,
    *kv_checks.RULES,
    *sglang_checks.RULES,
    *startup_allocations.RULES,
    *nccl.RULES,
    *peaks.RULES,
    *unplaced.RULES,
    *pools.RULES,
    *pressure.RULES,
    *trends.RULES,
    *hangs.RULES,
    *lookalikes.RULES,
    *endings.RULES,
)
"""Every rule; all run on the same facts, the judge ranks what they find."""
