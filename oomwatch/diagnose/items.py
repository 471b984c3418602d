"""What a log yields: lines that a pattern matched, and failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from oomwatch.engines.patterns import Pattern
from oomwatch.engines.pytorch import TorchOom
from oomwatch.records import LogLine


@dataclasses.dataclass(frozen=True, slots=True)
class LogEvent:
    """A line that a pattern matched, with its fields in base units."""

    pattern: Pattern
    fields: Mapping[str, Any]
    line: LogLine
    order: int
    """Position in the whole input, for sorting over files."""
    seen_at: float | None = None
    """Time of the line, or of the last line before it in its file that has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """One raised exception, or a line that says as much: what, where in the code, who.

    `frames` are ``file.py:function``, outermost first. `matches` are the patterns that the message
    matched. `relayed` marks a failure that another process repeats.
    """

    name: str
    message: str
    frames: tuple[str, ...]
    paths: tuple[str, ...]
    line: LogLine
    order: int
    matches: tuple[tuple[Pattern, Mapping[str, Any]], ...] = ()
    oom: TorchOom | None = None
    header: str = ""
    relayed: bool = False
    details: tuple[LogLine, ...] = ()
    code: str = ""
    """The last line of source that the traceback shows: all that is left where it was cut."""
    announced: bool = True
    """Whether a record of a program, or Python's own words, introduce it; quoted text has neither."""
    seen_at: float | None = None
    """As that of `LogEvent`."""

    def match(self, *ids: str) -> Mapping[str, Any] | None:
        """The fields of the first of these patterns that the message matched, or None."""
        for pattern, fields in self.matches:
            if pattern.id in ids:
                return fields
        return None

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all patterns that the message matched."""
        return frozenset(pattern.kind for pattern, _ in self.matches)
