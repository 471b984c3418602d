"""What a changed flag does: tokens, concurrency, bytes.

Where the model's sizes are known the memory model says so, starting from what the log printed.
Else only proportions of the log's own figures are used: the KV cache's bytes and tokens, the share
and the total, the longest request; what they cannot tell stays None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines.flags import as_number
from oomwatch.records import Effect
from oomwatch.remedies.context import Context

HALVED: Final = ("fp8", "fp8_e4m3", "fp8_e5m2")


def effect_of(
    changes: Mapping[str, Any], context: Context, unset: tuple[str, ...] = ()
) -> Effect | None:
    """The predicted effect of setting flags (by canonical name), or None where nothing is known."""
    if not changes and not unset:
        return None
    return _modelled(changes, context, unset) or _in_proportion(changes, context)


def _modelled(
    changes: Mapping[str, Any], context: Context, unset: tuple[str, ...]
) -> Effect | None:
    """By the memory model; what the log printed is scaled by what the model says changes."""
    found = context.forecast.of(changes, unset) if context.forecast else None
    if found is None:
        return None
    before, after = found.before, found.after
    printed = context.kv_tokens
    scale = printed / before.tokens if printed and before.tokens else 1.0
    held = context.max_concurrency if printed or context.engine.max_concurrency else None
    if held is None and math.isfinite(before.max_concurrency):
        held = before.max_concurrency
    then = after.max_concurrency
    if held and before.max_concurrency and math.isfinite(then):
        then = held * then / before.max_concurrency
    return Effect(
        kv_tokens_before=round(printed) if printed else before.tokens,
        kv_tokens_after=round(after.tokens * scale),
        freed_bytes=found.freed_bytes,
        max_concurrency_before=None if held is None else round(held, 2),
        max_concurrency_after=round(then, 2) if math.isfinite(then) else None,
        kv_tokens_after_low=round(found.tokens_low * scale),
        kv_tokens_after_high=round(found.tokens_high * scale),
    )


def _in_proportion(changes: Mapping[str, Any], context: Context) -> Effect | None:
    tokens, concurrency = context.kv_tokens, context.max_concurrency
    factor = 1.0
    freed: float | None = None
    known = False
    delta = kv_change_bytes(changes, context)
    kv_bytes = context.engine.kv_bytes
    if delta is not None:
        freed = -delta if delta < 0 else None
        known = True
        factor = max((kv_bytes + delta) / kv_bytes, 0.0) if kv_bytes else 0.0
    if changes.get("--kv-cache-dtype") in HALVED and not context.says("hybrid"):
        factor, known = factor * context.kv_bits / 8, True
    ratio = 1.0
    length, longest = as_number(changes.get(context.flag("length") or "")), context.max_model_len
    if length and longest:
        ratio, known = longest / length, True
    ranks = rank_change(changes, context)
    if ranks is not None and context.engine.weights_bytes:
        freed, known = context.engine.weights_bytes * (1 - 1 / ranks), True
        factor = 0.0  # the pool grows, by how much depends on the model's heads
    if not known:
        return None
    return Effect(
        kv_tokens_before=None if tokens is None else round(tokens),
        kv_tokens_after=round(tokens * factor) if tokens and factor else None,
        freed_bytes=None if freed is None else round(freed),
        max_concurrency_before=concurrency,
        max_concurrency_after=round(concurrency * factor * ratio, 2)
        if concurrency and factor
        else None,
    )


def kv_change_bytes(changes: Mapping[str, Any], context: Context) -> float | None:
    """By how much the KV cache of one GPU would grow (or shrink, negative); None if unknown."""
    total = context.total_bytes
    share = context.flag("share")
    new = as_number(changes.get(share)) if share else None
    if new is not None:
        old = context.now(share)
        if (
            context.name not in ("vllm", "sglang")
            or context.pinned_kv
            or old is None
            or total is None
        ):
            return None
        base = context.engine.free_at_start_bytes if context.name == "sglang" else None
        return (new - old) * (base or total)
    new = as_number(changes.get("--kv-cache-memory-bytes"))
    if new is not None:
        old = context.now("--kv-cache-memory-bytes") or context.engine.kv_bytes
        return None if old is None else new - old
    return None


_BEFORE_KV: Final = frozenset({"slots", "repack", "quantize", "profile", "compile", "draft"})
"""Stages of a start that come before the KV cache is sized."""
_CACHE: Final = ("kv_no_blocks", "kv_lt_max_len")


def would_not_start(
    changes: Mapping[str, Any], context: Context, unset: tuple[str, ...] = ()
) -> bool:
    """Whether a change would surely make the next start fail.

    By the log's own numbers when the budget would not hold weights and measured activation, the
    card not weights and a cache of fixed size, or the KV cache no longer one request of the length
    in force; by the memory model when the changed server is refused even where its interval is
    kindest.
    """
    total, engine = context.total_bytes, context.engine
    share = context.flag("share")
    new = as_number(changes.get(share)) if share else None
    if new is not None and total and context.name == "vllm" and engine.weights_bytes:
        fixed = (
            engine.weights_bytes + (engine.activation_bytes or 0) + (engine.non_torch_bytes or 0)
        )
        if new * total <= fixed:
            return True
    fixed_kv = as_number(changes.get("--kv-cache-memory-bytes"))
    if fixed_kv and total and engine.weights_bytes and engine.weights_bytes + fixed_kv >= total:
        return True
    delta = kv_change_bytes(changes, context)
    length_kept = as_number(changes.get(context.flag("length") or "")) is None
    concurrency = context.max_concurrency
    if delta is not None and delta < 0 and engine.kv_bytes and concurrency and length_kept:
        return concurrency * (engine.kv_bytes + delta) / engine.kv_bytes < 1 <= concurrency
    if context.forecast is None or not (changes or unset):
        return False
    found = context.forecast.of(changes, unset)
    if found is None or not found.surely_refused:
        return False
    # A start that failed before the KV cache was sized, and that the model refuses anyway, is
    # helped past the place where it failed by whatever frees memory there.
    early = context.finding.values.get("stage") in _BEFORE_KV
    helps = found.freed_bytes > 0 or (found.freed_bytes == 0 and found.after.refusal in _CACHE)
    return not (early and context.forecast.now.refusal is not None and helps)


def rank_change(changes: Mapping[str, Any], context: Context) -> float | None:
    """Factor by which the ranks that share the weights grow."""
    factor = 1.0
    for flag in (context.flag("ranks"), context.flag("stages")):
        new = as_number(changes.get(flag)) if flag else None
        if new is not None:
            factor *= new / (context.now_or_assumed(flag) or 1)
    return factor if factor > 1 else None
