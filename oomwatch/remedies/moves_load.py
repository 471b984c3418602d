"""Steps that change how much work runs at once: tokens, sequences, lengths, graphs."""

from __future__ import annotations

import math
from typing import Any, Final

from oomwatch.engines.vllm.flags import capture_sizes
from oomwatch.remedies.context import (
    Context,
    Draft,
    floor_to,
    json_object,
    power_of_two_below,
)
from oomwatch.units import format_bytes, format_count

_LEAST_TOKENS: Final = 256
_PROMPT_TOKENS: Final = 2048  # a step that serves long prompts without losing much speed
_LARGE_ONES: Final = 4
"""Requests at once whose number is no lever: each is large."""
_FIRST_CHUNK: Final = 4096  # SGLang's own advice for a prefill that runs out: 4096, then 2048


# ---------------------------------------------------------------- tokens of one step
def smaller_batch(context: Context) -> Draft | None:
    """Fewer prompt tokens in one step; where prompts are not cut, chunked prefill with them."""
    flag = context.flag("batch_tokens")
    if flag is None:
        return _smaller_batch_in_words(context)
    old = context.now(flag)
    if old is not None and old < 0 and context.name == "sglang":  # -1: whole prompts at once
        old = max(context.max_model_len or 0, 16384)
    if old is None:
        old = context.now_or_assumed(flag)
    if old is None:
        return None
    new = _covering(context, old, power_of_two_below(old / 2))
    extra: dict[str, Any] = {}
    if context.name == "vllm" and _whole_prompts(context, new):
        if context.generation == "V0" and not _can_chunk_on_v0(context):
            return None
        extra = {"--enable-chunked-prefill": True}
        new = min(2048, max(new, _LEAST_TOKENS)) if context.generation == "V0" else new
    if new < _LEAST_TOKENS or (context.name == "sglang" and new < 512):
        return None
    sequences = context.given("--max-num-seqs") and context.now("--max-num-seqs")
    if context.name == "vllm" and sequences and sequences > new:  # the engine refuses less tokens
        extra["--max-num-seqs"] = new
    chunked = " in chunks" if "--enable-chunked-prefill" in extra else ""
    return Draft(
        id="smaller-batch",
        title=f"Process at most {new} prompt tokens in one step{chunked}",
        why=f"Activations grow with the tokens of a step; now up to {format_count(old)}."
        + _shrunk(context, old, new),
        cost="Long prompts take more steps: slower first token.",
        set={**extra, flag: new},
        reason="Activations grow with the tokens of a step.",
    )


def _covering(context: Context, old: float, half: int) -> int:
    """Half the tokens of a step, or so few that the allocation that failed fits what was free."""
    if context.finding.cause != "prefill_activation_peak":
        return half
    if context.name == "sglang":
        half = min(half, _FIRST_CHUNK)
    tried, free = context.number("tried_bytes"), context.number("free_bytes")
    if not tried or not free or free >= tried:
        return half
    return min(half, max(power_of_two_below(old * free / tried), _PROMPT_TOKENS))


def _shrunk(context: Context, old: float, new: int) -> str:
    """What becomes of the allocation that failed, which grows with the tokens of a step."""
    tried, free = context.number("tried_bytes"), context.number("free_bytes")
    if context.finding.cause != "prefill_activation_peak" or not tried or free is None:
        return ""
    then = tried * new / old
    said = f" What failed takes {format_bytes(then)} then instead of {format_bytes(tried)}"
    if then <= free:
        return f"{said}; {format_bytes(free)} were free."
    return f"{said}, and {format_bytes(free)} were free: take the next step with it."


def _whole_prompts(context: Context, tokens: int) -> bool:
    """Whether prompts are not cut, so that vLLM refuses a step shorter than the longest request.

    vLLM's SchedulerConfig: without chunked prefill a step holds at least max_model_len tokens.
    """
    if context.switched_on("--enable-chunked-prefill"):
        return False
    if context.generation == "V0":
        return True
    off = str(context.force.get("--enable-chunked-prefill", True)).lower() in ("false", "0", "no")
    length = context.max_model_len
    return off and (length is None or tokens < length)


def _can_chunk_on_v0(context: Context) -> bool:
    """V0 chunks from 0.4.1 on, with adapters or a draft model only in its last releases."""
    alone = not any(
        context.force.get(flag)
        for flag in ("--enable-lora", "--speculative-model", "--speculative-config")
    )
    return context.at_least("0.4.1" if alone else "0.7.0")


def _smaller_batch_in_words(context: Context) -> Draft | None:
    return Draft(
        id="smaller-batch",
        title="Process fewer prompt tokens at once",
        why="Activations grow with the tokens of a step.",
        cost="Long prompts take more steps.",
        action=f"Limit the prompt tokens that {context.label} processes in one batch.",
    )


