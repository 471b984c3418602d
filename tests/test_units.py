from __future__ import annotations

import pytest

from oomwatch.units import format_share, format_span


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59.6, "1 min"),
        (96, "1 min 36 s"),
        (120, "2 min"),
        (3599, "59 min 59 s"),
        (3600, "1 h"),
        (7194, "2 h"),
        (9000, "2 h 30 min"),
        (86_399, "1 d"),
        (90_000, "1 d 1 h"),
        (90 * 86_400, "90 d"),
    ],
)
def test_a_span_is_said_in_two_units_at_most(seconds, shown):
    assert format_span(seconds) == shown


@pytest.mark.parametrize(
    ("ratio", "shown"),
    [(None, "?"), (0.0, "0%"), (0.424, "42%"), (0.99, "99%"), (0.9999, "99.9%"), (1.0, "100%")],
)
def test_a_share_is_whole_only_where_nothing_is_left(ratio, shown):
    assert format_share(ratio) == shown
