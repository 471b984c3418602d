"""Refusals of the KV cache at start: no block, one request too long, unlike ranks, state blocks.

One message covers several causes: who else is on the card, how the ranks differ and what the
start measured decide before the words do.
"""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.diagnose.rules.tenants import holder_evidence
from oomwatch.engines.versions import release
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, format_bytes, format_count

_LENGTH_CHECKS: Final = ("raise_if_cache_size_invalid", "check_enough_kv_cache_memory")


def _run_evidence(facts: Facts, *ids: str) -> list[Evidence]:
    return [cite(event.line) for event in (facts.said(identity) for identity in ids) if event]


def no_blocks(facts: Facts) -> Finding | None:
    """Weights and the activation peak leave nothing of the share for the KV cache."""
    hit = facts.failing("vllm.no_blocks", "vllm.auto_fit_fail")
    if hit is None:
        return None
    failure, _ = hit
    engine = facts.engine
    values = {
        "stage": "kv",
        "available_kv_bytes": engine.kv_bytes,
        "utilization": engine.in_force.get("--gpu-memory-utilization"),
        "max_model_len": engine.max_model_len,
    }
    evidence = [
        *cite_failure(failure),
        *_run_evidence(
            facts,
            "vllm.kv_available",
            "vllm.profile_v0_parts",
            "vllm.weights_v1",
            "vllm.weights_v0",
        ),
    ]
    evidence += cite_arguments(engine, ("--gpu-memory-utilization", "--kv-cache-memory-bytes"))
    split = _uneven(facts, None, None)
    if split is not None:
        return found(
            facts,
            "parallel_imbalance",
            0.72,
            split,
            [*evidence, *_rank_evidence(facts)],
            strength=NAMED_CHECK,
            order=failure.order,
            values=values,
        )
    tenant = _cotenant(facts)
    if tenant is not None:
        return found(
            facts,
            "kv_budget_cotenant",
            0.72,
            tenant,
            evidence,
            strength=NAMED_CHECK,
            order=failure.order,
            values=values,
            unseen=("Who else was on the card at that moment: NVML's process list.",),
        )
    pinned = engine.arguments.get("--kv-cache-memory-bytes")
    if pinned not in (None, ""):
        sentence = f"The KV cache is pinned to {pinned} bytes, which is less than one block; the memory share is not in force."
    elif engine.kv_bytes is not None and engine.kv_bytes < 0:
        sentence = (
            f"Weights and the activation peak need {format_bytes(-engine.kv_bytes)} more than the share of the card allows,"
            " so nothing is left for the KV cache."
        )
    else:
        sentence = "Weights and the activation peak fill the whole share of the card, so nothing is left for the KV cache."
    return found(
        facts,
        "kv_no_blocks",
        0.92,
        sentence,
        evidence,
        strength=NAMED_CHECK,
        order=failure.order,
        values=values,
    )


def _cotenant(facts: Facts) -> str | None:
    """Why a second tenant explains an empty KV budget, or None.

    V0 and V1 up to 0.9.0 charge other processes' memory to this engine (memory model, 2). The sign
    is a budget much larger than this engine's own weights.
    """
    engine = facts.engine
    outside = engine.non_torch_bytes
    ranks = facts.number("--tensor-parallel-size") or 1
    if (
        outside is not None
        and ranks == 1
        and outside > max(4 * GIB, 2 * (engine.weights_bytes or 0))
    ):
        return (
            f"{format_bytes(outside)} outside PyTorch are charged to this engine, whose weights are"
            f" {format_bytes(engine.weights_bytes)}: another process on the card took them while it measured."
        )
    at = release(engine.version)
    if engine.generation == "V1" and at is not None and at < (0, 9, 1):
        holders = holder_evidence(facts)
        if holders and facts.tree_pids:
            return (
                f"{holders[0].text}; this release counts everything on the card against its own share, so nothing is left for"
                " the KV cache."
            )
    if engine.kv_bytes is not None and engine.activation_bytes is not None:
        return None
    share = engine.in_force.get("--gpu-memory-utilization")
    weights = engine.weights_bytes
    if not isinstance(share, int | float) or weights is None:
        return None
    total = engine.total_bytes or min(facts.series.gpu_totals.values(), default=None)
    budget = share * total if total else None
    if budget is not None and weights < 0.35 * budget:
        return (
            f"The weights are {format_bytes(weights)} of a budget of {format_bytes(budget)}, yet nothing is left for the KV"
            " cache: this release charges memory of other processes on the card to itself."
        )
    small = weights < 2 * GIB and share >= 0.15
    if budget is None and small:
        return (
            f"The weights are only {format_bytes(weights)} at a share of {share:g}, yet nothing is left for the KV cache:"
            " another process on the card takes the rest of the share."
        )
    return None


