"""The engine's own KV pool failed: no slot for a planned batch, leaking, or asked for what it can never hold.

A full pool is never a CUDA failure. Causes here want more pool or fewer requests, the opposite of
every activation peak.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.points import Point, points_of
from oomwatch.diagnose.rules.findings import ARITHMETIC, COUNTERS, NAMED_CHECK, Rule, found
from oomwatch.diagnose.runs import Load
from oomwatch.records import Evidence, Finding
from oomwatch.units import format_count, format_duration, format_share

_HIGH: Final = 0.9
_FULL_POOL: Final = re.compile(
    r"\b(?P<pool>swa|mamba)(?: token)? usage: (?P<share>0\.9[5-9]\d*|1\.0\d*)"
)
"""A second pool of a hybrid model on a load line, with nothing left."""
_ROOM: Final = re.compile(r"\b(?:full )?token usage: 0\.[0-8]\d*")
"""The pool of full attention on a load line, with room."""


def pool_allocation(facts: Facts) -> Finding | None:
    """SGLang's token allocator had no slots for a batch the scheduler had planned."""
    hit = facts.failing("sglang.pool_alloc", "sglang.pool_alloc_old")
    if hit is None:
        return None
    failure, fields = hit
    pools = {
        str(p.get("pool") or ("swa" if p.get("swa") else "full")): p
        for pattern, p in failure.matches
        if pattern.id == "sglang.pool_available"
    }
    if not pools and facts.run is not None:
        near = [
            e
            for e in facts.run.all("sglang.pool_available")
            if e.line.source == failure.line.source
            and 0 <= e.line.number - failure.line.number <= 8
        ]
        pools = {str(e.fields.get("pool") or "full"): e.fields for e in near}
    asked_event = failure.match("sglang.pool_asked") or next(
        (
            e.fields
            for e in (facts.run.all("sglang.pool_asked") if facts.run else [])
            if 0 <= e.line.number - failure.line.number <= 8
        ),
        {},
    )
    asked = asked_event.get("asked_tokens")
    full = pools.get("full", {})
    load = facts.load_before(failure.line)
    usage = load.kv_usage_ratio if load else None
    values: dict[str, Any] = {
        "asked_tokens": asked,
        "available_tokens": full.get("available_tokens"),
        "evictable_tokens": full.get("evictable_tokens"),
        "running": load.running if load else None,
        "kv_usage_ratio": usage,
        "stage": "serving",
    }
    evidence = [*cite_failure(failure), *([cite(load.line)] if load else [])]
    second = next(
        (name for name in ("mamba", "swa") if name in pools and _short(pools[name], asked, full)),
        None,
    )
    order = failure.order
    dry = _FULL_POOL.search(load.line.text) if load and second is None and not pools else None
    if load is not None and dry is not None and _ROOM.search(load.line.text):
        return found(
            facts,
            "kv_alloc_fail_hybrid_state",
            0.8,
            f"The {dry['pool']} pool of this hybrid model was {format_share(float(dry['share']))} full at the last load line, while the"
            " full attention pool had room.",
            evidence,
            strength=ARITHMETIC,
            order=order,
            values={**values, "pool": dry["pool"], "hybrid": True},
        )
    if second is not None:
        return found(
            facts,
            "kv_alloc_fail_hybrid_state",
            0.88,
            f"The {second} pool of this hybrid model is exhausted ({format_count(pools[second].get('available_tokens'))} left) while the full"
            f" attention pool still holds {format_count(full.get('available_tokens'))} tokens.",
            evidence,
            strength=ARITHMETIC,
            order=order,
            values={**values, "pool": second, "hybrid": True},
        )
    phase = fields.get("phase") or _phase_of(failure, load)
    guessed = fields.get("phase") is None and load is None and not failure.frames
    leaked = facts.said("sglang.tree_tokens")
    if (
        usage is not None
        and usage < 0.5
        and asked is None
        and (leaked is not None or phase == "Prefill")
    ):
        return found(
            facts,
            "kv_pool_leak",
            0.75,
            f"The pool refused a {phase.lower()} at a token usage of {usage:.2f}: slots were taken and never given back.",
            [*evidence, *([cite(leaked.line)] if leaked else [])],
            strength=ARITHMETIC,
            order=order,
            values=values,
        )
    if (
        usage is not None
        and usage < 0.5
        and full.get("evictable_tokens") == 0
        and (load.running or 0) <= 2
        if load
        else False
    ):
        return found(
            facts,
            "kv_pool_leak",
            0.7,
            f"The pool is exhausted although the last load line says {format_share(usage)} use with {format_count(load.running if load else None)} running: slots were not given back.",
            evidence,
            strength=ARITHMETIC,
            order=order,
            values=values,
        )
    available = full.get("available_tokens")
    if phase == "Decode":
        page = facts.number("--page-size")
        rounding = available is not None and asked is not None and available >= asked
        why = (
            f"{format_count(asked)} tokens were asked and {format_count(available)} are there, but every running request needs a whole page"
            + (f" of {page:.0f}" if page and page > 1 else "")
            if rounding
            else f"{format_count(asked)} tokens were asked and {format_count(available)} are left"
        )
        return found(
            facts,
            "kv_alloc_fail_decode",
            0.9,
            f"The KV pool had no slot for the next token of every running request: {why}.",
            evidence,
            strength=NAMED_CHECK,
            order=order,
            values=values,
        )
    return found(
        facts,
        "kv_alloc_fail_prefill",
        (0.88 if facts.engine.arguments_seen else 0.78) if not guessed else 0.55,
        f"The KV pool had no room for the next prefill chunk: {format_count(asked)} tokens asked, {format_count(available)} available"
        + (", none of them evictable." if full.get("evictable_tokens") == 0 else "."),
        evidence,
        strength=NAMED_CHECK,
        order=order,
        values=values,
    )


