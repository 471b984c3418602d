"""Steps that change how the card is divided: the share, a pinned KV cache, its type, ranks."""

from __future__ import annotations

import math
import re
from typing import Final

from oomwatch.engines import flags
from oomwatch.remedies.context import (
    Context,
    Draft,
    ceil_hundredth,
    floor_hundredth,
    floor_to,
    power_of_two_below,
)
from oomwatch.units import GIB, MIB, format_bytes

_CEILING: Final = 0.95  # above it, runtime contexts and graphs have no room on any card
_SGLANG_SLACK: Final = 6 * GIB  # SGLang's own advice: 5 to 8 GB left at the ready line is good
_QUANTIZED: Final = re.compile(
    r"awq|gptq|fp8|fp4|int[48]|w[48]a(?:8|16)|gguf|bnb|bitsandbytes|[48]-?bit|mxfp|quant",
    re.IGNORECASE,
)


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
    total = context.total_bytes
    freed = f" (about {format_bytes((old - new) * total)})" if total else ""
    return Draft(
        id="lower-memory-share",
        title=f"Lower {flag} to {new:.2f}",
        why=f"The share of {old:g} leaves too little for what is allocated outside the KV cache; "
        f"{new:.2f} leaves {(old - new) * 100:.0f}% of the card more{freed}.",
        cost="A smaller KV cache: fewer tokens and requests at a time.",
        set={flag: f"{new:.2f}"},
    )


def _share_step(context: Context, old: float) -> float:
    """0.02 to 0.15 by the bytes that were missing, 0.05 when those are not known."""
    total, missing = context.total_bytes, context.shortage_bytes
    if not total or missing is None:
        return 0.05 if old > 0.5 else 0.03
    return min(max(ceil_hundredth(missing / total) + 0.02, 0.03), 0.15)


def _least_share(context: Context) -> float:
    """The smallest share that still holds the weights and the measured activation."""
    engine, total = context.engine, context.total_bytes
    if context.name != "vllm" or not total or not engine.weights_bytes:
        return 0.0
    fixed = engine.weights_bytes + (engine.activation_bytes or 0) + (engine.non_torch_bytes or 0)
    return ceil_hundredth(fixed / total) + 0.01


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
    if flag is None or context.name not in ("vllm", "sglang", "lmdeploy"):
        return None
    old = context.now_or_assumed(flag)
    new = None if old is None else _raised(context, old)
    if old is None or new is None or new <= old + 0.004:
        return None
    total = context.total_bytes
    gained = f", about {format_bytes((new - old) * total)} a GPU" if total else ""
    return Draft(
        id="raise-memory-share",
        title=f"Raise {flag} to {new:.2f}",
        why=f"The KV cache gets what the share of {old:g} leaves unused{gained}.",
        cost="Less room for peaks outside the KV cache; check that nothing else needs the card.",
        set={flag: f"{new:.2f}"},
        direction="more_kv",
    )


def _raised(context: Context, old: float) -> float | None:
    """The next share: the engine's own figure, else what the gap needs, within what is free."""
    engine, total = context.engine, context.total_bytes
    ceiling = _CEILING
    if context.name == "sglang":
        suggested = context.number("suggested_fraction")
        if suggested is not None:
            return min(ceil_hundredth(suggested), 0.98)
        if engine.available_gpu_bytes is not None:
            spare = engine.available_gpu_bytes - _SGLANG_SLACK
            if spare <= 0 or not total:
                return None
            ceiling = min(ceiling, floor_hundredth(old + spare / total))
    elif engine.free_at_start_bytes and total and context.at_least("0.9.1"):
        ceiling = min(ceiling, floor_hundredth(engine.free_at_start_bytes / total))
    needed, available = context.number("needed_kv_bytes"), context.number("available_kv_bytes")
    wanted = old + 0.03 if old >= 0.85 else max(0.9, old + 0.05)
    if needed is not None and available is not None and total and needed > available:
        wanted = max(wanted, ceil_hundredth(old + (needed - available) / total) + 0.01)
    return min(floor_hundredth(wanted), ceiling)


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
    return Draft(
        id="fp8-kv-cache",
        title="Store the KV cache as FP8",
        why="Half the bytes per token: about twice the tokens in the same memory.",
        cost="Some accuracy; needs an attention backend that reads FP8 on this card"
        f"{_fp8_limits(context)}.",
        set={flag: "fp8"},
    )


