"""What is missing makes a finding less sure: logs of which somebody chose the lines, or the end."""

from __future__ import annotations

import json
import pathlib
import re

import pytest
from logtext import inputs_of

from oomwatch.diagnose.judge import diagnose

CASES = pathlib.Path(__file__).parents[1] / "cases"
SURE = 0.8


def judged(name: str, *, last: int | None = None, only: str = "") -> tuple[str | None, float]:
    log = (CASES / name / "server.log").read_text()
    lines = [line for line in log.splitlines(keepends=True) if re.search(only, line)]
    incidents = diagnose(inputs_of("".join(lines[-last:] if last else lines))).incidents
    finding = incidents[0].finding if incidents else None
    return (finding.cause, finding.confidence) if finding else (None, 0.0)


@pytest.mark.parametrize(
    "name",
    [
        "attn-workspace-peak",
        "concurrency-burst-peak-decode",
        "engine-buffers-unprofiled",
        "engine-buffers-unprofiled-nccl",
        "fragmentation",
        "mm-encoder-peak",
        "prefill-activation-peak",
        "prefill-activation-peak-sglang",
        "profile-activation-peak",
        "prompt-logprobs-peak",
        "quant-repack-awq",
        "spec-decode-underprofiled",
    ],
)
def test_lines_that_somebody_chose_are_no_sure_sign_of_another_cause(name: str) -> None:
    wanted = json.loads((CASES / name / "case.json").read_text())["cause"]
    cause, confidence = judged(name, only="rror|emory")
    assert cause == wanted or confidence < SURE


def test_a_whole_log_is_surer() -> None:
    cause, confidence = judged("cuda-graph-capture")
    assert cause == "cuda_graph_capture"
    assert confidence > judged("cuda-graph-capture", only="rror|emory")[1]


def test_nccl_out_of_memory_with_nothing_of_the_start_is_not_sure_to_be_at_start() -> None:
    cause, confidence = judged("engine-buffers-unprofiled-nccl", last=5)
    assert cause == "engine_buffers_unprofiled" or confidence < SURE
