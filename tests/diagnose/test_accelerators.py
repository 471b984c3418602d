"""A kernel that failed is told in the words of its card."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options

CASES = Path(__file__).parents[1] / "cases"


@pytest.mark.parametrize(
    ("case", "kernel", "variable", "flags"),
    [
        ("illegal-memory-access", "A CUDA kernel", "CUDA_LAUNCH_BLOCKING", []),
        ("rocm-memory-fault", "A GPU kernel", "AMD_SERIALIZE_KERNEL", []),
        ("ascend-vector-core", "An NPU kernel", "ASCEND_LAUNCH_BLOCKING", ["--enforce-eager"]),
    ],
)
def test_the_words_and_the_variable_are_those_of_the_card(
    case: str, kernel: str, variable: str, flags: list[str]
) -> None:
    incident = run_diagnosis(Options(logs=(str(CASES / case / "server.log"),))).incidents[0]
    first = incident.remedies[0]
    assert incident.finding.summary.startswith(kernel)
    assert list(first.env) == [variable]
    assert list(first.set) == flags
    assert variable in str(first.action)
    assert not [r for r in incident.remedies if "GiB" in r.why], "memory is no reason here"
