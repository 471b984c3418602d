"""Whether a server fits, how many tokens and requests it holds, and what a change would do.

`plan` is a pure function of a `PlanInput`. A fact that is known (`Known`, from a log or NVML)
replaces what the model would compute; `change` carries the difference between fact and model over
to changed settings, so that predictions for a running server start from what it printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from oomwatch.engines.versions import outside
from oomwatch.errors import UsageError
from oomwatch.memory.budget import Budget, Known, cut_to_card, divide
from oomwatch.memory.devices import Device
from oomwatch.memory.kv_cache import KvLayout, build_layout
from oomwatch.memory.kv_formats import find_format, unsupported
from oomwatch.memory.model_config import Attention, ModelConfig
from oomwatch.memory.refusals import refusal_of
from oomwatch.memory.settings import NEWEST, Settings, resolve
from oomwatch.memory.term import Term
from oomwatch.units import GIB, format_bytes, format_count

_READ_WRONG = 1.02
"""Sizes of one start may exceed the card by what a data sheet's total is off."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanInput:
    """A model, a card and a server command; `gpu_count` None means as many as it asks for."""

    model: ModelConfig
    device: Device
    engine: str = "vllm"
    version: str | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpu_count: int | None = None
    known: Known = dataclasses.field(default_factory=Known)
    version_assumed: bool = False
    """`version` was not given: it is the newest that is known."""
    offset_bytes: int = 0
    """Added to the predicted KV memory: what a log said beyond the model, for changed settings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one command. Sizes are bytes per GPU, lengths in tokens."""

    settings: Settings
    kv_format: str
    """The cache format in force, where ``auto`` may mean fp8."""
    budget: Budget
    layout: KvLayout
    kv_available_bytes: int
    kv_low_bytes: int
    kv_high_bytes: int
    blocks: int
    tokens: int
    line_tokens: int
    max_concurrency: float
    bytes_per_request: int
    fits: bool
    refusal: str | None
    """Cause id of the refusal (oomwatch.causes), None when it starts."""
    refusal_text: str | None
    max_model_len_that_fits: int
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    """What may go wrong although it starts."""

    @property
    def pool_bytes(self) -> int:
        """What the KV pool takes: all that is available, unless a flag sets its size."""
        if self.settings.blocks_override is None and self.settings.most_tokens is None:
            return max(0, self.kv_available_bytes)
        return self.blocks * self.layout.block_bytes


