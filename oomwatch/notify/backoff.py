"""How long to wait after a failed attempt."""

from __future__ import annotations

import random
from typing import Final

_FACTORS: Final = (1, 6, 24, 60, 180)
"""Of the first pause: with 5 s those are 5 s, 30 s, 2 min, 5 min, 15 min."""
_JITTER: Final = 0.2
MOST_ASKED_SECONDS: Final = 3600.0
"""A receiver that asks for a longer pause is asked again after this one."""


def pause_seconds(attempts: int, first_seconds: float) -> float:
    """The pause after so many failed attempts, a fifth more or less so that agents spread out."""
    factor = _FACTORS[min(max(attempts, 1), len(_FACTORS)) - 1]
    return first_seconds * factor * random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
