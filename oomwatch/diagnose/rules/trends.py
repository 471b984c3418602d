"""Growth that only a series shows: leaks of the host and of the card, and their harmless twin.

Growth without a plateau is a leak; growth that ends is a warm-up. The series must cover more than
the warm-up before either is said.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.facts import Facts, cite
from oomwatch.diagnose.rules.findings import ARITHMETIC, REQUEST, TREND, Rule, found
from oomwatch.diagnose.rules.placing import gpu_failure
from oomwatch.diagnose.series import HolderTrend, ProcessTrend, Trend, has_settled, is_growing
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, MIB, format_bytes, format_duration

_LEAST_SECONDS: Final = 600.0
_SHORT_SECONDS: Final = 2400.0
_STEP_SHARE: Final = 0.5
_ENGINE_NAME: Final = re.compile(
    r"(?i)vllm|sglang|EngineCore|ray::|llama|ollama|text-gener|lmdeploy"
)


def gpu_growth(facts: Facts) -> Finding | None:
    """The engine's own GPU memory rises from one idle moment to the next while the KV pool is fixed."""
    holder = _growing_holder(facts)
    if holder is None or holder.used.seconds < _LEAST_SECONDS:
        return None
    failure = gpu_failure(facts)
    used = holder.used
    if failure is not None and used.seconds < 1800:
        # A minute of filling up before a failure is a peak or a buffer, not a leak.
        return None
    grammar = _grammar_requests(facts)
    total = facts.series.gpu_totals.get(holder.gpu)
    free = facts.series.gpu_free.get(holder.gpu)
    eta = free.last / used.slope_per_second if free and used.slope_per_second > 0 else None
    values = {
        "grown_bytes": round(used.grown),
        "slope_bytes_per_second": used.slope_per_second,
        "eta_seconds": eta,
        "pid": holder.pid or None,
        "process_name": holder.name if holder.pid else None,
        "total_bytes": total,
        "free_bytes": round(free.last) if free else None,
        "multimodal": facts.multimodal or None,
    }
    known = holder.pid > 0
    who = f"{holder.name} (PID {holder.pid}) on GPU {holder.gpu}" if known else f"GPU {holder.gpu}"
    evidence = [
        Evidence(
            "nvml",
            str(holder.pid) if known else f"GPU {holder.gpu}",
            at=holder.last_seen,
            text=f"{who}: {format_bytes(used.first)} to {format_bytes(used.last)} in {format_duration(used.seconds)}",
            value=round(used.last),
            unit="bytes",
        )
    ]
    if failure is not None:
        evidence.append(cite(failure.line))
    strength, order = (ARITHMETIC, -1) if failure is not None else (TREND, None)
    if grammar is not None and grammar >= 10:
        each = used.grown / grammar
        return found(
            facts,
            "structured_output_growth",
            0.85,
            f"GPU memory grows by {format_bytes(each)} with every request that uses a grammar ({format_bytes(used.grown)} over {grammar:.0f} requests), and never falls back.",
            [*evidence, _counter(facts, "num_grammar_total", grammar)],
            strength=strength,
            order=order,
            values=values,
            risk=failure is None,
        )
    return found(
        facts,
        "gpu_leak_growth",
        0.85 if known else 0.65,
        f"The {'engine' if known else 'card'}'s GPU memory grew by {format_bytes(used.grown)} in {format_duration(used.seconds)} and does not level off, although its KV pool has a fixed size: a leak.",
        evidence,
        strength=strength,
        order=order,
        values=values,
        risk=failure is None,
        unseen=()
        if known
        else ("Which process grows: the driver does not say what each one holds.",),
    )


def _growing_holder(facts: Facts) -> HolderTrend | None:
    growing = [
        h
        for h in _own_holders(facts)
        if is_growing(h.used, least_bytes=300 * MIB, least_share=0.006) and not _one_step(h.used)
    ]
    return max(growing, key=lambda h: h.used.grown, default=None)


