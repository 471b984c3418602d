"""Steps that change how the card is divided: the share, a pinned KV cache, its type."""

from __future__ import annotations

from typing import Final

from oomwatch.remedies.context import (
    Context,
    Draft,
    ceil_hundredth,
    floor_hundredth,
    floor_to,
)
from oomwatch.remedies.effects import kv_change_bytes
from oomwatch.remedies.forecast import known_formats, only_flashinfer
from oomwatch.units import GIB, MIB, format_bytes

HIGHEST_SHARE: Final = 0.95  # above it, runtime contexts and graphs have no room on any card
_SGLANG_SLACK: Final = 6 * GIB  # SGLang's own advice: 5 to 8 GB left at the ready line is good


# ---------------------------------------------------------------- the share of the card
def lower_share(context: Context) -> Draft | None:
    """Leave more room outside the KV pool; moves the pinned size where one is set."""
    if context.pinned_kv:
        return lower_pinned_kv(context)
    flag = context.flag("share")
    if flag is None:
        return _lower_share_in_words(context)
    old = context.now_or_assumed(flag)
    if old is None or old <= 0.1:
        return None
    new = floor_hundredth(old - _share_step(context, old) + 0.0001)
    new = max(new, _least_share(context), 0.1)
    if new >= old:
        return None
    missing, left = context.shortage_bytes, _left_by(context, flag, old, new)
    lacked = f"; {format_bytes(missing)} were missing" if missing else ""
    freed = f" (about {format_bytes(left)}{lacked})" if left else ""
    return Draft(
        id="lower-memory-share",
        title=f"Lower {flag} to {new:.2f}",
        why=f"The share of {old:g} leaves too little for what is allocated outside the KV cache; "
        f"{new:.2f} leaves {(old - new) * 100:.0f}% of the card more{freed}.",
        cost="A smaller KV cache: fewer tokens and requests at a time.",
        set={flag: f"{new:.2f}"},
        reason="What is allocated outside the KV cache finds too little room beside it.",
    )


def _left_by(context: Context, flag: str, old: float, new: float) -> float | None:
    """What a lower share leaves: the same figure as the step's predicted effect."""
    changes = {flag: f"{new:.2f}"}
    found = context.forecast.of(changes) if context.forecast else None
    if found is not None and found.freed_bytes:
        return found.freed_bytes
    moved = kv_change_bytes(changes, context)
    if moved is not None:
        return -moved
    total = context.total_bytes
    return (old - new) * total if total else None


def _share_step(context: Context, old: float) -> float:
    """0.02 to 0.15 by the bytes that were missing, 0.05 when those are not known."""
    total, missing = context.total_bytes, context.shortage_bytes
    if not total or missing is None:
        return 0.05 if old > 0.5 else 0.03
    return min(max(ceil_hundredth(missing / total) + 0.02, 0.03), 0.15)


def _least_share(context: Context) -> float:
    """The smallest share that still holds the weights and the measured activation."""
    engine, total = context.engine, context.total_bytes
    if context.name != "vllm" or not total:
        return 0.0
    modelled = context.forecast.least_share() if context.forecast else None
    if modelled is not None and not engine.kv_bytes:
        return ceil_hundredth(modelled)
    if not engine.weights_bytes:
        return 0.0
    fixed = engine.weights_bytes + (engine.activation_bytes or 0) + (engine.non_torch_bytes or 0)
    return max(ceil_hundredth(fixed / total) + 0.01, _share_for_one_request(context, total))


def _share_for_one_request(context: Context, total: float) -> float:
    """The smallest share at which one request of the full length still fits the KV cache."""
    kv_bytes, concurrency = context.engine.kv_bytes, context.max_concurrency
    old = context.now_or_assumed(context.flag("share"))
    if not kv_bytes or not concurrency or concurrency < 1 or old is None:
        return 0.0
    spare_bytes = kv_bytes * (1 - 1 / concurrency)
    return ceil_hundredth(old - spare_bytes / total)


def _lower_share_in_words(context: Context) -> Draft | None:
    if context.name in ("vllm", "sglang"):
        return None
    return Draft(
        id="lower-memory-share",
        title="Lower the share of the card that is taken in advance",
        why="What is allocated while requests run finds no room beside the memory taken at start.",
        cost="A smaller cache: fewer tokens and requests at a time.",
        action=f"Lower the memory that {context.label} reserves for its cache by about 5% of "
        "the card.",
    )


