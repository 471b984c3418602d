"""The activation peak of a profile run: the sampler, one layer's forward pass, an image encoder.

Constants are fitted to figures that servers printed; what each was read from stands beside it.
"""

from __future__ import annotations

from typing import Final

from oomwatch.memory.model_config import Attention, LatentAttention, Layer, ModelConfig
from oomwatch.memory.settings import Settings
from oomwatch.memory.term import Term
from oomwatch.units import GIB

# Bytes per logit (rows x vocabulary) alive at the sampler's peak.
SAMPLER_V0: Final = 47.6
"""V0 from 0.8: two starts that print it, Phi-4 on A100 and Qwen2.5-0.5B on A6000, 256 sequences."""
SAMPLER_SORT: Final = 38.4
"""PyTorch's sort for top-k and top-p: six 0.11.0 starts on H100 print 38.3 to 38.6, and V0 before
0.8 the same (Llama-3-8B 0.6.5, Qwen2.5-14B 0.7.2, Qwen2.5-7B 0.7.3)."""
SAMPLER_TRITON: Final = 14.0
"""16-bit logits, 32-bit logits, probabilities and noise, from 0.17: with the buffer below and 0.37
GiB non-torch this gives 2.53 of 2.45 GiB (H100, 0.19.1) and 1.14 of 1.23 GiB (A100, 0.19.0)."""
TRITON_BUFFER_ROWS: Final = 120
"""Rows of 32-bit scratch in the same sampler: one per multiprocessor (108 on A100, 132 on H100)."""
SAMPLER_FLASHINFER: Final = 10.0
"""16-bit logits, 32-bit logits, probabilities: a 0.10.1 start on A100 (0.86 of 0.86 GiB with its
non-torch); a start of 0.27 leaves at most 9.9."""

_ENCODER_INPUT_BYTES: Final = 2 * 3 * 4
"""Per pixel of a patch: two frames, three colours, 32 bits."""


def activation_peak(model: ModelConfig, settings: Settings) -> Term:
    """The peak of the profile run: the sampler, one layer's forward pass, or the image encoder."""
    tokens = settings.max_num_batched_tokens
    hidden = tokens * model.hidden * model.dtype_bytes
    rows = min(settings.max_num_seqs, tokens, settings.decode_batch or tokens)
    per_logit = _sampler_bytes(settings)
    buffer = 4 * TRITON_BUFFER_ROWS if per_logit == SAMPLER_TRITON else 0
    sampler = (rows * per_logit + buffer) * model.vocab + hidden
    forward = (
        tokens
        * model.dtype_bytes
        * max(_forward_elements(model, layer, settings) for layer in model.layers)
    )
    peak = max(sampler, forward)
    if model.vision is None or not settings.encoder:
        return Term.around(peak, 0.1, 0.1 * GIB)
    encoder, kept = _encoder(model, settings)
    return Term.around(max(peak + kept, encoder), 0.4, 0.2 * GIB)


def _sampler_bytes(settings: Settings) -> float:
    if settings.engine == "sglang":
        return SAMPLER_FLASHINFER
    if settings.v0:
        return SAMPLER_V0 if settings.version >= (0, 8, 0) else SAMPLER_SORT
    if settings.flashinfer_sampler:
        return SAMPLER_FLASHINFER
    return SAMPLER_TRITON if settings.version >= (0, 17, 0) else SAMPLER_SORT


def _forward_elements(model: ModelConfig, layer: Layer, settings: Settings) -> int:
    """Elements per token alive in one layer: the widest of attention and MLP.

    MLP: gate and up projections, their product, and three hidden vectors (four in V0 from 0.7).
    Experts: each token's copies for its active experts, as the fused kernels hold them.
    """
    ranks, attention, hidden = settings.tensor_parallel, settings.attention_ranks, model.hidden
    kept = (4 if settings.v0 and settings.version >= (0, 7, 0) else 3) * hidden
    mlp = layer.mlp
    wide = 3 * max(mlp.dense, mlp.shared_width) // ranks
    if mlp.experts:
        width = mlp.expert_width
        if not settings.expert_parallel:
            width //= ranks * settings.data_parallel
        wide += mlp.active_experts * (max(2 * width, hidden) + width)
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        mixed = (2 * mixer.heads + 2 * mixer.kv_heads) * mixer.head_dim // attention
    elif isinstance(mixer, LatentAttention):
        per_head = 3 * (mixer.nope_dim + mixer.rope_dim) + 2 * (mixer.nope_dim + mixer.value_dim)
        mixed = mixer.heads * per_head // attention
    else:
        mixed = (2 * mixer.conv_dim + 3 * mixer.value_dim) // attention
    return kept + max(wide, mixed)


def _encoder(model: ModelConfig, settings: Settings) -> tuple[float, float]:
    """(peak while images are encoded, bytes of their embeddings kept during the text pass)."""
    vision = model.vision
    if vision is None:
        return 0.0, 0.0
    per_item = max(1, vision.max_patches_per_item // vision.merge)
    items = max(1, settings.max_num_batched_tokens // per_item)
    patches = items * vision.max_patches_per_item
    ranks = settings.tensor_parallel if vision.sharded else 1
    width = 3 * vision.hidden + (3 if vision.gated else 2) * vision.intermediate // ranks
    pixels = patches * vision.patch**2 * _ENCODER_INPUT_BYTES
    kept = items * per_item * model.hidden * model.dtype_bytes
    mask = patches**2 * model.dtype_bytes if vision.block_mask else 0
    return patches * width * model.dtype_bytes + pixels + mask, kept
