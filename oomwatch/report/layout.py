"""Lines for a terminal: hanging indents, columns that align, wide characters counted as two.

rich colours the lines and counts cells; wrapping is done here because Chinese text breaks
between characters (never before closing punctuation) and flags must not break at all.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size

_WIDE: Final = "\u2e80-\u303f\u3040-\ua4cf\uac00-\ud7af\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60"
_OPENING: Final = "（「『《〈【“‘"
_CLOSING: Final = "，。、；：？！）」』》〉】”’…"
# A unit that must stay together: one wide character with its punctuation, a word, or spaces.
_UNITS: Final = re.compile(rf" +|[{_OPENING}]*[{_WIDE}][{_CLOSING}]*|[^ {_WIDE}]+[{_CLOSING}]*|.")


def wrap(text: str, width: int, *, fold: bool = True) -> list[str]:
    """`text` in lines of at most `width` cells; without `fold` a longer word keeps its line."""
    lines, line, used = [], "", 0
    for unit in _UNITS.findall(text):
        piece, size = unit, cell_len(unit)
        if used and used + size > width:
            lines.append(line.rstrip())
            line, used = "", 0
        if not used and piece.isspace():
            continue  # the break, or the indent, stands for the spaces
        while fold and size > width > 1:
            head = set_cell_size(piece, width).rstrip() or piece[:1]
            lines.append(head)
            piece = piece[len(head) :]
            size = cell_len(piece)
        line, used = line + piece, used + size
    return [*lines, line.rstrip()] if line.strip() or not lines else lines


class Sheet:
    """Collects lines of styled spans, then renders them with or without colours."""

    def __init__(self, width: int, *, color: bool) -> None:
        self.width = max(width, 24)
        self.color = color
        self._lines: list[list[tuple[str, str]]] = []

    def spans(self, *spans: tuple[str, str]) -> None:
        """One line as given, as (text, style) spans."""
        self._lines.append(list(spans))

    def blank(self) -> None:
        """An empty line, never two in a row."""
        if self._lines and self._lines[-1]:
            self._lines.append([])

    def text(self, text: str, style: str = "", *, indent: int = 0, fold: bool = True) -> None:
        """A paragraph."""
        for line in wrap(text, self.width - indent, fold=fold):
            self.spans((" " * indent + line, style))

    def heading(self, word: str, title: str, style: str) -> None:
        """A coloured word, then the rest of a bold line."""
        first, *rest = wrap(word + title, self.width)
        head = first[: len(word)]
        self.spans((head, style), (first[len(word) :], "bold"))
        for line in rest:
            self.spans((line, "bold"))

    def flow(self, items: Sequence[str], joint: str, style: str = "", *, indent: int = 0) -> None:
        """Items side by side; a line breaks between items where it can."""
        line = ""
        for item in items:
            longer = f"{line}{joint}{item}" if line else item
            if line and cell_len(longer) > self.width - indent:
                self.text(line, style, indent=indent)
                longer = item
            line = longer
        if line:
            self.text(line, style, indent=indent)

    def rows(self, rows: Sequence[tuple[str, str]], style: tuple[str, str]) -> None:
        """Labels with texts beside them; a label too long for the column has its own line.

        No word of a label is broken: a path is there to be copied.
        """
        sizes = [cell_len(label) + 2 for label, _ in rows]
        column = max((size for size in sizes if size <= self.width * 0.36), default=4)
        for (label, text), size in zip(rows, sizes, strict=True):
            if size <= column:
                self.row(label, text, style, indent=2, column=column)
                continue
            self.text(label, style[0], indent=2, fold=False)
            if text:
                self.text(text, style[1], indent=6)

    def command(self, label: str, parts: Sequence[str], *, indent: int, column: int) -> None:
        """Words of a shell command; lines that go on end in a backslash."""
        space = self.width - indent - column - len(" \\")
        lines: list[str] = []
        for part in parts:
            if lines and cell_len(lines[-1]) + 1 + cell_len(part) <= space:
                lines[-1] += f" {part}"
            else:
                lines.append(part)
        gap = " " * max(column - cell_len(label), 1)
        for number, line in enumerate(lines):
            tail = " \\" if number < len(lines) - 1 else ""
            head = [(label, "dim"), (gap, "")] if not number else [(" " * column, "")]
            self.spans((" " * indent, ""), *head, (line, "bold"), (tail, "dim"))

    def row(
        self, label: str, text: str, style: tuple[str, str] = ("", ""), *, indent: int, column: int
    ) -> None:
        """A label of `column` cells (with its gap), then text that hangs beside it."""
        gap = " " * max(column - cell_len(label), 1)
        first, *rest = wrap(text, max(self.width - indent - column, 16))
        self.spans((" " * indent, ""), (label, style[0]), (gap, ""), (first, style[1]))
        for line in rest:
            self.spans((" " * (indent + column) + line, style[1]))

    def render(self) -> str:
        """All lines; escape sequences only where colour is on."""
        while self._lines and not self._lines[-1]:
            self._lines.pop()
        if not self.color:
            plain = ("".join(text for text, _ in line).rstrip() for line in self._lines)
            return "".join(line + "\n" for line in plain)
        from rich.console import Console  # noqa: PLC0415 - costs start-up time
        from rich.text import Text  # noqa: PLC0415 - costs start-up time

        out = io.StringIO()
        console = Console(
            file=out, width=self.width, force_terminal=True, color_system="standard",
            legacy_windows=False, highlight=False, markup=False, emoji=False, _environ={},
        )  # fmt: skip
        for line in self._lines:
            console.print(Text.assemble(*line), soft_wrap=True)
        return out.getvalue()
