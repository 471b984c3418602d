"""Steps speak of their own engine: no other engine's name, flags, variables or folders."""

from __future__ import annotations

import re

import pytest

from oomwatch.causes import CAUSES
from oomwatch.records import EngineFacts, Finding
from oomwatch.remedies.catalog import prescribe
from oomwatch.report.phrases import left_in_english

_OF_VLLM = re.compile(
    r"vLLM|VLLM_|/vllm|--(?:mm-processor|kv-cache-memory|num-gpu-blocks|max-num-)"
)
_OF_BOTH = re.compile(r"--(?:attention-backend|disable-custom-all-reduce|speculative)")


@pytest.mark.parametrize("engine", ["sglang", "tgi", "lmdeploy", "llama.cpp", "ollama"])
def test_no_step_names_what_another_engine_has(engine: str) -> None:
    for cls, causes in CAUSES.items():
        for cause in causes:
            finding = Finding(cls=cls, cause=cause, confidence=0.9, summary="")
            for step in prescribe(finding, EngineFacts(id="e", engine=engine)):
                said = f"{step.title} {step.action} {step.why} {step.cost} {step.set}"
                assert "[[" not in said
                assert not _OF_VLLM.search(said), (cause, said)
                assert engine == "sglang" or not _OF_BOTH.search(said), (cause, said)
                assert left_in_english(step, "zh") == [], cause
