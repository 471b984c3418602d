"""NVIDIA Xid codes that are seen on inference servers, by what they say about memory and hardware.

``hardware`` needs a reset, a drain or a replacement; ``program`` is a fault of the program that
ran; ``cleanup`` follows another fault; ``driver`` is the driver's or its firmware's. A plain CUDA
out-of-memory makes no Xid at all. Meanings follow NVIDIA's public Xid catalogue.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

XidKind = Literal["hardware", "program", "cleanup", "driver"]


@dataclasses.dataclass(frozen=True, slots=True)
class Xid:
    """What one code says."""

    kind: XidKind
    text: str


_XIDS: Final[dict[int, Xid]] = {
    13: Xid("program", "graphics engine exception: out-of-bounds access or a bad instruction"),
    31: Xid("program", "GPU memory page fault: the program used an invalid address"),
    32: Xid("driver", "invalid or corrupted push buffer stream"),
    38: Xid("driver", "driver firmware error"),
    43: Xid("program", "the GPU stopped processing this program; the GPU itself is healthy"),
    45: Xid("cleanup", "the driver removed a program after a fault, a kill or Ctrl-C"),
    46: Xid("hardware", "GPU stopped processing"),
    48: Xid("hardware", "double-bit ECC error in GPU memory"),
    61: Xid("hardware", "internal micro-controller breakpoint"),
    62: Xid("hardware", "internal micro-controller halt"),
    63: Xid("hardware", "a memory row or page was marked for remapping or retirement"),
    64: Xid("hardware", "remapping or retiring of a memory row or page failed"),
    68: Xid("driver", "video processor exception"),
    69: Xid("program", "graphics engine class error"),
    74: Xid("hardware", "NVLink error"),
    79: Xid("hardware", "the GPU has fallen off the bus"),
    92: Xid("hardware", "high rate of single-bit ECC errors"),
    94: Xid("hardware", "contained ECC error: only the program that used the page is hit"),
    95: Xid("hardware", "uncontained ECC error: the GPU needs a reset"),
    109: Xid("driver", "context switch timed out"),
    110: Xid("hardware", "security fault: the GPU needs a reset"),
    119: Xid("driver", "GPU system processor (GSP) did not answer in time"),
    120: Xid("driver", "GPU system processor (GSP) error"),
    121: Xid("hardware", "corrected error on the chip-to-chip link"),
    123: Xid("driver", "power management unit of the driver failed"),
    136: Xid("hardware", "the link could not be trained"),
    137: Xid("program", "NVLink fault caused by an access of a peer's program"),
    140: Xid("hardware", "unrecovered ECC error"),
    143: Xid("hardware", "GPU initialisation failed"),
    145: Xid("hardware", "NVLink error, reported by its own unit"),
    154: Xid("hardware", "the action needed to recover the GPU changed"),
    158: Xid("hardware", "GPU fatal timeout"),
    171: Xid("hardware", "uncorrectable memory error, with 48"),
    172: Xid("hardware", "uncorrectable memory error, with 48"),
}


def describe_xid(code: int) -> Xid | None:
    """The meaning of a code; None if it is not in the table."""
    return _XIDS.get(code)