def plan(given: PlanInput) -> Plan:
    """What the server would print, and whether it starts.

    Raises UsageError for an engine without a model, for values that no release accepts, and for
    facts that cannot be of one start on this card.
    """
    settings = resolve(
        given.engine,
        given.version,
        arguments=given.arguments,
        env=given.env,
        device=given.device,
        model=given.model,
    )
    model = given.model
    if settings.dtype_bytes is not None:
        model = dataclasses.replace(model, dtype_bytes=settings.dtype_bytes)
    budget, layout = _tightest(model, given, settings)
    _one_start(given, settings, budget)
    kv = _shifted(budget.kv, given.offset_bytes)
    if settings.measures_activations and given.known.kv_available_bytes is None and kv.bytes > 0:
        kv = kv.at_most(budget.requested_bytes - budget.weights.low)
    blocks = layout.blocks(kv.bytes)
    if settings.blocks_override is not None:
        blocks = settings.blocks_override
    if settings.most_tokens is not None:
        blocks = min(blocks, settings.most_tokens // layout.block_tokens)
    length = settings.max_model_len
    limit = max(length, model.max_model_len)
    checked, held = layout, blocks
    if settings.checks_all_layers:
        checked = build_layout(model, dataclasses.replace(settings, pipeline_parallel=1))
        held = checked.blocks(kv.bytes)
    longest = checked.longest(held, limit)
    refusal, text = refusal_of(
        given, settings, budget, checked, kv_bytes=kv.bytes, blocks=held, longest=longest
    )
    found = Plan(
        settings=settings,
        kv_format=settings.kv_format(model).name,
        budget=budget,
        layout=layout,
        kv_available_bytes=kv.bytes,
        kv_low_bytes=kv.low,
        kv_high_bytes=kv.high,
        blocks=blocks,
        tokens=layout.tokens(blocks, length),
        line_tokens=layout.line_tokens(blocks, length),
        max_concurrency=layout.concurrency(blocks, length),
        bytes_per_request=layout.request_bytes(length),
        fits=refusal is None,
        refusal=refusal,
        refusal_text=text,
        max_model_len_that_fits=longest,
        assumptions=_assumptions(model, given, settings, layout),
    )
    if not found.fits:
        return found
    budget = cut_to_card(budget, found.pool_bytes, measured=settings.measures_activations)
    return dataclasses.replace(found, budget=budget, warnings=_warnings(settings, budget))


def _one_start(given: PlanInput, settings: Settings, budget: Budget) -> None:
    """Raise UsageError where weights and KV memory that were read exceed the card together."""
    read = given.known.kv_available_bytes
    weights = 0 if settings.cpu_offload_bytes else given.known.weights_bytes or 0
    if read is not None and weights + read > _READ_WRONG * budget.total_bytes:
        raise UsageError(
            f"weights of {weights / GIB:.2f} GiB and {read / GIB:.2f} GiB of KV memory do not fit "
            f"a card of {budget.total_bytes / GIB:.2f} GiB: they are not of one start on it"
        )


def _warnings(settings: Settings, budget: Budget) -> tuple[str, ...]:
    """What the engine does not check before it starts."""
    if budget.short_bytes <= 0:
        return ()
    short = f"at least {format_bytes(budget.short_bytes)} short on each GPU"
    if settings.engine == "sglang":
        lower = "--mem-fraction-static or --chunked-prefill-size"
    elif not settings.measures_activations:
        lower = "the size of the KV cache that is set"
    else:
        return (
            f"CUDA graphs come on top of the share, and what is left for them is {short}: their "
            "capture may run out of memory; lower --gpu-memory-utilization",
        )
    return (
        f"what is left for activations and CUDA graphs is {short}, and nothing checks that before "
        f"the server starts: the capture or a long prompt may run out of memory; lower {lower}",
    )


def change(
    given: PlanInput,
    set_flags: Mapping[str, Any],
    unset: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> PlanInput:
    """The same server with other flags; facts of the old start are carried over as differences.

    Without known facts this is the plan of the changed command from scratch.
    """
    arguments = {k: v for k, v in given.arguments.items() if k not in unset}
    arguments.update(set_flags)
    lasting = without_facts(given)
    offset = given.offset_bytes
    if "--num-gpu-blocks-override" not in given.arguments and lasting.known != given.known:
        offset += plan(given).kv_available_bytes - plan(lasting).kv_available_bytes
    return dataclasses.replace(
        without_facts(given, {*set_flags, *unset}),
        arguments=arguments,
        env={**given.env, **(env or {})},
        offset_bytes=offset,
    )


def without_facts(given: PlanInput, changed: Collection[str] = ()) -> PlanInput:
    """The same server with only those facts that still hold when the flags `changed` change."""
    known = given.known
    return dataclasses.replace(
        given,
        known=Known(
            weights_bytes=None if _moves_weights(set(changed)) else known.weights_bytes,
            free_at_start_bytes=known.free_at_start_bytes,
            checkpoint_bytes=known.checkpoint_bytes,
            activation_scale=_activation_scale(given),
        ),
    )


def _activation_scale(given: PlanInput) -> float:
    """How much of the modelled peak of a step a start that was seen had room for, at most all.

    A peak that is smaller than the model says cannot be freed as if it were the model's.
    """
    known = given.known
    if known.kv_available_bytes is None and known.activation_bytes is None:
        return known.activation_scale
    bare = dataclasses.replace(known, kv_available_bytes=None, activation_bytes=None)
    modelled = plan(dataclasses.replace(given, known=bare)).budget.activation.bytes
    seen = plan(given).budget.activation.bytes
    return known.activation_scale * min(1.0, seen / modelled) if modelled > 0 else 1.0


_SHARD_FLAGS = (
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--enable-expert-parallel",
    "--quantization",
    "--cpu-offload-gb",
    "--enable-lora",
    "--max-loras",
    "--max-lora-rank",
    "--speculative-config",
    "--tp-size",
    "--pp-size",
    "--dp-size",
    "--ep-size",
    "--dtype",
)


def _moves_weights(names: set[str]) -> bool:
    return bool(names & set(_SHARD_FLAGS))


def _shifted(term: Term, offset: int) -> Term:
    return Term(term.bytes + offset, term.low + offset, term.high + offset)


def _tightest(model: ModelConfig, given: PlanInput, settings: Settings) -> tuple[Budget, KvLayout]:
    """Budget and layout of the pipeline stage with the fewest blocks, which all stages use."""
    best: tuple[int, Budget, KvLayout] | None = None
    for stage in range(min(settings.pipeline_parallel, len(model.layers))):
        budget = divide(model, given.device, settings, given.known, stage)
        layout = build_layout(model, settings, stage)
        blocks = layout.blocks(budget.kv.bytes + given.offset_bytes)
        if best is None or blocks < best[0]:
            best = (blocks, budget, layout)
    assert best is not None  # noqa: S101 - a pipeline has at least one stage
    return best[1], best[2]


def _assumptions(
    model: ModelConfig, given: PlanInput, settings: Settings, layout: KvLayout
) -> tuple[str, ...]:
    found = list(layout.notes) + list(settings.notes)
    if given.gpu_count is not None and settings.gpus > given.gpu_count:
        found.append(f"all replicas together need {settings.gpus} GPUs")
    fmt = find_format(settings.kv_cache_dtype, settings.engine)
    if fmt is not None and settings.engine == "vllm":
        reason = unsupported(fmt, settings.version, given.device, model, v0=settings.v0)
        found += [f"the engine may refuse this cache format: {reason}"] if reason else []
    if settings.checks_all_layers:
        found.append(
            "this release holds the layers of all pipeline stages against the memory of one GPU "
            "and refuses too much; 0.16.0 mended it"
        )
    if settings.max_model_len > given.model.max_model_len and not given.model.unknown:
        found.append(
            f"{format_count(settings.max_model_len)} tokens are more than the model's own "
            f"{format_count(given.model.max_model_len)}: the engine refuses that unless it is told "
            "otherwise"
        )
    beyond = outside(settings.engine, given.version) if given.version else None
    if beyond and settings.version != NEWEST:
        found.append(f"{beyond}: the nearest release's rules are taken")
    if given.version_assumed:
        found.append(
            f"no version of {settings.engine} is given: planned, and flags checked, as "
            f"{given.version} (--engine-version)"
        )
    if settings.version == NEWEST:
        found.append("engine version unknown: newest rules taken (--engine-version)")
    if not given.device.measured and given.known.kv_available_bytes is None:
        found.append(
            f"total memory of {given.device.name} is from its data sheet (--gpu-total-gib)"
        )
    found += [f"not understood in the model's configuration: {x}" for x in model.unknown]
    if model.vision is not None and settings.encoder and given.known.kv_available_bytes is None:
        found.append("the image encoder's peak depends on the largest image and is rough")
    if settings.lora_slots and given.known.weights_bytes is None:
        found.append("LoRA slots are counted for every projection of the decoder")
    if given.model.is_hybrid and not settings.max_seqs_given and settings.engine == "vllm":
        found.append(
            "each running sequence holds its own state blocks; --max-num-seqs is capped by them"
        )
    kept = [x.mixer for x in model.layers if isinstance(x.mixer, Attention)]
    if kept and all(m.heads == m.kv_heads for m in kept) and kept[0].heads > 1:
        found.append(
            "every attention head has its own KV head (MHA): grouped-query models of this size "
            "need several times less per token"
        )
    return tuple(dict.fromkeys(found))
