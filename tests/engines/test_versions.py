from __future__ import annotations

import pytest

from oomwatch.engines import versions


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.6.6.post1", (0, 6, 6)),
        ("v0.11.0rc2", (0, 11, 0)),
        ("0.9", (0, 9, 0)),
        ("vllm 0.10.1.dev12+gabc", (0, 10, 1)),
        ("b9722", None),
        ("", None),
        (None, None),
    ],
)
def test_release(text: str | None, expected: tuple[int, int, int] | None) -> None:
    assert versions.release(text) == expected


def test_older_sampled_release_speaks_between_two() -> None:
    assert versions.standing_for("vllm", (0, 18, 4)) == (0, 18, 0)
    assert versions.standing_for("vllm", (0, 1, 0)) == (0, 3, 3)
    assert versions.standing_for("sglang", (0, 5, 21)) == (0, 5, 20)


@pytest.mark.parametrize(
    ("engine", "version", "known"),
    [
        ("vllm", "0.33.2", True),
        ("vllm", "0.34.0", False),
        ("vllm", "0.2.7", False),
        ("vllm", "0.1.dev7+g123", False),
        ("vllm", None, False),
        ("sglang", "0.0.2", False),
        ("sglang", "0.4.6.post5", True),
        ("tgi", "3.2.0", False),
        (None, None, False),
    ],
)
def test_outside(engine: str | None, version: str | None, known: bool) -> None:
    assert (versions.outside(engine, version) is None) is known


def test_at_least_is_unknown_without_a_version() -> None:
    assert versions.at_least(None, "0.8.0") is None
    assert versions.at_least("0.8.0rc1", "0.8.0") is True
    assert versions.at_least("0.7.3", "0.8.0") is False


def test_latest_holds_until_the_next_entry() -> None:
    table = {"0.9.0": "b", "0.3.3": "a", "0.10.0": "c"}
    assert versions.latest(table, (0, 9, 9)) == "b"
    assert versions.latest(table, (0, 10, 0)) == "c"
    assert versions.latest(table, (0, 1, 0)) is None


def test_span_holds_at_both_ends() -> None:
    assert versions.span_holds("0.5.5..0.5.15", (0, 5, 5))
    assert versions.span_holds("0.5.5..0.5.15", (0, 5, 15))
    assert not versions.span_holds("0.5.5..0.5.15", (0, 5, 16))
    assert versions.span_holds("0.5.4", (0, 5, 4))