def raise_share(context: Context) -> Draft | None:
    """Give the KV pool more of the card, where the card has more to give."""
    if context.pinned_kv:
        return raise_pinned_kv(context)
    flag = context.flag("share")
    if context.state_slots:
        return None  # their number is fixed, whatever the share is
    if flag is None or context.name not in ("vllm", "sglang", "lmdeploy"):
        return None
    old = context.now_or_assumed(flag)
    new = None if old is None else _raised(context, old)
    if old is None or new is None or new <= old + 0.004:
        return None
    total, known = context.total_bytes, context.knows(flag)
    gained = f", about {format_bytes((new - old) * total)} a GPU" if total else ""
    gets = "The KV cache gets what the share"
    if context.second_pool:
        gets = f"The {context.second_pool} and the KV cache get what the share"
    return Draft(
        id="raise-memory-share",
        title=f"Raise {flag} to {new:.2f}",
        why=f"{gets} of {old:g} leaves unused{gained}." if known else f"{gets} leaves unused.",
        cost="Less room for peaks outside the KV cache; check that nothing else needs the card.",
        set={flag: f"{new:.2f}"},
        direction="more_kv",
        reason=f"{gets} leaves unused.",
    )


def _raised(context: Context, old: float) -> float | None:
    """The next share: the engine's own figure, else what the gap needs, within what is free."""
    engine, total = context.engine, context.total_bytes
    ceiling = HIGHEST_SHARE
    if context.name == "sglang":
        suggested = context.number("suggested_fraction")
        if suggested is not None:
            return min(ceil_hundredth(suggested), 0.98)
        if engine.available_gpu_bytes is not None:
            spare = engine.available_gpu_bytes - _SGLANG_SLACK
            if spare <= 0 or not total:
                return None
            ceiling = min(ceiling, floor_hundredth(old + spare / total))
        if context.finding.cause == "kv_no_blocks":
            return _over_weights(context, old)
    elif engine.free_at_start_bytes and total and context.at_least("0.9.1"):
        ceiling = min(ceiling, floor_hundredth(engine.free_at_start_bytes / total))
    needed, available = context.number("needed_kv_bytes"), context.number("available_kv_bytes")
    if needed is None and context.forecast and context.name == "vllm":
        needed, available = context.forecast.needed_bytes, context.forecast.pool_bytes
        total = total or context.forecast.total_bytes
    if context.finding.cause == "kv_no_blocks" and not context.knows(context.flag("share") or ""):
        return ceiling  # whatever it is now, it is too low
    wanted = old + 0.03 if old >= 0.85 else max(0.9, old + 0.05)
    if needed is not None and available is not None and total and needed > available:
        wanted = max(wanted, ceil_hundredth(old + (needed - available) / total) + 0.01)
    return min(floor_hundredth(wanted), ceiling)


def _over_weights(context: Context, old: float) -> float | None:
    """A static share of SGLang that leaves something beside the weights, or None if none does."""
    least = ceil_hundredth(context.least_static_share or 0) + 0.02
    if least > HIGHEST_SHARE:
        return None
    if not context.knows("--mem-fraction-static"):
        return HIGHEST_SHARE  # whatever it is now, it is too low
    return max(least, min(old + 0.03, HIGHEST_SHARE))


def fit_share_to_free(context: Context) -> Draft | None:
    """Ask for no more than is free: below free divided by total, with a margin."""
    flag = context.flag("share")
    free, total = context.number("free_bytes"), context.total_bytes
    old = context.now(flag) or context.number("utilization") or context.now_or_assumed(flag)
    if flag is None or old is None:
        return None
    new = old - 0.03
    if free is not None and total:
        new = min(new, floor_hundredth(free / total) - 0.01)
    new = floor_hundredth(new)
    if new < max(0.1, _least_share(context)):
        return None
    seen = f" ({format_bytes(free)} of {format_bytes(total)})" if free is not None else ""
    return Draft(
        id="fit-share-to-free",
        title=f"Lower {flag} to {new:.2f}",
        why=f"The server asked for {old:g} of the card and less was free{seen}.",
        cost="A smaller KV cache; it may become too small for the longest request.",
        set={flag: f"{new:.2f}"},
        direction="less_kv",
    )


# ---------------------------------------------------------------- a KV cache of fixed size
def lower_pinned_kv(context: Context) -> Draft | None:
    """Shrink the pinned KV cache: the share does nothing while a size is pinned."""
    flag = context.pinned_kv
    old = context.now(flag)
    if flag is None or not old:
        return None
    if flag == "--kv-cache-memory-bytes":
        missing = context.shortage_bytes
        new: float = old * 0.85 if missing is None else min(old * 0.95, old - missing - 512 * MIB)
        unit = 256 * MIB if old > 4 * GIB else 64 * MIB
        rounded = floor_to(new, unit)
    else:
        rounded = int(old * 0.85)
    if rounded <= 0:
        return None
    return Draft(
        id="lower-pinned-kv",
        title=f"Lower {flag} to {rounded}",
        why=f"{flag} {old:.0f} fixes the KV cache without checking that it fits; "
        "--gpu-memory-utilization has no effect while it is set.",
        cost="A smaller KV cache: fewer tokens and requests at a time.",
        set={flag: rounded},
    )