def _phase_of(failure: Failure, load: Load | None) -> str:
    """What was being planned where the message does not say: by the frames, else by the last batch."""
    frames = "\n".join(failure.frames)
    if re.search(r":(?:\w*verify|\w*decode|draft\w*)\b", frames):
        return "Decode"
    if re.search(r":\w*(?:prefill|extend)\w*", frames):
        return "Prefill"
    return "Decode" if load and load.line.text.startswith("Decode batch") else "Prefill"


def _short(pool: Any, asked: Any, full: Any) -> bool:
    """Whether a second pool is the one that ran out, next to the full one."""
    left, there = pool.get("available_tokens"), full.get("available_tokens")
    if left is None:
        return False
    if there is None:
        return True
    # A state pool counts slots, a window pool tokens; either way it is short where the full one is not.
    return there > 8 * max(left, 1) and (
        asked is None or left < asked or pool.get("pool") == "mamba"
    )


def state_pool(facts: Facts) -> Finding | None:
    """A hybrid model's state slots ran out, told by an assertion."""
    hit = facts.failing("sglang.mamba_ping_pong", "sglang.mamba_short")
    if hit is None:
        return None
    failure, _ = hit
    load = facts.load_before(failure.line)
    return found(
        facts,
        "kv_alloc_fail_hybrid_state",
        0.85,
        "The state pool of this hybrid model has no slot left, whatever the token pool says.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "pool": "mamba",
            "hybrid": True,
            "stage": "serving",
            "running": load.running if load else None,
        },
    )


def request_slots(facts: Facts) -> Finding | None:
    """No sequence slot or no KV slot for a batch."""
    hit = facts.failing("sglang.req_slots")
    event = facts.said("llama.slots", "llama.slots_old")
    if hit is None and event is None:
        return None
    load = facts.load_before(hit[0].line) if hit else None
    evidence = list(cite_failure(hit[0])) if hit else [cite(event.line)] if event else []
    return found(
        facts,
        "kv_slot_exhausted",
        0.85,
        "Every request slot is taken; no bytes are involved."
        if hit
        else "No KV slot is free for the next batch, even after halving it: the context is too small for the parallel requests.",
        evidence,
        strength=NAMED_CHECK,
        order=hit[0].order if hit else event.order if event else None,
        values={"stage": "serving", "running": load.running if load else None},
    )


def swap_exhausted(facts: Facts) -> Finding | None:
    """V0's swap space in host memory is full."""
    hit = facts.failing("vllm.swap_lack")
    if hit is None:
        return None
    failure, _ = hit
    load, blocks = facts.load_before(failure.line), facts.said("vllm.blocks")
    return found(
        facts,
        "cpu_swap_exhausted",
        0.95,
        "Preempted sequences did not fit the CPU swap space that V0 keeps for them; neither the host's RAM nor its swap file is full.",
        [
            *cite_failure(failure),
            *([cite(load.line)] if load else []),
            *cite_arguments(facts.engine, ("--swap-space",)),
        ],
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "stage": "serving",
            "kv_usage_ratio": load.kv_usage_ratio if load else None,
            "cpu_blocks": blocks.fields.get("cpu_block_count") if blocks else None,
        },
    )


