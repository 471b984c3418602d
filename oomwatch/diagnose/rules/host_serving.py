"""Host memory that was refused, rather than taken away, while the engine served."""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.facts import Facts, cite_failure
from oomwatch.diagnose.rules.findings import NAMED_CHECK, Rule, found
from oomwatch.records import Finding


def refused_while_serving(facts: Facts) -> Finding | None:
    """An allocation on the host failed with an exception, in a server that was up."""
    hit = facts.failing("torch.cpu_alloc", "host.alloc", "host.bad_alloc")
    if hit is None or not (facts.served or facts.ready):
        return None
    failure, fields = hit
    tried = fields.get("tried")
    return found(
        facts,
        "host_oom_kill",
        0.7,
        "The host refused memory to a process of the server while it served; the GPU is not involved.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "stage": "serving",
            "tried_bytes": int(tried) if isinstance(tried, str) and tried.isdigit() else None,
            "host_total_bytes": facts.series.host_total_bytes,
        },
        unseen=("Which process grew: resident memory of the server's processes over time.",),
    )


RULES: Final[tuple[Rule, ...]] = (refused_while_serving,)
