r"""The Prometheus text format, read by name: only wanted series are taken apart.

``vllm:num_requests_running{engine="0",model_name="a \"b\" }"} 3.0 1760000000000 # {id="x"} 1``

A page of a megabyte has ten thousand lines of which a hundred matter, so a line is looked at up to
its name first. Label values may hold quotes, braces and hash signs; a timestamp and an exemplar may
follow the value.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*,?')
_OPEN: Final = re.compile(r"\s*\{")
_END: Final = re.compile(r"\s*\}")
_BLANKS: Final = re.compile(r"\s*")
_VALUE: Final = re.compile(r"[+-]?(?:\d[\d.]*(?:[eE][+-]?\d+)?|\.\d+|[Ii]nf(?:inity)?|NaN)")
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


class Series(NamedTuple):
    """One line: a name and its labels. `start` is where its value begins."""

    name: str
    labels: Mapping[str, str]
    start: int


class Page:
    """A page taken apart once, and read again as long as only its values change.

    A server prints the same names and labels each time. Whether another page differs in nothing
    else is one comparison a line, made in C; what is read of it then is the values of `series`.
    """

    def __init__(self, text: str, names: Container[str]) -> None:
        """Take apart the series with one of the given names."""
        lines = text.split("\n")
        self.series: list[Series] = []
        """In order of the page."""
        self.values: list[float] = []
        """Of `series`; may be NaN or infinite."""
        self.unreadable = 0
        """Wanted lines that could not be read."""
        self._places: list[tuple[int, int]] = []
        self._heads: list[str] = []
        self._whole = True
        for number, raw in enumerate(lines):
            name, cut = ("", len(raw)) if raw[:1] in {"", "#"} else _name(raw)
            self._whole &= not name or cut < len(raw)  # a name alone may go on in the next page
            if name in names:
                series = _series(name, raw, cut)
                value = None if series is None else _value(raw[series.start :])
                if series is None or value is None:
                    self.unreadable += 1
                else:
                    self.series.append(series)
                    self.values.append(value)
                    self._places.append((number, series.start))
                    cut = series.start - 1
            self._heads.append(raw[: cut + 1])
        # Comments too: one that goes on may declare another family.
        self._fixed = [(number, raw) for number, raw in enumerate(lines) if raw[:1] in {"", "#"}]
        self.families = tuple(_families(lines))
        """Name and type of every family that the page declares."""

    def read(self, text: str) -> list[float] | None:
        """The values of `series` on another page; None where that has other lines."""
        lines = text.split("\n")
        if (
            self.unreadable
            or not self._whole
            or len(lines) != len(self._heads)
            or not all(map(str.startswith, lines, self._heads))
            or any(lines[number] != raw for number, raw in self._fixed)
        ):
            return None
        texts = [lines[number][start:] for number, start in self._places]
        if not all(map(_VALUE.fullmatch, texts)):  # timestamps, exemplars
            values = [_value(text) for text in texts]
            return None if None in values else [value for value in values if value is not None]
        try:
            return list(map(float, texts))
        except ValueError:  # 1.2.3
            return None


def _name(raw: str) -> tuple[str, int]:
    """The name that a line begins with, and where it ends."""
    brace, space = raw.find("{"), raw.find(" ")
    cut = brace if 0 <= brace < space or space < 0 else space
    name = raw[:cut] if cut > 0 else raw
    if "\t" in name:  # a tab is as good as a blank
        cut = name.index("\t")
        name = name[:cut]
    return name, len(name)


def _families(lines: Sequence[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line.startswith("# TYPE "):
            words = line.split()
            if len(words) == 4:
                yield words[2], words[3]


def _series(name: str, raw: str, cut: int) -> Series | None:
    labels: dict[str, str] = {}
    opening = _OPEN.match(raw, cut)
    if opening is not None:
        position = opening.end()
        while match := _LABEL.match(raw, position):
            labels[match[1]] = _unescape(match[2])
            position = match.end()
        end = _END.match(raw, position)
        if end is None:
            return None
        cut = end.end()
    blanks = _BLANKS.match(raw, cut)
    return Series(name, labels, cut if blanks is None else blanks.end())


def _value(text: str) -> float | None:
    """The number that a text begins with."""
    words = text.split(None, 1)
    if not words or not _VALUE.fullmatch(words[0]):
        return None
    try:
        return float(words[0])
    except ValueError:  # 1.2.3
        return None


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), value)
