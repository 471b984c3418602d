"""A model as the memory model sees it: layers, their attention and MLP kinds, vocabulary, towers.

`hf_config` fills these records from configuration files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

DTYPE_BYTES: Final = {
    "float32": 4,
    "float": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "auto": 2,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """Softmax attention of one layer (MHA, GQA or MQA); sizes in elements, over all ranks."""

    heads: int
    kv_heads: int
    head_dim: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    output_gate: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "full"] | None = None
    sinks: bool = False
    shares_kv: bool = False
    """The layer reads another layer's pages and has none of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek, Kimi, GLM-5); one latent per token, no V."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int = 0
    index_dim: int = 0
    """Head size of the sparse indexer's own key cache; 0 without one."""
    has_indexer: bool = False
    """Whether this layer computes its own index (the cache exists on every layer)."""

    @property
    def latent_dim(self) -> int:
        """Elements kept per token."""
        return self.kv_lora_rank + self.rope_dim


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrent:
    """A layer with a constant state per sequence: Mamba 2, gated delta net or Kimi delta (KDA)."""

    kind: Literal["mamba2", "gdn", "kda"]
    heads: int
    head_dim: int
    state_dim: int
    conv_dim: int
    conv_kernel: int
    state_dtype_bytes: int
    key_dim: int = 0  # GDN: elements of all key heads
    groups: int = 0  # Mamba 2

    @property
    def value_dim(self) -> int:
        """Elements of all (value) heads."""
        return self.heads * self.head_dim


Mixer = Attention | LatentAttention | Recurrent


@dataclasses.dataclass(frozen=True, slots=True)
class Mlp:
    """The feed-forward part of one layer; widths in elements, over all ranks."""

    dense: int = 0
    experts: int = 0
    expert_width: int = 0
    active_experts: int = 0
    shared_width: int = 0
    shared_gate: bool = False
    expert_bias: bool = False
    router_dtype_bytes: int = 2
    experts_beside: bool = False
    """Gemma 4: the experts stand beside the dense MLP, not inside a module named ``mlp``."""
    gated: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer."""

    mixer: Mixer
    mlp: Mlp


@dataclasses.dataclass(frozen=True, slots=True)
class VisionTower:
    """An image encoder with its projector."""

    layers: int
    hidden: int
    intermediate: int
    gated: bool
    patch: int
    projector_parameters: int
    extra_parameters: int
    max_patches_per_item: int
    """Patches of the largest image that the engine profiles with."""
    merge: int = 1
    """Patches that become one language token."""
    block_mask: bool = False
    """Images are kept apart by a mask over all patches of the batch (Pixtral)."""
    sharded: bool = False
    """Split over the tensor-parallel ranks; else every rank holds a copy."""
    shards_mlp: bool = False
    """Only the MLPs are split, attention is copied (SigLIP: a Gemma 3 load on four cards)."""

    @property
    def parameters(self) -> int:
        """Weights of tower and projector, in elements."""
        mlp = (3 if self.gated else 2) * self.hidden * self.intermediate
        per_layer = 4 * self.hidden * self.hidden + mlp + 9 * self.hidden
        return self.layers * per_layer + self.projector_parameters + self.extra_parameters

    def parameters_on(self, ranks: int) -> int:
        """Weights that one of `ranks` tensor-parallel ranks holds, in elements."""
        if self.sharded:
            return self.parameters // ranks
        mlp = self.layers * (3 if self.gated else 2) * self.hidden * self.intermediate
        return self.parameters - (mlp - mlp // ranks if self.shards_mlp else 0)


@dataclasses.dataclass(frozen=True, eq=False)
class ModelConfig:
    """Everything about a model that decides memory; hashed by identity, so results are cached."""

    architecture: str
    model_type: str
    dtype_bytes: int
    hidden: int
    vocab: int
    tied_embeddings: bool
    layers: tuple[Layer, ...]
    max_model_len: int
    rope_cache_bytes: int
    norms_per_layer: int = 2
    vision: VisionTower | None = None
    quantization: Mapping[str, Any] | None = None
    mtp_layers: int = 0
    encoder_tokens: int = 0
    """Encoder positions that cross attention keeps per request (Whisper)."""
    extra_parameters: int = 0
    """Weights beside the decoder layers, split over the ranks (audio encoder)."""
    unknown: tuple[str, ...] = ()
    """What could not be read and had to be assumed; widens every interval."""

    @property
    def attention_layers(self) -> tuple[Layer, ...]:
        """Layers that keep keys and values per token."""
        return tuple(x for x in self.layers if not isinstance(x.mixer, Recurrent))

    @property
    def is_hybrid(self) -> bool:
        """Attention mixed with layers of constant state."""
        return any(isinstance(x.mixer, Recurrent) for x in self.layers)

    @property
    def is_latent(self) -> bool:
        """Multi-head latent attention."""
        return any(isinstance(x.mixer, LatentAttention) for x in self.layers)

    @property
    def latent_dim(self) -> int | None:
        """Elements that MLA keeps per token and layer; None without it."""
        return next(
            (x.mixer.latent_dim for x in self.layers if isinstance(x.mixer, LatentAttention)), None
        )

    @property
    def is_sparse_latent(self) -> bool:
        """Latent attention with a sparse indexer."""
        return any(isinstance(x.mixer, LatentAttention) and x.mixer.index_dim for x in self.layers)
