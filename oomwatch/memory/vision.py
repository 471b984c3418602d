"""The image encoder of a model: its weights, and the patches that the engine profiles with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.memory.config_reader import Reader
from oomwatch.memory.model_config import VisionTower

_DYNAMIC_TOKENS: Final = 16384
"""Language tokens of the largest image where the processor, not the model, limits its size."""


def read_tower(read: Reader, hidden: int) -> VisionTower | None:
    """The encoder in ``vision_config``, with a projector to `hidden`; None for text models."""
    raw = read.outer.get("vision_config") or read.outer.get("vit_config")
    if not isinstance(raw, Mapping):
        return _clip_large(hidden) if read.outer.get("img_processor") else None
    width = _pick(raw, "vt_hidden_size", "hidden_size", "width", "embed_dim")
    depth = _pick(raw, "vt_num_hidden_layers", "num_hidden_layers", "depth", "layers")
    if not width or not depth:
        read.unknown.append("size of the image encoder")
        return None
    inner = _pick(raw, "vt_intermediate_size", "intermediate_size") or 4 * width
    kind, family = str(raw.get("model_type") or ""), read.model_type
    patch, merge = _pick(raw, "patch_size") or 14, _merge(raw, read)
    size = raw.get("image_size")
    patches = (
        math.ceil(size / patch) ** 2
        if isinstance(size, int) and size > 0
        else _DYNAMIC_TOKENS * merge * merge
    )
    positions = _pick(raw, "num_position_embeddings", "position_embedding_size")
    frames = _pick(raw, "temporal_patch_size") or 1
    return VisionTower(
        layers=depth,
        hidden=width,
        intermediate=inner,
        gated=kind == "pixtral" or kind.startswith("gemma4") or family.startswith("qwen2_5_vl"),
        patch=patch,
        projector_parameters=_projector(
            raw, read, width=width, inner=inner, merge=merge, hidden=hidden
        ),
        extra_parameters=(positions or (patches if size else 0)) * width
        + 3 * patch * patch * width * frames,
        max_patches_per_item=patches,
        merge=merge * merge,
        block_mask=kind == "pixtral",
        sharded="qwen" in f"{kind} {family}",
        shards_mlp=kind.startswith("siglip"),
    )


def _pick(raw: Mapping[str, Any], *names: str) -> int:
    """The first positive integer of these keys, else 0."""
    for name in names:
        value = raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _merge(raw: Mapping[str, Any], read: Reader) -> int:
    """Patches per side that are merged into one language token."""
    kernel = raw.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel and isinstance(kernel[0], int):
        return max(1, kernel[0])
    ratio = raw.get("pixel_shuffle_ratio")
    if isinstance(ratio, float) and 0 < ratio < 1:
        return round(1 / ratio)
    return (
        _pick(raw, "pooling_kernel_size", "spatial_merge_size")
        or _pick(read.outer, "spatial_merge_size")
        or 1
    )


def _projector(
    raw: Mapping[str, Any], read: Reader, *, width: int, inner: int, merge: int, hidden: int
) -> int:
    """Weights between the encoder and the language model, in elements."""
    kind, outer = str(raw.get("model_type") or ""), str(read.outer.get("model_type") or "")
    block = width * merge * merge
    if "qwen" in f"{kind} {read.model_type}" or "kimi" in outer:
        return block * block + block * hidden
    if kind == "llama4_vision_model":
        out = _pick(raw, "projector_output_dim") or 4096
        return inner * out + out * out + (_pick(raw, "vision_output_dim") or out) * hidden
    if kind == "pixtral":
        return width * hidden + hidden * hidden + width * width * merge * merge
    return width * hidden + (hidden * hidden if "llava" in outer else 0)


def _clip_large(hidden: int) -> VisionTower:
    """Phi-3 vision names its encoder only: CLIP ViT-L/14 at 336 pixels, up to 17 crops."""
    return VisionTower(
        layers=24,
        hidden=1024,
        intermediate=4096,
        gated=False,
        patch=14,
        projector_parameters=4 * 1024 * hidden + hidden * hidden,
        extra_parameters=1024 * (577 + 3 * 14 * 14),
        max_patches_per_item=576 * 17,
    )
