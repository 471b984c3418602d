"""Steps on the settings of PyTorch's allocator."""

from __future__ import annotations

from oomwatch.engines import flags
from oomwatch.remedies.context import (
    Context,
    Draft,
)
from oomwatch.units import format_bytes


def expandable_segments(context: Context) -> Draft | None:
    """Segments that grow, where PyTorch holds enough memory in pieces that are too small."""
    tried, held = context.number("tried_bytes"), context.number("reserved_unallocated_bytes")
    if context.finding.cause != "fragmentation" and (held is None or tried is None or held < tried):
        return None
    if context.switched_on("--enable-sleep-mode") and not context.at_least("0.21.0"):
        return None  # "Expandable segments are not compatible with memory pool"
    connector = context.given("--kv-transfer-config")
    if connector and context.at_least("0.21.0") and not context.switched_on("--enable-sleep-mode"):
        return None  # refused with connectors that register memory
    variable, old = allocator_setting(context)
    if "expandable_segments:true" in old.lower():
        return None
    kept = [part for part in old.split(",") if part and not part.startswith("expandable_segments")]
    size = f"{format_bytes(held)} reserved but unused" if held else "memory reserved but unused"
    return Draft(
        id="expandable-segments",
        title="Let the allocator's segments grow",
        why=f"PyTorch held {size}, in pieces smaller than the request.",
        cost="None known; not for servers whose KV cache is registered for transfer.",
        env={variable: ",".join([*kept, "expandable_segments:True"])},
    )


def expandable_segments_off(context: Context) -> Draft | None:
    """Plain segments where the driver cannot map them piecewise."""
    variable, old = allocator_setting(context)
    if "expandable_segments:false" in old.lower():
        return None
    kept = [part for part in old.split(",") if part and not part.startswith("expandable_segments")]
    return Draft(
        id="expandable-segments-off",
        title="Turn expandable segments off",
        why="Mapping memory piecewise fails on memory shared with the host and on virtual drivers.",
        cost="More fragmentation.",
        env={variable: ",".join([*kept, "expandable_segments:False"])},
    )


def smaller_split(context: Context) -> Draft | None:
    """Keep large blocks whole, where expandable segments are on or cannot be used."""
    variable, old = allocator_setting(context)
    if "max_split_size_mb" in old:
        return None
    return Draft(
        id="max-split-size",
        title="Keep large blocks of the allocator whole",
        why="Blocks above the limit are not cut into pieces that later requests cannot use.",
        cost="Somewhat slower allocation.",
        env={variable: ",".join([*filter(None, old.split(",")), "max_split_size_mb:512"])},
    )


def allocator_setting(context: Context) -> tuple[str, str]:
    """The allocator's variable (the name the user already has, if any) and its value now."""
    env = context.engine.env
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if name in env:
            return name, env[name]
    return flags.allocator_variable(context.name, context.version), ""
