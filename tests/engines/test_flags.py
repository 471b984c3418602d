from __future__ import annotations

import json
from typing import Any

import pytest

from oomwatch.engines import versions
from oomwatch.engines.flags import allocator_variable, as_number, check_flag, in_force, spell
from oomwatch.engines.vllm.flags import generation

GIB = 2**30


@pytest.mark.parametrize(
    ("engine", "version", "flag", "value", "valid"),
    [
        ("vllm", "0.33.0", "--kv-cache-dtype", "int8", False),
        ("vllm", "0.20.0", "--kv-cache-dtype", "int8_per_token_head", True),
        ("vllm", "0.19.0", "--kv-cache-dtype", "int8_per_token_head", False),
        ("vllm", "0.4.2", "--kv-cache-dtype", "fp8_e5m2", False),
        ("vllm", "0.8.4", "--enable-chunked-prefill", "False", True),
        ("vllm", "0.8.5", "--enable-chunked-prefill", "False", False),
        ("vllm", "0.8.5", "--no-enable-chunked-prefill", True, True),
        ("vllm", "0.8.4", "--no-enable-chunked-prefill", True, False),
        ("vllm", "0.17.2", "--swap-space", "4", True),
        ("vllm", "0.18.0", "--swap-space", "4", False),
        ("vllm", "0.10.1", "--num-scheduler-steps", "1", False),
        ("vllm", "0.12.3", "--cuda-graph-sizes", "64", True),
        ("vllm", "0.13.0", "--cuda-graph-sizes", "64", False),
        ("vllm", "0.10.1", "--kv-cache-memory-bytes", "1000", False),
        ("vllm", "0.10.2", "--kv-cache-memory-bytes", "1000", True),
        ("vllm", "0.10.2", "--max-num-seqs", True, False),
        ("vllm", "0.10.2", "--enforce-eager", "yes", False),
        ("vllm", "0.10.2", "--max_num_seqs", "4", True),
        ("vllm", "0.10.2", "--compilation-config.cudagraph_mode", "NONE", True),
        ("vllm", "0.10.2", "-O3", True, True),
        ("vllm", None, "--max-num-seqs", "4", False),
        ("sglang", "0.5.19", "--cuda-graph-max-bs", "16", True),
        ("sglang", "0.5.20", "--cuda-graph-max-bs", "16", False),
        ("sglang", "0.5.20", "--cuda-graph-max-bs-decode", "16", True),
        ("sglang", "0.5.10", "--kv-cache-dtype", "fp8", False),
        ("sglang", "0.5.10", "--kv-cache-dtype", "fp8_e4m3", True),
        ("sglang", "0.4.1", "--kv-cache-dtype", "fp8_e4m3", False),
        ("sglang", "0.5.10", "--enable-radix-attention", True, False),
        ("sglang", "0.5.10", "--gpu-memory-utilization", "0.8", False),
        ("sglang", "0.5.10", "--tensor-parallel-size", "2", True),
        ("tgi", "3.2.0", "--num-shard", "2", False),
    ],
)
def test_check_flag(engine: str, version: str | None, flag: str, value: Any, valid: bool) -> None:
    reason = check_flag(engine, version, flag, value)
    assert (reason is None) is valid
    assert reason is None or len(reason) > 10


