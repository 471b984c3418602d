"""Bytes of the weights on one GPU, tensor by tensor as the engine builds them.

The figure is what the engine prints as "Model loading took": tensors as PyTorch's caching
allocator hands them out, with the fused projections, rank shares, kernel padding and small buffers
(norms, rotary tables, absorbed MLA projections) that file sizes and parameter counts leave out.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Final

from oomwatch.memory.devices import Device
from oomwatch.memory.model_config import (
    Attention,
    LatentAttention,
    Layer,
    Mlp,
    ModelConfig,
    Recurrent,
)
from oomwatch.memory.quantization import (
    MXFP4,
    PLAIN,
    Format,
    Quantization,
    quantization_of,
)
from oomwatch.units import MIB

_EAGLE3_VOCABULARY: Final = 32_000
_VOCAB_PADDING: Final = 64  # rows; vocabulary matrices are padded before they are split
_SMALL: Final = 512  # bytes; the allocator's rounding (c10 CUDACachingAllocator)
_LARGE: Final = 10 * MIB  # above: own segment, rounded up to 2 MiB
_SEGMENT: Final = 2 * MIB
_KEPT_REMAINDER: Final = MIB  # a remainder up to this size is not split off


def allocated(size: int) -> int:
    """Bytes the caching allocator counts for a tensor of `size` bytes.

    From 10 MiB a tensor gets a segment of its own in steps of 2 MiB; a rest of up to 1 MiB is not
    split off and counts as allocated. This is why 47.5 MiB matrices cost 48 MiB each.
    """
    rounded = -(-size // _SMALL) * _SMALL
    if rounded < _LARGE:
        return rounded
    segment = -(-rounded // _SEGMENT) * _SEGMENT
    return segment if segment - rounded <= _KEPT_REMAINDER else rounded


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """How the model is spread over ranks, pipeline stages, experts and data-parallel replicas."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    attention_data: int = 1
    """SGLang's data-parallel attention: attention is split over tensor / attention_data ranks."""

    @property
    def attention_tensor(self) -> int:
        """Ranks that share one copy of the attention weights."""
        return max(1, self.tensor // self.attention_data)


def stages(layers: int, pipeline: int) -> tuple[range, ...]:
    """Layer numbers of each pipeline stage, as vLLM divides them.

    Left-over layers go to the stages before the last, from the back.
    """
    base, rest = divmod(layers, pipeline)
    counts = [base] * pipeline
    for i in range(2, rest + 2):
        counts[-i % pipeline if pipeline > 1 else 0] += 1
    found, start = [], 0
    for count in counts:
        found.append(range(start, start + count))
        start += count
    return tuple(found)


class _Builder:
    """Collects the tensors of one rank."""

    def __init__(
        self, model: ModelConfig, shard: Sharding, quant: Quantization, device: Device | None
    ) -> None:
        self.model, self.shard, self.quant, self.device = model, shard, quant, device
        self.total = 0
        self.lora_elements_per_rank = 0
        self._seen: dict[tuple[Format, int, int], int] = {}

    def tensor(self, elements: int, width: int = 0) -> None:
        self.total += allocated(elements * (width or self.model.dtype_bytes))

    def matrix(self, fmt: Format, rows: int, columns: int) -> None:
        """A (rows, columns) matrix in one format."""
        if fmt is PLAIN:
            self.tensor(rows * columns)
            return
        key = (fmt, rows, columns)
        if key not in self._seen:
            self._seen[key] = sum(allocated(x) for x in fmt.tensors(rows, columns))
        self.total += self._seen[key]

    def linear(self, prefix: str, parts: Iterable[tuple[str, int]], columns: int) -> None:
        """Projections that the engine fuses into one matrix where their formats agree."""
        by_format: dict[Format, int] = {}
        for name, rows in parts:
            self.lora_elements_per_rank += rows + columns
            fmt = self.quant.of(f"{prefix}.{name}")
            by_format[fmt] = by_format.get(fmt, 0) + rows
        for fmt, rows in by_format.items():
            self.matrix(fmt, rows, columns)


@functools.lru_cache(maxsize=64)
def weights_bytes(
    model: ModelConfig,
    shard: Sharding,
    *,
    device: Device | None = None,
    quantization_flag: str | None = None,
    stage: int = 0,
    draft_layers: int = 0,
    draft_head: str | None = None,
    lora_slots: int = 0,
    lora_rank: int = 0,
) -> int:
    """Bytes of the weights on a GPU of pipeline stage `stage`.

    `draft_layers` adds MTP layers, `draft_head` an EAGLE draft; LoRA slots are two thin matrices
    beside every projection.
    """
    quant = quantization_of(model, quantization_flag)
    build = _Builder(model, shard, quant, device)
    split = stages(len(model.layers), shard.pipeline)
    for index in split[stage]:
        _layer(build, f"layers.{index}", model.layers[index])
    first, last = stage == 0, stage == shard.pipeline - 1
    padded = -(-model.vocab // _VOCAB_PADDING) * _VOCAB_PADDING
    rows = -(-padded // shard.tensor)
    if first or (last and model.tied_embeddings):
        build.tensor(rows * model.hidden)
    if last and not model.tied_embeddings:
        build.matrix(quant.of("lm_head"), rows, model.hidden)
    build.tensor(model.hidden)
    for _ in range(draft_layers if last else 0):
        _layer(build, "mtp.layers.0", model.layers[-1])
        build.tensor(2 * model.hidden * model.hidden)
    if draft_head is not None and last:
        _eagle(build, draft_head)
    build.total += model.rope_cache_bytes
    build.tensor(-(-model.extra_parameters // shard.tensor))
    if model.vision and first:
        build.total += model.vision.parameters_on(shard.tensor) * model.dtype_bytes
    lora = build.lora_elements_per_rank * lora_slots * lora_rank * model.dtype_bytes
    return build.total + lora


def _eagle(build: _Builder, kind: str) -> None:
    """One 16-bit layer with a projection in front.

    EAGLE 3 reads three hidden states, takes pairs into its attention and has an output head for its
    own short vocabulary.
    """
    build.quant = quantization_of(dataclasses.replace(build.model, quantization=None))
    hidden, layer = build.model.hidden, build.model.layers[-1]
    _layer(build, "draft.layers.0", layer)
    build.tensor((3 if kind == "eagle3" else 2) * hidden * hidden)
    if kind == "eagle3" and isinstance(layer.mixer, Attention):
        heads = layer.mixer.heads + 2 * layer.mixer.kv_heads
        build.tensor(heads * layer.mixer.head_dim * hidden // build.shard.tensor)
        build.tensor(_EAGLE3_VOCABULARY * hidden // build.shard.tensor)


def _layer(build: _Builder, prefix: str, layer: Layer) -> None:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        _attention(build, f"{prefix}.self_attn", mixer)
    elif isinstance(mixer, LatentAttention):
        _latent(build, f"{prefix}.self_attn", mixer)
    else:
        _recurrent(build, prefix, mixer)
    _mlp(build, prefix, layer.mlp)
    for _ in range(build.model.norms_per_layer):
        build.tensor(build.model.hidden)


def _attention(build: _Builder, prefix: str, mixer: Attention) -> None:
    tp, hidden, dim = build.shard.attention_tensor, build.model.hidden, mixer.head_dim
    queries = -(-mixer.heads // tp) * dim
    keys = max(1, mixer.kv_heads // tp) * dim
    gated = queries * (2 if mixer.output_gate else 1)
    build.linear(prefix, (("q_proj", gated), ("k_proj", keys), ("v_proj", keys)), hidden)
    build.linear(prefix, (("o_proj", hidden),), queries)
    if mixer.qkv_bias:
        build.tensor(gated + 2 * keys)
    if mixer.out_bias:
        build.tensor(hidden)
    if mixer.qk_norm == "head":
        build.tensor(dim)
        build.tensor(dim)
    elif mixer.qk_norm == "full":
        build.tensor(queries)
        build.tensor(keys)
    if mixer.sinks:
        build.tensor(-(-mixer.heads // tp))


def _latent(build: _Builder, prefix: str, mixer: LatentAttention) -> None:
    """MLA: the down-projections are copied on every rank, the rest is split by heads."""
    tp, hidden = build.shard.attention_tensor, build.model.hidden
    heads = -(-mixer.heads // tp)
    query_rows = heads * (mixer.nope_dim + mixer.rope_dim)
    latent = (("kv_a_proj_with_mqa", mixer.latent_dim),)
    if mixer.q_lora_rank:
        build.linear(prefix, (("q_a_proj", mixer.q_lora_rank), *latent), hidden)
        build.linear(prefix, (("q_b_proj", query_rows),), mixer.q_lora_rank)
        build.tensor(mixer.q_lora_rank)
    else:
        build.linear(prefix, latent, hidden)
        build.linear(prefix, (("q_proj", query_rows),), hidden)
    up_rows = heads * (mixer.nope_dim + mixer.value_dim)
    build.linear(prefix, (("kv_b_proj", up_rows),), mixer.kv_lora_rank)
    build.linear(prefix, (("o_proj", hidden),), heads * mixer.value_dim)
    build.tensor(mixer.kv_lora_rank)
    # 16-bit copies of the up-projections, absorbed into queries and outputs after loading.
    build.tensor(heads * mixer.nope_dim * mixer.kv_lora_rank)
    build.tensor(heads * mixer.value_dim * mixer.kv_lora_rank)
    if mixer.has_indexer:
        name = f"{prefix}.indexer"
        build.linear(
            name, (("wq_b", mixer.index_heads * mixer.index_dim),), mixer.q_lora_rank or hidden
        )
        build.linear(name, (("wk", mixer.index_dim),), hidden)
        build.tensor(mixer.index_heads * hidden)
        build.tensor(2 * mixer.index_dim)


def _recurrent(build: _Builder, prefix: str, mixer: Recurrent) -> None:
    tp, hidden = build.shard.attention_tensor, build.model.hidden
    heads, value = -(-mixer.heads // tp), -(-mixer.value_dim // tp)
    if mixer.kind == "gdn":
        name, key = f"{prefix}.linear_attn", -(-mixer.key_dim // tp)
        build.linear(name, (("in_proj_qkv", 2 * key + value), ("in_proj_z", value)), hidden)
        build.linear(name, (("in_proj_b", heads), ("in_proj_a", heads)), hidden)
        build.tensor(mixer.head_dim)
    elif mixer.kind == "kda":
        name = f"{prefix}.self_attn"
        for part in ("q_proj", "k_proj", "v_proj"):
            build.linear(name, ((part, value),), hidden)
        for gate in ("f", "g"):  # low-rank gates through one head's width
            build.linear(name, ((f"{gate}_a_proj", mixer.head_dim),), hidden)
            build.linear(name, ((f"{gate}_b_proj", value),), mixer.head_dim)
        build.linear(name, (("b_proj", heads),), hidden)
        build.tensor(mixer.head_dim)
    else:
        name, groups = f"{prefix}.mamba", -(-mixer.groups // tp)
        rows = 2 * value + 2 * groups * mixer.state_dim + heads
        build.linear(name, (("in_proj", rows),), hidden)
        build.tensor(value)
    build.linear(name, (("out_proj", hidden),), value)
    build.tensor(-(-mixer.conv_dim // tp) * mixer.conv_kernel)
    build.tensor(heads, 4)
    build.tensor(heads, 4)


def _mlp(build: _Builder, prefix: str, mlp: Mlp) -> None:
    tp, hidden = build.shard.tensor, build.model.hidden
    if mlp.dense:
        _dense(build, f"{prefix}.mlp", mlp.dense, mlp.gated)
    if not mlp.experts:
        return
    # The router is never quantized and copied on every rank.
    build.tensor(mlp.experts * hidden, mlp.router_dtype_bytes)
    name = f"{prefix}.experts" if mlp.experts_beside else f"{prefix}.mlp.experts"
    fmt = build.quant.of(name)
    if fmt is PLAIN:
        fmt = build.quant.of(f"{name}.0.down_proj")
    ranks = tp * build.shard.data
    if build.shard.expert:
        count, width = -(-mlp.experts // ranks), mlp.expert_width
    else:
        count, width = mlp.experts, -(-mlp.expert_width // ranks)
    rows, columns = _padded_expert(fmt, width, hidden, build.device)
    for size in _expert_tensors(build, fmt, count, rows, columns):
        build.total += allocated(size)
    if mlp.expert_bias:
        build.tensor(count * 2 * rows)
        build.tensor(count * columns)
    if mlp.shared_width:
        shared = "shared_expert" if mlp.shared_gate else "shared_experts"
        _dense(build, f"{prefix}.mlp.{shared}", mlp.shared_width, True)
        if mlp.shared_gate:
            build.tensor(hidden)


def _dense(build: _Builder, name: str, width: int, gated: bool) -> None:
    share = -(-width // build.shard.tensor)
    parts = (("gate_proj", share), ("up_proj", share)) if gated else (("up_proj", share),)
    build.linear(name, parts, build.model.hidden)
    build.linear(name, (("down_proj", build.model.hidden),), share)


def _expert_tensors(
    build: _Builder, fmt: Format, count: int, width: int, hidden: int
) -> Iterator[int]:
    """Sizes of the stacked expert tensors: gate and up together, then down; scales beside each."""
    if fmt is PLAIN:
        yield count * 2 * width * hidden * build.model.dtype_bytes
        yield count * width * hidden * build.model.dtype_bytes
        return
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        for size in fmt.tensors(rows, columns):
            yield count * size


def _padded_expert(fmt: Format, width: int, hidden: int, device: Device | None) -> tuple[int, int]:
    """Expert width and hidden size as the 4-bit kernels pad them.

    MXFP4 (gpt-oss logs): Hopper pads the width to 256; Marlin on Ampere and Ada pads the width to
    128 and hidden to 256; Blackwell pads both to 256.
    """
    if fmt is not MXFP4 or device is None or device.compute_capability is None:
        return width, hidden
    major = device.compute_capability[0]
    if major == 9:
        return _up(width, 256), hidden
    if major >= 10:
        return _up(width, 256), _up(hidden, 256)
    return _up(width, 128), _up(hidden, 256)


def _up(value: int, step: int) -> int:
    """`value` rounded up to a multiple of `step`."""
    return -(-value // step) * step