def length_over_pool(facts: Facts) -> Finding | None:
    """One request of the full length does not fit the KV cache."""
    hit = facts.failing("vllm.max_len_v1", "vllm.max_len_v0")
    engine = facts.engine
    if hit is None:
        return _cut_length_check(facts)
    failure, fields = hit
    needed, available = fields.get("needed_bytes"), fields.get("available_bytes")
    estimated = fields.get("estimated_tokens", fields.get("capacity_tokens"))
    length = fields.get("max_model_tokens")
    if estimated is None and needed and available and length:
        estimated = int(length * available / needed)
    values = {
        "stage": "kv",
        "needed_kv_bytes": needed,
        "available_kv_bytes": available,
        "estimated_max_len": estimated,
        "max_model_len": length,
        "kv_tokens": fields.get("capacity_tokens"),
        "utilization": engine.in_force.get("--gpu-memory-utilization"),
    }
    evidence = [
        *cite_failure(failure),
        *_run_evidence(facts, "vllm.kv_available", "vllm.blocks", "vllm.blocks_override"),
    ]
    split = _uneven(facts, needed, available)
    if split is not None:
        return found(
            facts,
            "parallel_imbalance",
            0.75,
            split,
            [*evidence, *_rank_evidence(facts)],
            strength=ARITHMETIC,
            order=failure.order,
            values=values,
        )
    fits = f"; about {format_count(estimated)} tokens would fit" if estimated else ""
    amounts = (
        f" ({format_bytes(needed)} needed, {format_bytes(available)} there)"
        if needed and available
        else ""
    )
    return found(
        facts,
        "kv_lt_max_len",
        0.95,
        f"One request of {format_count(length)} tokens does not fit the KV cache{amounts}{fits}.",
        evidence,
        strength=ARITHMETIC,
        order=failure.order,
        values=values,
    )


def _cut_length_check(facts: Facts) -> Finding | None:
    """The length check by its frame and the block count, where the message itself was cut off."""
    engine = facts.engine
    for failure in facts.failures:
        checked = any(
            name in frame for name in _LENGTH_CHECKS for frame in (*failure.frames, failure.code)
        )
        if not checked or failure.message:
            continue
        tokens = engine.kv_tokens
        if tokens and engine.max_model_len and tokens >= engine.max_model_len:
            continue
        cause = "kv_no_blocks" if engine.kv_blocks == 0 else "kv_lt_max_len"
        values = {
            "stage": "kv",
            "kv_tokens": tokens,
            "estimated_max_len": tokens,
            "max_model_len": engine.max_model_len,
        }
        return found(
            facts,
            cause,
            0.8,
            f"The check of the KV cache against the model length refused; the cache holds {format_count(tokens)} tokens,"
            f" the length is {format_count(engine.max_model_len)}.",
            [cite(failure.line), *_run_evidence(facts, "vllm.blocks", "vllm.kv_available")],
            strength=STAGE,
            order=failure.order,
            values=values,
            unseen=("The last line of the traceback is missing from the log.",),
        )
    return None


def _uneven(facts: Facts, needed: float | None, available: float | None) -> str | None:
    """Why the split over ranks, not the total, is what does not fit; None if it is even."""
    stages = facts.number("--pipeline-parallel-size") or 1
    named = facts.run.by_rank.get("kv_bytes", {}) if facts.run else {}
    ranks = max(
        stages * (facts.number("--tensor-parallel-size") or 1),
        sum(any(word in who for word in ("TP", "PP", "rank")) for who in named),
    )
    layers = facts.engine.env.get("VLLM_PP_LAYER_PARTITION")
    if layers and stages > 1:
        return f"The layers are split over the pipeline stages as {layers}: the fullest stage has the least room for KV and decides for all."
    totals = sorted(facts.series.gpu_totals.values())
    mixed = len(totals) > 1 and totals[0] and totals[-1] > 1.15 * totals[0]
    rooms = sorted(named.values())
    if rooms and rooms[-1] <= 0:
        return None  # no rank has room: not the split, the sum is too large
    if ranks > 1 and len(rooms) > 1 and rooms[-1] > max(1.3 * rooms[0], rooms[0] + GIB):
        return (
            f"The ranks have very different room for KV ({format_bytes(rooms[0])} to {format_bytes(rooms[-1])}); the"
            " smallest decides for all."
        )
    if mixed and ranks > 1:
        return (
            "The cards differ in size; the smallest one decides how much KV cache every rank gets."
        )
    if stages > 1 and needed and available and needed > 2 * available:
        return (
            f"{format_bytes(needed)} of KV are asked of one pipeline stage, which holds only its share of the layers and has"
            f" {format_bytes(available)}: the split over {stages:.0f} stages is what does not fit."
        )
    return None


