"""Tracebacks while they are read, and the failures that they become.

A failure has the words of the exception, the frames above it, and every pattern its message matches,
less what it echoes of a client's request.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any, Final

from oomwatch.diagnose.client_text import refuses_request, without_echo
from oomwatch.diagnose.items import Failure
from oomwatch.engines.common import OTHER_ENGINES
from oomwatch.engines.common import PATTERNS as COMMON
from oomwatch.engines.keepers import PATTERNS as KEEPERS
from oomwatch.engines.kernel_words import PATTERNS as KERNEL
from oomwatch.engines.patterns import Pattern, PatternTable
from oomwatch.engines.pytorch import PATTERNS as PYTORCH
from oomwatch.engines.pytorch import parse_oom
from oomwatch.engines.sglang.patterns import PATTERNS as SGLANG
from oomwatch.engines.vllm.patterns import PATTERNS as VLLM
from oomwatch.records import LogLine

TABLE: Final = PatternTable(VLLM, SGLANG, PYTORCH, KEEPERS, KERNEL, COMMON, OTHER_ENGINES)

_BOXED_FRAME: Final = re.compile(r"(/[^\s:│]{1,400}\.py):\d{1,6} in\s*<?(\w{1,200})")
_RAISE: Final = re.compile(r"\s*raise (\w+)\(")
_LITERAL: Final = re.compile(r'"([^"\\]*)"')
_MAX_FRAMES: Final = 60
MAX_MESSAGE: Final = 6000


@dataclasses.dataclass(slots=True)
class OpenTraceback:
    """A traceback that is being read."""

    header: LogLine
    order: int
    announced: bool
    seen_at: float | None = None
    frames: list[str] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)
    code: str = ""
    source: str = ""
    """All lines of source that the last frame shows."""
    boxed: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str, function: str) -> None:
        """One more frame, further in."""
        self.source = ""
        if len(self.frames) < _MAX_FRAMES:
            self.paths.append(path)
            self.frames.append(f"{path.rpartition('/')[2]}:{function}")

    def add_boxed(self, text: str) -> None:
        """One line of a drawn traceback; long paths go on in the next line of the box."""
        if text.startswith("│") and len(self.boxed) < 400:
            self.boxed.append(text.rstrip().removesuffix("│").removesuffix(" ")[2:])
        elif text.startswith("╰"):
            for path, function in _BOXED_FRAME.findall("".join(self.boxed)):
                self.add(path, function)


@dataclasses.dataclass(slots=True)
class OpenMessage:
    """An exception whose message may go on over the next lines."""

    name: str
    parts: list[str]
    line: LogLine
    order: int
    traceback: OpenTraceback
    details: list[LogLine] = dataclasses.field(default_factory=list)
    alone: bool = False
    """Whether it stands without a traceback, so that nothing but its words says how far it goes."""


def finish(message: OpenMessage) -> Failure:
    """The failure that a message, read to its end, and the traceback above it make."""
    opened = message.traceback
    failure = _failure(message.name, "\n".join(message.parts), message.line, message.order)
    if opened.paths and refuses_request(message.name, opened.paths[-1]):
        failure = dataclasses.replace(failure, matches=(), oom=None, relayed=False)
    return dataclasses.replace(
        failure,
        frames=tuple(opened.frames),
        paths=tuple(opened.paths),
        header="" if message.alone else opened.header.text,
        details=tuple(message.details),
        announced=opened.announced or message.line.prefixed,
        seen_at=opened.seen_at,
    )


def cut(opened: OpenTraceback) -> Failure:
    """A traceback without its last line. Where it stands at a `raise`, the source has the words."""
    raised = _RAISE.match(opened.source)
    words = "".join(_LITERAL.findall(opened.source)) if raised else ""
    matches = tuple(TABLE.match_exception(words)) if words else ()
    return Failure(
        raised[1] if raised and matches else "",
        words if matches else "",
        tuple(opened.frames),
        tuple(opened.paths),
        opened.header,
        opened.order,
        matches,
        header=opened.header.text,
        code=opened.code,
        announced=opened.announced,
        seen_at=opened.seen_at,
    )


def standalone(
    line: LogLine, order: int, name: str, text: str, frame: str | None = None
) -> Failure:
    """The failure that one line tells, without a traceback of its own."""
    failure = _failure(name, text, line, order)
    return dataclasses.replace(failure, frames=(frame,) if frame else (), announced=line.prefixed)


def _fullest(
    *readings: Iterable[tuple[Pattern, dict[str, Any]]],
) -> tuple[tuple[Pattern, dict[str, Any]], ...]:
    """Each pattern that any reading of a message matches, with the most fields one found."""
    best: dict[str, tuple[Pattern, dict[str, Any]]] = {}
    for pattern, fields in itertools.chain.from_iterable(readings):
        known = best.get(pattern.id)
        if known is None or len(fields) > len(known[1]):
            best[pattern.id] = (pattern, fields)
    return tuple(best.values())


def _failure(name: str, message: str, line: LogLine, order: int) -> Failure:
    """The failure of one exception line, with what its message matches, less what it echoes."""
    text = message[:MAX_MESSAGE]
    own = without_echo(name, text)
    whole = f"{name}: {own}" if name else own
    matches = tuple(TABLE.match_exception(whole))
    if "\n" in whole:
        # A terminal broke the one line of the message at its width, or a person between words.
        matches = _fullest(
            matches, *(TABLE.match_exception(whole.replace("\n", g)) for g in ("", " "))
        )
    matches += tuple(
        (pattern, fields)
        for part in own.split("\n")
        for pattern, fields in TABLE.match_exception(part)
        if pattern.regex.startswith("^") and all(pattern is not seen for seen, _ in matches)
    )
    relayed = any(pattern.id == "vllm.worker_failed_with" for pattern, _ in matches)
    return Failure(name, text, (), (), line, order, matches, oom=parse_oom(whole), relayed=relayed)