def raise_pinned_kv(context: Context) -> Draft | None:
    """Enlarge the pinned KV cache, or let the engine measure instead of counting blocks."""
    flag = context.pinned_kv
    old = context.now(flag)
    if flag is None or not old:
        return None
    if flag == "--num-gpu-blocks-override":
        return drop_block_override(context)
    needed = context.number("needed_kv_bytes")
    new = floor_to(max(needed or 0, old * 1.1) + 64 * MIB, 64 * MIB)
    return Draft(
        id="raise-pinned-kv",
        title=f"Raise {flag} to {new}",
        why=f"{flag} {old:.0f} fixes the KV cache; raising --gpu-memory-utilization does nothing "
        "while it is set.",
        cost="No check: a size that does not fit fails at allocation.",
        set={flag: new},
        direction="more_kv",
    )


def drop_block_override(context: Context) -> Draft | None:
    """Let the engine measure how many KV blocks fit."""
    if context.now("--num-gpu-blocks-override") is None:
        return None
    return Draft(
        id="drop-block-override",
        title="Remove --num-gpu-blocks-override",
        why="The number of KV blocks is fixed by hand; the engine would measure what fits.",
        cost="None; the option is meant for tests.",
        unset=("--num-gpu-blocks-override",),
        direction="more_kv",
    )


def fixed_kv_bytes(context: Context) -> Draft | None:
    """Pin the KV cache somewhat below its measured size, so that the start no longer varies."""
    size = context.engine.kv_bytes
    if context.name != "vllm" or context.pinned_kv or not size or not context.at_least("0.10.2"):
        return None
    new = floor_to(size * 0.9 - (context.shortage_bytes or 0), 256 * MIB)
    if new <= 0:
        return None
    return Draft(
        id="fix-kv-bytes",
        title=f"Fix the KV cache at {format_bytes(new)}",
        why=f"It measured {format_bytes(size)} at start; a fixed size below it leaves the rest "
        "free.",
        cost="A smaller KV cache, and no check that it fits.",
        set={"--kv-cache-memory-bytes": new},
    )


def fp8_kv(context: Context) -> Draft | None:
    """Half the bytes per token, where the release can use it."""
    flag = "--kv-cache-dtype"
    if context.name not in ("vllm", "sglang"):
        return None
    if str(context.force.get(flag, "auto")) not in ("auto", "None", "bfloat16", "float16", "bf16"):
        return None
    if context.name == "vllm":
        cached = context.switched_on("--enable-prefix-caching")
        if cached and not context.at_least("0.5.5"):  # refused together until then
            return None
        if context.generation == "V1" and not context.at_least("0.8.2"):  # falls back to V0
            return None
    formats = known_formats(context.engine, context.forecast)
    if formats is not None and "fp8" not in formats:
        return _int8_kv(flag) if "int8_per_token_head" in formats else None
    limits = "; needs an attention backend that reads FP8 on this card" + _fp8_limits(context)
    return Draft(
        id="fp8-kv-cache",
        title="Store the KV cache as FP8",
        why="A quarter of the bytes per token: about four times the tokens in the same memory."
        if context.kv_bits == 32
        else "Half the bytes per token: about twice the tokens in the same memory.",
        cost=f"Some accuracy{limits if only_flashinfer(context.engine, context.forecast) else ''}.",
        set={flag: "fp8"},
    )


def _int8_kv(flag: str) -> Draft:
    return Draft(
        id="int8-kv-cache",
        title="Store the KV cache in 8-bit integers with a scale per token and head",
        why="Half the bytes per token; FP8 has no backend on this card in this release.",
        cost="Some accuracy.",
        set={flag: "int8_per_token_head"},
    )


def _fp8_limits(context: Context) -> str:
    """Where FP8 does not work, and what does there instead."""
    if context.name != "vllm":
        return ""
    if context.generation == "V1" and not context.at_least("0.10.0"):
        return ", else (all but Hopper) this release falls back to V0"
    other = "; int8_per_token_head runs on any card" if context.at_least("0.20.0") else ""
    return f" (on A100 only FlashInfer), else the start is refused{other}"
