"""Steps against a kernel that fails by itself: no memory is gained by them, a culprit is found."""

from __future__ import annotations

import dataclasses

from oomwatch.engines.accelerators import ACCELERATORS, Accelerator
from oomwatch.remedies import moves_load as load
from oomwatch.remedies.context import Context, Draft


def failing_kernel(context: Context) -> Draft:
    """Upgrade, and run once with launches that wait, in the words of the card."""
    card = _card(context)
    name, value = card.blocking
    eager = load.eager(context) if card.graphs_block else None
    flags = f" and {' '.join(eager.set)}" if eager else ""
    other = ", or try another attention backend" if not card.graphs_block else ""
    return Draft(
        id="find-failing-kernel",
        title="Upgrade, and find the failing kernel",
        why="A kernel read outside its buffer: a defect, not a lack of memory.",
        cost="None." if eager is None else eager.cost,
        action=f"Upgrade {context.engine.fork or context.label}{card.stack}; if it persists run "
        f"once with {name}={value}{flags} and report the kernel{other}.",
        set={} if eager is None else eager.set,
        env={name: value},
    )


def without_graphs(context: Context) -> Draft | None:
    """No graphs, where that is no part of the step before it."""
    draft = None if _card(context).graphs_block else load.eager(context)
    return draft and dataclasses.replace(
        draft,
        why="Inside a graph the failing kernel is not named, and some faults come only there.",
    )


def _card(context: Context) -> Accelerator:
    return ACCELERATORS.get(str(context.finding.values.get("accelerator")), ACCELERATORS["cuda"])
