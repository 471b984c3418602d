"""What the makers of accelerators call their kernels, and the variable that runs them one by one."""

from __future__ import annotations

from typing import Final, NamedTuple


class Accelerator(NamedTuple):
    """The words for one kind of card."""

    kernel: str
    """What failed, as the first words of a sentence."""
    blocking: tuple[str, str]
    """The variable that makes each launch wait for its end."""
    stack: str
    """What is upgraded with the engine."""
    graphs_block: bool
    """Whether the variable is refused while graphs are captured."""


ACCELERATORS: Final = {
    "cuda": Accelerator("A CUDA kernel", ("CUDA_LAUNCH_BLOCKING", "1"), "", False),
    "rocm": Accelerator("A GPU kernel", ("AMD_SERIALIZE_KERNEL", "3"), " and ROCm", False),
    "npu": Accelerator(
        "An NPU kernel", ("ASCEND_LAUNCH_BLOCKING", "1"), ", torch_npu and CANN", True
    ),
}
"""By the first part of a pattern's id."""


def accelerator_of(pattern: str, message: str) -> str:
    """The kind of card that a failure's pattern or its own words tell; ``cuda`` for any other."""
    first = pattern.partition(".")[0]
    if first in ("npu", "rocm"):
        return first
    return "rocm" if "HIP error" in message or "hipError" in message else "cuda"