@pytest.mark.parametrize(
    ("engine", "version", "flag", "value", "expected"),
    [
        ("vllm", "0.5.0", "--enable-chunked-prefill", False, None),
        ("vllm", "0.6.0", "--enable-chunked-prefill", False, ("--enable-chunked-prefill", "False")),
        ("vllm", "0.9.0", "--enable-chunked-prefill", False, ("--no-enable-chunked-prefill", True)),
        ("vllm", "0.9.0", "--enforce-eager", True, ("--enforce-eager", True)),
        (
            "vllm",
            "0.12.0",
            "--max-cudagraph-capture-size",
            64,
            ("--max-cudagraph-capture-size", "64"),
        ),
        ("vllm", "0.9.0", "--max-cudagraph-capture-size", 64, ("--cuda-graph-sizes", "64")),
        (
            "vllm",
            "0.8.0",
            "--max-cudagraph-capture-size",
            16,
            ("--compilation-config", '{"cudagraph_capture_sizes":[1,2,4,8,16]}'),
        ),
        ("vllm", "0.5.0", "--max-cudagraph-capture-size", 64, None),
        (
            "vllm",
            "0.8.4",
            "--limit-mm-per-prompt",
            {"image": 1, "video": 0},
            ("--limit-mm-per-prompt", "image=1,video=0"),
        ),
        (
            "vllm",
            "0.8.5",
            "--limit-mm-per-prompt",
            {"image": 1},
            ("--limit-mm-per-prompt", '{"image":1}'),
        ),
        ("vllm", "0.3.3", "--kv-cache-dtype", "fp8", ("--kv-cache-dtype", "fp8_e5m2")),
        ("vllm", "0.9.0", "--kv-cache-dtype", "fp8", ("--kv-cache-dtype", "fp8")),
        ("vllm", None, "--max-num-seqs", 4, ("--max-num-seqs", "4")),
        ("vllm", "0.18.0", "--swap-space", 0, None),
        ("sglang", "0.5.12", "--cuda-graph-max-bs", 16, ("--cuda-graph-max-bs", "16")),
        ("sglang", "0.5.14", "--cuda-graph-max-bs", 16, ("--cuda-graph-max-bs-decode", "16")),
        ("sglang", "0.4.0", "--kv-cache-dtype", "fp8", ("--kv-cache-dtype", "fp8_e5m2")),
        ("sglang", "0.4.2", "--kv-cache-dtype", "fp8", ("--kv-cache-dtype", "fp8_e4m3")),
        ("sglang", "0.1.26", "--kv-cache-dtype", "fp8", None),
        ("tgi", "3.2.0", "--num-shard", 2, ("--num-shard", "2")),
    ],
)
def test_spell(engine: str, version: str | None, flag: str, value: Any, expected: Any) -> None:
    assert spell(engine, version, flag, value) == expected


SETTINGS = [
    ("--enable-chunked-prefill", True),
    ("--enable-chunked-prefill", False),
    ("--max-cudagraph-capture-size", 32),
    ("--limit-mm-per-prompt", {"image": 1}),
    ("--kv-cache-dtype", "fp8"),
    ("--kv-cache-memory-bytes", 2**30),
    ("--disable-cuda-graph", True),
    ("--cuda-graph-max-bs", 16),
    ("--swap-space", 0),
    ("--page-size", 1),
]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_spelling_is_valid_in_its_release(engine: str) -> None:
    spelled = 0
    for version in versions.table(engine)["releases"]:
        for flag, value in SETTINGS:
            written = spell(engine, version, flag, value)
            if written is not None:
                spelled += 1
                assert check_flag(engine, version, *written) is None
    assert spelled > 100


@pytest.mark.parametrize(
    ("version", "gpu", "total_gib", "length", "flag", "expected"),
    [
        ("0.19.0", None, None, None, "--gpu-memory-utilization", 0.9),
        ("0.20.0", None, None, None, "--gpu-memory-utilization", 0.92),
        (None, None, None, None, "--gpu-memory-utilization", 0.9),
        ("0.7.3", None, None, 8192, "--max-num-batched-tokens", 8192),
        ("0.7.3", None, None, 512, "--max-num-batched-tokens", 2048),
        ("0.6.3", None, None, 65536, "--max-num-batched-tokens", 512),
        ("0.7.3", None, None, 65536, "--max-num-batched-tokens", 2048),
        ("0.10.0", "NVIDIA H100 80GB HBM3", 79.2, None, "--max-num-batched-tokens", 8192),
        ("0.10.0", "NVIDIA A100-SXM4-80GB", 79.2, None, "--max-num-batched-tokens", 2048),
        ("0.10.0", None, 23.6, None, "--max-num-batched-tokens", 2048),
        ("0.28.0", None, 276.0, None, "--max-num-batched-tokens", 16384),
        ("0.10.0", None, None, None, "--max-num-batched-tokens", None),
        ("0.7.3", None, None, None, "--max-num-seqs", 256),
        ("0.10.0", None, 79.2, None, "--max-num-seqs", 1024),
        ("0.33.0", "NVIDIA GB10", 121.7, None, "--max-num-seqs", 256),
        ("0.17.0", None, None, None, "--swap-space", 4),
        ("0.18.0", None, None, None, "--swap-space", None),
    ],
)
def test_vllm_defaults(
    *,
    version: str | None,
    gpu: str | None,
    total_gib: float | None,
    length: int | None,
    flag: str,
    expected: Any,
) -> None:
    total = None if total_gib is None else int(total_gib * GIB)
    found = in_force("vllm", version, total_bytes=total, max_model_len=length, gpu_name=gpu)
    assert found.get(flag) == expected


