"""Why an engine would refuse a start: the error it gives, as a cause and a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from oomwatch.memory.budget import Budget
from oomwatch.memory.kv_cache import KvLayout
from oomwatch.memory.model_config import Attention, ModelConfig, Recurrent
from oomwatch.memory.settings import Settings
from oomwatch.units import GIB, format_count

if TYPE_CHECKING:
    from oomwatch.memory.planner import PlanInput

_LEAST_CONTEXT: Final = GIB // 4
"""CUDA's own context, which is gone before the engine reads what is free."""


def refusal_of(
    given: PlanInput,
    settings: Settings,
    budget: Budget,
    layout: KvLayout,
    *,
    kv_bytes: int,
    blocks: int,
    longest: int,
) -> tuple[str | None, str | None]:
    """(cause id, sentence) of the error that the engine would give, or (None, None)."""
    length = settings.max_model_len
    weights = budget.weights.bytes
    ranks = settings.tensor_parallel * settings.pipeline_parallel
    if given.gpu_count is not None and ranks > given.gpu_count:
        return "config_error", (
            f"it asks for {ranks} GPUs and {given.gpu_count} "
            f"{'is' if given.gpu_count == 1 else 'are'} there"
        )
    unsplit = _unsplit(given.model, settings) or _uncut(given, settings)
    if unsplit is not None:
        return "config_error", unsplit
    if given.known.kv_available_bytes is None and weights > budget.total_bytes:
        return (
            "weights_dont_fit",
            f"weights take {weights / GIB:.1f} GiB of a {budget.total_bytes / GIB:.1f} GiB card",
        )
    needs = layout.request_bytes(length)
    overcommitted = _overcommitted(given, settings, budget, layout)
    if overcommitted is not None:
        return overcommitted
    if settings.engine == "sglang":
        if kv_bytes <= 0:
            return "kv_no_blocks", "the static fraction is smaller than the weights"
        return None, None
    peak = weights + budget.activation.low
    if given.known.kv_available_bytes is None and peak > budget.total_bytes:
        return "profile_activation_peak", "weights and the profile run's peak exceed the card"
    if kv_bytes <= 0 or blocks <= 0:
        return "kv_no_blocks", f"nothing is left for KV cache ({kv_bytes / GIB:.2f} GiB)"
    usable = blocks - 1 if settings.version >= (0, 29, 0) and not settings.v0 else blocks
    if given.known.kv_available_bytes is not None and given.known.kv_rounding_bytes:
        usable += 1 + given.known.kv_rounding_bytes // layout.block_bytes
    if layout.request_blocks(length) > usable:
        return (
            "kv_lt_max_len",
            (
                f"one request of {format_count(length)} tokens needs {needs / GIB:.2f} GiB of KV "
                f"cache, {kv_bytes / GIB:.2f} GiB are available; {format_count(longest)} tokens "
                "would fit"
            ),
        )
    if (
        given.model.is_hybrid
        and settings.max_seqs_given
        and settings.version >= (0, 20, 0)
        and settings.graph_count
        and settings.max_num_seqs > usable
    ):
        return (
            "state_cache_seqs",
            f"--max-num-seqs {settings.max_num_seqs} exceeds the {format_count(blocks)} blocks "
            "for states",
        )
    return None, None


def _overcommitted(
    given: PlanInput, settings: Settings, budget: Budget, layout: KvLayout
) -> tuple[str, str] | None:
    """Why what vLLM is told to take is not there: a pool sized by hand, or the whole card."""
    total, weights = budget.total_bytes, budget.weights.bytes
    if settings.engine != "vllm":
        return None
    pool = settings.kv_cache_memory_bytes
    if settings.blocks_override is not None:
        pool = settings.blocks_override * layout.block_bytes
    if pool is not None:
        if weights + pool <= total - _LEAST_CONTEXT:
            return None
        return "kv_alloc_overcommit", (
            f"the KV cache is set to {pool / GIB:.1f} GiB, and beside {weights / GIB:.1f} GiB "
            f"of weights a {total / GIB:.1f} GiB card does not hold it"
        )
    nvidia = given.device.compute_capability is not None and not given.device.unified
    seen = given.known.kv_available_bytes is not None
    if settings.v0 or seen or not nvidia or budget.requested_bytes <= total - _LEAST_CONTEXT:
        return None
    return "gpu_busy_margin", (
        f"--gpu-memory-utilization {settings.utilization:g} asks for more of the card than is "
        "free beside CUDA's own context"
    )


def _uncut(given: PlanInput, settings: Settings) -> str | None:
    """Why vLLM refuses steps shorter than a prompt that it must not cut; None where it does not."""
    tokens, length = settings.max_num_batched_tokens, settings.max_model_len
    if settings.engine != "vllm" or "--max-num-batched-tokens" not in given.arguments:
        return None
    chunked = given.arguments.get("--enable-chunked-prefill")
    by_default = not settings.v0 or length > 32768  # V0 turns it on for long contexts
    cuts = by_default if chunked is None else str(chunked).lower() in ("true", "1", "yes")
    if cuts or tokens >= length:
        return None
    return (
        f"without chunked prefill --max-num-batched-tokens {tokens} is less than the longest "
        f"request of {format_count(length)} tokens: set --enable-chunked-prefill with it"
    )


def _unsplit(model: ModelConfig, settings: Settings) -> str | None:
    """Why the engine cannot split the model so; None where it can."""
    stages, ranks = settings.pipeline_parallel, settings.attention_ranks
    if stages > len(model.layers):
        return f"{len(model.layers)} layers do not fill {stages} pipeline stages"
    for layer in model.layers:
        mixer = layer.mixer
        if isinstance(mixer, Recurrent):
            continue
        if mixer.heads % ranks:
            return f"{mixer.heads} attention heads do not divide by {ranks} GPUs"
        if isinstance(mixer, Attention) and mixer.kv_heads % ranks and ranks % mixer.kv_heads:
            return f"{mixer.kv_heads} KV heads and {ranks} GPUs do not divide each other"
    return None
