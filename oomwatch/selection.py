"""Which of an incident's remedies are set together, where somebody wants one answer to paste.

The steps of a report are alternatives. Everything that prints settings rather than steps (the
formats of a report, `oomwatch flags`, alerts) takes the same ones, and the report says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from oomwatch.records import Remedy

_AT_ONCE: Final = 3
# Steps that cost much or replace each other: taken only as the best one, not on top of it.
_ALONE: Final = frozenset(
    [
        "cpu-offload",
        "drop-block-override",
        "fix-kv-bytes",
        "fp8-kv-cache",
        "language-model-only",
        "max-split-size",
        "more-ranks",
        "no-cuda-graphs",
        "nccl-cumem-off",
        "nccl-without-shm",
        "no-speculation",
        "quantize-online",
        "shorter-context",
        "tensor-instead-of-pipeline",
        "v1-model-runner",
    ]
)


def set_together(remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
    """The first remedy in settings that is enough alone; else the first, and what goes with it."""
    able = [remedy for remedy in remedies if remedy.set or remedy.unset or remedy.env]
    enough = [remedy for remedy in able if remedy.enough]
    chosen = enough[:1] or able[:1]
    for remedy in [] if enough else able[1:]:
        fits = remedy.id not in _ALONE and remedy.direction == chosen[0].direction
        taken = {flag for other in chosen for flag in (*other.set, *other.unset, *other.env)}
        if (
            fits
            and not taken & {*remedy.set, *remedy.unset, *remedy.env}
            and len(chosen) < _AT_ONCE
        ):
            chosen.append(remedy)
    if any({"--kv-cache-memory-bytes", "--num-gpu-blocks-override"} & {*r.set} for r in chosen):
        chosen = [r for r in chosen if r.id not in ("lower-memory-share", "raise-memory-share")]
    return tuple(chosen)
