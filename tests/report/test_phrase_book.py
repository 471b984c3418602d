from __future__ import annotations

import pytest

from oomwatch.report.locale.phrase_book import PhraseBook

BOOK = PhraseBook(
    {
        "Restart the server": "重启服务",
        "Lower {flag}[ to {value}].": "降低 {flag}[，降到 {value}]。",
        "Stop {what}.": "停止 {what}。",
        "the server": "该服务",
        "{flag} {value} is too much.": "{flag} {value} 过大。",
        'Wake with tags=["weights"].': '唤醒时用 tags=["weights"]。',
    }
)


@pytest.mark.parametrize(
    ("english", "chinese"),
    [
        ("Restart the server", "重启服务"),
        ("Restart the server.", "重启服务。"),
        ("Lower --x.", "降低 --x。"),
        ("Lower --x to 0.85.", "降低 --x，降到 0.85。"),
        ("Stop the server.", "停止该服务。"),
        ("Stop vLLM.", "停止 vLLM。"),
        ("Lower --x to 0.85. Restart the server.", "降低 --x，降到 0.85。重启服务。"),
        ("Restart the server. Nobody knows why.", "重启服务。Nobody knows why."),
        ("Nobody knows why. Restart the server.", "Nobody knows why. 重启服务。"),
        ("--x 7 is too much.", "--x 7 过大。"),
        ("All of it is too much.", "All of it is too much."),
        ('Wake with tags=["weights"].', '唤醒时用 tags=["weights"]。'),
        ("", ""),
    ],
)
def test_says_what_the_book_has_and_leaves_the_rest(english: str, chinese: str) -> None:
    assert BOOK.say(english) == chinese


def test_tells_what_the_book_lacks() -> None:
    assert BOOK.has("Stop the server. Restart the server.")
    assert not BOOK.has("Stop the server. Nobody knows why.")


def test_long_texts_are_left_alone() -> None:
    text = "Stop " + "x" * 5000 + "."
    assert BOOK.say(text) == text
