"""What a log pattern is, and how its fields become numbers.

An entry names a cheap substring (`needle`) that a line must contain before its anchored regular
expression is tried, and a sample line that it matches. Field names carry their unit by suffix:

=============  ==========================================  =====================
suffix         text in the log                             value
=============  ==========================================  =====================
``_gib``       number of GiB (also where "GB" is printed)  ``_bytes``, int
``_mib``       number of MiB                               ``_bytes``, int
``_kib``       number of KiB (the kernel's kB)             ``_bytes``, int
``_gb``        number of decimal GB                        ``_bytes``, int
``_size``      number and unit, ``512.00 MiB``             ``_bytes``, int
``_tokens``    integer, thousands commas allowed           int
``_count``     integer, thousands commas allowed           int
``_ratio``     number 0..1                                 float
``_percent``   number 0..100                               ``_ratio``, float
``_seconds``   number                                      float
``_rate``      number per second                           float
no suffix      text                                        str
=============  ==========================================  =====================
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal

from oomwatch.units import GIB, KIB, MIB, parse_size

Kind = Literal[
    "identity",  # who runs: version, arguments, device
    "stage",  # how far a start has come
    "capacity",  # what the start measured
    "stats",  # periodic load figures
    "pressure",  # preemption, retraction: alive but short
    "check",  # a named engine check that refused
    "oom",  # an allocator that refused
    "failure",  # a failure that is not about memory; names its cause
    "messenger",  # repeats or announces a failure that stands elsewhere
    "lifecycle",  # signals, exits, shutdown
    "detail",  # numbers that belong to the failure before
    "hint",  # a fact that helps a rule to decide
]
Where = Literal["line", "exception", "any"]


@dataclasses.dataclass(frozen=True, slots=True)
class Pattern:
    """One kind of log line: how to find it, what its fields mean, where it was seen.

    `where` is "line" for text the engine logs by itself, "exception" for the message of a raised
    exception, "any" for both. `cause` is set where the line alone names a cause.
    """

    id: str
    kind: Kind
    needle: str
    regex: str
    sample: str
    span: str
    where: Where = "line"
    cause: str | None = None
    anchors: tuple[str, ...] = ()
    """Further substrings of which a line must contain one: for wordings that share no needle."""

    def search(self, text: str) -> re.Match[str] | None:
        """The match in `text`, or None."""
        if self.needle not in text or not self.is_near(text):
            return None
        return _compiled(self.regex).search(text)

    def is_near(self, text: str) -> bool:
        """Whether the text holds one of the anchors, if there are any."""
        return not self.anchors or any(anchor in text for anchor in self.anchors)

    def fields(self, match: re.Match[str]) -> dict[str, Any]:
        """The named fields of a match, as numbers in base units; unreadable ones are left out."""
        return convert(match.groupdict())


@functools.cache
def _compiled(regex: str) -> re.Pattern[str]:
    return re.compile(regex)


def _integer(text: str) -> int:
    return int(text.replace(",", ""))


def _scaled(factor: int) -> Callable[[str], int]:
    return lambda text: round(float(text.replace(",", "")) * factor)


_CONVERTERS: Final[Mapping[str, tuple[str, Callable[[str], Any]]]] = {
    "_gib": ("_bytes", _scaled(GIB)),
    "_mib": ("_bytes", _scaled(MIB)),
    "_kib": ("_bytes", _scaled(KIB)),
    "_gb": ("_bytes", _scaled(10**9)),
    "_size": ("_bytes", parse_size),
    "_tokens": ("_tokens", _integer),
    "_count": ("_count", _integer),
    "_ratio": ("_ratio", float),
    "_percent": ("_ratio", lambda text: float(text) / 100),
    "_seconds": ("_seconds", float),
    "_rate": ("_rate", float),
}


LARGEST: Final = 10.0**18
"""No size, count or rate of a log is as large; what is, is damage. Compares false to NaN too."""


def convert(groups: Mapping[str, str | None]) -> dict[str, Any]:
    """Named groups as values in base units; absent groups and unreadable numbers are left out."""
    values: dict[str, Any] = {}
    for name, text in groups.items():
        if text is None:
            continue
        # A name may end in a digit where a pattern has the same field twice.
        base = name.rstrip("0123456789")
        suffix = "_" + base.rpartition("_")[2]
        key, convert_one = _CONVERTERS.get(suffix, (None, None))
        if key is None or convert_one is None:
            values.setdefault(base, text)
            continue
        try:
            value = convert_one(text)
        except (ValueError, OverflowError):
            continue
        if value is not None and abs(value) < LARGEST:
            values.setdefault(base.removesuffix(suffix) + key, value)
    return values


class PatternTable:
    """Patterns of one or more engines, searched in order; the first of each id wins."""

    def __init__(self, *groups: Iterable[Pattern]) -> None:
        self.patterns: Final = tuple(pattern for group in groups for pattern in group)
        self._by_needle: Final = _group(p for p in self.patterns if p.where != "exception")
        self._access: Final = _group(p for p in self.patterns if _ACCESS in p.needle)
        self._exceptions: Final = _group(p for p in self.patterns if p.where != "line")

    def match_line(self, text: str) -> Iterator[tuple[Pattern, dict[str, Any]]]:
        """Every pattern of logged lines that matches `text`, with its fields.

        Six of seven lines of a busy server are access lines. Their path is a client's choice, so
        only patterns of access lines are tried on them.
        """
        return _matches(self._access if _ACCESS in text else self._by_needle, text)

    def match_exception(self, text: str) -> Iterator[tuple[Pattern, dict[str, Any]]]:
        """Every pattern of exception messages that matches `text`, with its fields."""
        return _matches(self._exceptions, text)


_ACCESS: Final = 'HTTP/1.1" '
_Grouped = tuple[tuple[str, tuple[Pattern, ...]], ...]


def _group(patterns: Iterable[Pattern]) -> _Grouped:
    grouped: dict[str, list[Pattern]] = {}
    for pattern in patterns:
        grouped.setdefault(pattern.needle, []).append(pattern)
    return tuple((needle, tuple(found)) for needle, found in grouped.items())


def _matches(grouped: _Grouped, text: str) -> Iterator[tuple[Pattern, dict[str, Any]]]:
    for needle, patterns in grouped:
        if needle in text:
            for pattern in patterns:
                if not pattern.is_near(text):
                    continue
                match = _compiled(pattern.regex).search(text)
                if match is not None:
                    yield pattern, pattern.fields(match)