def _own_holders(facts: Facts) -> list[HolderTrend]:
    """The engine's processes on the cards: by number, or by name where numbers are another namespace's.

    Where the driver hides what each process holds, the card itself stands in for them.
    """
    holders = facts.series.holders
    if not holders:
        return [
            HolderTrend(gpu, 0, "the card", used, facts.series.ended_at or 0.0)
            for gpu, used in facts.series.gpus.items()
        ]
    mine = [h for h in holders if not facts.tree_pids or h.pid in facts.tree_pids]
    return mine or [h for h in holders if _ENGINE_NAME.search(h.name)]


def _one_step(trend: Trend) -> bool:
    """Whether the rise is one jump: filling the card at start, or a last peak."""
    return trend.high - trend.last > _STEP_SHARE * trend.grown or (
        trend.first < 0.3 * trend.last
        and trend.late_slope_per_second * trend.seconds < 0.2 * trend.grown
    )


def _grammar_requests(facts: Facts) -> float | None:
    counted = [
        s.extra["num_grammar_total"] for s in facts.series.engine if "num_grammar_total" in s.extra
    ]
    return counted[-1] - counted[0] if len(counted) > 1 else None


def _counter(facts: Facts, name: str, grown: float) -> Evidence:
    return Evidence(
        "metrics",
        name,
        at=facts.series.ended_at,
        text=f"{name} grew by {grown:g} in the window",
        value=grown,
        unit="requests",
    )


def foreign_growth(facts: Facts) -> Finding | None:
    """Another process on the card grows into this engine's headroom."""
    if not facts.tree_pids:
        return None
    own = _own_holders(facts)
    foreign = [
        h
        for h in facts.series.holders
        if h not in own and h.used.last > GIB and is_growing(h.used, least_bytes=512 * MIB)
    ]
    if not foreign:
        return None
    holder = max(foreign, key=lambda h: h.used.grown)
    free = facts.series.gpu_free.get(holder.gpu)
    eta = (
        free.last / holder.used.slope_per_second
        if free and holder.used.slope_per_second > 0
        else None
    )
    return found(
        facts,
        "colocated_tenant",
        0.8,
        f"{holder.name} (PID {holder.pid}), no part of this engine, grew to {format_bytes(holder.used.last)} on the same GPU.",
        [
            Evidence(
                "nvml",
                str(holder.pid),
                at=holder.last_seen,
                text=f"{holder.name}: {format_bytes(holder.used.first)} to {format_bytes(holder.used.last)}",
                value=round(holder.used.last),
                unit="bytes",
            )
        ],
        strength=TREND,
        risk=True,
        values={
            "other_process_bytes": round(holder.used.last),
            "other_pids": [holder.pid],
            "eta_seconds": eta,
            "process_name": holder.name,
        },
    )


def host_growth(facts: Facts) -> Finding | None:
    """A process of the engine grows in host memory without a plateau."""
    own = _own_processes(facts)
    grown = [p for p in own if _leaks(facts, p.rss)]
    # A helper that no engine started, such as a cache server, may be the one that grows.
    beside = [] if grown else [p for p in facts.series.processes if p not in own]
    grown += [p for p in beside if _leaks(facts, p.rss) and p.rss.grown > GIB]
    if not grown:
        return None
    grown.sort(key=lambda p: -p.rss.grown)
    lead = grown[0]
    alike = [p for p in grown if p.rss.grown > 0.5 * lead.rss.grown]
    slope = sum(p.rss.slope_per_second for p in alike)
    available = facts.series.available
    total = facts.series.host_total_bytes
    eta = available.last / slope if available and slope > 0 else None
    exhausted = bool(available and total and available.last < 0.08 * total)
    cache = facts.run.all("llama.prompt_cache") if facts.run else []
    values = {
        "grown_bytes": round(sum(p.rss.grown for p in alike)),
        "slope_bytes_per_second": slope,
        "eta_seconds": eta,
        "pid": lead.pid,
        "process_name": lead.name,
        "host_total_bytes": total,
        "host_free_bytes": round(available.last) if available else None,
    }
    evidence = [_rss(p) for p in alike[:4]]
    if available:
        evidence.append(
            Evidence(
                "process",
                "MemAvailable",
                at=facts.series.ended_at,
                text=f"host memory available {format_bytes(available.first)} to {format_bytes(available.last)}",
                value=round(available.last),
                unit="bytes",
            )
        )
    if cache and _stepwise(facts, lead):
        return found(
            facts,
            "host_cache_growth",
            0.8,
            f"{lead.name} grows in host memory with every prompt state it stores ({format_bytes(lead.rss.grown)} in {format_duration(lead.rss.seconds)}).",
            [*evidence, cite(cache[-1].line)],
            strength=TREND,
            values=values,
            risk=not exhausted,
        )
    who = (
        f"{lead.name} (PID {lead.pid})"
        if len(alike) == 1
        else f"{len(alike)} processes such as {lead.name} (PID {lead.pid})"
    )
    return found(
        facts,
        "host_ram_leak",
        0.87 if not beside else 0.7,
        f"{who}{', no part of the engine,' if beside else ''} grew by {format_bytes(lead.rss.grown)}{' each' if len(alike) > 1 else ''} of host memory in {format_duration(lead.rss.seconds)} without levelling off{_card(facts)}.",
        evidence,
        strength=TREND,
        values=values,
        risk=not exhausted,
    )


