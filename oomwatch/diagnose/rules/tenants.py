"""Memory of a card that belongs to nobody of this engine, by the listing of a message or by its sums."""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts
from oomwatch.records import Evidence
from oomwatch.units import GIB, MIB, format_bytes

_SIBLING: Final = 1 * GIB
"""Contexts of sibling ranks take 250 to 500 MiB each and are no tenants (taxonomy)."""
_CONTEXT: Final = 1.5 * GIB
"""What a process holds outside PyTorch's allocator: CUDA context, libraries, NCCL."""


def foreign_bytes(facts: Facts, failure: Failure) -> tuple[int, tuple[int, ...]]:
    """Memory and pids of the listed processes that are no part of this engine."""
    oom = failure.oom
    if oom is None:
        return 0, ()
    own_tree = facts.tree_pids | (facts.run.pids if facts.run else set())
    ranks = int(facts.number("--tensor-parallel-size", "--tp-size") or 1)
    others = [
        (pid, size)
        for pid, size in oom.others
        if pid not in own_tree and (size >= _SIBLING or (ranks == 1 and size >= 64 * MIB))
    ]
    return sum(size for _, size in others), tuple(pid for pid, _ in others)


def hidden_bytes(failure: Failure) -> int:
    """Memory of the card that the message accounts to no process; 0 where that cannot be said.

    Messages before PyTorch 2.1, those of NPUs, and those inside containers list nobody else: what
    is neither free nor this process's is somebody else's.
    """
    oom = failure.oom
    if oom is None or not oom.total_bytes or oom.free_bytes is None:
        return 0
    used = oom.total_bytes - oom.free_bytes
    listed = sum(size for _, size in oom.others)
    if oom.own_bytes is not None:
        rest = used - oom.own_bytes - listed
        return max(0, rest) if rest > max(0.15 * oom.total_bytes, 2 * GIB) else 0
    if oom.allocated_bytes is None:
        return 0
    rest = used - oom.allocated_bytes - (oom.reserved_bytes or 0) - listed - round(_CONTEXT)
    return max(0, rest) if rest > max(0.25 * oom.total_bytes, 3 * GIB) else 0


def holder_evidence(facts: Facts) -> list[Evidence]:
    """Foreign processes that hold GPU memory, largest first."""
    foreign = [
        h for h in facts.series.holders if h.pid not in facts.tree_pids and h.used.last > 0.5 * GIB
    ]
    foreign.sort(key=lambda h: -h.used.last)
    return [
        Evidence(
            "nvml",
            str(h.pid),
            text=f"{h.name} (PID {h.pid}) holds {format_bytes(h.used.last)} on GPU {h.gpu}",
            value=round(h.used.last),
            unit="bytes",
        )
        for h in foreign[:3]
    ]
