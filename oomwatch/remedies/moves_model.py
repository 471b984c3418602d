"""Steps on what comes with the model: images and video, LoRA adapters, draft models."""

from __future__ import annotations

import re
from typing import Any, Final

from oomwatch.remedies.context import Context, Draft, json_object
from oomwatch.units import format_count

_QWEN_PIXELS: Final = 1280 * 28 * 28  # 1280 visual tokens of 28 x 28 pixels


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
            action=context.words(
                "Limit the pixels of an image with the processor's own setting"
                "[[vllm: (--mm-processor-kwargs)]], or scale images down at the gateway."
            ),
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
        else context.words(
            "Start without speculative decoding[[vllm,sglang: (remove the --speculative options)]]"
            ", or with a smaller draft model."
        ),
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
