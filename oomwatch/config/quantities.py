"""Times and sizes as the configuration writes them: ``30s``, ``1h 30min``, ``512MiB``."""

from __future__ import annotations

import math
import re
from typing import Final

from oomwatch.units import GIB, KIB, MIB

_UNITS: Final = {
    "ms": 0.001,
    "s": 1.0,
    "sec": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
    "w": 604800.0,
}
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)\s*")


def parse_duration(text: str) -> float | None:
    """Seconds of ``500ms``, ``30s``, ``5min``, ``2h``, ``7d`` or ``1h 30min``; None if unreadable.

    ``m`` is minutes. A number without a unit is unreadable.
    """
    rest, seconds = text.strip().lower(), 0.0
    if not rest:
        return None
    while rest:
        match = _PART.match(rest)
        if match is None or match.group(2) not in _UNITS:
            return None
        seconds += float(match.group(1)) * _UNITS[match.group(2)]
        rest = rest[match.end() :]
    return seconds if math.isfinite(seconds) else None


def show_duration(seconds: float) -> str:
    """The shortest exact text that `parse_duration` reads back: ``90s``, ``1h``, ``100ms``."""
    milliseconds = round(seconds * 1000)
    for label, factor in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if milliseconds and milliseconds % factor == 0:
            return f"{milliseconds // factor}{label}"
    return f"{milliseconds}ms" if milliseconds else "0s"


def show_size(size_bytes: int) -> str:
    """The shortest exact text of a size: ``512MiB``, ``1GiB``, ``1000B``."""
    for label, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes and size_bytes % factor == 0:
            return f"{size_bytes // factor}{label}"
    return f"{size_bytes}B"
