"""A POSIX command line split into words, in linear time and without ever running anything.

Quotes, backslashes and line continuations are read as a shell reads them; `$NAME`, backquotes and
globs stay as they are. ``;``, ``&``, ``|`` and line ends separate commands.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

MAX_TEXT: Final = 256 * 1024  # no server is started with more; hostile text may be any size

_PIECE: Final = re.compile(
    r"""(?P<space>[ \t\r\f\v]+) | (?P<join>\\\r?\n|\d*>&\d) | (?P<end>[;&|\n]+)
    | '(?P<single>[^']*+)' | "(?P<double>(?:[^"\\]|\\.)*+)" | \\(?P<escaped>.)
    | (?P<plain>[^\s;&|'"\\]++) | (?P<odd>.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_DOUBLE: Final = re.compile(r'\\(?:\r?\n|([$`"\\]))')
_REDIRECT: Final = re.compile(r"(?:\d*|&)(?:>>?|<)(.*)", re.DOTALL)


def split_commands(text: str) -> tuple[list[list[str]], bool]:
    """The commands in a text, each as its words, and whether all quotes were closed."""
    commands: list[list[str]] = [[]]
    word: list[str] = []
    bare = ""  # how the word begins where that is not quoted: only then may it be a redirection
    open_word = skip = False
    closed = True
    for match in _PIECE.finditer(text[:MAX_TEXT] + "\n"):
        kind, found = match.lastgroup, match.group()
        if kind in ("space", "end"):
            redirect = _REDIRECT.fullmatch(bare) if open_word else None
            if open_word and not skip and not redirect:
                commands[-1].append("".join(word))
            if open_word:
                skip = redirect is not None and len(word) == 1 and not redirect.group(1)
            word, bare, open_word = [], "", False
            if kind == "end" and commands[-1]:
                commands.append([])
                skip = False
        elif kind != "join":
            if not open_word and kind == "plain":
                bare = found
            open_word = True
            if kind == "double":
                found = _IN_DOUBLE.sub(lambda m: m.group(1) or "", match.group("double"))
            elif kind in ("single", "escaped"):
                found = match.group(kind)
            closed = closed and kind != "odd"  # a quote that nothing closes, or a last backslash
            word.append(found)
    return [words for words in commands if words], closed


def quote(words: Iterable[str]) -> str:
    """Words as one line that a POSIX shell splits back into the same words."""
    return " ".join(_quoted(word) for word in words)


def _quoted(word: str) -> str:
    if re.fullmatch(r"[\w@%+=:,./-]+", word, re.ASCII):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"
