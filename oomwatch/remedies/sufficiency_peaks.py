"""Whether one step alone makes room for an allocation beside the KV cache that was refused.

The message says what was asked for and what was free. A step is called enough where these figures,
and for CUDA graphs the memory model, say that it is. That it is not enough they cannot say: what
else a step of work takes is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines import flags, versions
from oomwatch.engines.flags import as_number
from oomwatch.remedies.context import Context
from oomwatch.remedies.effects import kv_change_bytes

PEAKS: Final = frozenset(
    {
        "prefill_activation_peak",
        "attn_workspace_peak",
        "lora_activation_peak",
        "mm_encoder_peak",
        "moe_dispatch_peak",
        "concurrency_burst_peak",
        "spec_decode_underprofiled",
        "engine_buffers_unprofiled",
        "sampler_warmup",
        "cuda_graph_capture",
    }
)
_AGAIN: Final = 0.5
"""What may follow in the same step, as a part of what was refused."""
_DERIVED: Final = 0.02
"""A fraction of SGLang as near as this to its default may follow from the chunk."""
_LEFT_OPEN: Final[Mapping[str, str]] = {
    "cuda_graph_capture": "not surely the graphs that were still to be captured",
    "fragmentation": "pieces too small to use may take it again",
}
"""What the figures of the message leave open."""
_GRAPHS_OFF: Final = ("--enforce-eager", "--disable-cuda-graph")


def makes_room(changes: Mapping[str, Any], context: Context) -> bool | None:
    """True where the figures show that the refused allocation would find room; else None."""
    tried, free = context.number("tried_bytes"), context.number("free_bytes")
    missing = context.shortage_bytes
    if not tried or free is None or not missing:
        return None
    moved = kv_change_bytes(changes, context)
    if moved is not None:
        follows = _graphs_to_come(context)
        return True if follows is not None and -moved >= missing + follows else None
    if context.finding.cause == "cuda_graph_capture":
        return _captures_less(changes, context)
    if context.finding.cause == "prefill_activation_peak":
        return _takes_less(changes, context, tried=tried, free=free)
    return None


def why_unsure(changes: Mapping[str, Any], context: Context) -> str:
    """A sentence where the figures of a step exceed what was missing, and still are no proof."""
    moved, missing = kv_change_bytes(changes, context), context.shortage_bytes
    left = _LEFT_OPEN.get(context.finding.cause)
    if context.finding.cause in PEAKS:
        left = left or "not surely what the same step asks for next"
    if not left or not missing or moved is None or -moved < missing:
        return ""
    return f"That covers what was missing, but {left}."


def _graphs_to_come(context: Context) -> float | None:
    """What is allocated after the refused piece: the graphs not captured yet, else a part of it."""
    if context.finding.cause != "cuda_graph_capture":
        return _AGAIN * (context.number("tried_bytes") or 0)
    graphs = context.forecast.graph_bytes() if context.forecast else None
    return (
        None if graphs is None else max(0.0, graphs - (context.number("private_pool_bytes") or 0))
    )


def _captures_less(changes: Mapping[str, Any], context: Context) -> bool | None:
    """Whether all graphs that are left take less than those that were captured already.

    Where nobody knows what the graphs take, no step has figures: then going without them, which
    costs the most speed, is not preferred to leaving more room.
    """
    graphs = context.forecast.graph_bytes(changes) if context.forecast else None
    if graphs is not None and any(changes.get(flag) is True for flag in _GRAPHS_OFF):
        return True
    captured = context.number("private_pool_bytes")
    return True if captured and graphs is not None and graphs <= captured else None


def _takes_less(
    changes: Mapping[str, Any], context: Context, *, tried: float, free: float
) -> bool | None:
    """Whether what was refused fits what was free in a step of fewer tokens.

    What the smaller step frees elsewhere must not be taken by a larger KV cache: vLLM measures the
    step at start and gives the cache what it leaves, SGLang derives its default fraction from it.
    """
    flag = context.flag("batch_tokens") or ""
    new, old = as_number(changes.get(flag)), context.now(flag)
    if not new or not old or new >= old:
        return None
    part = new / old
    if part * tried > free:
        return None
    if context.name == "sglang":
        return True if _fraction_stays(context) else None
    if context.name != "vllm":
        return None
    if context.pinned_kv:
        return True
    share, total = context.now(context.flag("share")), context.total_bytes
    if share is None or not total:
        return None
    return True if part * (tried - free) <= (1 - part) * (1 - share) * total else None


def _fraction_stays(context: Context) -> bool:
    """Whether SGLang's fraction was set, so that it does not grow when the chunk shrinks."""
    flag = context.flag("share") or ""
    if context.given(flag) is None and flag not in context.engine.in_force:
        return False
    kept = ("--chunked-prefill-size", "--tp-size", "--pp-size")
    default = flags.in_force(
        "sglang",
        context.version or versions.newest("sglang"),
        arguments={name: context.now(name) for name in kept if context.now(name) is not None},
        total_bytes=round(context.total_bytes) if context.total_bytes else None,
    ).get(flag)
    now = context.now(flag)
    return now is not None and default is not None and abs(now - default) > _DERIVED
