"""Start-up allocations refused by a property of the device rather than by the engine's plan.

A MIG slice, memory shared with the host, the limit of a virtual machine, and a card that is not
the one that was meant.
"""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts
from oomwatch.errors import UsageError
from oomwatch.memory.devices import find_device
from oomwatch.units import GIB, MIB

_SLICES_GIB: Final = (4.75, 9.50, 19.50, 39.25, 39.50)
"""CUDA totals of 1g.5gb to 3g.40gb slices of A100 and H100 that no whole card has (39.4 and 39.56
are A100 40 GB cards, 9.77 is an RTX 3080)."""
_PART: Final = 0.6
"""Under this share of the smallest card of the host, a total is that of a part of a card."""
_UNIFIED_GIB: Final = (119.0, 124.0)
"""CUDA totals of GB10 and Thor boards; no discrete card reports one in this range."""
_SPARE: Final = 512 * MIB


def shares_host_memory(facts: Facts, total: float | None) -> bool:
    """Whether GPU and host share one memory, by the board's name or by a total only such boards have."""
    if facts.unified:
        return True
    in_range = total is not None and _UNIFIED_GIB[0] <= total / GIB <= _UNIFIED_GIB[1]
    return in_range and not facts.gpu_names


def is_slice(facts: Facts, failure: Failure) -> bool:
    """Whether the device is a MIG slice: by name, by the variable that selects it, or by its total."""
    env = facts.engine.env
    chosen = f"{env.get('CUDA_VISIBLE_DEVICES', '')} {env.get('NVIDIA_VISIBLE_DEVICES', '')}"
    if "MIG-" in chosen or any("MIG" in name for name in facts.gpu_names):
        return True
    total = failure.oom.total_bytes if failure.oom else None
    if facts.gpu_names:
        whole = [size for name in facts.gpu_names if (size := _total_of(name)) is not None]
        return total is not None and bool(whole) and total < _PART * min(whole)
    if facts.said("mig.device") is not None:
        return True
    return total is not None and any(abs(total / GIB - s) < 0.02 for s in _SLICES_GIB)


def refused_with_room(failure: Failure) -> bool:
    """Whether far more was free than was asked for, and no limit of the process itself explains it."""
    oom = failure.oom
    if oom is None or not oom.tried_bytes or not oom.free_bytes or oom.allowed_bytes is not None:
        return False
    return oom.free_bytes > oom.tried_bytes + _SPARE


def intended_card(facts: Facts, failure: Failure) -> str | None:
    """Why the card that ran out is not the one that was chosen, or None.

    A device list chosen by number counts in CUDA's own order (fastest first) unless
    CUDA_DEVICE_ORDER says PCI_BUS_ID, while nvidia-smi counts by PCI address.
    """
    env = facts.engine.env
    total = failure.oom.total_bytes if failure.oom else None
    chosen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    ranks = facts.number("--tensor-parallel-size", "--tp-size") or 1
    if (
        total is None
        or ranks > 1
        or len(chosen) != 1
        or env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    ):
        return None
    if not chosen[0].strip().isdigit():
        return None
    meant = facts.series.gpu_totals.get(int(chosen[0]))
    if meant is not None:
        others = [t for gpu, t in facts.series.gpu_totals.items() if gpu != int(chosen[0])]
        if meant > 1.15 * total and any(0.9 * t <= total <= 1.02 * t for t in others):
            return (
                f"GPU {chosen[0]} by PCI address has {meant / GIB:.1f} GiB, the message counts"
                f" {total / GIB:.1f} GiB"
            )
        return None
    mix = facts.said("cuda.device_mix")
    if mix is None:
        return None
    names = [name.strip() for name in str(mix.fields.get("devices", "")).split(",")]
    sizes = {name: size for name in names if (size := _total_of(name)) is not None}
    largest = max(sizes, key=lambda name: sizes[name], default=None)
    if largest is None or sizes[largest] < 1.15 * total:
        return None
    if not any(0.93 * size <= total <= 1.05 * size for size in sizes.values()):
        return None
    return f"the host has a {largest}, the message counts {total / GIB:.1f} GiB"


def _total_of(name: str) -> int | None:
    try:
        return find_device(name).total_bytes
    except UsageError:
        return None
