"""From a cause to its remedies: the plan's steps, made into flags that this engine accepts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from oomwatch.records import Direction, EngineFacts, Finding, Remedy
from oomwatch.remedies import irregular, long_context, not_oom, startup
from oomwatch.remedies.actions import act
from oomwatch.remedies.context import Context, Move, context_of
from oomwatch.remedies.flags import compatible, finish
from oomwatch.remedies.plans import Plan

PLANS: Final[Mapping[str, Plan]] = {
    **startup.PLANS,
    **long_context.PLANS,
    **irregular.PLANS,
    **not_oom.PLANS,
}
"""The plan of every cause in `oomwatch.causes`."""

_GENERAL: Final[Mapping[Direction, Move]] = {
    "more_kv": act(
        "more-room-for-kv",
        "Give the KV cache more room",
        "Run fewer or shorter requests at once in {engine}, or give its cache more of the card or "
        "more GPUs.",
        why="The cache of keys and values is too small for what has to run.",
        cost="Throughput, or more GPUs.",
    ),
    "less_kv": act(
        "more-room-beside-kv",
        "Leave more room beside the KV cache",
        "Lower what {engine} takes in advance, or the tokens and requests it processes at once.",
        why="What is allocated for a step finds no room beside the cache.",
        cost="A smaller cache.",
    ),
    "less_weights": act(
        "fewer-weight-bytes",
        "Use a quantized or smaller model, or more GPUs",
        "Use a quantized or smaller model, or split it over more GPUs.",
        why="The weights take more than the card can give.",
    ),
    "less_host": act(
        "more-host-memory",
        "Give the host more memory",
        "Give the host, or the container's limit, more memory, or run less beside {engine}.",
        why="The container's limit or the host's memory ran out, not the GPU's.",
    ),
    "free_gpu": act(
        "free-the-gpu",
        "Stop the other process on the GPU",
        "Stop the other process on the GPU, or use another GPU.",
        why="The memory that is missing is held by another process.",
    ),
    "other": act(
        "change-setting",
        "Change the setting that the message names",
        "Change the setting that the message of {engine} names, or upgrade {engine}.",
        why="No option of this engine is known to oomwatch for this.",
    ),
}
"""What to do where no step of the plan can be written for the engine."""


def direction_of(cause: str) -> Direction:
    """Which way memory has to move for a cause; ``other`` for one that does not exist."""
    plan = PLANS.get(cause)
    return plan.direction if plan else "other"


def prescribe(finding: Finding, engine: EngineFacts) -> tuple[Remedy, ...]:
    """Remedies in the order to try them; the first points the cause's way.

    Steps that the engine or version lacks, that would change nothing, that would make the next
    start fail, or that fight an earlier step, are left out. Those that cannot cure alone come last.
    """
    plan = PLANS.get(finding.cause)
    if plan is None:
        return ()
    context = context_of(finding, engine)
    found = compatible(_remedies(plan.moves, plan.direction, context), context.force)
    found = tuple(sorted(found, key=lambda remedy: remedy.enough is False))
    # A cause without a way of its own takes its steps as they are listed.
    ahead = [r for r in found if plan.direction in (r.direction, "other")]
    # "A newer version" is no first step where nobody knows the version that runs.
    sure = [remedy for remedy in ahead if remedy.id != "upgrade" or engine.version is not None]
    first = next(iter(sure or ahead), None)
    if first is None:
        first = next(_remedies((_GENERAL[plan.direction],), plan.direction, context))
    return (first, *(remedy for remedy in found if remedy is not first))


def _remedies(moves: Iterable[Move], direction: Direction, context: Context) -> Iterator[Remedy]:
    for move in moves:
        draft = move(context)
        remedy = None if draft is None else finish(draft, context, direction)
        if remedy is not None:
            yield remedy