def chunk_below_pool(context: Context) -> Draft | None:
    """A prefill chunk that fits what the KV pool has free (SGLang)."""
    flag = "--chunked-prefill-size"
    if context.name != "sglang" or context.second_pool == "state pool":
        return None  # a state takes one slot, however long the chunk is
    old = context.now_or_assumed(flag) or 0
    free = context.number("available_tokens")
    new = power_of_two_below(min(old / 2, free) if free else old / 2)
    if new < 512:
        return None
    return Draft(
        id="chunk-below-pool",
        title=f"Prefill in chunks of {new} tokens",
        why="A chunk has to find free KV slots for all its tokens at once.",
        cost="Slower first token for long prompts.",
        set={flag: new},
    )


# ---------------------------------------------------------------- sequences
def fewer_sequences(context: Context) -> Draft | None:
    """Half the sequences at a time (a quarter of 1024), below what was running."""
    flag = context.flag("sequences")
    if flag is None:
        return Draft(
            id="fewer-sequences",
            title="Run fewer requests at once",
            why="Every running request adds to the memory of a step.",
            cost="Requests wait in the queue.",
            action=f"Limit the requests that {context.label} runs at the same time.",
        )
    limit = context.number("seqs") or context.now_or_assumed(flag)
    running = context.number("running")
    few = (
        running is not None
        and 0 < running <= _LARGE_ONES
        and context.finding.cause != "kv_slot_exhausted"
    )
    if limit is None or few:
        return None  # a few large requests: their number is not the lever
    base = min(limit, running) if running else limit
    new = power_of_two_below(base / (4 if base >= 1024 else 2))
    held = context.max_concurrency if context.finding.cls != "startup" else None
    if held and held > new:
        new = math.floor(held)  # as many requests of full length as the KV cache holds
    if new >= limit:
        return None
    return _sequences(context, flag, new, f"up to {format_count(limit)} sequences share a step")


def fit_sequences_to_pool(context: Context) -> Draft | None:
    """As many sequences as the KV pool can hold without preempting."""
    flag = context.flag("sequences")
    if flag is None:
        return fewer_sequences(context)
    limit = context.now_or_assumed(flag)
    if limit is None:
        return None
    running, held = context.number("running"), context.max_concurrency
    few = running is not None and 0 < running <= _LARGE_ONES
    if few and (context.finding.cause == "kv_saturation" or context.second_pool == "state pool"):
        return None  # few requests, and none was preempted: their number is not the lever
    base = min(limit, running) if running else limit
    new = int(base * 0.75) if running else int(base / 2)
    new = floor_to(new, 8) if new >= 32 else max(new, 1)
    if held and held > new:
        new = math.floor(held)
    slots = context.state_slots
    if new >= limit or (slots and new >= slots):
        return None
    pool = context.second_pool or "KV cache"
    return _sequences(context, flag, new, f"the {pool} does not hold what runs at once")


def fit_sequences_to_states(context: Context) -> Draft | None:
    """No more sequences than there are state blocks."""
    blocks = context.number("blocks")
    flag = context.flag("sequences")
    asked = context.number("seqs") or context.now_or_assumed(flag)
    if flag is None or not asked:
        return None
    new = int(blocks) if blocks else int(asked / 2)
    new = floor_to(new, 8) if new >= 32 else new
    return _sequences(
        context,
        flag,
        new,
        f"every sequence needs a state block, and there are {format_count(blocks)}",
    )


def _sequences(context: Context, flag: str, new: int, reason: str) -> Draft | None:
    old, running = context.now(flag), context.number("running")
    if new < 1 or (old is not None and new >= old) or (running and new >= running):
        return None  # a cap above what ran would not have acted
    return Draft(
        id="fewer-sequences",
        title=f"Run at most {new} requests at once",
        why=f"{reason[0].upper()}{reason[1:]}.",
        cost="Requests above the limit wait in the queue.",
        set={flag: new},
        reason="Every request that runs takes a place and memory of its own.",
    )


# ---------------------------------------------------------------- length
def shorter_context(context: Context) -> Draft | None:
    """Half the longest request."""
    flag, old = context.flag("length"), context.max_model_len
    if flag is None or old is None or old <= 2048:
        return None
    return _shorter(flag, floor_to(old / 2, 1024), old, "Shorter requests need less at once.")


def shorter_context_on_v0(context: Context) -> Draft | None:
    """Half the longest request, where a step takes whole prompts: V0 without chunks."""
    whole = context.generation == "V0" and not context.switched_on("--enable-chunked-prefill")
    if context.name == "sglang":
        whole = str(context.force.get("--chunked-prefill-size")) == "-1"
    return shorter_context(context) if whole or context.name not in ("vllm", "sglang") else None


