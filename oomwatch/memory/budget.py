"""How the engine divides a GPU: weights, activation peak, graphs, non-torch, and the rest for KV.

`divide` predicts each term with an interval. Constants are fitted to figures that servers printed;
what each was read from stands beside it. "Rows" are starts of public logs.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from oomwatch.memory.activation import activation_peak
from oomwatch.memory.devices import Device
from oomwatch.memory.model_config import ModelConfig, Recurrent
from oomwatch.memory.quantization import quantization_of
from oomwatch.memory.settings import Settings
from oomwatch.memory.term import Term
from oomwatch.memory.weights import Sharding, weights_bytes
from oomwatch.units import GIB, MIB

GRAPH_LAYER_BYTES: Final = 0.3 * MIB
"""Per layer and captured size: 0.29 to 0.34 MiB in five V1 captures (3 to 67 sizes)."""
GRAPH_LAYER_BYTES_V0: Final = 0.8 * MIB
"""V0 captures print 0.6 GiB for 24 layers and 1.12 GiB for 40 at 35 sizes."""

# Memory outside PyTorch (CUDA modules, cuBLAS, NCCL), GiB.
NON_TORCH_SINGLE: Final = 0.07
"""One GPU: 0.04 to 0.09 on T4, RTX 2060, A6000, A100."""
NON_TORCH_SINGLE_HOPPER: Final = 0.135
"""One GPU: 0.13 to 0.14 in four H100 starts."""
NON_TORCH_RANKS_HOPPER: Final = 0.54
"""Two and four H100s: 0.53 to 0.55 (0.73 in one start of unknown version)."""
NON_TORCH_RANKS: Final = 0.36
"""Several other cards: L40S 0.35 and 0.21, L4 0.46, A100 0.27, RTX 3090 0.20."""
NON_TORCH_RANKS_V0_NVLINK: Final = 2.1
"""Eight A100s on 0.7: the old engine's snapshot is older than NCCL's buffers."""
NON_TORCH_CONTEXT_064: Final = 0.35
"""0.6.4 counts the CUDA context as well: three RTX 3090 starts."""
NON_TORCH_065: Final = 1.79
"""0.6.5 miscounts: 1.79 on one H100, twice that on two."""
NON_TORCH_LATER: Final = 0.3
"""More from 0.17 on (kernel libraries): see SAMPLER_TRITON; 0.27 on four cards agrees."""
CONSUMED_EXTRA: Final = 0.2
CONSUMED_EXTRA_RANKS: Final = 0.6
"""From 0.27.0 the drop of free memory is billed: workspaces and kept segments on top."""

_LEFT_BY_SGLANG: Final = 0.6 * GIB
"""CUDA context that is gone before SGLang reads its free memory."""
SGLANG_GRAPH_BYTES: Final = 2 * MIB
"""Per request of the largest decode graph: SGLang's own reserve. Real captures took half to four
times that."""
SGLANG_STATE_SHARE: Final = 0.9 / 1.9
"""SGLang gives recurrent states 0.9 parts and the token pool 1 (4.48 of 9.5 GiB in one log)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Budget:
    """The shares of one GPU."""

    total_bytes: int
    requested_bytes: int
    weights: Term
    activation: Term
    graphs: Term
    non_torch: Term
    state_pool_bytes: int
    """SGLang's separate pool of recurrent states."""
    kv: Term
    counts_graphs: bool
    """Whether the graphs come out of the requested share, or stand beside it."""
    short_bytes: int = 0
    """By how much activations and graphs at their smallest exceed what is left beside the pool."""


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Facts that a log or NVML gives; they replace what the model would compute."""

    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graphs_bytes: int | None = None
    kv_available_bytes: int | None = None
    kv_rounding_bytes: int = 0
    """How much more the KV memory may be than the figure, which a log rounds."""
    free_at_start_bytes: int | None = None
    checkpoint_bytes: int | None = None
    """All tensors of the weight files together, over all GPUs."""
    activation_scale: float = 1.0
    """How much of the modelled activation peak there was room for in a start that was seen."""


def divide(
    model: ModelConfig,
    device: Device,
    settings: Settings,
    known: Known | None = None,
    stage: int = 0,
) -> Budget:
    """Every share of a GPU of pipeline stage `stage`."""
    known = known or Known()
    weights = _weights(model, device, settings, known, stage)
    activation = (
        Term.exact(known.activation_bytes)
        if known.activation_bytes is not None
        else activation_peak(model, settings).scaled(known.activation_scale)
    )
    graphs = (
        Term.exact(known.graphs_bytes)
        if known.graphs_bytes is not None
        else graph_term(model, settings)
    )
    non_torch = (
        Term.exact(known.non_torch_bytes)
        if known.non_torch_bytes is not None
        else _non_torch(settings, device)
    )
    if settings.engine == "sglang":
        return _sglang(
            model,
            device,
            settings,
            known=known,
            weights=weights,
            activation=activation,
            graphs=graphs,
        )
    requested = int(device.total_bytes * settings.utilization)
    terms = [weights, activation, non_torch] + ([graphs] if settings.estimates_graphs else [])
    if known.kv_available_bytes is not None:
        kv = Term.exact(known.kv_available_bytes)
        if settings.kv_cache_memory_bytes is None and known.activation_bytes is None:
            beside = sum(t.bytes for t in terms) - activation.bytes
            activation = activation.at_most(requested - beside - max(0, kv.bytes))
    elif settings.kv_cache_memory_bytes is not None:
        kv = Term.exact(settings.kv_cache_memory_bytes)
    else:
        kv = Term(
            requested - sum(t.bytes for t in terms),
            requested - sum(t.high for t in terms),
            requested - sum(t.low for t in terms),
        )
    return Budget(
        device.total_bytes,
        requested,
        weights,
        activation,
        graphs,
        non_torch,
        0,
        kv,
        settings.estimates_graphs,
    )


def cut_to_card(budget: Budget, pool_bytes: int, *, measured: bool) -> Budget:
    """The budget with activations and graphs no larger than what a pool of this size leaves them.

    Activations have their room for sure where they are `measured` before the pool is sized: not on
    SGLang, and not beside a pool that was set by hand.
    """
    kept = budget.weights.bytes + budget.non_torch.bytes + budget.state_pool_bytes + pool_bytes
    left = max(0, budget.total_bytes - kept)
    activation, graphs = budget.activation, budget.graphs
    least = activation.bytes if measured else activation.low
    short = max(0, least + graphs.low - left)
    if activation.bytes > left:
        activation = activation.at_most(left)
    if graphs.bytes > left - activation.bytes:
        graphs = graphs.at_most(left - activation.bytes)
    return dataclasses.replace(budget, activation=activation, graphs=graphs, short_bytes=short)


def sharding(settings: Settings) -> Sharding:
    """How the settings spread the weights."""
    data = 1 if settings.attention_data_parallel > 1 else settings.data_parallel
    return Sharding(
        tensor=settings.tensor_parallel,
        pipeline=settings.pipeline_parallel,
        data=data if settings.engine == "vllm" else 1,
        expert=settings.expert_parallel,
        attention_data=settings.attention_data_parallel,
    )


def _weights(
    model: ModelConfig, device: Device, settings: Settings, known: Known, stage: int
) -> Term:
    if known.weights_bytes is not None:
        return Term.exact(known.weights_bytes)
    size = weights_bytes(
        model,
        sharding(settings),
        device=device,
        quantization_flag=settings.quantization,
        stage=stage,
        draft_layers=settings.draft_weight_layers,
        draft_head=settings.draft_head,
        lora_slots=settings.lora_slots,
        lora_rank=settings.lora_rank,
    )
    size = max(0, size - settings.cpu_offload_bytes)
    if known.checkpoint_bytes and settings.quantization is None:
        return _scaled_to_files(model, size, known.checkpoint_bytes)
    quant = quantization_of(model, settings.quantization)
    relative = 0.005 if quant.method in ("none", "fp8", "mxfp4") else 0.02
    if "nvfp4" in quant.method or "mixed" in quant.method:
        relative = 0.08
    if model.unknown or not quant.known:
        relative = 0.2
    draft = 0.3 * GIB if settings.draft_head else 0.0
    return Term.around(size, relative, 0.05 * GIB + draft)


def _scaled_to_files(model: ModelConfig, size: int, checkpoint: int) -> Term:
    """The predicted share, scaled where the files say that the whole is larger or smaller.

    Files and loaded weights differ by a few percent (absorbed and padded matrices, tied heads), so
    only a larger gap is a fact about the model.
    """
    ratio = checkpoint / max(1, weights_bytes(model, Sharding()))
    if 0.96 <= ratio <= 1.04:
        return Term.around(size, 0.01, 0.05 * GIB)
    return Term.around(size * ratio, 0.05, 0.05 * GIB)


# ---------------------------------------------------------------------------- graphs, non-torch
def graph_term(model: ModelConfig, settings: Settings) -> Term:
    """What the captured CUDA graphs take."""
    if settings.engine == "sglang":
        reserve = 0 if settings.enforce_eager else settings.decode_batch * SGLANG_GRAPH_BYTES
        return Term(reserve, reserve // 2, 4 * reserve)
    layers = len(model.layers) // settings.pipeline_parallel
    per_layer = GRAPH_LAYER_BYTES_V0 if settings.v0 else GRAPH_LAYER_BYTES
    return Term.around(layers * settings.graph_count * per_layer, 0.6)


def _non_torch(settings: Settings, device: Device) -> Term:
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    hopper = (device.compute_capability or (0, 0))[0] >= 9 and device.nvlink
    if settings.v0 and (0, 6, 4) <= settings.version < (0, 6, 6):
        exact = settings.version < (0, 6, 5)
        value = NON_TORCH_CONTEXT_064 if exact else NON_TORCH_065 * min(ranks, 2)
    elif settings.v0 and ranks >= 8 and device.nvlink:
        value = NON_TORCH_RANKS_V0_NVLINK
    elif ranks == 1:
        value = NON_TORCH_SINGLE_HOPPER if hopper else NON_TORCH_SINGLE
    else:
        value = NON_TORCH_RANKS_HOPPER if hopper else NON_TORCH_RANKS
    if settings.engine == "vllm" and settings.version >= (0, 17, 0):
        value += NON_TORCH_LATER
    if settings.engine == "vllm" and settings.version >= (0, 27, 0):
        value += CONSUMED_EXTRA if ranks == 1 else CONSUMED_EXTRA_RANKS
    return Term.around(value * GIB, 0.5, 0.05 * GIB if ranks == 1 else 0.2 * GIB)


def _sglang(
    model: ModelConfig,
    device: Device,
    settings: Settings,
    *,
    known: Known,
    weights: Term,
    activation: Term,
    graphs: Term,
) -> Budget:
    """SGLang: all pools together get fraction x free - weights.

    Activations and graphs live in what the fraction leaves, which nothing measures or reserves.
    """
    free = known.free_at_start_bytes or device.total_bytes - _LEFT_BY_SGLANG
    usable = settings.utilization * free
    rest = usable - weights.bytes
    states = any(isinstance(layer.mixer, Recurrent) for layer in model.layers)
    share = 1 - SGLANG_STATE_SHARE if states else 1.0
    pool = int(max(0.0, rest) * (1 - share))
    if known.kv_available_bytes is not None:
        kv = Term.exact(known.kv_available_bytes)
    else:
        spread = (weights.high - weights.low) / 2 + 0.5 * GIB
        kv = Term(
            round(rest * share), round((rest - spread) * share), round((rest + spread) * share)
        )
    return Budget(
        device.total_bytes,
        int(usable),
        weights,
        activation,
        graphs,
        Term.exact(_LEFT_BY_SGLANG),
        pool,
        kv,
        counts_graphs=False,
    )
