"""Start-up refusals that an engine names itself. The numbers are tested before the words are taken."""

from __future__ import annotations

from typing import Any, Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, format_bytes, format_count

_MARGIN: Final = 0.02
"""A gap under this share of the card is a margin, not another process (taxonomy, gpu_busy_margin)."""
_LENGTH_CHECKS: Final = ("raise_if_cache_size_invalid", "check_enough_kv_cache_memory")
_UNIFIED_GIB: Final = (119.0, 124.0)
"""CUDA totals of GB10 and Thor boards; no discrete card reports one in this range."""


def _run_evidence(facts: Facts, *ids: str) -> list[Evidence]:
    return [cite(event.line) for event in (facts.said(identity) for identity in ids) if event]


def device_busy(facts: Facts) -> Finding | None:
    """The card had less free memory than the share asks for, before anything of this engine was on it."""
    hit = facts.failing(
        "vllm.free_below_budget", "vllm.free_below_external", "vllm.cpu_below_budget"
    )
    if hit is None:
        return None
    failure, fields = hit
    free, total = fields.get("free_bytes"), fields.get("total_bytes")
    wanted, share = fields.get("requested_bytes"), fields.get("utilization_ratio")
    gap = wanted - free if wanted is not None and free is not None else None
    values = {
        "free_bytes": free,
        "total_bytes": total,
        "requested_bytes": wanted,
        "utilization": share,
        "gap_bytes": gap,
        "stage": "init",
    }
    evidence = [*cite_failure(failure), *_holders(facts)]
    common: dict[str, Any] = {"strength": ARITHMETIC, "values": values, "order": failure.order}
    unified = facts.unified or (
        total is not None
        and _UNIFIED_GIB[0] <= total / GIB <= _UNIFIED_GIB[1]
        and not facts.gpu_names
    )
    if unified:
        return found(
            facts,
            "unified_memory",
            0.85 if facts.unified else 0.7,
            f"{format_bytes(free)} of {format_bytes(total)} were free, {format_bytes(wanted)} asked for; on this board"
            " GPU and host share one memory, so the page cache and the system hold the rest, not another GPU process.",
            evidence,
            **common,
        )
    if gap is not None and total and gap <= _MARGIN * total and not _big_holder(facts, total):
        return found(
            facts,
            "gpu_busy_margin",
            0.85,
            f"Free memory misses the share by only {format_bytes(gap)} ({format_bytes(free)} free, {format_bytes(wanted)}"
            " asked for): nobody else need be on the card, the runtime's own context is larger than the margin.",
            evidence,
            **common,
        )
    return found(
        facts,
        "gpu_busy_other_process",
        0.92,
        f"Something else already held GPU memory when the engine started: {format_bytes(free)} of {format_bytes(total)}"
        f" free, {format_bytes(wanted)} asked for.",
        evidence,
        **common,
        unseen=()
        if facts.series.holders
        else ("Who holds the card: run `oomwatch diagnose` or `nvidia-smi` on the host.",),
    )


def _holders(facts: Facts) -> list[Evidence]:
    """Foreign processes that hold GPU memory, largest first."""
    foreign = [
        h for h in facts.series.holders if h.pid not in facts.tree_pids and h.used.last > 0.5 * GIB
    ]
    foreign.sort(key=lambda h: -h.used.last)
    return [
        Evidence(
            "nvml",
            str(h.pid),
            text=f"{h.name} (PID {h.pid}) holds {format_bytes(h.used.last)} on GPU {h.gpu}",
            value=round(h.used.last),
            unit="bytes",
        )
        for h in foreign[:3]
    ]


def _big_holder(facts: Facts, total: float) -> bool:
    return any(
        h.pid not in facts.tree_pids and h.used.last > _MARGIN * total for h in facts.series.holders
    )


def profiling_race(facts: Facts) -> Finding | None:
    """Free memory rose while the engine measured its own use."""
    hit = facts.failing("vllm.profile_error")
    if hit is None:
        return None
    failure, fields = hit
    try:
        initial, current = float(fields["initial"]), float(fields["current"])
    except (KeyError, ValueError):
        initial = current = 0.0
    if fields.get("initial") is not None and initial == current:
        return found(
            facts,
            "profile_race_false",
            0.9,
            "The profiling check failed although free memory was the same before and after: the check is too strict in"
            " this release, no other process is to blame.",
            cite_failure(failure),
            strength=ARITHMETIC,
            order=failure.order,
            values={"stage": "profile"},
        )
    return found(
        facts,
        "profile_race",
        0.9,
        "Another process gave GPU memory back while this engine measured its own use, so the measurement was refused.",
        cite_failure(failure),
        strength=ARITHMETIC,
        order=failure.order,
        values={"stage": "profile"},
    )


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
    env = facts.engine.env.get("VLLM_PP_LAYER_PARTITION")
    ranks = sorted((facts.run.by_rank.get("kv_bytes") or {}).values()) if facts.run else []
    spread = ranks[-1] / ranks[0] if len(ranks) > 1 and ranks[0] > 0 else 1.0
    if env and stages > 1:
        return f"The layers are split over the pipeline stages as {env}: the fullest stage has the least room for KV and decides for all."
    totals = sorted(facts.series.gpu_totals.values())
    if len(totals) > 1 and totals[0] and totals[-1] > 1.15 * totals[0]:
        return (
            "The cards differ in size; the smallest one decides how much KV cache every rank gets."
        )
    if spread > 1.3:
        return (
            f"The ranks have very different room for KV ({format_bytes(ranks[0])} to {format_bytes(ranks[-1])}); the"
            " smallest decides for all."
        )
    if stages > 1 and needed and available and needed > 2 * available:
        return (
            f"{format_bytes(needed)} of KV are asked of one pipeline stage, which holds only its share of the layers and has"
            f" {format_bytes(available)}: the split over {stages:.0f} stages is what does not fit."
        )
    return None