def _leaks(facts: Facts, rss: Trend) -> bool:
    """Whether resident memory grows for long enough, and not only because the load does."""
    return (
        is_growing(rss)
        and rss.seconds >= _LEAST_SECONDS
        and not (rss.seconds < _SHORT_SECONDS and _load_rises(facts))
    )


def _load_rises(facts: Facts) -> bool:
    """Whether many more requests run at the end of the window than at its start."""
    running = [s.running for s in facts.series.engine if s.running is not None]
    third = len(running) // 3
    if third < 2:
        return False
    first, last = sum(running[:third]) / third, sum(running[-third:]) / third
    return last > 1.4 * first + 1


def _rests(facts: Facts) -> bool:
    """Whether nothing was asked of the engine in the last part of the window, after it had worked."""
    running = [s.running for s in facts.series.engine if s.running is not None]
    part = len(running) * 2 // 5
    return part >= 3 and max(running) > 0 and not any(running[-part:])


def _card(facts: Facts) -> str:
    """What the GPUs did meanwhile, for the sentence; empty if that is not known."""
    gpus = facts.series.gpus.values()
    return "; GPU memory stays flat" if gpus and all(abs(g.grown) < GIB for g in gpus) else ""


def _own_processes(facts: Facts) -> list[ProcessTrend]:
    return [p for p in facts.series.processes if not facts.tree_pids or p.pid in facts.tree_pids]


def _rss(process: ProcessTrend) -> Evidence:
    rss = process.rss
    return Evidence(
        "process",
        str(process.pid),
        at=process.last_seen,
        text=f"{process.name} (PID {process.pid}) resident {format_bytes(rss.first)} to {format_bytes(rss.last)} in {format_duration(rss.seconds)}",
        value=round(rss.last),
        unit="bytes",
    )


def _stepwise(facts: Facts, process: ProcessTrend) -> bool:
    states = [
        e.fields.get("state_bytes", 0)
        for e in (facts.run.all("llama.prompt_cache") if facts.run else [])
    ]
    return bool(states) and process.rss.grown > 0.3 * max(states)


def warm_up(facts: Facts) -> Finding | None:
    """Growth that has ended: tables that fill once, not a leak."""
    settled = [
        p
        for p in _own_processes(facts)
        if has_settled(p.rss, least_bytes=512 * MIB)
        and p.rss.seconds >= _LEAST_SECONDS
        and p.rss.first > 256 * MIB
    ]
    if not settled or _rests(facts):
        return None  # what stands still because nothing is asked of it has not settled
    lead = max(settled, key=lambda p: p.rss.grown)
    if facts.failures or (
        facts.run is not None
        and facts.run.stage not in ("init", "ready", "serving")
        and lead.rss.seconds < 1800
    ):
        return None
    return found(
        facts,
        "bounded_warmup_growth",
        0.8,
        f"{lead.name} (PID {lead.pid}) grew by {format_bytes(lead.rss.grown)} of host memory and has been flat since: a warm-up, not a leak.",
        [_rss(lead)],
        strength=REQUEST,
        values={"grown_bytes": round(lead.rss.grown), "pid": lead.pid, "process_name": lead.name},
    )


RULES: Final[tuple[Rule, ...]] = (gpu_growth, foreign_growth, host_growth, warm_up)
