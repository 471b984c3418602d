"""Arguments as engines print them: ``Namespace(...)``, ``ServerArgs(...)`` and ``{...}``.

The text is a Python repr in which values may be anything (``<Enum: 0>``, nested objects) and which
may be cut short. It is read by hand in one pass; nothing is evaluated.
"""

from __future__ import annotations

import re
from typing import Any, Final

MAX_TEXT: Final = 256 * 1024
_DEPTH: Final = 24  # containers nested deeper than this are kept as text

_BEGIN: Final = re.compile(r"(?:\b[A-Za-z_]\w{0,80}\()|\{")
_KEY: Final = re.compile(
    r"\s*(?:'([^'\\\n]{1,200})'|\"([^\"\\\n]{1,200})\"|([A-Za-z_]\w{0,200}))\s*[:=]\s*"
)
_STRING: Final = re.compile(
    r"[rbuRBU]{0,2}(?:'((?:[^'\\]|\\.)*+)'|\"((?:[^\"\\]|\\.)*+)\")", re.DOTALL
)
_PREFIX: Final = re.compile(r"[rbuRBU]{0,2}(['\"])")
_ESCAPE: Final = re.compile(r"\\(.)", re.DOTALL)
_ATOM: Final = re.compile(r"[^\s,()\[\]{}<>'\"]++")
_INTEGER: Final = re.compile(r"[+-]?\d{1,40}")
_FLOAT: Final = re.compile(
    r"[+-]?(?:\d{1,40}\.\d{0,40}|\.\d{1,40}|\d{1,40})(?:e[+-]?\d{1,3})?", re.IGNORECASE
)
_SPACE: Final = re.compile(r"[\s,]*")
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}", "<": ">"}
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r"}


def parse_repr(text: str) -> dict[str, Any]:
    """Names and values of the first call or dict in a text; those that could be read.

    Strings, numbers, booleans, None, lists and dicts become Python values; anything else stays as
    its text. A text that ends too soon yields what stood before the end.
    """
    text = text[:MAX_TEXT]
    begin = _BEGIN.search(text)
    if begin is None:
        return {}
    reader = _Reader(text, begin.end())
    return reader.pairs(")" if begin.group().endswith("(") else "}", 0)


class _Reader:
    """One pass over the text; every method moves `at` forward."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self.unclosed: set[str] = set()  # quote signs that nothing ahead closes

    def pairs(self, closer: str, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self._more(closer):
            key = _KEY.match(self.text, self.at)
            if key is None:  # a positional value, or a key that is no name
                before = self.at
                self.value(depth)
                if self.at == before or self._peek() == ":":
                    self.at += 1
                continue
            self.at = key.end()
            if self.at >= len(self.text):
                break
            found[key.group(1) or key.group(2) or key.group(3)] = self.value(depth)
        self.at += 1
        return found

    def items(self, closer: str, depth: int) -> list[Any]:
        found: list[Any] = []
        while self._more(closer):
            before = self.at
            found.append(self.value(depth))
            self.at += self.at == before
        self.at += 1
        return found

    def value(self, depth: int) -> Any:
        """The value at `at`; text that is no literal comes back as it stands."""
        begin = self.at
        string = self._string()
        if string is not None:
            self.at = string.end()
            body = string.group(1) if string.group(1) is not None else string.group(2)
            plain = _ESCAPE.sub(lambda m: _ESCAPED.get(m.group(1), m.group(1)), body)
            return self._or_text(begin, plain)
        opener = self._peek()
        if opener in ("[", "(", "{") and depth < _DEPTH:
            self.at += 1
            inner = (
                self.pairs("}", depth + 1)
                if opener == "{"
                else self.items(_CLOSERS[opener], depth + 1)
            )
            return self._or_text(begin, inner)
        atom = _ATOM.match(self.text, self.at)
        if atom is not None:
            self.at = atom.end()
            return self._or_text(begin, _literal(atom.group()))
        return self._raw(begin)

    def _or_text(self, begin: int, parsed: Any) -> Any:
        """`parsed` if the value ends here, else the whole of it as text."""
        following = self._peek()
        if following in ("", ",", ")", "]", "}", ":", " ", "\n", "\t"):
            return parsed
        return self._raw(begin)

    def _raw(self, begin: int) -> str:
        """Skip to the end of a value that is no literal: a comma or closer at its own level."""
        open_closers: list[str] = []
        text = self.text
        while self.at < len(text):
            char = text[self.at]
            if char in "'\"":
                string = self._string()
                self.at = string.end() if string else self.at + 1
                continue
            if open_closers and char == open_closers[-1]:
                open_closers.pop()
            elif char in _CLOSERS:
                open_closers.append(_CLOSERS[char])
            elif not open_closers and char in ",)]}":
                break
            self.at += 1
        return text[begin : self.at].strip()

    def _string(self) -> re.Match[str] | None:
        """A quoted string here; an open one is looked for once, so the pass stays linear."""
        begin = _PREFIX.match(self.text, self.at)
        if begin is None or begin.group(1) in self.unclosed:
            return None
        match = _STRING.match(self.text, self.at)
        if match is None:
            self.unclosed.add(begin.group(1))
        return match

    def _more(self, closer: str) -> bool:
        self.at = _end(_SPACE, self.text, self.at)
        if self.at >= len(self.text):
            return False
        return self.text[self.at] != closer

    def _peek(self) -> str:
        return self.text[self.at : self.at + 1]


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return match.end() if match else at


def _literal(word: str) -> Any:
    if word in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[word]
    if _INTEGER.fullmatch(word):
        return int(word)
    if _FLOAT.fullmatch(word):
        return float(word)
    return word
