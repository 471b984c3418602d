"""Context lengths and rotary tables, from the position settings of a model's configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomwatch.memory.config_reader import Reader
from oomwatch.memory.model_config import Attention, LatentAttention, Layer

_FINAL: Final = ("default", "llama3", "su", "longrope", "mrope")
"""Rotary kinds whose position count already is the length that can be used."""
_LONGEST: Final = 2**31
_ASSUMED: Final = 8192
_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
)


def max_model_len(read: Reader) -> int:
    """The context length, in tokens, that an engine derives when none is asked for."""
    positions = read.number(*_NAMES)
    if not positions:
        read.unknown.append(f"context length ({_ASSUMED} assumed)")
        return _ASSUMED
    rope = _rope(read)
    if _kind(rope) in _FINAL or read.model_type.startswith("gemma3"):
        return min(positions, _LONGEST)
    product = _yarn_positions(rope)
    if product is not None:
        # Released files write either the product or the original length as the position count.
        return min(max(product, positions), _LONGEST)
    factor = rope.get("factor")
    if isinstance(factor, int | float) and 1 < factor < 1e6:
        return min(int(positions * factor), _LONGEST)
    return min(positions, _LONGEST)


def rope_cache_bytes(read: Reader, layers: Sequence[Layer]) -> int:
    """Bytes of the cosine and sine tables: positions x rotary width x 2 bytes.

    The engine keeps one table per distinct rotary setting and shares it among the layers.
    """
    if read.get("position_embedding_type") == "nope":
        return 0
    if read.model_type == "llama4_text":
        return 0  # lists 10 million positions; printed loads do not contain such a table
    rope = _rope(read)
    positions = _yarn_positions(rope) or read.size(*_NAMES, default=_ASSUMED)
    if rope.get("mrope_section"):
        positions *= 4  # multi-axis tables are four times as long, for images and videos
    partial = read.get("partial_rotary_factor") or rope.get("partial_rotary_factor")
    share = partial if isinstance(partial, int | float) and 0 < partial <= 1 else 1.0
    two_bases = bool(read.get("rope_local_base_freq")) or read.model_type.startswith("gemma")
    widths: set[tuple[str, int]] = set()
    for layer in layers:
        mixer = layer.mixer
        if isinstance(mixer, LatentAttention):
            widths.add(("latent", mixer.rope_dim))
        elif isinstance(mixer, Attention):
            base = "local" if mixer.window_tokens and two_bases else "main"
            widths.add((base, read.number("rotary_dim") or int(mixer.head_dim * share)))
    return sum(min(positions, _LONGEST) * width * 2 for _, width in widths)


def _rope(read: Reader) -> Mapping[str, Any]:
    for name in ("rope_scaling", "rope_parameters"):
        value = read.get(name)
        if isinstance(value, Mapping):
            nested = next((v for v in value.values() if isinstance(v, Mapping)), None)
            return nested if nested is not None and "rope_type" not in value else value
    return {}


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _yarn_positions(rope: Mapping[str, Any]) -> int | None:
    """Original length times the factor, for YaRN."""
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if _kind(rope) != "yarn" or isinstance(original, bool) or isinstance(factor, bool):
        return None
    if not isinstance(original, int | float) or not isinstance(factor, int | float):
        return None
    product = original * factor
    return int(product) if math.isfinite(product) and 1 <= product <= _LONGEST else None
