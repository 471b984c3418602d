"""What each flag change would do: the changed command, planned like any other.

Every change is planned from scratch with the changed flags, so a what-if and a plan of the changed
command never disagree. Costs say the other side of the trade.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from oomwatch.engines.flags import check_flag
from oomwatch.errors import UsageError
from oomwatch.memory.data.kv_formats import KV_FORMATS, SGLANG_FORMATS
from oomwatch.memory.kv_formats import backend_of, caveat, runs_on_sglang, unsupported
from oomwatch.memory.planner import Plan, PlanInput, change, plan
from oomwatch.units import GIB

_MOST_RANKS = 16
_GPU_COST = "needs {n} GPUs; every layer waits for the interconnect"


@dataclasses.dataclass(frozen=True, slots=True)
class WhatIf:
    """One change and the plan with it; `freed_bytes` is the KV memory gained on each GPU."""

    set: Mapping[str, Any]
    unset: tuple[str, ...]
    plan: Plan
    freed_bytes: int
    cost: str
    validated: bool
    reason: str | None = None
    """Why the flag could not be validated."""


@dataclasses.dataclass(frozen=True, slots=True)
class FormatRow:
    """One KV format that this version, card and model can run."""

    name: str
    in_force: bool
    bytes_per_request: int
    tokens: int
    max_concurrency: float
    backend: str
    quality: str


def what_if(given: PlanInput, now: Plan) -> tuple[WhatIf, ...]:
    """Every single change worth showing, in the order of the knobs people turn."""
    changes = (
        _sglang_changes(given, now)
        if now.settings.engine == "sglang"
        else _vllm_changes(given, now)
    )
    found = []
    for flags, unset, cost in changes:
        try:
            after = plan(change(given, flags, unset))
        except UsageError:
            continue
        reasons = [
            reason
            for flag, value in flags.items()
            if (reason := check_flag(now.settings.engine, given.version, flag, value))
        ]
        found.append(
            WhatIf(
                set=flags,
                unset=unset,
                plan=after,
                freed_bytes=max(0, after.kv_available_bytes) - max(0, now.kv_available_bytes),
                cost=cost,
                validated=not reasons,
                reason=reasons[0] if reasons else None,
            )
        )
    return tuple(found)


def kv_table(given: PlanInput, now: Plan, length: int | None = None) -> tuple[FormatRow, ...]:
    """The KV formats that can run here, largest first, at `length` tokens per request."""
    rows = []
    engine, version, model = now.settings.engine, now.settings.version, given.model
    current = now.settings.kv_cache_dtype
    for fmt in SGLANG_FORMATS if engine == "sglang" else KV_FORMATS:
        name = fmt.name
        if fmt.key_bits == 16 and name not in ("auto", current):
            continue
        if engine == "vllm" and unsupported(fmt, version, given.device, model, v0=now.settings.v0):
            continue
        if (
            engine == "sglang"
            and name != current
            and (
                check_flag("sglang", given.version, "--kv-cache-dtype", name)
                or not runs_on_sglang(fmt, given.device)
            )
        ):
            continue
        needs = caveat(fmt, version, given.device, model) if engine == "vllm" else ""
        after = now if name == current else plan(change(given, {"--kv-cache-dtype": name}))
        wanted = length or now.settings.max_model_len
        rows.append(
            FormatRow(
                name=name,
                in_force=name == current,
                bytes_per_request=after.layout.request_bytes(wanted),
                tokens=after.layout.tokens(after.blocks, wanted),
                max_concurrency=after.layout.concurrency(after.blocks, wanted),
                backend=backend_of(fmt, given.device, model, engine),
                quality=f"{fmt.quality}; {needs}" if needs else fmt.quality,
            )
        )
    return tuple(rows)


Change = tuple[Mapping[str, Any], tuple[str, ...], str]


def _vllm_changes(given: PlanInput, now: Plan) -> Iterator[Change]:
    settings, model = now.settings, given.model
    yield from _formats(given, now)
    if now.refusal == "kv_lt_max_len" and now.max_model_len_that_fits > 0:
        fitting = _rounded(now.max_model_len_that_fits)
        yield {"--max-model-len": str(fitting)}, (), "longer prompts are refused"
    elif settings.max_model_len > 8192:
        half = settings.max_model_len // 2
        yield {"--max-model-len": str(half)}, (), "longer prompts are refused"
    if settings.utilization < 0.95 and settings.kv_cache_memory_bytes is None:
        more = min(0.95, round(settings.utilization + 0.03, 2))
        cost = f"{(1 - more) * given.device.total_bytes / GIB:.1f} GiB are left for everything else"
        yield {"--gpu-memory-utilization": f"{more:g}"}, (), cost
    for seqs in (256, 64):
        if settings.max_num_seqs > seqs:
            yield {"--max-num-seqs": str(seqs)}, (), "fewer requests run at once"
    for tokens in (4096, 2048):
        if settings.max_num_batched_tokens > tokens and settings.max_num_seqs <= tokens:
            yield {"--max-num-batched-tokens": str(tokens)}, (), "slower prefill"
            break
    if not settings.enforce_eager and settings.estimates_graphs:
        yield {"--enforce-eager": True}, (), "slower decoding, most at small batches"
    if not settings.hybrid_manager:
        yield {}, ("--disable-hybrid-kv-cache-manager",), "none known"
    if not model.quantization and not settings.quantization:
        yield {"--quantization": "fp8"}, (), "small quality loss; check on your data"
    yield from _ranks(given, now, "--tensor-parallel-size")
    if model.is_latent and settings.version >= (0, 10, 2) and settings.tensor_parallel > 1:
        spread = settings.tensor_parallel
        if settings.context_parallel < spread:
            yield {"--decode-context-parallel-size": str(spread)}, (), "one more exchange per step"
    if model.vision is not None and settings.encoder and settings.version >= (0, 17, 0):
        yield {"--language-model-only": True}, (), "no images"


def _sglang_changes(given: PlanInput, now: Plan) -> Iterator[Change]:
    settings = now.settings
    yield from _formats(given, now)
    if settings.utilization < 0.95:
        more = round(settings.utilization + 0.02, 3)
        yield {"--mem-fraction-static": f"{more:g}"}, (), "less slack for activations and graphs"
    if settings.max_model_len > 8192:
        yield (
            {"--context-length": str(settings.max_model_len // 2)},
            (),
            "longer prompts are refused",
        )
    yield from _ranks(given, now, "--tp-size")


def _formats(given: PlanInput, now: Plan) -> Iterator[Change]:
    rows = kv_table(given, now)
    # In vLLM fp8 means e4m3; e5m2 takes as many bytes and is coarser.
    doubles = {"fp8_e5m2"} | ({"fp8_e4m3"} if any(row.name == "fp8" for row in rows) else set())
    for row in rows:
        same = row.name in doubles
        if not row.in_force and not same and row.name not in ("auto", now.kv_format):
            yield {"--kv-cache-dtype": row.name}, (), row.quality


def _ranks(given: PlanInput, now: Plan, flag: str) -> Iterator[Change]:
    """Twice the GPUs, or as many times as it takes to start, of those that are there."""
    tried = [
        each
        for each in _wider(given, now, flag)
        if given.gpu_count is None or each.settings.gpus <= given.gpu_count
    ]
    chosen = next((each for each in tried if each.fits), tried[0] if tried else None)
    if chosen is not None:
        wider, gpus = chosen.settings.tensor_parallel, chosen.settings.gpus
        yield {flag: str(wider)}, (), _GPU_COST.format(n=gpus)


def fewest_gpus(given: PlanInput, now: Plan) -> Plan | None:
    """The plan that starts with the least tensor parallelism over that of `now`, up to 16 GPUs.

    As many GPUs as that takes, whether or not they are there; None if none is enough.
    """
    flag = "--tensor-parallel-size" if now.settings.engine == "vllm" else "--tp-size"
    anywhere = dataclasses.replace(given, gpu_count=None)
    return next((each for each in _wider(anywhere, now, flag) if each.fits), None)


def _wider(given: PlanInput, now: Plan, flag: str) -> Iterator[Plan]:
    """The plans with 2, 4, … times the tensor parallelism, as far as the heads divide."""
    heads = max((getattr(x.mixer, "heads", 1) for x in given.model.layers), default=1)
    wider = now.settings.tensor_parallel * 2
    while wider <= _MOST_RANKS and heads % wider == 0:
        try:
            yield plan(change(given, {flag: str(wider)}))
        except UsageError:
            return
        wider *= 2


def _rounded(length: int) -> int:
    """A length a person would type, not above the one that fits."""
    step = 1024 if length >= 8192 else 256 if length >= 1024 else 16
    return max(1, length // step * step) if length >= step else length
