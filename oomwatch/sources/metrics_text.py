r"""The Prometheus text format, read by name: only wanted series are taken apart.

``vllm:num_requests_running{engine="0",model_name="a \"b\" }"} 3.0 1760000000000 # {id="x"} 1``

A page of a megabyte has ten thousand lines of which a hundred matter, so a line is looked at up to
its name first. Label values may hold quotes, braces and hash signs; a timestamp and an exemplar may
follow the value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterator, Mapping
from typing import Final

_LABEL: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"([^"\\]*(?:\\.[^"\\]*)*)"\s*,?')
_OPEN: Final = re.compile(r"\s*\{")
_END: Final = re.compile(r"\s*\}")
_VALUE: Final = re.compile(r"[+-]?(?:\d[\d.]*(?:[eE][+-]?\d+)?|\.\d+|[Ii]nf(?:inity)?|NaN)")
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = {"n": "\n", "\\": "\\", '"': '"'}


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """One line: a name, its labels and a value, which may be NaN or infinite."""

    name: str
    labels: Mapping[str, str]
    value: float


class PageProblems:
    """How many wanted lines could not be read."""

    def __init__(self) -> None:
        self.unreadable = 0


def parse_series(text: str, names: Container[str], problems: PageProblems) -> Iterator[Series]:
    """The series with one of the given names, in order of the page."""
    for raw in text.split("\n"):
        if not raw or raw[0] == "#":
            continue
        brace, space = raw.find("{"), raw.find(" ")
        cut = brace if 0 <= brace < space or space < 0 else space
        name = raw[:cut] if cut > 0 else raw
        if "\t" in name:  # a tab is as good as a blank
            cut = name.index("\t")
            name = name[:cut]
        if name not in names:
            continue
        series = _read(name, raw, cut)
        if series is None:
            problems.unreadable += 1
        else:
            yield series


def parse_families(text: str) -> Iterator[tuple[str, str]]:
    """Name and type of every family that the page declares."""
    for line in text.split("\n"):
        if line.startswith("# TYPE "):
            words = line.split()
            if len(words) == 4:
                yield words[2], words[3]


def _read(name: str, raw: str, cut: int) -> Series | None:
    labels: dict[str, str] = {}
    opening = _OPEN.match(raw, cut) if cut > 0 else None
    if opening is not None:
        position = opening.end()
        while match := _LABEL.match(raw, position):
            labels[match[1]] = _unescape(match[2])
            position = match.end()
        end = _END.match(raw, position)
        if end is None:
            return None
        rest = raw[end.end() :]
    else:
        rest = raw[cut:] if cut > 0 else ""
    words = rest.split(None, 1)
    if not words or not _VALUE.fullmatch(words[0]):
        return None
    try:
        return Series(name, labels, float(words[0]))
    except ValueError:  # 1.2.3
        return None


def _unescape(value: str) -> str:
    if "\\" not in value:
        return value
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), value)
