"""Whether a text is a log, or prose that quotes logs: a README, an issue, a page, a runbook.

Nothing that a document quotes has happened. A log is told by lines that a program wrote (with an
engine's prefix, or in a runtime's wrapper) outside of what the text itself marks as a quotation.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.records import LogLine

_FENCE: Final = ("```", "~~~")
_HEADING: Final = re.compile(r"#{1,6} \S|<h[1-6]\b|\.\. [\w-]+::")
_UNDERLINE: Final = re.compile(r"([=\-~^\"'*+#])\1{3,}\s*$")
_MARKUP: Final = re.compile(
    r"</?(?:html|head|body|div|p|ul|ol|li|h[1-6]|details|summary|blockquote|section|article|table|br)\b"
    r"|<!DOCTYPE|\]\(https?://|^\|(?: ?:?-{3,}:? ?\|)+\s*$|^(?:[*-] |\d\. ).{0,80}`",
    re.IGNORECASE,
)
_PRE: Final = re.compile(r"<(/?)pre\b", re.IGNORECASE)
_SENTENCE: Final = re.compile(r"[A-Z][a-z']*(?:[ /-][A-Za-z][A-Za-z']*[,;]?){3,}[^|{}=]*[.:?!]\s*$")
_NOT_PROSE: Final = re.compile(
    # What Python and PyTorch print as whole sentences of their own.
    r"The above exception was|During handling of|Compile with|For debugging|Search for|Please |Setting |Using |Loading "
)

_USAGE: Final = re.compile(r"[Uu]sage: \S")
_SECTION: Final = re.compile(r"[A-Za-z][A-Za-z ]{1,40}:$")

_BINARY: Final = 10
"""One unreadable byte in so many characters: a log in a foreign encoding is mostly ASCII."""


class Form:
    """Looks at the lines of one text, in order."""

    def __init__(self) -> None:
        self.quoted = False
        """Whether the line looked at last stands in a fence or a `pre` block."""
        self.explains = False
        """Whether the line looked at last is of the help that a program prints below its usage."""
        self._usage = False
        self._fences = 0
        self._marks = 0
        self._sentences = 0
        self._by_program = 0
        self._blank = True
        self._title = False
        self._characters = 0
        self._unreadable = 0

    def look_at(self, line: LogLine) -> None:
        """Take the next line into account."""
        text = line.text
        self._characters += len(text)
        self._unreadable += text.count("\ufffd")
        self._look_for_help(line)
        if line.stream is not None or (line.at is not None and not line.prefixed):
            self._by_program += 1
        if line.prefixed:
            self._by_program += not self.quoted
            self._blank = self._title = False
            return
        stripped = text.lstrip()
        if stripped.startswith(_FENCE):
            self.quoted = not self.quoted
            self._fences += 1
        for match in _PRE.finditer(text[:2000]):
            self.quoted = not match[1]
            self._fences += 1
        if not self.quoted:
            self._marks += bool(_HEADING.match(text) or _MARKUP.search(text[:400]))
            self._marks += self._title and _UNDERLINE.match(text) is not None
            self._sentences += (
                self._blank
                and len(text) < 600
                and _SENTENCE.match(text) is not None
                and _NOT_PROSE.match(text) is None
            )
        self._blank = not stripped
        self._title = 3 <= len(text) <= 80 and not text[0].isspace() and "Error" not in text

    def _look_for_help(self, line: LogLine) -> None:
        text = line.text
        goes_on = self._usage and not line.prefixed
        self.explains = goes_on and (
            not text or text[0].isspace() or _SECTION.match(text) is not None
        )
        self._usage = self.explains or (not line.prefixed and _USAGE.match(text) is not None)

    @property
    def is_binary(self) -> bool:
        """Whether much of it is bytes that are no text, and no program's line is among them."""
        return self._by_program == 0 and self._unreadable * _BINARY > self._characters

    @property
    def is_document(self) -> bool:
        """Marks of a document, or sentences in paragraphs, and no line of a program among them."""
        if self._by_program > 0:
            return False
        return self._fences >= 2 or self._marks >= 2 or self._sentences >= 3