def sized_to_nothing(facts: Facts) -> Finding | None:
    """The start measured too little for the cache, and of the refusal only a wrapper is in the input."""
    engine, run = facts.engine, facts.run
    if run is None or facts.failures or run.stage != "kv":
        return None
    if not facts.messengers:
        return _measured_negative(facts)
    first = min(facts.messengers, key=lambda m: m.order)
    empty = engine.kv_blocks == 0 or (engine.kv_bytes is not None and engine.kv_bytes <= 0)
    short = engine.kv_blocks is not None and ((engine.kv_tokens or 0) < (engine.max_model_len or 0))
    if not empty and not short:
        return None
    room = (
        f"{format_bytes(engine.kv_bytes)} were left for it"
        if engine.kv_bytes is not None
        else f"it holds {format_count(engine.kv_tokens)} tokens at a length of {format_count(engine.max_model_len)}"
    )
    return found(
        facts,
        "kv_no_blocks" if empty else "kv_lt_max_len",
        0.7 if empty else 0.62,
        f"The start failed right after the KV cache was measured, and {room}.",
        [*_run_evidence(facts, "vllm.kv_available", "vllm.blocks"), cite(first.line)],
        strength=STAGE,
        order=first.order,
        values={
            "stage": "kv",
            "available_kv_bytes": engine.kv_bytes,
            "kv_tokens": engine.kv_tokens,
            "estimated_max_len": engine.kv_tokens if not empty else None,
            "max_model_len": engine.max_model_len,
        },
        unseen=("The refusal itself: the lines of the engine core.",),
    )


def _measured_negative(facts: Facts) -> Finding | None:
    """The log ends where a start measured less than nothing for the cache, which every release refuses."""
    measured = facts.said("vllm.kv_available")
    size = facts.engine.kv_bytes
    if measured is None or size is None or size >= 0 or facts.served:
        return None
    return found(
        facts,
        "kv_no_blocks",
        0.6,
        f"The start measured {format_bytes(size)} for the KV cache: weights and the activation peak need more than the share"
        " of the card allows, and no release starts like that.",
        [cite(measured.line), *_run_evidence(facts, "vllm.weights_v1", "vllm.weights_v0")],
        strength=STAGE,
        order=measured.order,
        values={
            "stage": "kv",
            "available_kv_bytes": size,
            "max_model_len": facts.engine.max_model_len,
        },
        unseen=("The refusal itself: the log ends before it.",),
    )


def _rank_evidence(facts: Facts) -> list[Evidence]:
    events = facts.run.all("vllm.kv_available") if facts.run else []
    if len(events) < 2:
        return list(cite_arguments(facts.engine, ("--pipeline-parallel-size",)))
    low = min(events, key=lambda e: e.fields.get("kv_bytes", 0))
    high = max(events, key=lambda e: e.fields.get("kv_bytes", 0))
    return [cite(low.line), cite(high.line)]


def state_cache(facts: Facts) -> Finding | None:
    """More sequences are allowed than there are state blocks."""
    hit = facts.failing("vllm.mamba_blocks")
    if hit is None:
        return None
    failure, fields = hit
    return found(
        facts,
        "state_cache_seqs",
        0.95,
        f"--max-num-seqs is {format_count(fields.get('seq_count'))}, but the state cache of this hybrid model holds only"
        f" {format_count(fields.get('block_count'))} sequences.",
        cite_failure(failure),
        strength=ARITHMETIC,
        order=failure.order,
        values={
            "seqs": fields.get("seq_count"),
            "blocks": fields.get("block_count"),
            "stage": "capture",
            "hybrid": True,
        },
    )


def cpu_pool(facts: Facts) -> Finding | None:
    """On the CPU back-end the KV cache was sized against host memory, and did not fit."""
    hit = facts.failing("vllm.cpu_kv_over_free")
    if hit is None:
        return None
    failure, fields = hit
    wanted, free = fields.get("requested_bytes"), fields.get("free_bytes")
    values = {
        "stage": "kv",
        "requested_bytes": wanted,
        "free_bytes": free,
        "utilization": facts.engine.in_force.get("--gpu-memory-utilization"),
        "on_cpu": True,
    }
    evidence = [
        *cite_failure(failure),
        *cite_arguments(facts.engine, ("--gpu-memory-utilization", "--kv-cache-memory-bytes")),
    ]
    if wanted is not None and wanted <= 0:
        return found(
            facts,
            "kv_no_blocks",
            0.9,
            f"Weights and runtime use more than the share allows ({format_bytes(wanted)} left for the KV cache) although"
            f" {format_bytes(free)} are free: the share is too small, other processes are not to blame.",
            evidence,
            strength=ARITHMETIC,
            order=failure.order,
            values={**values, "available_kv_bytes": wanted},
        )
    return found(
        facts,
        "kv_alloc_overcommit",
        0.9,
        f"A KV cache of {format_bytes(wanted)} was asked for and {format_bytes(free)} of memory are free.",
        evidence,
        strength=ARITHMETIC,
        order=failure.order,
        values=values,
    )


RULES: Final[tuple[Rule, ...]] = (
    cpu_pool,
    no_blocks,
    length_over_pool,
    sized_to_nothing,
    state_cache,
)
