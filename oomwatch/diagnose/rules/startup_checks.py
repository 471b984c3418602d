"""Start-up refusals that an engine names itself. The numbers are tested before the words are taken."""

from __future__ import annotations

from typing import Any, Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.rules.device_limits import shares_host_memory
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.diagnose.rules.tenants import holder_evidence
from oomwatch.records import Finding
from oomwatch.units import format_bytes, format_count

_MARGIN: Final = 0.02
"""A gap under this share of the card is a margin, not another process (taxonomy, gpu_busy_margin)."""


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
    evidence = [*cite_failure(failure), *holder_evidence(facts)]
    common: dict[str, Any] = {"strength": ARITHMETIC, "values": values, "order": failure.order}
    if shares_host_memory(facts, total):
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


def held_card(facts: Facts) -> Finding | None:
    """The start failed for a reason that is not in the log, and NVML shows somebody else on the card."""
    if facts.failures or not facts.messengers or facts.served or facts.ready or not facts.tree_pids:
        return None
    if facts.run is None or facts.run.stage not in ("init", "load"):
        return None
    share = facts.number("--gpu-memory-utilization", "--mem-fraction-static") or 0.9
    for holder in facts.series.holders:
        total = facts.series.gpu_totals.get(holder.gpu)
        if holder.pid in facts.tree_pids or not total:
            continue
        if holder.used.first > (1 - share) * total + _MARGIN * total:
            first = min(facts.messengers, key=lambda m: m.order)
            return found(
                facts,
                "gpu_busy_other_process",
                0.68,
                f"{holder.name} (PID {holder.pid}), which is no part of this engine, holds {format_bytes(holder.used.first)} of"
                f" {format_bytes(total)} of GPU {holder.gpu}; the share of {share:g} cannot be had. The log holds only the messenger.",
                [*holder_evidence(facts), cite(first.line)],
                strength=STAGE,
                order=first.order,
                values={
                    "stage": "init",
                    "other_process_bytes": round(holder.used.first),
                    "other_pids": [holder.pid],
                    "total_bytes": total,
                    "free_bytes": round(total - holder.used.first),
                    "utilization": share,
                },
                unseen=("The refusal itself: the lines of the engine core.",),
            )
    return None


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
            "swap_space_bytes": asked or fields.get("asked_bytes"),
            "host_total_bytes": fields.get("host_total_bytes"),
            "host_free_bytes": fields.get("free_bytes"),
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


RULES: Final[tuple[Rule, ...]] = (
    device_busy,
    held_card,
    profiling_race,
    sampler,
    host_pool,
    prefill_warmup,
)
