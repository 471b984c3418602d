"""Steps whose number hangs on a value in force that nobody saw: the way without the number.

A number computed from a guess may lie on the wrong side of the value in force, and then it makes
worse what it is to cure.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Final

from oomwatch.engines import flags
from oomwatch.engines.flags import as_number
from oomwatch.remedies.context import ASSUMED, KNOBS, Context, Draft
from oomwatch.remedies.moves_memory import HIGHEST_SHARE
from oomwatch.units import GIB

_ABSOLUTE: Final = frozenset({"--hicache-size", "--hicache-ratio", "--kv-cache-memory-bytes"})
"""Settings whose number follows from what was measured, not from the number before."""
_NO_FLOOR: Final = frozenset({"--max-running-requests"})
"""Settings whose smallest default is not known (see `ASSUMED`)."""
_LARGEST_CARD: Final = 288 * GIB
_DIGIT: Final = re.compile(r"\d")
_WHY: Final = "What is in force stands in nothing that was read; --command tells it."


def without_guesses(draft: Draft, context: Context) -> Draft:
    """The draft, or its way in words where nobody knows whether its number goes that way."""
    guessed = [f for f, value in draft.set.items() if not _goes_its_way(f, value, context)]
    if not guessed:
        return draft
    flag = guessed[0]
    spelled = flags.spell(context.name or "", context.version, flag, draft.set[flag])
    if spelled is None:
        return draft  # the release has no such setting
    new, usual = as_number(draft.set[flag]) or 0, context.now(flag)
    up = new > (usual or ASSUMED.get(flag) or new)
    way, beyond = ("Raise", "above") if up else ("Lower", "below")
    hint = "" if usual is None else f": {new:g} if that is the default, {usual:g}"
    reason = draft.reason if _DIGIT.search(draft.why) else draft.why
    return dataclasses.replace(
        draft,
        title=f"{way} {spelled[0]}",
        action=f"{way} {spelled[0]} {beyond} the value in force{hint}.",
        why=f"{reason} {_WHY}".lstrip(),
        set={f: value for f, value in draft.set.items() if f not in guessed},
    )


def _goes_its_way(flag: str, value: Any, context: Context) -> bool:
    """Whether a setting is surely on the side of the value in force that its step wants."""
    new = None if isinstance(value, bool) else as_number(value)
    if new is None or new == 0 or flag in _ABSOLUTE or context.knows(flag):
        return True
    least, most = _least(flag, context), _most(flag, context)
    if (least is not None and new < least) or (most is not None and new > most):
        return True
    if not context.engine.arguments_seen:
        return False
    default = ASSUMED.get(flag)
    return default is None or (new < default and flag not in _NO_FLOOR)


def _least(flag: str, context: Context) -> float | None:
    """The least that the value in force can be: as many requests are allowed as ran."""
    return context.number("running") if flag == context.flag("sequences") else None


def _most(flag: str, context: Context) -> float | None:
    """The most that the value in force can be, by what the engine measured or refused."""
    refused = context.finding.cause == "kv_no_blocks"
    if refused and flag in KNOBS["share"].values():
        return HIGHEST_SHARE - 0.001  # whoever sets more than that has nothing left to raise
    swapped, blocks = context.number("cpu_blocks"), context.engine.kv_blocks
    if flag == "--swap-space" and swapped and blocks:
        # The blocks of both pools are of one size, and those of the GPU fit beside the weights.
        room = (context.total_bytes or _LARGEST_CARD) - (context.engine.weights_bytes or 0)
        return room / GIB * swapped / blocks
    return None