def _fp8_limits(context: Context) -> str:
    """Where FP8 does not work, and what does there instead."""
    if context.name != "vllm":
        return ""
    if context.generation == "V1" and not context.at_least("0.10.0"):
        return ", else (all but Hopper) this release falls back to V0"
    other = "; int8_per_token_head runs on any card" if context.at_least("0.20.0") else ""
    return f" (on A100 only FlashInfer), else the start is refused{other}"


# ---------------------------------------------------------------- weights
def more_ranks(context: Context) -> Draft | None:
    """Split weights and KV heads over more GPUs."""
    flag = context.flag("ranks")
    if flag is None:
        return Draft(
            id="more-gpus",
            title="Use more GPUs or a larger GPU",
            why="Each GPU then holds a smaller part of the model.",
            cost="More GPUs.",
            action=f"Split the model over more GPUs, or run {context.label} on a larger card.",
        )
    old = int(context.now_or_assumed(flag) or 1)
    stages = context.flag("stages")
    if old >= 8 and stages is not None:
        now = int(context.now_or_assumed(stages) or 1)
        return _ranks_draft(stages, now * 2, old * now * 2)
    new = max(power_of_two_below(old) * 2, _ranks_for_weights(context, old))
    if not _heads_split(context, new):
        return None
    return _ranks_draft(flag, new, new * int(context.now_or_assumed(stages) or 1))


def _ranks_draft(flag: str, new: int, gpus: int) -> Draft:
    return Draft(
        id="more-ranks",
        title=f"Split the model over {gpus} GPUs",
        why="Each GPU then holds a smaller part of weights and KV cache.",
        cost=f"Needs {gpus} GPUs and traffic between them.",
        set={flag: new},
    )


def _ranks_for_weights(context: Context, old: int) -> int:
    weights, total = context.engine.weights_bytes, context.total_bytes
    if not weights or not total:
        return 2
    new = 1
    while new < 8 and weights * old / new > 0.8 * total:
        new *= 2
    return new


def _heads_split(context: Context, ranks: int) -> bool:
    config = context.engine.model_config or {}
    heads = config.get("num_attention_heads")
    return not isinstance(heads, int) or heads % ranks == 0


def quantized_checkpoint(context: Context) -> Draft | None:
    """Fewer bytes per weight."""
    already = _QUANTIZED.search(context.engine.model or "") or context.given("--quantization")
    kind = (
        "a smaller model, or one quantized to fewer bits"
        if already
        else "a quantized checkpoint (FP8, AWQ, GPTQ)"
    )
    return Draft(
        id="quantized-checkpoint",
        title="Use a quantized checkpoint or a smaller model",
        why="The weights take more than the card can give.",
        cost="Some accuracy.",
        action=f"Serve {kind} of this model, or use a larger GPU.",
    )


def pre_quantized_checkpoint(context: Context) -> Draft | None:
    """No conversion at load."""
    return Draft(
        id="pre-quantized-checkpoint",
        title="Use a pre-quantized checkpoint",
        why="Converting at load holds the original weights and their converted copy together.",
        cost="A different checkpoint.",
        action=f"Load a checkpoint that is already quantized, so that {context.label} converts "
        "nothing.",
    )


def quantize_online(context: Context) -> Draft | None:
    """FP8 weights made at load, for a checkpoint in 16 bits."""
    name = context.engine.model
    if context.name not in ("vllm", "sglang") or context.given("--quantization"):
        return None
    if name is None or _QUANTIZED.search(name):
        return None
    return Draft(
        id="quantize-online",
        title="Quantize the weights to FP8 while loading",
        why="FP8 halves 16-bit weights.",
        cost="Some accuracy; the load itself still holds 16-bit parts for a while.",
        set={"--quantization": "fp8"},
    )