def fit_length_to_pool(context: Context) -> Draft | None:
    """The longest request that the KV cache can hold."""
    flag, old = context.flag("length"), context.max_model_len
    if flag is None:
        return None
    best = context.number("estimated_max_len")
    tokens = context.kv_tokens
    needed, available = context.number("needed_kv_bytes"), context.number("available_kv_bytes")
    if not best and tokens and (old is None or tokens < old):
        best = tokens
    if not best and old and needed and available and needed > available > 0:
        best = old * available / needed
    if not best and context.forecast is not None and not context.forecast.now.fits:
        best = context.forecast.longest()
    if not best:
        return shorter_context(context)
    new = floor_to(best, context.block_tokens)
    new = (
        floor_to(best, 1024) if context.number("estimated_max_len") is None and best > 8192 else new
    )
    if new < 1 or (old is not None and new >= old):
        return None
    return _shorter(
        flag, new, old, f"The KV cache holds one request of about {format_count(best)} tokens."
    )


def larger_context(context: Context) -> Draft | None:
    """A larger cache, where it is divided among parallel slots (llama.cpp)."""
    flag = context.flag("length")
    old = context.now(flag)
    if context.name != "llama.cpp" or flag is None:
        return None
    new = int(old * 2) if old else None
    return Draft(
        id="larger-context",
        title=f"Raise {flag}" + (f" to {new}" if new else ""),
        why="The context is divided among the parallel slots, and no slot had room for the batch.",
        cost="More KV memory.",
        set={flag: new} if new else {},
        action=None if new else f"Raise {flag}: it is divided among the parallel slots.",
    )


def _shorter(flag: str, new: int, old: float | None, reason: str) -> Draft:
    before = f" instead of {old:.0f}" if old else ""  # both as flags are written
    return Draft(
        id="shorter-context",
        title=f"Allow at most {format_count(new)} tokens a request",
        why=f"{reason} {flag} {new}{before}.",
        cost="Longer requests are refused.",
        set={flag: new},
    )


# ---------------------------------------------------------------- graphs and compilation
def eager(context: Context) -> Draft | None:
    """No CUDA graphs; in vLLM's V1 no compilation either."""
    flag = {"vllm": "--enforce-eager", "sglang": "--disable-cuda-graph"}.get(context.name or "")
    if flag is None or context.switched_on(flag):
        return None
    return Draft(
        id="no-cuda-graphs",
        title="Run without CUDA graphs",
        why="Graphs keep their own memory, commonly 0.5 to 4 GiB.",
        cost="Slower decoding, most of all at small batches.",
        set={flag: True},
    )


def fewer_graphs(context: Context) -> Draft | None:
    """Capture graphs for small batches only."""
    if context.name == "sglang":
        old = context.now("--cuda-graph-max-bs") or context.now("--cuda-graph-max-bs-decode")
        new = 16 if old is None or old > 16 else power_of_two_below(old / 2)
        flag = "--cuda-graph-max-bs"
    elif context.name == "vllm" and not context.switched_on("--enforce-eager"):
        sequences = context.now("--max-num-seqs") or 256
        old = context.now("--max-cudagraph-capture-size") or min(2 * sequences, 512)
        new = min(64, power_of_two_below(old / 2))
        flag = "--max-cudagraph-capture-size"
    else:
        return None
    if new < 1 or (context.given("--compilation-config") and not context.at_least("0.9.0")):
        return None
    wanted: dict[str, Any] = {flag: new}
    if context.generation == "V0":  # it does not look at the option of V1
        config = json_object(context.given("--compilation-config"))
        wanted = {"--compilation-config": {**config, "cudagraph_capture_sizes": capture_sizes(new)}}
    listed = ("--cudagraph-capture-sizes",) if context.given("--cudagraph-capture-sizes") else ()
    return Draft(
        id="fewer-graphs",
        title=f"Capture CUDA graphs up to batch size {new} only",
        why="Each captured size keeps memory of its own.",
        cost="Larger batches decode without graphs.",
        set=wanted,
        unset=listed,
    )


def piecewise_graphs(context: Context) -> Draft | None:
    """Only piecewise graphs, not one set more for the whole model."""
    if (
        context.name != "vllm"
        or context.generation == "V0"
        or context.switched_on("--enforce-eager")
        or not context.at_least("0.10.1")
    ):
        return None
    config = json_object(context.given("--compilation-config"))
    if str(config.get("cudagraph_mode", "")).upper() in ("PIECEWISE", "NONE"):
        return None
    return Draft(
        id="piecewise-graphs",
        title="Capture piecewise CUDA graphs only",
        why="The default captures a second set of graphs for the whole model.",
        cost="Somewhat slower decoding.",
        set={"--compilation-config": {**config, "cudagraph_mode": "PIECEWISE"}},
    )
