"""From a cause to its remedies: the plan's steps, made into flags that this engine accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from oomwatch.records import Direction, EngineFacts, Finding, Remedy
from oomwatch.remedies import irregular, long_context, not_oom, startup
from oomwatch.remedies.context import Context, context_of
from oomwatch.remedies.flags import compatible, finish
from oomwatch.remedies.plans import Plan

PLANS: Final[Mapping[str, Plan]] = {
    **startup.PLANS,
    **long_context.PLANS,
    **irregular.PLANS,
    **not_oom.PLANS,
}
"""The plan of every cause in `oomwatch.causes`."""


def direction_of(cause: str) -> Direction:
    """Which way memory has to move for a cause; ``other`` for one that does not exist."""
    plan = PLANS.get(cause)
    return plan.direction if plan else "other"


def prescribe(finding: Finding, engine: EngineFacts) -> tuple[Remedy, ...]:
    """Remedies in the order to try them; the first points the cause's way.

    Steps that the engine or version lacks, that would change nothing, that would make the next
    start fail, or that fight an earlier step, are left out.
    """
    plan = PLANS.get(finding.cause)
    if plan is None:
        return ()
    context = context_of(finding, engine)
    found = compatible(_remedies(plan, context), context.force)
    first = next((r for r in found if r.direction == plan.direction), None)
    if first is None or found[0] is first:
        return found
    return (first, *(remedy for remedy in found if remedy is not first))


def _remedies(plan: Plan, context: Context) -> Iterator[Remedy]:
    for move in plan.moves:
        draft = move(context)
        remedy = None if draft is None else finish(draft, context, plan.direction)
        if remedy is not None:
            yield remedy