def cpu_offload(context: Context) -> Draft | None:
    """Part of the weights in host memory."""
    if context.name not in ("vllm", "sglang"):
        return None
    if context.name == "vllm" and context.generation == "V1" and not context.at_least("0.8.3"):
        return None
    old = context.now("--cpu-offload-gb") or 0
    total, weights = context.total_bytes, context.engine.weights_bytes
    part = math.ceil((total or 64 * GIB) * 0.15 / GIB)
    if total and weights and weights > 0.8 * total:
        part = math.ceil((weights - 0.8 * total) / GIB) + 1
    return Draft(
        id="cpu-offload",
        title=f"Keep {old + part:.0f} GiB of weights in host memory",
        why="They are streamed to the GPU at each step.",
        cost="Much slower; needs that much pinned host memory for each GPU.",
        set={"--cpu-offload-gb": int(old + part)},
    )


def language_model_only(context: Context) -> Draft | None:
    """Leave out the encoders of a multimodal model that is used for text."""
    if context.name != "vllm" or not context.says("multimodal"):
        return None
    return Draft(
        id="language-model-only",
        title="Load only the language model",
        why="The image and audio encoders take memory that a text service does not need.",
        cost="No images, video or audio.",
        set={"--language-model-only": True},
    )


# ---------------------------------------------------------------- the allocator
def expandable_segments(context: Context) -> Draft | None:
    """Segments that grow, where PyTorch holds enough memory in pieces that are too small."""
    tried, held = context.number("tried_bytes"), context.number("reserved_unallocated_bytes")
    if context.finding.cause != "fragmentation" and (held is None or tried is None or held < tried):
        return None
    if context.switched_on("--enable-sleep-mode") and not context.at_least("0.21.0"):
        return None  # "Expandable segments are not compatible with memory pool"
    connector = context.given("--kv-transfer-config")
    if connector and context.at_least("0.21.0") and not context.switched_on("--enable-sleep-mode"):
        return None  # refused with connectors that register memory
    variable, old = allocator_setting(context)
    if "expandable_segments:true" in old.lower():
        return None
    kept = [part for part in old.split(",") if part and not part.startswith("expandable_segments")]
    size = f"{format_bytes(held)} reserved but unused" if held else "memory reserved but unused"
    return Draft(
        id="expandable-segments",
        title="Let the allocator's segments grow",
        why=f"PyTorch held {size}, in pieces smaller than the request.",
        cost="None known; not for servers whose KV cache is registered for transfer.",
        env={variable: ",".join([*kept, "expandable_segments:True"])},
    )


def expandable_segments_off(context: Context) -> Draft | None:
    """Plain segments where the driver cannot map them piecewise."""
    variable, old = allocator_setting(context)
    if "expandable_segments:false" in old.lower():
        return None
    kept = [part for part in old.split(",") if part and not part.startswith("expandable_segments")]
    return Draft(
        id="expandable-segments-off",
        title="Turn expandable segments off",
        why="Mapping memory piecewise fails on memory shared with the host and on virtual drivers.",
        cost="More fragmentation.",
        env={variable: ",".join([*kept, "expandable_segments:False"])},
    )


def smaller_split(context: Context) -> Draft | None:
    """Keep large blocks whole, where expandable segments are on or cannot be used."""
    variable, old = allocator_setting(context)
    if "max_split_size_mb" in old:
        return None
    return Draft(
        id="max-split-size",
        title="Keep large blocks of the allocator whole",
        why="Blocks above the limit are not cut into pieces that later requests cannot use.",
        cost="Somewhat slower allocation.",
        env={variable: ",".join([*filter(None, old.split(",")), "max_split_size_mb:512"])},
    )


def allocator_setting(context: Context) -> tuple[str, str]:
    """The allocator's variable (the name the user already has, if any) and its value now."""
    env = context.engine.env
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env:
            return name, env[name]
    return flags.allocator_variable(context.name, context.version), ""
