"""Steps on the bytes of the weights: more GPUs, fewer bits, host memory."""

from __future__ import annotations

import math
import re
from typing import Final

from oomwatch.remedies.context import (
    Context,
    Draft,
    power_of_two_below,
)
from oomwatch.remedies.moves_memory import HIGHEST_SHARE
from oomwatch.units import GIB

_FEWER: Final = 256
"""Sequences at a time that serve most loads, where a large card's default is 1024."""
_QUANTIZED: Final = re.compile(
    r"awq|gptq|fp8|fp4|int[48]|w[48]a(?:8|16)|gguf|bnb|bitsandbytes|[48]-?bit|mxfp|quant",
    re.IGNORECASE,
)


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
    if context.on_cpu:
        return None
    old = int(context.now_or_assumed(flag) or 1)
    stages = context.flag("stages")
    if old >= 8 and stages is not None:
        now = int(context.now_or_assumed(stages) or 1)
        return _ranks_draft(stages, now * 2, old * now * 2)
    new = max(power_of_two_below(old) * 2, _ranks_for_weights(context, old))
    if context.forecast is not None and not context.forecast.now.fits:
        wider = [n for n in (2, 4, 8, 16) if n >= power_of_two_below(old) * 2]
        new = context.forecast.ranks_that_start(flag, wider) or new
    if not _heads_split(context, new):
        return None
    gpus = int(context.now_or_assumed(stages) or 1)
    return _ranks_draft(flag, new, new * gpus, _fewer_are_tight(context, flag, new, gpus))


def _fewer_are_tight(context: Context, flag: str, chosen: int, stages: int) -> str:
    """That fewer GPUs hold the weights as well, and what else that takes."""
    forecast = context.forecast
    if forecast is None or forecast.now.fits:
        return ""
    share, sequences = context.flag("share") or "", context.flag("sequences") or ""
    least = int(context.now_or_assumed(flag) or 1)
    ranks = chosen // 2
    found = forecast.of({flag: ranks}) if ranks > least else None
    if found is None or found.after.refusal not in ("kv_no_blocks", "kv_lt_max_len"):
        return ""
    more: dict[str, str] = {}
    if found.after.settings.utilization < HIGHEST_SHARE and not context.pinned_kv:
        more[share] = f"{HIGHEST_SHARE:g}"
    if context.name == "vllm" and found.after.settings.max_num_seqs > _FEWER:
        more[sequences] = str(_FEWER)
    for flags in (*({name: more[name]} for name in more), more):
        then = forecast.of({flag: ranks, **flags})
        if flags and then is not None and then.after.fits:
            named = " ".join(f"{name} {value}" for name, value in flags.items())
            return f" {ranks * stages} GPUs are tight: they start with {named} too."
    return f" {ranks * stages} GPUs hold the weights, with too little left for the KV cache."


def _ranks_draft(flag: str, new: int, gpus: int, tight: str = "") -> Draft:
    return Draft(
        id="more-ranks",
        title=f"Split the model over {gpus} GPUs",
        why=f"Each GPU then holds a smaller part of weights and KV cache.{tight}",
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
    if context.forecast is not None:
        return context.forecast.splits(ranks)
    config = context.engine.model_config or {}
    heads = config.get("num_attention_heads")
    return not isinstance(heads, int) or heads % ranks == 0


_SMALLER: Final = {
    "llama.cpp": "a smaller GGUF quantization (such as Q4_K_M)",
    "ollama": "a smaller quantization (a tag such as q4_K_M)",
}
"""Of engines with formats of their own."""
_LAYERS: Final = {"llama.cpp": "--n-gpu-layers", "ollama": "num_gpu"}
"""The setting for how many layers are on the GPU, of engines that run the rest on the CPU."""


def quantized_checkpoint(context: Context) -> Draft | None:
    """Fewer bytes per weight."""
    already = _QUANTIZED.search(context.engine.model or "") or context.given("--quantization")
    kind = _SMALLER.get(context.name or "") or (
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
    if setting := _LAYERS.get(context.name or ""):
        return Draft(
            id="fewer-gpu-layers",
            title="Put fewer layers on the GPU",
            why="The layers that are not on the GPU stay in host memory and run on the CPU.",
            cost="Much slower with each layer that runs on the CPU.",
            action=f"Lower {setting}, so that only as many layers as fit are on the GPU.",
        )
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
