"""Sentences made in English, said in another language by templates.

A template names what changes in braces and puts in square brackets what may be missing, the same
in both languages: ``Lower {flag}[ to {new}]`` is ``降低 {flag}[，降到 {new}]``. What a place holds
is itself said in the other language where the book has it. A text of several sentences is said one
by one; a sentence that the book does not have stays as it is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

_MARKS: Final = re.compile(r"\{(\w+)\}|[\[\]]")
_FILL: Final = re.compile(r"\{(\w+)\}")
_OPTIONAL: Final = re.compile(r"\[([^\[\]]*)\]")
_BREAK: Final = re.compile(r"(?<=\.) +")
_PLACES: Final = {"flag": r"--?\w[\w-]*", "new": r"\S+", "old": r"\S+", "value": r"\S+"}
"""What the places of these names hold; any other holds a part of one sentence."""
_PART: Final = r"(?:(?!\. |; ).)+?"
_WIDE: Final = "\u3000-\u303f\u4e00-\u9fff\uff00-\uffef"
_BETWEEN_WIDE: Final = re.compile(rf"(?<=[{_WIDE}]) +(?=[{_WIDE}])")
_LONGEST: Final = 2000
"""Characters of a text; what is longer is no sentence of a rule or a remedy."""


class PhraseBook:
    """The templates of one language."""

    def __init__(self, *chapters: Mapping[str, str]) -> None:
        self._plain: dict[str, str] = {}
        self._forms: list[tuple[str, str, str]] = []
        for english, other in ((e, o) for chapter in chapters for e, o in chapter.items()):
            if "{" in english:
                self._forms.append((_MARKS.split(english, maxsplit=1)[0], english, other))
            else:
                self._plain[english] = other

    def say(self, text: str) -> str:
        """The text in the other language, as far as the book has it."""
        if len(text) > _LONGEST:
            return text
        whole = self._one(text)
        return "".join(_joined(map(self._or_same, _BREAK.split(text)))) if whole is None else whole

    def has(self, text: str) -> bool:
        """Whether the book has every sentence of a text."""
        return self._one(text) is not None or all(map(self._one, _BREAK.split(text)))

    def _or_same(self, sentence: str) -> str:
        said = self._one(sentence)
        return sentence if said is None else said

    def _one(self, text: str) -> str | None:
        if text in self._plain:
            return self._plain[text]
        for head, english, other in self._forms:
            match = _pattern(english).fullmatch(text) if text.startswith(head) else None
            if match is not None:
                return self._filled(other, match.groupdict())
        bare = text.removesuffix(".")
        return f"{self._plain[bare]}。" if bare in self._plain else None

    def _filled(self, other: str, found: Mapping[str, str | None]) -> str:
        values = {name: self.say(value) for name, value in found.items() if value is not None}

        def option(part: re.Match[str]) -> str:
            return part[1] if set(_FILL.findall(part[1])) <= values.keys() else ""

        while _OPTIONAL.search(other):
            other = _OPTIONAL.sub(option, other)
        return _BETWEEN_WIDE.sub("", _FILL.sub(lambda name: values[name[1]], other))


@functools.cache
def _pattern(english: str) -> re.Pattern[str]:
    """The template as an expression; a name that comes twice stands for the same text."""
    written, end, seen = "", 0, set[str]()
    for mark in _MARKS.finditer(english):
        written += re.escape(english[end : mark.start()])
        end = mark.end()
        if mark[0] == "[":
            written += "(?:"
        elif mark[0] == "]":
            written += ")?"
        else:
            place = _PLACES.get(mark[1], _PART)
            written += f"(?P={mark[1]})" if mark[1] in seen else f"(?P<{mark[1]}>{place})"
            seen.add(mark[1])
    return re.compile(written + re.escape(english[end:]), re.DOTALL)


def _joined(sentences: Iterable[str]) -> Iterator[str]:
    """The sentences, with a blank after one that does not end with a wide full stop."""
    last = ""
    for sentence in sentences:
        if last and last[-1] != "。":
            yield " "
        yield sentence
        last = sentence
