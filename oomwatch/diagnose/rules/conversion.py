"""Whether a checkpoint is converted to fewer bits while it loads, and would fit once converted.

Loading then holds weights at full width and converted ones together: the peak is what does not
fit (taxonomy, quant_load_peak). The flag alone does not decide: a model that is too large even
when converted, and one that is stored converted, simply do not fit.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.rules.placing import is_quantized

_BYTES_PER_WEIGHT: Final[tuple[tuple[re.Pattern[str], float], ...]] = (
    (re.compile(r"(?i)bitsandbytes|int4|nf4|4bit|mxfp4|nvfp4|w4"), 0.62),
    (re.compile(r"(?i)fp8|int8|8bit|rtn|torchao|quark|w8"), 1.05),
)
"""Bytes of a converted weight, scales included."""
_BILLIONS: Final = re.compile(
    r"(?i)(?<![a-z0-9.])(?:(\d{1,2})x)?(\d{1,4}(?:\.\d{1,2})?)b(?![a-z0-9])"
)
"""``72B``, ``30B-A3B`` and ``8x7B`` in a model's name."""
_SHARED: Final = 0.83
"""Experts share attention: an 8x7B model has 46.7 billion weights."""
_FLAGS: Final = ("--quantization", "--torchao-config", "--load-format")


def converts_to_fit(facts: Facts, failure: Failure) -> bool:
    """Whether the load converts weights and the converted model, as far as its size is known, would fit."""
    if is_quantized(facts) and "bitsandbytes" not in str(facts.argument(*_FLAGS)):
        return False
    width = _width(facts)
    if width is None:
        return False
    total = (failure.oom.total_bytes if failure.oom else None) or facts.engine.total_bytes
    count = _weights(facts.engine.model or "")
    ranks = (facts.number("--tensor-parallel-size", "--tp-size") or 1) * (
        facts.number("--pipeline-parallel-size", "--pp-size") or 1
    )
    if count is None or total is None:
        return True
    return count * width / ranks < 0.97 * total


def _width(facts: Facts) -> float | None:
    for flag in _FLAGS:
        value = facts.argument(flag)
        for pattern, width in _BYTES_PER_WEIGHT:
            if value is not None and pattern.search(str(value)):
                return width
    return None


def _weights(name: str) -> float | None:
    """Weights of a model by its name, or None; of several figures the largest is the total."""
    counts = [
        float(billions) * 1e9 * (int(experts) * _SHARED if experts else 1)
        for experts, billions in _BILLIONS.findall(name.rpartition("/")[2])
    ]
    return max(counts, default=None)
