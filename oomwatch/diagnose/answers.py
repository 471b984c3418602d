"""A server's answer to a client as the whole input: its words are the server's own.

Who has no access to the server's log gives what the client got: a JSON body, what an OpenAI client
raised, or one sentence under a heading of their own. In a log such text is a client's and never
evidence; where it is all there is, the message in it is what the server said.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Final

from oomwatch.records import LogLine

MOST_LINES: Final = 40
"""An answer is short; more is a log."""
_ERROR: Final = re.compile(
    r"""["'](?:object["']\s*:\s*["']error["']|(?:error|error_type|detail|code)["']\s*:)|^\S*Error\b"""
)
_SAID: Final = re.compile(
    r"""["'](?:message|error|detail|errors)["']\s*:\s*("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
)
_HEADING: Final = re.compile(
    r"\s*[\[【(*]*(?:error|ERROR|Error|报错|错误)[\]】)*]*\s*[:：]?\s*(?=\S)"
)


def answered(lines: Sequence[LogLine]) -> list[LogLine]:
    """The lines of a short text as a server's own, as far as they are its answers; [] if none is."""
    whole = "\n".join(line.text for line in lines)
    found = [_own(line, words) for line in lines for words in _words(line.text, whole)]
    return found if len(lines) <= MOST_LINES else []


def _words(text: str, whole: str) -> Iterable[str]:
    if _ERROR.search(whole) is not None:
        yield from (_unquoted(match[1]) for match in _SAID.finditer(text))
    heading = _HEADING.match(text)
    if heading is not None:
        yield text[heading.end() :]


def _own(line: LogLine, words: str) -> LogLine:
    return dataclasses.replace(line, text=words, level="ERROR", prefixed=True)


def _unquoted(text: str) -> str:
    try:
        said = json.loads(text) if text.startswith('"') else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text[1:-1]
    return str(said)
