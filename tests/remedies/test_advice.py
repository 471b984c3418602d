from __future__ import annotations

from typing import Any

import pytest

from oomwatch.records import EngineFacts
from oomwatch.remedies.advice import wrong_flags


def advice(
    engine: str, version: str | None, arguments: dict[str, Any] | None = None, **facts: Any
) -> str:
    return " | ".join(
        wrong_flags(
            EngineFacts(id="e", engine=engine, version=version, arguments=arguments or {}, **facts)
        )
    )


@pytest.mark.parametrize(
    ("engine", "version", "arguments", "words"),
    [
        ("vllm", "0.33.0", {"--kv-cache-dtype": "int8"}, "int8_per_token_head"),
        ("vllm", "0.10.0", {"--kv-cache-dtype": "int8"}, "use fp8."),
        ("vllm", "0.10.0", {"--swap-space": "16"}, "V1 never swaps"),
        ("vllm", "0.18.0", {"--swap-space": "16"}, "0.18.0"),
        ("vllm", "0.10.0", {"--mem-fraction-static": "0.8"}, "--gpu-memory-utilization"),
        ("vllm", "0.10.0", {"--enable-prefix-caching": False}, "frees no GPU memory"),
        ("vllm", "0.7.0", {"--enable-chunked-prefill": "False"}, "raises the activation peak"),
        ("vllm", "0.10.0", {"--max-model-len": "16k"}, "16384"),
        ("vllm", "0.10.0", {"--gpu-memory-utilization": "0.98"}, "0.98"),
        (
            "vllm",
            "0.10.0",
            {"--num-scheduler-steps": "8", "--num-gpu-blocks-override": "9"},
            "tests",
        ),
        (
            "vllm",
            "0.11.0",
            {"--num-scheduler-steps": "8"},
            "--num-scheduler-steps is not an option",
        ),
        ("vllm", "0.11.0", {"--kv-cache-dtype": "fp9"}, "does not take fp9"),
        ("sglang", "0.5.1", {"--enable-radix-attention": True}, "never an option"),
        ("sglang", "0.5.1", {"--kv-cache-dtype": "fp8"}, "fp8_e4m3"),
        ("sglang", "0.5.1", {"--gpu-memory-utilization": "0.9"}, "--mem-fraction-static"),
        ("sglang", "0.5.20", {"--cuda-graph-max-bs": "16"}, "--cuda-graph-max-bs-decode"),
        ("sglang", "0.5.1", {"--disable-radix-cache": True}, "frees no GPU memory"),
    ],
)
def test_wrong(engine: str, version: str, arguments: dict[str, Any], words: str) -> None:
    assert words in advice(engine, version, arguments)


@pytest.mark.parametrize(
    ("engine", "version", "arguments"),
    [
        ("vllm", "0.7.0", {"--swap-space": "16"}),
        ("vllm", "0.33.0", {"--kv-cache-dtype": "int8_per_token_head"}),
        (
            "vllm",
            "0.10.0",
            {
                "--gpu-memory-utilization": "0.9",
                "--max-model-len": "16K",
                "--enable-prefix-caching": True,
                "--served-model-name": ["a"],
            },
        ),
        ("vllm", None, {"--some-new-option": "1"}),
        ("sglang", "0.5.1", {"--kv-cache-dtype": "fp8_e4m3", "--cuda-graph-max-bs": "16"}),
        ("tgi", "3.2.0", {"--kv-cache-dtype": "int8"}),
    ],
)
def test_right(engine: str, version: str | None, arguments: dict[str, Any]) -> None:
    assert advice(engine, version, arguments) == ""


def test_the_allocators_variable() -> None:
    old, new = {"PYTORCH_CUDA_ALLOC_CONF": "x:1"}, {"PYTORCH_ALLOC_CONF": "x:1"}
    assert "PYTORCH_ALLOC_CONF" in advice("vllm", "0.20.0", env=old)
    assert "not read" in advice("vllm", "0.7.0", env=new)
    assert advice("vllm", "0.7.0", env=old) == advice("vllm", "0.20.0", env=new) == ""
    sleeping = {"--enable-sleep-mode": True}
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert "--enable-sleep-mode" in advice("vllm", "0.9.0", sleeping, env=env)


def test_sentences_are_printable_and_few() -> None:
    hostile = {f"--x{n}\x1b[31m\n": "y" for n in range(50)}
    found = wrong_flags(EngineFacts(id="e", engine="vllm", version="0.10.0", arguments=hostile))
    assert 0 < len(found) <= 12
    assert all(sentence.isprintable() for sentence in found)


def test_what_the_server_printed_as_its_own_it_took() -> None:
    given = {"--enable-tiers": True, "--max-num-seqs": "8"}
    assert "--enable-tiers is not an option" in advice("vllm", "0.23.1", given)
    assert not advice("vllm", "0.23.1", given, accepted=frozenset(given))
