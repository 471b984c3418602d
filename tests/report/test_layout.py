from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from oomwatch.report.layout import Sheet, wrap


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 10, [""]),
        ("one two three", 7, ["one two", "three"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("显存不足请重试", 6, ["显存不", "足请重", "试"]),
        # closing punctuation does not start a line
        ("显存不，足", 6, ["显存", "不，足"]),
        # no early break before a run of wide characters
        ("KV 缓存不足", 8, ["KV 缓存", "不足"]),
        ("--flag=abcdefgh", 6, ["--flag", "=abcde", "fgh"]),
    ],
)
def test_wraps(text: str, width: int, lines: list[str]) -> None:
    assert wrap(text, width) == lines


def test_keeps_long_words_whole_without_folding() -> None:
    assert wrap("a bbbbbbbbbb c", 4, fold=False) == ["a", "bbbbbbbbbb", "c"]


@given(st.text(alphabet="ab 显存，。（x-/😀", max_size=80), st.integers(4, 30))
@settings(max_examples=200)
def test_wrapped_lines_fit_and_lose_nothing(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_commands_that_go_on_end_in_a_backslash() -> None:
    sheet = Sheet(38, color=False)
    sheet.command("flags", ["--aaaaaaaaaa 1", "--bbbbbbbbbb 2", "--c"], indent=2, column=7)
    assert sheet.render().splitlines() == [
        "  flags  --aaaaaaaaaa 1 \\",
        "         --bbbbbbbbbb 2 --c",
    ]


def test_a_label_too_long_for_its_column_has_its_own_line() -> None:
    sheet = Sheet(40, color=False)
    sheet.rows([("short", "text"), ("a/very/long/path/to/file.log:12", "quote")], ("", ""))
    assert sheet.render().splitlines() == [
        "  short  text",
        "  a/very/long/path/to/file.log:12",
        "      quote",
    ]


def test_a_label_can_be_copied_however_long_it_is() -> None:
    path = "/var/log/" + "vllm/" * 20 + "server.log:12"
    sheet = Sheet(40, color=False)
    sheet.rows([(path, "quote")], ("", ""))
    assert sheet.render().splitlines() == ["  " + path, "      quote"]


def test_colour_is_only_colour() -> None:
    plain, coloured = Sheet(40, color=False), Sheet(40, color=True)
    for sheet in (plain, coloured):
        sheet.heading("WORD", ": title", "bold red")
        sheet.text("[bold]not markup[/] :smile: http://x 123", "dim")
    text = coloured.render()
    assert "\x1b[1;31mWORD" in text
    import re

    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == plain.render()
