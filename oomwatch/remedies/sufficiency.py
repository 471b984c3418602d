"""Whether one step alone lifts a refusal that is arithmetic: bytes needed against bytes there.

By the memory model where the model's sizes are known, else in proportion of the log's own figures;
a step is called enough, or not enough, only where the figures say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines.flags import as_number
from oomwatch.remedies.context import Context
from oomwatch.remedies.effects import HALVED, kv_change_bytes, rank_change
from oomwatch.remedies.sufficiency_peaks import PEAKS, makes_room, why_unsure
from oomwatch.units import GIB, format_bytes

_REFUSALS: Final = frozenset({"kv_lt_max_len", "kv_no_blocks", "weights_dont_fit"})
_WORK: Final = frozenset(
    {"--max-num-batched-tokens", "--max-num-seqs", "--enforce-eager", "--enable-chunked-prefill"}
)
"""Settings that free only what a step of work takes beside the weights and the KV cache."""
_UNEVEN: Final = 1.05
"""What is copied to every rank makes its part of the weights larger than the mere quotient."""
_MOST_WORK: Final = 16 * GIB
"""More than a step of work takes beside weights and cache on any card but with extreme settings."""


def sufficiency(
    changes: Mapping[str, Any], context: Context, unset: tuple[str, ...] = ()
) -> tuple[bool | None, str]:
    """Whether the start would pass with these flags alone, and a sentence where it would not.

    None for causes that are no such refusal, and where the figures do not say; then the sentence
    says what they leave open, if they look as if they did.
    """
    if not (changes or unset):
        return None, ""
    if context.finding.cause in PEAKS:
        room = makes_room(changes, context)
        return room, "" if room else why_unsure(changes, context)
    if context.finding.cause not in _REFUSALS:
        return None, why_unsure(changes, context)
    found = context.forecast.of(changes, unset) if context.forecast else None
    if found is not None:
        missing = found.after.bytes_per_request - found.after.kv_available_bytes
        if found.after.fits:
            return True, ""
        if found.after.refusal == "weights_dont_fit":
            weights = found.after.budget
            missing = weights.weights.bytes - weights.total_bytes
        return False, _short(missing, "are still missing with it")
    if context.finding.cause == "weights_dont_fit" or unset:
        return None, ""
    return _in_proportion(changes, context)


def _in_proportion(changes: Mapping[str, Any], context: Context) -> tuple[bool | None, str]:
    share = context.flag("share") or ""
    least = context.least_static_share
    if least is not None and context.finding.cause == "kv_no_blocks":
        return _over_weights(changes, least, context), ""
    needed = context.number("needed_kv_bytes")
    there = as_number(context.finding.values.get("available_kv_bytes"))
    if there is None:
        there = context.engine.kv_bytes
    if there is None:
        return None, ""
    gap = (needed or 0) - there
    gained = kv_change_bytes(changes, context)
    sure = needed is not None
    if gained is None and share in changes:
        gained, sure = _share_bytes(as_number(changes[share]), there, context), False
    if gained is None and changes.keys() <= _WORK:
        gained, sure = _work_bytes(there, context), False
    ranks = rank_change(changes, context)
    if ranks is not None:
        # Each GPU then takes a part of weights and cache, if the model's KV heads divide.
        weights = context.engine.weights_bytes
        sure = False
        gained = None if weights is None else weights * (1 - 1 / ranks)
        gained = None if gained is None else gained + (needed or 0) * (1 - 1 / ranks)
    if needed and changes.get("--kv-cache-dtype") in HALVED and not context.says("hybrid"):
        gained = needed * (1 - 8 / context.kv_bits)
    length, longest = as_number(changes.get(context.flag("length") or "")), context.max_model_len
    if needed and length and longest:
        estimate = context.number("estimated_max_len")
        if estimate and length <= estimate:
            return True, ""
        gained = needed * (1 - length / longest)
    if gained is None:
        return None, ""
    if gained < gap or (needed is None and gained <= gap):
        return False, _short(gap, f"are missing, and this gives {_amount(gained, sure=sure)}")
    return (True if sure else None), ""


def _over_weights(changes: Mapping[str, Any], least: float, context: Context) -> bool | None:
    """Whether SGLang's share then exceeds the weights, which is all that it asks for."""
    flag = context.flag("share") or ""
    new, ranks = as_number(changes.get(flag)), rank_change(changes, context)
    if new is not None:
        return new > least
    now = context.now(flag) if context.knows(flag) else None
    return True if now and ranks and now > _UNEVEN * least / ranks else None


def _share_bytes(new: float | None, there: float, context: Context) -> float | None:
    """The most that a larger share of a card of unknown size can add to the KV cache."""
    old, weights = context.now_or_assumed(context.flag("share")), context.engine.weights_bytes
    if new is None or not old or weights is None or context.name != "vllm" or context.pinned_kv:
        return None
    return (new - old) * (weights + there + _MOST_WORK) / old


def _work_bytes(there: float, context: Context) -> float | None:
    """All that the budget holds beside weights and cache: the most that less work can free."""
    share, total = context.now(context.flag("share")), context.total_bytes
    weights = context.engine.weights_bytes
    if share is None or total is None or weights is None:
        return context.engine.activation_bytes
    return max(share * total - weights - there, 0)


def _amount(gained: float, *, sure: bool) -> str:
    return f"{'about' if sure else 'at most'} {format_bytes(gained)}"


def _short(missing: float, what: str) -> str:
    return f"Not enough by itself: {format_bytes(missing)} {what}." if missing > 0 else ""
