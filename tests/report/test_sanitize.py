from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.report.sanitize import clean


@pytest.mark.parametrize(
    ("hostile", "expected"),
    [
        ("plain [rank0]: text", "plain [rank0]: text"),
        ("\x1b[31mred\x1b[0;0m end", "red end"),
        ("\x1b]0;own your title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jcleared", "cleared"),
        ("\x1bP1;2q sixel \x1b\\rest", "rest"),
        ("a\r\nb\tc", "a  b c"),
        ("safe\u202egnp.exe", "safegnp.exe"),
        ("zero\u200bwidth\ufeff", "zerowidth"),
        ("line\u2028sep\u00a0nbsp", "line sep nbsp"),
        ("half \ud800 pair", "half \ufffd pair"),
        ("bell\x07 nul\x00 del\x7f c1\x85end", "bell nul del c1 end"),
        ("[bold red]markup[/]", "[bold red]markup[/]"),
        ("显存不足", "显存不足"),
        (12.5, "12.5"),
    ],
)
def test_leaves_one_printable_line(hostile: object, expected: str) -> None:
    assert clean(hostile) == expected


def test_cuts_with_an_ellipsis() -> None:
    assert clean("a" * 30, 10) == "a" * 9 + "…"
    assert clean("a" * 10, 10) == "a" * 10


def test_looks_at_the_beginning_of_a_long_line_only() -> None:
    assert len(clean("x" * 20_000_000, 100)) == 100


@given(st.text(), st.integers(1, 40))
@settings(max_examples=200)
def test_any_text_becomes_printable(text: str, limit: int) -> None:
    line = clean(text, limit)
    assert line == "" or line.isprintable()
    assert len(line) <= limit
    assert clean(line, limit) == line
