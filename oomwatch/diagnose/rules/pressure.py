"""The pool is too small for the load: preemption, swapping, retraction, queues at a full cache.

The server lives, and throws work away. A full pool is never a CUDA failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

from oomwatch.diagnose.facts import Facts, cite
from oomwatch.diagnose.points import Point, points_of
from oomwatch.diagnose.rules.findings import COUNTERS, TREND, Rule, found
from oomwatch.records import Evidence, Finding
from oomwatch.units import format_count, format_duration, format_share

_FULL: Final = 0.97
_TO_THE_BRIM: Final = 0.995
"""Below it a share is told as nearly full."""
_HIGH: Final = 0.9
_MOST: Final = 0.5
_FEW: Final = 8
_STEADY: Final = 4
"""Points in a row with the same few requests running and others waiting that are no blip."""
_IDLE: Final = 3
"""So many are enough where no prompt was read meanwhile: there was time for those that wait."""
_LATE_SECONDS: Final = 86400.0
_MANY: Final = 100
"""Preemptions since the start that a line may count without a storm being the reason to paste it."""
_STORM_PER_MINUTE: Final = 6.0
"""Preemptions a minute that cost real work; a few are harmless (taxonomy)."""


def preemption_storm(facts: Facts) -> Finding | None:
    """V0 preempts again and again."""
    events = facts.run.all("vllm.preempt_v0") if facts.run else []
    if not events:
        events = facts.run.all("vllm.preempt_v0_cut") if facts.run else []
    points = points_of(facts)
    minutes, count = _preemptions(events, points)
    if count is None or count < 2:
        return _swapping(facts, points)
    rate = count / minutes if minutes else None
    if rate is not None and rate < (_STORM_PER_MINUTE if count < 100 else 1):
        return _swapping(facts, points)
    mode = events[-1].fields.get("mode") if events else "RECOMPUTE"
    swapped = max((p.swapped or 0 for p in points), default=0)
    cause = (
        "kv_preempt_swap_storm" if mode == "SWAP" or swapped > 0 else "kv_preempt_recompute_storm"
    )
    last = points[-1] if points else None
    sentence = (
        f"The KV cache is too small for the running requests: {format_count(count)} preemptions"
        + (f" in {format_duration(minutes * 60)}" if minutes else "")
        + (
            ", each throws computed tokens away."
            if cause.endswith("recompute_storm")
            else ", each copies a sequence to host memory and back."
        )
    )
    evidence = [cite(events[0].line), cite(events[-1].line)] if events else []
    counted = [p for p in points if p.preemptions_total is not None]
    evidence += [p.evidence for p in (counted[:1] if not events else [])]
    evidence += [p.evidence for p in points[-1:] if p.evidence not in evidence]
    return found(
        facts,
        cause,
        0.88 if events or facts.is_v0 else 0.75,
        sentence,
        evidence,
        strength=COUNTERS,
        risk=True,
        order=events[-1].order if events else None,
        values={
            "preemptions_per_minute": rate,
            "running": max((p.running for p in points[-3:] if p.running is not None), default=None),
            "waiting": last.waiting if last else None,
            "kv_usage_ratio": last.kv if last else None,
        },
    )


def _swapping(facts: Facts, points: Sequence[Point]) -> Finding | None:
    """V0 before 0.4.3 prints no line: sequences that stay swapped out tell."""
    out = [p for p in points if (p.swapped or 0) > 0]
    full = len(points) == 1 and bool(out) and (points[0].kv or 0) >= _HIGH
    if not full and (len(out) < 3 or points[-1] not in out):
        return None
    most = max(out, key=lambda p: p.swapped or 0)
    return found(
        facts,
        "kv_preempt_swap_storm",
        0.87,
        f"The KV cache is too small for the running requests: up to {format_count(most.swapped)} of them lie swapped out in host memory.",
        [out[0].evidence, most.evidence],
        strength=COUNTERS,
        risk=True,
        values={
            "running": most.running,
            "waiting": most.waiting,
            "kv_usage_ratio": most.kv,
        },
    )


def _preemptions(
    events: Sequence[Any], points: Sequence[Point]
) -> tuple[float | None, float | None]:
    """Minutes and number of preemptions, from log lines or from the counter."""
    if events:
        counts = [e.fields["preemption_count"] for e in events if "preemption_count" in e.fields]
        times = [e.line.at for e in events if e.line.at is not None]
        total = (
            float(counts[-1] - (counts[0] - 1 if counts[0] > 1 else 0))
            if counts
            else float(len(events))
        )
        if counts and len(counts) > 1 and counts[-1] < counts[0]:
            total = float(counts[-1])
        if len(events) == 1 and counts and counts[0] >= _MANY and not points:
            total = float(counts[0])  # that one line is all there is: its count since the start
        minutes = (times[-1] - times[0]) / 60 if len(times) > 1 else None
        return (minutes or None), max(total, float(len(events)))
    counted = [p for p in points if p.preemptions_total is not None]
    if len(counted) < 2:
        return None, None
    grown = sum(
        max(0.0, (b.preemptions_total or 0) - (a.preemptions_total or 0))
        for a, b in itertools.pairwise(counted)
    )
    begin = next(
        (
            i
            for i, (a, b) in enumerate(itertools.pairwise(counted))
            if (b.preemptions_total or 0) > (a.preemptions_total or 0)
        ),
        0,
    )
    first, last = counted[begin].at, counted[-1].at
    minutes = (
        (last - first) / 60 if first is not None and last is not None and last > first else None
    )
    return minutes, grown


def retraction_storm(facts: Facts) -> Finding | None:
    """SGLang sends running requests back to the queue."""
    events = facts.run.all("sglang.retract") if facts.run else []
    if not events or facts.failing("sglang.pool_alloc", "sglang.pool_alloc_old"):
        return None
    times = [e.line.at for e in events if e.line.at is not None]
    window = max(times) - min(times) if len(times) > 1 else 0.0
    # SGLang's documentation accepts about one a minute.
    if len(events) < 2 or (window > 0 and len(events) / (window / 60) < 1.5):
        return None
    load = facts.load_before(events[-1].line)
    return found(
        facts,
        "kv_retract_storm",
        0.9,
        f"The KV pool is full and {format_count(len(events))} times running requests were sent back to the queue within {format_duration(max(window, 1))}; the server lives, its work is thrown away.",
        [cite(events[0].line), cite(events[-1].line), *([cite(load.line)] if load else [])],
        strength=COUNTERS,
        risk=True,
        order=events[-1].order,
        values={
            "running": load.running if load else None,
            "waiting": load.waiting if load else None,
            "kv_usage_ratio": load.kv_usage_ratio if load else None,
        },
    )


def saturation(facts: Facts) -> Finding | None:
    """The KV cache is full and requests queue for it."""
    points = [p for p in points_of(facts) if p.kv is not None]
    if not points:
        return _filling(facts)
    if facts.live and not facts.ended:  # of a server that runs, what it went through of late
        now = points[-1].at or 0
        points = [p for p in points if p.at is None or p.at > now - _LATE_SECONDS]
    full = [p for p in points if (p.kv or 0) >= _HIGH and (p.waiting or 0) > 0]
    if not full:
        return _next_does_not_fit(facts, points) or _filling(facts)
    worst = max(full, key=lambda p: ((p.kv or 0) >= _FULL, p.waiting or 0))
    last = points[-1]
    sliding = _shrinking(points)
    # At the end, or long enough to be no blip, or running falls while waiting rises: preemption
    # without a line, since V1 never logs one and its counter comes late (seen on 0.32).
    at_end = last in full and ((last.kv or 0) >= _FULL or (last.waiting or 0) >= 2)
    if not (at_end or sliding or len(full) >= 3):
        return _filling(facts)
    evidence = [p.evidence for p in ([full[0], worst, last] if at_end else [full[0], worst])]
    unique = list({(e.where, e.text): e for e in evidence}.values())
    return found(
        facts,
        "kv_saturation",
        0.85 if at_end or sliding else 0.7,
        f"The KV cache {'is' if at_end else 'was'} {'full' if (worst.kv or 0) >= _TO_THE_BRIM else 'nearly full'} ({format_share(worst.kv)}) and {format_count(worst.waiting)} requests {'wait' if at_end else 'waited'} with {format_count(worst.running)} running: the pool, not the card, limits this server.",
        unique,
        strength=COUNTERS,
        risk=True,
        values={
            "kv_usage_ratio": worst.kv,
            "running": worst.running,
            "waiting": worst.waiting,
            "kv_tokens": facts.engine.kv_tokens,
            "max_model_len": facts.engine.max_model_len,
        },
        unseen=()
        if facts.series.engine or not facts.run
        else ("Preemptions: vLLM V1 logs none; its counter vllm:num_preemptions_total tells.",)
        if facts.engine.engine == "vllm"
        else (),
    )


def _next_does_not_fit(facts: Facts, points: Sequence[Point]) -> Finding | None:
    """A long request holds most of the cache, and none of those that wait fits beside it."""
    idle = all(p.prompt_rate == 0 for p in points[-_IDLE:])
    least = _IDLE if idle else _STEADY
    tail = points[-least:]
    seqs = facts.number("--max-num-seqs", "--max-running-requests")
    if (
        len(tail) < least
        or facts.lora
        or any((p.kv or 0) < _MOST or (p.waiting or 0) < 1 for p in tail)
        or any((p.running or 0) < 1 or (p.running or 0) > _FEW for p in tail)
        or any((p.running or 0) >= (seqs or _FEW + 1) for p in tail)
    ):
        return None
    last = tail[-1]
    unseen = facts.run is not None and facts.run.printed is None and not facts.engine.arguments
    one = last.running == 1
    return found(
        facts,
        "kv_saturation",
        0.6 if unseen else 0.7,
        f"{format_count(last.running)} running {'request holds' if one else 'requests hold'} {format_share(last.kv)} of the KV cache, and none of the {format_count(last.waiting)} that wait fits beside {'it' if one else 'them'}.",
        [tail[0].evidence, last.evidence],
        strength=COUNTERS,
        risk=True,
        values={
            "kv_usage_ratio": last.kv,
            "running": last.running,
            "waiting": last.waiting,
            "kv_tokens": facts.engine.kv_tokens,
            "max_model_len": facts.engine.max_model_len,
        },
        unseen=(
            f"The limit of requests at once: if it is {format_count(last.running)}, they wait for that.",
        )
        if unseen
        else (),
    )


def _filling(facts: Facts) -> Finding | None:
    """The cache is not full yet, and the agent has seen that it will be."""
    ahead = next((t for t in reversed(facts.noticed) if t.kind == "forecast_kv"), None)
    if ahead is None or not ahead.text:
        return None
    values = {
        name: ahead.values.get(name)
        for name in ("kv_usage_ratio", "eta_seconds", "eta_low_seconds", "eta_high_seconds")
    }
    return found(
        facts,
        "kv_saturation",
        0.6,
        f"{ahead.text}. Then requests are preempted or wait: the pool is small for this load.",
        [Evidence("metrics", "KV cache use", at=ahead.at, text=ahead.text)],
        strength=TREND,
        risk=True,
        values={
            **values,
            "kv_tokens": facts.engine.kv_tokens,
            "max_model_len": facts.engine.max_model_len,
        },
    )


def _shrinking(points: Sequence[Point]) -> bool:
    """Whether running falls while waiting rises at a full pool, over three points."""
    for a, b, c in zip(points, points[1:], points[2:], strict=False):
        if (
            all((p.kv or 0) >= _HIGH for p in (b, c))
            and (a.running or 0) > (b.running or 0) > (c.running or 0)
            and (a.waiting or 0) < (c.waiting or 0)
            and (c.waiting or 0) > 1
        ):
            return True
    return False


RULES: Final[tuple[Rule, ...]] = (preemption_storm, retraction_storm, saturation)
