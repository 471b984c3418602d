from __future__ import annotations

import pytest

from oomwatch.diagnose.answers import MOST_LINES, answered
from oomwatch.records import LogLine


def said(text: str) -> list[str]:
    lines = [LogLine("a", n, line) for n, line in enumerate(text.split("\n"), 1)]
    found = answered(lines)
    assert all(line.prefixed for line in found)
    return [line.text for line in found]


@pytest.mark.parametrize(
    "text",
    [
        '{"object":"error","message":"too \\"long\\"","code":400}',
        '{\n "object": "error",\n "message": "too \\"long\\""\n}',
        "openai.BadRequestError: Error code: 400 - {'object': 'error', 'message': 'too \"long\"'}",
        '{"error": {"message": "too \\"long\\"", "type": "x"}}',
        '{"error":"too \\"long\\"","error_type":"validation"}',
        '[Error]too "long"',
        '报错：too "long"',
    ],
)
def test_the_message_of_an_answer_is_the_servers(text: str) -> None:
    assert 'too "long"' in said(text)


@pytest.mark.parametrize(
    "text", ['{"role":"user","message":"out of memory"}', "why does it run out of memory", ""]
)
def test_what_is_no_answer_says_nothing(text: str) -> None:
    assert said(text) == []


def test_a_long_text_is_no_answer() -> None:
    assert said('{"object":"error","message":"x"}' + "\n" * MOST_LINES) == []


def test_a_broken_string_is_taken_as_it_stands() -> None:
    assert said('{"error": "a\\x"}') == ["a\\x"]
