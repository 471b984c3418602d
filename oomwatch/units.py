"""Sizes, times and their texts. Inside oomwatch: bytes, seconds, UTC epoch seconds."""

from __future__ import annotations

import datetime
import itertools
import math
import re
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
_SPANS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))

_FACTORS: Final = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    "k": 1000,
    "kb": 1000,
    "kib": KIB,
    "m": 1000**2,
    "mb": 1000**2,
    "mib": MIB,
    "g": 1000**3,
    "gb": 1000**3,
    "gib": GIB,
    "t": 1000**4,
    "tb": 1000**4,
    "tib": 1024**4,
}
_SIZE: Final = re.compile(r"\s*(-?\d+(?:[.,]\d+)*)\s*([A-Za-z]*)\s*")


def parse_size(text: str, unit: str = "") -> int | None:
    """Bytes of a size such as ``1.50 GiB``; `unit` is used where the text names none.

    Decimal and binary units are told apart (GB is 10^9, GiB is 2^30); engines that print GB for
    2^30 bytes must pass the text without its label and ``GiB`` as the unit. None if unreadable.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        return None
    number, label = match.group(1).replace(",", ""), (match.group(2) or unit).lower()
    if label not in _FACTORS or number.count(".") > 1:
        return None
    value = float(number) * _FACTORS[label]
    return round(value) if abs(value) <= 2**62 else None


def format_bytes(value: float | None) -> str:
    """A size for people: ``70.1 GiB``, ``512 MiB``; ``?`` when unknown."""
    if value is None:
        return "?"
    size = abs(value)
    for factor, label in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= factor:
            shown = value / factor
            return f"{shown:.1f} {label}" if abs(shown) < 100 else f"{shown:.0f} {label}"
    return f"{value:.0f} B"


def format_count(value: float | None) -> str:
    """A count for people, with thousands commas; ``?`` when unknown."""
    return "?" if value is None else f"{round(value):,}"


def format_share(ratio: float | None) -> str:
    """A ratio as percent: ``42%``; ``99.5%`` and not ``100%`` where something is left."""
    if ratio is None:
        return "?"
    percent = 100 * ratio
    return f"{math.floor(10 * percent) / 10:.1f}%" if 99 < percent < 100 else f"{percent:.0f}%"


def format_duration(seconds: float | None) -> str:
    """A span for people: ``45 s``, ``12 min``, ``3.5 h``, ``2.1 d``; ``?`` when unknown."""
    if seconds is None:
        return "?"
    for factor, label in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * factor:
            return f"{seconds / factor:.1f}".removesuffix(".0") + f" {label}"
    return f"{seconds:.0f} s"


def format_span(seconds: float) -> str:
    """A span to the point, for messages and lists: ``45 s``, ``1 min 36 s``, ``2 h 30 min``."""
    whole = max(0, round(seconds))
    for (large, label), (small, lesser) in itertools.pairwise(_SPANS):
        if whole < large:
            continue
        whole = round(whole / small) * small
        upper = next((name for size, name in _SPANS if size == whole), label)
        if upper != label:  # 23 h 59 min 59 s
            return f"1 {upper}"
        rest = whole % large // small
        return f"{whole // large} {label}" + (f" {rest} {lesser}" if rest else "")
    return f"{whole} s"


def format_rfc3339(epoch_seconds: float) -> str:
    """UTC epoch seconds as RFC 3339 text with milliseconds and a Z."""
    moment = datetime.datetime.fromtimestamp(epoch_seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
