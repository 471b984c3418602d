"""How a rule states what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from oomwatch.causes import class_of
from oomwatch.diagnose.facts import Facts
from oomwatch.records import Evidence, Finding

Rule = Callable[[Facts], Finding | None]

KERNEL = 6
"""The kernel or the driver said it."""
ARITHMETIC = 5
"""The numbers of the message decide."""
NAMED_CHECK = 4
"""A check of the engine refused, by name."""
STAGE = 3
"""Placed by the stage or the part of the code it happened in."""
COUNTERS = 2
"""Told by counters and pool lines."""
TREND = 1
"""Told by a series."""
REQUEST = 0
"""One request was refused; the server is well."""
LIFECYCLE = -1
"""Only how the process ended is known."""
NOTHING = -2
"""Only a wrapper, or nothing, is in the input."""
FAILURES = (ARITHMETIC, NAMED_CHECK, STAGE)
"""Kinds of which the earliest in the log decides."""


def found(
    facts: Facts,
    cause: str,
    confidence: float,
    summary: str,
    evidence: Iterable[Evidence],
    *,
    strength: int,
    values: Mapping[str, Any] | None = None,
    unseen: Iterable[str] = (),
    at: float | None = None,
    risk: bool = False,
    order: int | None = None,
) -> Finding:
    """A finding of `cause`; its class follows from the cause.

    Raises:
        KeyError: the cause is not one of the contract.

    """
    cls = class_of(cause)
    if cls is None:
        raise KeyError(cause)
    cited = tuple(_once(evidence))
    if at is None and cited and cited[0].at is None:
        at = _failed_at(facts, order)
    return Finding(
        cls=cls,
        cause=cause,
        confidence=round(confidence, 2),
        summary=" ".join(summary.split()),
        evidence=cited,
        values={key: value for key, value in (values or {}).items() if value is not None},
        unseen=tuple(unseen),
        engine_id=facts.engine.id,
        at=at if at is not None else next((e.at for e in cited if e.at is not None), None),
        risk=risk,
        strength=strength,
        order=order,
    )


def _once(evidence: Iterable[Evidence]) -> Iterator[Evidence]:
    """Each place once: two looks at a log may find the same line."""
    seen: set[tuple[str, str, str | None]] = set()
    for item in evidence:
        place = (item.source, item.where, item.text)
        if place not in seen:
            seen.add(place)
            yield item


def _failed_at(facts: Facts, order: int | None) -> float | None:
    """The time of the failure at this place; a traceback's last line often has none of its own."""
    return next((f.seen_at for f in facts.failures if f.order == order), None)
