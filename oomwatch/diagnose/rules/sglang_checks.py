"""SGLang's own refusals at start: unequal cards, and a static share without room for the pool.

Its words blame other processes, or advise a larger share; what was free before the load, the other
holders of the card and a draft model decide first.
"""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.frames import find_stage
from oomwatch.diagnose.rules.findings import NAMED_CHECK, Rule, found
from oomwatch.diagnose.rules.tenants import holder_evidence
from oomwatch.memory.data.cards import CARDS
from oomwatch.records import Finding
from oomwatch.units import GIB, format_bytes

_LOAD: Final = ("sglang.load_begin", "sglang.load_end")
_UNTOUCHED: Final = 0.85
"""Share of a card that is free when nobody else is on it: context and communicators take the rest."""


def unbalanced_cards(facts: Facts) -> Finding | None:
    """SGLang refuses because one card has much less free memory than the others."""
    hit = facts.failing("sglang.unbalanced")
    if hit is None:
        return None
    failure, fields = hit
    smallest, local = fields.get("smallest_bytes"), fields.get("local_bytes")
    holders = holder_evidence(facts)
    pooled = facts.said("sglang.kv_allocated", "sglang.pool_end") is not None
    if (facts.speculative and pooled) or find_stage(failure.frames, failure.paths) == "draft":
        cause, confidence = "spec_draft", 0.72
        sentence = (
            "The check before the draft model loads blames other processes, but it is the target and its pool that hold"
            " the memory."
        )
    elif holders or (smallest and local and not _is_other_card(smallest, local)):
        cause, confidence = "gpu_busy_other_process", 0.75 if holders else 0.62
        sentence = (
            f"One card has {format_bytes(smallest)} free and another {format_bytes(local)}, which is no difference between"
            " cards: something else runs on the first."
        )
    else:
        cause, confidence = "parallel_imbalance", 0.75
        sentence = "One GPU has under 90 % of the free memory of another: unequal cards, or something else runs on one of them."
    return found(
        facts,
        cause,
        confidence,
        sentence,
        [*cite_failure(failure), *holders],
        strength=NAMED_CHECK,
        order=failure.order,
        values={"free_bytes": smallest, "total_bytes": local, "stage": "init"},
    )


def _is_other_card(smallest: float, local: float) -> bool:
    """Whether the smaller figure is a nearly empty card of another size (free is a little under total)."""
    if max(smallest, local) < 4 * GIB:
        return False
    totals = {card.total_gib * GIB for card in CARDS}
    return any(0.93 * total <= smallest <= total for total in totals if total < 0.9 * local)


def sglang_budget(facts: Facts) -> Finding | None:
    """SGLang's static share holds the weights and nothing more."""
    hit = facts.failing(
        "sglang.weights_over_budget", "sglang.kv_budget_zero", "sglang.kv_budget_negative"
    )
    if hit is None:
        return None
    failure, fields = hit
    values = {
        "stage": "kv",
        "suggested_fraction": fields.get("suggested_ratio"),
        "utilization": fields.get("fraction_ratio"),
    }
    evidence = [
        *cite_failure(failure),
        *(cite(e.line) for name in _LOAD if (e := facts.said(name))),
    ]
    if facts.speculative:
        return found(
            facts,
            "spec_draft",
            0.7,
            "The target and its draft model together leave no memory for the KV cache under the static share.",
            [
                *evidence,
                *cite_arguments(
                    facts.engine, ("--speculative-algorithm", "--speculative-draft-model-path")
                ),
            ],
            strength=NAMED_CHECK,
            order=failure.order,
            values=values,
        )
    taken = _taken_before(facts)
    if taken is not None:
        return found(
            facts,
            "kv_budget_cotenant",
            0.72,
            taken,
            [*evidence, *holder_evidence(facts)],
            strength=NAMED_CHECK,
            order=failure.order,
            values=values,
        )
    return found(
        facts,
        "kv_no_blocks",
        0.92,
        "The weights fill the static share of the memory that was free at start, so no token fits the KV pool: the share is"
        " too small, or the weights too large for the card.",
        evidence,
        strength=NAMED_CHECK,
        order=failure.order,
        values=values,
    )


def _taken_before(facts: Facts) -> str | None:
    """Why the free memory that the share is taken of was small already, or None."""
    begin, total = facts.said("sglang.load_begin"), facts.engine.total_bytes
    free = begin.fields.get("free_bytes") if begin is not None else None
    if not free or not total or free > _UNTOUCHED * total:
        return None
    return (
        f"Only {format_bytes(free)} of {format_bytes(total)} were free before the weights were loaded, and the share is"
        " taken of that: somebody else's memory on the card is what the KV pool lacks."
    )


RULES: Final[tuple[Rule, ...]] = (unbalanced_cards, sglang_budget)
