"""Steps on SGLang's pools, and on how many requests it admits."""

from __future__ import annotations

from oomwatch.remedies.context import Context, Draft, power_of_two_below
from oomwatch.remedies.moves_load import fewer_sequences
from oomwatch.units import format_count


def more_conservative(context: Context) -> Draft | None:
    """Reserve more of each request's future tokens at admission."""
    flag = "--schedule-conservativeness"
    old = context.now(flag) if context.now(flag) is not None else 1.0
    if context.name != "sglang" or old is None or old >= 2:
        return None
    new = 1.3 if old < 1.3 else round(old + 0.3, 1)
    return Draft(
        id="more-conservative",
        title=f"Raise {flag} to {new}",
        why="Requests are admitted on a hope for short answers, then retracted when the pool "
        f"fills.{_now(context, flag)}",
        cost="Fewer requests run while the pool is not full.",
        set={flag: new},
    )


def fewer_slots_taken(context: Context) -> Draft | None:
    """Fewer requests at once: SGLang's message asks for it, a row short of any length."""
    flag = "--max-running-requests"
    if context.name != "sglang":
        return fewer_sequences(context)
    old = context.now_or_assumed(flag)
    if not old or old < 2:
        return None
    new = power_of_two_below(old / 2)
    return Draft(
        id="fewer-sequences",
        title=f"Run at most {new} requests at once",
        why=f"The scheduler admitted more requests than there are rows for, up to "
        f"{format_count(old)} at once.",
        cost="Requests above the limit wait in the queue.",
        set={flag: new},
        reason="The scheduler admitted more requests than there are rows for.",
    )


def single_token_pages(context: Context) -> Draft | None:
    """Pages of one token: no rounding up for each request."""
    flag = "--page-size"
    old = context.now(flag)
    if context.name != "sglang" or old is None or old <= 1:
        return None
    new = 1 if old <= 64 else power_of_two_below(old / 8)
    return Draft(
        id="smaller-pages",
        title=f"Lower {flag} to {new}",
        why=f"Each running request rounds up to whole pages of {old:.0f} tokens, so the pool fails "
        "while it still has more tokens than were asked for.",
        cost="Some attention backends need larger pages.",
        set={flag: new},
    )


def larger_window_pool(context: Context) -> Draft | None:
    """More of the KV budget for sliding-window layers."""
    flag = "--swa-full-tokens-ratio"
    pool = context.finding.values.get("pool")
    old = context.now(flag)
    if context.name != "sglang" or (pool != "swa" and (pool is not None or old is None)):
        return None
    new = 0.9 if old is None else round(min(old * 2, old + 0.2, 1.0), 2)
    if old is not None and new <= old:
        return None
    return Draft(
        id="larger-window-pool",
        title=f"Raise {flag} to {new:g}",
        why="The pool of the sliding-window layers is full while the one of full attention is not."
        + _now(context, flag),
        cost="Fewer tokens in the full-attention pool.",
        set={flag: f"{new:g}"},
    )


def larger_state_pool(context: Context) -> Draft | None:
    """More state slots of linear-attention layers."""
    pool = context.finding.values.get("pool")
    slots = context.now("--max-mamba-cache-size")
    if context.name != "sglang" or pool != "mamba":
        return None
    if slots:
        return Draft(
            id="more-state-slots",
            title=f"Raise --max-mamba-cache-size to {int(slots * 1.5)}",
            why="All state slots are taken while the KV pool is not full."
            + _now(context, "--max-mamba-cache-size"),
            cost="Fewer KV tokens.",
            set={"--max-mamba-cache-size": int(slots * 1.5)},
        )
    flag = "--mamba-full-memory-ratio"
    old = context.now(flag) or 0.9
    return Draft(
        id="larger-state-pool",
        title=f"Raise {flag} to {old + 0.3:.1f}",
        why="The state pool is full while the KV pool is not." + _now(context, flag),
        cost="Fewer KV tokens.",
        set={flag: f"{old + 0.3:.1f}"},
    )


def _now(context: Context, flag: str) -> str:
    """From where a step goes, where that was seen."""
    value = context.now(flag)
    return f" It is {value:g} now." if value is not None and context.knows(flag) else ""
