from __future__ import annotations

from typing import Any

import pytest

from oomwatch.records import EngineFacts, Finding
from oomwatch.remedies.catalog import prescribe

GB = 10**9


def first_step(version: str, arguments: dict[str, Any], asked: float, free: float) -> Any:
    values = {"swap_space_bytes": asked * GB, "host_free_bytes": free * GB}
    facts = EngineFacts(id="e1", engine="sglang", version=version, arguments=arguments)
    refused = Finding("startup", "host_pinned_swap", 0.95, "It failed.", values=values)
    return prescribe(refused, facts)[0]


@pytest.mark.parametrize(
    ("version", "arguments", "asked", "free", "expected"),
    [
        ("0.5.6", {"--hicache-ratio": "4.0"}, 200, 100, {"--hicache-ratio": "1.8"}),
        ("0.5.6", {"--hicache-size": "200"}, 200, 100, {"--hicache-size": "90"}),
        ("0.4.6.post5", {"--hicache-ratio": "2.0"}, 40, 45, {"--hicache-ratio": "1.5"}),
    ],
)
def test_the_pool_is_cut_to_what_is_free(
    version: str, arguments: dict[str, Any], asked: float, free: float, expected: dict[str, str]
) -> None:
    step = first_step(version, {"--enable-hierarchical-cache": True, **arguments}, asked, free)
    assert step.set == expected
    assert step.direction == "less_host"
    assert step.validated


def test_a_pool_that_would_be_smaller_than_the_cards_is_switched_off() -> None:
    step = first_step("0.5.6", {"--enable-hierarchical-cache": True}, 70, 20)
    assert step.unset == ("--enable-hierarchical-cache",)
    assert not step.set
