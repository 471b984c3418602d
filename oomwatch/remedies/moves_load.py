"""Steps that change how much work runs at once: tokens, sequences, lengths, graphs, modalities."""

from __future__ import annotations

import re
from typing import Any, Final

from oomwatch.remedies.context import (
    Context,
    Draft,
    floor_to,
    json_object,
    power_of_two_below,
)
from oomwatch.units import format_count

_LEAST_TOKENS: Final = 256
_QWEN_PIXELS: Final = 1280 * 28 * 28  # 1280 visual tokens of 28 x 28 pixels


# ---------------------------------------------------------------- tokens of one step
def smaller_batch(context: Context) -> Draft | None:
    """Fewer prompt tokens in one step; on V0 this also needs chunked prefill."""
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
    new = power_of_two_below(old / 2)
    extra: dict[str, Any] = {}
    if (
        context.name == "vllm"
        and context.generation == "V0"
        and not context.switched_on("--enable-chunked-prefill")
    ):
        if not _can_chunk_on_v0(context):
            return None
        extra = {"--enable-chunked-prefill": True}
        new = min(2048, max(new, _LEAST_TOKENS))
    if new < _LEAST_TOKENS or (context.name == "sglang" and new < 512):
        return None
    sequences = context.given("--max-num-seqs") and context.now("--max-num-seqs")
    if context.name == "vllm" and sequences and sequences > new:  # the engine refuses less tokens
        extra["--max-num-seqs"] = new
    chunked = " in chunks" if "--enable-chunked-prefill" in extra else ""
    return Draft(
        id="smaller-batch",
        title=f"Process at most {new} prompt tokens in one step{chunked}",
        why=f"Activations grow with the tokens of a step; now up to {format_count(old)}.",
        cost="Long prompts take more steps: slower first token.",
        set={**extra, flag: new},
    )


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
    if context.name != "sglang":
        return None
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
    if limit is None or (running is not None and 0 < running <= 4):
        return None  # a few large requests: their number is not the lever
    base = min(limit, running) if running else limit
    new = power_of_two_below(base / (4 if base >= 1024 else 2))
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
    base = min(limit, running) if running else limit
    new = int(base * 0.75) if running else int(base / 2)
    if held and held > new:
        new = min(int(held), int(base * 0.9))
    new = floor_to(new, 8) if new >= 32 else max(new, 1)
    return _sequences(context, flag, new, "the KV cache does not hold what runs at once")


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
    old = context.now(flag)
    if new < 1 or (old is not None and new >= old):
        return None
    return Draft(
        id="fewer-sequences",
        title=f"Run at most {new} requests at once",
        why=f"{reason[0].upper()}{reason[1:]}.",
        cost="Requests above the limit wait in the queue.",
        set={flag: new},
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
    return shorter_context(context) if whole or context.name != "vllm" else None


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
    before = f" instead of {format_count(old)}" if old else ""
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
    listed = ("--cudagraph-capture-sizes",) if context.given("--cudagraph-capture-sizes") else ()
    return Draft(
        id="fewer-graphs",
        title=f"Capture CUDA graphs up to batch size {new} only",
        why="Each captured size keeps memory of its own.",
        cost="Larger batches decode without graphs.",
        set={flag: new},
        unset=listed,
    )


def piecewise_graphs(context: Context) -> Draft | None:
    """Only piecewise graphs, not one set more for the whole model."""
    if (
        context.name != "vllm"
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


# ---------------------------------------------------------------- modalities
def limit_multimodal(context: Context) -> Draft | None:
    """Fewer images and no video per prompt."""
    if context.name != "vllm":
        return Draft(
            id="limit-multimodal",
            title="Limit images and video per request",
            why="The encoder's memory grows with every image and frame.",
            cost="Larger requests are refused.",
            action="Limit the images and frames of a request, and their size, at the gateway.",
        )
    old = _limits(context.given("--limit-mm-per-prompt"))
    images = old.get("image")
    fewer = max(images // 2, 1) if isinstance(images, int) else 1
    new: dict[str, Any] = {**old, "image": min(fewer, images) if isinstance(images, int) else fewer}
    if context.at_least("0.8.5"):
        new["video"] = 0
    if new == old:
        return None
    return Draft(
        id="limit-multimodal",
        title="Limit images and video per request",
        why="The encoder is sized for, and peaks with, the largest set of items a prompt may hold.",
        cost="Requests with more items are refused; raise the counts to what you really serve.",
        set={"--limit-mm-per-prompt": new},
    )


def _limits(value: Any) -> dict[str, Any]:
    found = json_object(value)
    if not found and isinstance(value, str):
        found = {name: int(n) for name, n in re.findall(r"(\w{1,20})=(\d{1,6})", value[:500])}
    return found


def smaller_images(context: Context) -> Draft | None:
    """Fewer pixels of each image."""
    qwen = "qwen" in (context.engine.model or "").lower()
    if context.name != "vllm" or not qwen:
        return Draft(
            id="smaller-images",
            title="Limit the size of images",
            why="The tokens of an image grow with its pixels.",
            cost="Less detail.",
            action="Limit the pixels of an image with the processor's own setting "
            "(--mm-processor-kwargs), or scale images down at the gateway.",
        )
    old = json_object(context.given("--mm-processor-kwargs"))
    pixels = old.get("max_pixels")
    new = pixels // 2 if isinstance(pixels, int) and pixels <= 2 * _QWEN_PIXELS else _QWEN_PIXELS
    return Draft(
        id="smaller-images",
        title=f"Scale images to at most {format_count(new)} pixels",
        why="The tokens of an image grow with its pixels.",
        cost="Less detail.",
        set={"--mm-processor-kwargs": {**old, "max_pixels": new}},
    )


# ---------------------------------------------------------------- adapters and drafts
def fewer_adapters(context: Context) -> Draft | None:
    """Fewer LoRA slots on the GPU."""
    old = context.now("--max-loras")
    if context.name != "vllm" or old is None or old <= 1:
        return None
    new = int(old // 2)
    return Draft(
        id="fewer-lora-slots",
        title=f"Keep {new} LoRA adapters on the GPU",
        why=f"Buffers for {old:.0f} adapters of the largest rank are allocated at load.",
        cost="Requests for more adapters at once wait.",
        set={"--max-loras": new},
    )


def more_adapters(context: Context) -> Draft | None:
    """More LoRA slots, where requests queue for one while the KV cache is idle."""
    if context.name != "vllm":
        return None
    old = context.now("--max-loras") or 1
    new = max(int(old * 2), 2)
    return Draft(
        id="more-lora-slots",
        title=f"Keep {new} LoRA adapters on the GPU",
        why="Requests wait for an adapter slot, not for memory.",
        cost="Each slot takes memory for the largest rank.",
        set={"--max-loras": new},
    )


def smaller_rank(context: Context) -> Draft | None:
    """The largest adapter rank that is needed, not more."""
    old = context.now("--max-lora-rank")
    if context.name != "vllm" or old is None or old <= 8:
        return None
    new = next((rank for rank in (256, 128, 64, 32, 16, 8) if rank < old), 8)
    return Draft(
        id="smaller-lora-rank",
        title=f"Lower --max-lora-rank to {new}",
        why=f"Buffers are sized for rank {old:.0f}; set it to the largest rank of your adapters.",
        cost="Adapters of a larger rank are refused.",
        set={"--max-lora-rank": new},
    )


def no_speculation(context: Context) -> Draft | None:
    """No draft model."""
    given = tuple(
        sorted(
            f
            for f in context.engine.arguments
            if f.startswith(("--speculative", "--num-speculative", "--spec-"))
        )
    )
    return Draft(
        id="no-speculation",
        title="Drop speculative decoding, or use a smaller draft model",
        why="The draft's weights, KV cache and graphs come on top of the model's.",
        cost="Slower decoding.",
        unset=given,
        action=None
        if given
        else "Start without speculative decoding (remove the --speculative options), "
        "or with a smaller draft model.",
    )


def fewer_draft_tokens(context: Context) -> Draft | None:
    """Fewer speculative tokens a step."""
    config = json_object(context.given("--speculative-config"))
    tokens = config.get("num_speculative_tokens")
    if context.name != "vllm" or not isinstance(tokens, int) or tokens <= 1:
        return None
    new = max(tokens // 2, 1)
    return Draft(
        id="fewer-draft-tokens",
        title=f"Speculate {new} tokens a step",
        why=f"Scoring {tokens} draft tokens for every sequence multiplies the rows of a step.",
        cost="A smaller gain from speculation.",
        set={"--speculative-config": {**config, "num_speculative_tokens": new}},
    )


def fewer_scheduler_steps(context: Context) -> Draft | None:
    """One step per scheduling (V0's multi-step keeps buffers for every step)."""
    old = context.now("--num-scheduler-steps")
    if context.name != "vllm" or old is None or old <= 1:
        return None
    return Draft(
        id="single-scheduler-step",
        title="Schedule one step at a time",
        why=f"--num-scheduler-steps {old:.0f} keeps buffers that profiling does not see.",
        cost="Somewhat lower throughput.",
        set={"--num-scheduler-steps": 1},
    )