def test_given_flags_win_and_become_numbers() -> None:
    given = {
        "--gpu-memory-utilization": "0.85",
        "--max-model-len": "16K",
        "--enforce-eager": True,
        "--kv-cache-dtype": "fp8",
    }
    found = in_force("vllm", "0.10.0", arguments=given, total_bytes=80 * GIB, max_model_len=4096)
    assert found["--gpu-memory-utilization"] == 0.85
    assert found["--max-model-len"] == 16384
    assert found["--enforce-eager"] is True
    assert found["--kv-cache-dtype"] == "fp8"
    fitted = in_force("vllm", "0.20.0", arguments={"--max-model-len": "auto"}, max_model_len=4096)
    assert fitted["--max-model-len"] == 4096


@pytest.mark.parametrize(
    ("version", "total_gib", "arguments", "flag", "expected"),
    [
        ("0.4.3", None, {"--tp-size": "8"}, "--mem-fraction-static", 0.81),
        ("0.3.0", None, {}, "--mem-fraction-static", 0.88),
        ("0.5.6", 79.6, {}, "--mem-fraction-static", 0.84),
        ("0.5.6", 79.6, {"--tp-size": "9" * 400}, "--mem-fraction-static", 0.84),
        ("0.5.6", 23.6, {}, "--mem-fraction-static", None),
        ("0.5.6", 23.6, {}, "--chunked-prefill-size", 2048),
        ("0.5.20", 23.6, {}, "--chunked-prefill-size", 4096),
        ("0.5.20", 180, {}, "--chunked-prefill-size", 16384),
        ("0.5.20", None, {}, "--schedule-conservativeness", 1.0),
        ("0.5.20", None, {"--mem-fraction-static": "0.7"}, "--mem-fraction-static", 0.7),
    ],
)
def test_sglang_defaults(
    version: str, total_gib: float | None, arguments: dict[str, Any], flag: str, expected: Any
) -> None:
    total = None if total_gib is None else int(total_gib * GIB)
    assert in_force("sglang", version, arguments=arguments, total_bytes=total).get(flag) == expected


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("16k", 16000),
        ("16K", 16384),
        ("0.9", 0.9),
        ("5G", 5 * GIB),
        (7, 7),
        ("auto", None),
        (True, None),
        ("9" * 400, None),
        ("1e999", None),
    ],
)
def test_as_number(text: Any, number: float | None) -> None:
    assert as_number(text) == number


@pytest.mark.parametrize(
    ("version", "env", "expected"),
    [
        ("0.7.3", {}, "V0"),
        ("0.7.3", {"VLLM_USE_V1": "1"}, "V1"),
        ("0.9.0", {}, "V1"),
        ("0.9.0", {"VLLM_USE_V1": "0"}, "V0"),
        ("0.11.0", {"VLLM_USE_V1": "0"}, "V1"),
        (None, {}, None),
    ],
)
def test_generation(version: str | None, env: dict[str, str], expected: str | None) -> None:
    assert generation(version, env) == expected


def test_allocator_variable_follows_the_release_of_pytorch() -> None:
    assert allocator_variable("vllm", "0.7.2") == "PYTORCH_CUDA_ALLOC_CONF"
    assert allocator_variable("vllm", "0.28.0") == "PYTORCH_ALLOC_CONF"
    assert allocator_variable("vllm", None) == "PYTORCH_CUDA_ALLOC_CONF"
    assert allocator_variable("tgi", "3.2.0") == "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_tables_are_sound(engine: str) -> None:
    table = versions.table(engine)
    known = {versions.release(text) for text in table["releases"]}
    for flag, row in table["flags"].items():
        assert flag.startswith("--"), flag
        for end in ("since", "until", "gone"):
            assert end not in row or versions.release(row[end]) in known, flag
        for choices in row.get("choices", {}).values():
            assert choices is None or isinstance(choices, list), flag
    assert json.dumps(table).isascii()
