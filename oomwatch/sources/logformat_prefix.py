"""Takes engine prefixes (`engines/prefixes`) off a line: level, time, process, rank, origin."""

from __future__ import annotations

import dataclasses
import re
import string
from typing import Final

from oomwatch.engines.prefixes import LEVELS, PROCESS_PREFIXES, RANK_IN_PROCESS, RECORD_PREFIXES
from oomwatch.engines.prefixes import Prefix as PrefixEntry
from oomwatch.sources.logformat_time import Clock

_STACKED: Final = 4  # Ray around vLLM around torch's rank: three are seen, one to spare

_EMPHASIS: Final = re.compile(r"(\*{1,3})(?=[^\s*])(.*[^\s*])\1\s*$", re.DOTALL)
"""Markdown's, around a line that a person pasted and marked."""


@dataclasses.dataclass(slots=True)
class Header:
    """What the prefixes of one line said."""

    at: float | None = None
    level: str | None = None
    process: str | None = None
    pid: int | None = None
    rank: str | None = None
    origin: str | None = None
    prefixed: bool = False
    record: bool = False
    """Whether a record began here (a level or a time), not merely a process's line."""


def _by_start(table: tuple[PrefixEntry, ...]) -> dict[str, tuple[PrefixEntry, ...]]:
    return {
        start: tuple(entry for entry in table if not entry.starts or start in entry.starts)
        for start in string.printable
    }


_PROCESSES: Final = _by_start(PROCESS_PREFIXES)
_RECORDS: Final = _by_start(RECORD_PREFIXES)
_DATED: Final = _by_start(
    tuple(entry for entry in RECORD_PREFIXES if "iso" in entry.pattern.groupindex)
)


def starts_record(text: str) -> bool:
    """Whether an engine's record, with its own time, begins here."""
    return any(entry.pattern.match(text) for entry in _DATED.get(text[:1], ()))


def without_emphasis(text: str) -> str:
    """The text of a line that is wrapped in asterisks as a whole; any other as it is."""
    match = _EMPHASIS.match(text)
    return text if match is None else match[2]


def take_prefix(text: str, clock: Clock) -> tuple[str, Header]:
    """The text without its engine prefixes, and what they said.

    Leading blanks of the text stay: they tell the frames of a traceback.
    """
    header = Header()
    if text[:1] == "*":  # Markdown's emphasis, which ends some lines further down
        marked = text.lstrip("*")
        text = marked if _match(_PROCESSES, marked) or _match(_RECORDS, marked) else text
    for _ in range(_STACKED):
        match = _match(_PROCESSES, text)
        if match is None:
            break
        _take(match[1], header, clock)
        text = text[match[1].end() :]
    found = _match(_RECORDS, text)
    if found is not None:
        entry, match_record = found
        _take(match_record, header, clock)
        header.record = True
        text = text[match_record.end() :]
        for inner in RECORD_PREFIXES if entry.then else ():
            again = inner.pattern.match(text) if inner.id in entry.then else None
            if again is not None:
                _take(again, header, clock)
                text = text[again.end() :]
                break
    if header.rank is None and header.process is not None:
        header.rank = _rank_of(header.process)
    if header.prefixed and text[:1] == "*":
        text = without_emphasis(text)
    return text, header


def _match(
    table: dict[str, tuple[PrefixEntry, ...]], text: str
) -> tuple[PrefixEntry, re.Match[str]] | None:
    for entry in table.get(text[:1], ()):
        match = entry.pattern.match(text)
        if match is not None:
            return entry, match
    return None


def _take(match: re.Match[str], header: Header, clock: Clock) -> None:
    header.prefixed = True
    for name, value in match.groupdict().items():
        if not value:
            continue
        if name == "level":
            header.level = LEVELS.get(value, value)
        elif name == "pid":
            header.pid = int(value)
        elif name == "rank":
            header.rank = value.strip()
        elif name == "iso":
            header.at = clock.read_dated(value)
        elif name in {"yearless", "glog"}:
            header.at = clock.read_yearless(value)
        elif name == "process":
            header.process = value
        else:
            header.origin = value


def _rank_of(process: str) -> str | None:
    match = RANK_IN_PROCESS.search(process)
    if match is None:
        return None
    return match.group(1).replace("_", " ") if match.group(1) else match.group(2)