def never_fits(facts: Facts) -> Finding | None:
    """A request waits for ever, as it can never fit the pool."""
    alone = ("sglang.retract_gave_up", "sglang.still_out", "vllm.input_over_pool_v0")
    hit = facts.failing(*alone)
    gave_up = hit[0] if hit else facts.said(*alone)
    if gave_up is not None:
        return found(
            facts,
            "kv_request_never_fits",
            0.85,
            "One request alone does not fit the KV pool.",
            [cite(gave_up.line)],
            strength=NAMED_CHECK,
            order=gave_up.order,
            values={
                "kv_tokens": facts.engine.kv_tokens,
                "max_model_len": facts.engine.max_model_len,
            },
        )
    points = points_of(facts)
    tail: list[Point] = []
    for point in reversed(points):
        if (point.running or 0) == 0 and (point.waiting or 0) >= 1 and (point.kv or 0) < 0.05:
            tail.append(point)
        else:
            break
    tail.reverse()
    if len(points) == 1 and tail:
        return _waits_at_empty_cache(facts, points[0])
    if len(tail) < 3:
        return None
    first, last = tail[0], tail[-1]
    flat = (
        first.generated_total is None
        or last.generated_total is None
        or last.generated_total <= first.generated_total + (points[0].generated_total or 0) * 0
        or _flat(tail)
    )
    seconds = last.at - first.at if first.at is not None and last.at is not None else None
    if not flat or (seconds is not None and seconds < 30):
        return None
    engine = facts.engine
    told = engine.kv_tokens is not None and engine.max_model_len is not None
    small = told and (engine.kv_tokens or 0) < (engine.max_model_len or 0)
    override = facts.argument("--num-gpu-blocks-override") or (
        facts.said("vllm.blocks_override") is not None
    )
    holds_any = told and not small and not override
    pool = f"The pool holds {format_count(engine.kv_tokens)} tokens, the length allows {format_count(engine.max_model_len)}"
    lasting = f"has waited for {format_duration(seconds)}" if seconds else "waits"
    means = (
        f"the scheduler does not start it, as it does not where a request needs more than the whole pool. {pool}: by these figures any request fits, so something else may hold it back."
        if holds_any
        else "it needs more than the whole pool and will never start."
        + (f" {pool}." if small else "")
    )
    evidence: list[Evidence] = [first.evidence, last.evidence]
    evidence += [
        cite(e.line)
        for e in (
            facts.said("vllm.blocks_override"),
            facts.said("vllm.kv_tokens"),
            facts.said("vllm.concurrency"),
        )
        if e
    ]
    return found(
        facts,
        "kv_request_never_fits",
        0.9 if small or override else 0.6 if holds_any else 0.75,
        f"A request {lasting} with nothing running and an empty KV cache: {means}",
        evidence,
        strength=COUNTERS,
        values={
            "waiting": last.waiting,
            "running": 0,
            "kv_usage_ratio": last.kv,
            "kv_tokens": engine.kv_tokens,
            "max_model_len": engine.max_model_len,
            "override": bool(override),
        },
        unseen=("What the scheduler waits for: the request's length, and the pool's size now.",)
        if holds_any
        else (),
    )


def _waits_at_empty_cache(facts: Facts, point: Point) -> Finding | None:
    """One look only: requests wait for capacity while nothing runs and the cache is empty."""
    return found(
        facts,
        "kv_request_never_fits",
        0.55,
        f"{format_count(point.waiting)} requests wait with nothing running and an empty KV cache; if that lasts, the first of them needs more than the whole pool.",
        [point.evidence],
        strength=COUNTERS,
        risk=True,
        values={
            "waiting": point.waiting,
            "running": 0,
            "kv_usage_ratio": point.kv,
            "kv_tokens": facts.engine.kv_tokens,
            "max_model_len": facts.engine.max_model_len,
        },
        unseen=("Whether it lasts: read the page again after half a minute.",),
    )


def _flat(points: Sequence[Point]) -> bool:
    totals = [p.generated_total for p in points if p.generated_total is not None]
    half = totals[len(totals) // 2 :]
    return len(half) < 2 or half[-1] <= half[0]


def blocks_not_returned(facts: Facts) -> Finding | None:
    """The pool stays full although the traffic is gone."""
    points = [p for p in points_of(facts) if p.kv is not None]
    tail = points[-max(6, len(points) // 3) :]
    if len(tail) < 6 or any((p.kv or 0) < _HIGH for p in tail):
        return None
    usual = sorted(p.running or 0 for p in points)[len(points) * 3 // 4]
    idle = [p for p in tail if (p.running or 0) <= 1]
    seconds = (
        tail[-1].at - tail[0].at if tail[-1].at is not None and tail[0].at is not None else 0.0
    )
    tokens_each = _tokens_per_request(facts)
    impossible = tokens_each is not None and any(
        (p.running or 0) * tokens_each < 0.3 * (p.kv or 0) * (facts.engine.kv_tokens or 0)
        for p in idle
    )
    # One long request may fill a small pool; several idle moments of a full pool cannot be explained.
    empty = [p for p in tail if (p.running or 0) == 0]
    if (
        not (len(empty) >= 2 or (impossible and len(idle) >= 3))
        or seconds < 60
        or (usual > 64 and len(empty) < 2)
    ):
        return None
    return found(
        facts,
        "kv_pool_leak",
        0.85,
        f"The KV cache stays at {format_share(tail[-1].kv)} for {format_duration(seconds)} although at most {format_count(max(p.running or 0 for p in idle))} requests run: blocks are not given back.",
        [empty[0].evidence if empty else idle[0].evidence, tail[-1].evidence],
        strength=COUNTERS,
        values={
            "kv_usage_ratio": tail[-1].kv,
            "running": tail[-1].running,
            "waiting": tail[-1].waiting,
        },
    )


def _tokens_per_request(facts: Facts) -> float | None:
    return float(facts.engine.max_model_len) if facts.engine.max_model_len else None


RULES: Final[tuple[Rule, ...]] = (
    pool_allocation,
    state_pool,
    request_slots,
    swap_exhausted,
    never_fits,
    blocks_not_returned,
)