def _rank_evidence(facts: Facts) -> list[Evidence]:
    events = facts.run.all("vllm.kv_available") if facts.run else []
    if len(events) < 2:
        return list(cite_arguments(facts.engine, ("--pipeline-parallel-size",)))
    low = min(events, key=lambda e: e.fields.get("kv_bytes", 0))
    high = max(events, key=lambda e: e.fields.get("kv_bytes", 0))
    return [cite(low.line), cite(high.line)]


def unbalanced_cards(facts: Facts) -> Finding | None:
    """SGLang refuses because one card has much less free memory than the others."""
    hit = facts.failing("sglang.unbalanced")
    if hit is None:
        return None
    failure, fields = hit
    return found(
        facts,
        "parallel_imbalance",
        0.75,
        "One GPU has under 90 % of the free memory of another: unequal cards, or something else runs on one of them.",
        [*cite_failure(failure), *_holders(facts)],
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "free_bytes": fields.get("smallest_bytes"),
            "total_bytes": fields.get("local_bytes"),
            "stage": "init",
        },
    )


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


def sampler(facts: Facts) -> Finding | None:
    """The sampler's warm-up with all sequences did not fit."""
    hit = facts.failing("vllm.sampler_oom")
    if hit is None:
        return None
    failure, fields = hit
    first = next((f for f in facts.failures if f.oom is not None), failure)
    oom = first.oom
    return found(
        facts,
        "sampler_warmup",
        0.93,
        f"The warm-up of the {fields.get('what', 'sampler')} with {format_count(fields.get('seq_count'))} dummy requests ran out of GPU memory"
        + (
            f" ({format_bytes(oom.tried_bytes)} asked, {format_bytes(oom.free_bytes)} free)."
            if oom
            else "."
        ),
        [*cite_failure(failure), *(cite_failure(first) if first is not failure else ())],
        strength=NAMED_CHECK,
        order=first.order,
        values={"seqs": fields.get("seq_count"), "stage": "sampler", **oom_values(first)},
    )


def sglang_budget(facts: Facts) -> Finding | None:
    """SGLang's static share holds the weights and nothing more."""
    hit = facts.failing("sglang.weights_over_budget", "sglang.kv_budget_zero")
    if hit is None:
        return None
    failure, fields = hit
    values = {
        "stage": "kv",
        "suggested_fraction": fields.get("suggested_ratio"),
        "utilization": fields.get("fraction_ratio"),
    }
    evidence = [
        *cite_failure(failure),
        *_run_evidence(facts, "sglang.load_begin", "sglang.load_end"),
    ]
    if facts.speculative:
        return found(
            facts,
            "spec_draft",
            0.7,
            "The target and its draft model together leave no memory for the KV cache under the static share.",
            [
                *evidence,
                *cite_arguments(
                    facts.engine, ("--speculative-algorithm", "--speculative-draft-model-path")
                ),
            ],
            strength=NAMED_CHECK,
            order=failure.order,
            values=values,
        )
    return found(
        facts,
        "kv_no_blocks",
        0.92,
        "The weights fill the static share of the memory that was free at start, so no token fits the KV pool: the share is"
        " too small, or the weights too large for the card.",
        evidence,
        strength=NAMED_CHECK,
        order=failure.order,
        values=values,
    )


def host_pool(facts: Facts) -> Finding | None:
    """A pinned pool in host memory is larger than the host allows."""
    hit = facts.failing("vllm.swap_too_large", "sglang.host_pool", "vllm.pinned_pool")
    if hit is None:
        return None
    failure, fields = hit
    asked = fields.get("swap_bytes", fields.get("needed_bytes"))
    return found(
        facts,
        "host_pinned_swap",
        0.95,
        "The pool that the engine wants to pin in host memory is too large for this host's RAM; the GPU is not the problem.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "swap_space_bytes": asked,
            "host_total_bytes": fields.get("host_total_bytes"),
            "stage": "init",
        },
    )


def prefill_warmup(facts: Facts) -> Finding | None:
    """TGI could not warm up with the prefill tokens it was given."""
    hit = facts.failing("tgi.warmup_failed")
    if hit is None:
        return None
    failure, _ = hit
    return found(
        facts,
        "profile_activation_peak",
        0.85,
        "The warm-up with the largest prefill batch ran out of GPU memory.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={"stage": "profile"},
    )


def oom_values(failure: Failure) -> dict[str, Any]:
    """The numbers of a refused allocation, by the names remedies use."""
    oom = failure.oom
    if oom is None:
        return {}
    return {
        "tried_bytes": oom.tried_bytes,
        "free_bytes": oom.free_bytes,
        "total_bytes": oom.total_bytes,
        "own_bytes": oom.own_bytes,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_unallocated_bytes": oom.reserved_bytes,
        "private_pool_bytes": oom.private_bytes,
    }


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
    device_busy,
    profiling_race,
    no_blocks,
    length_over_pool,
    unbalanced_cards,
    state_cache,
    sampler,
    sglang_budget,
    host_pool,
    prefill_warmup,
)
