import pytest

from oomwatch.memory.config_source import load_model
from oomwatch.memory.data.kv_formats import KV_FORMATS, SGLANG_FORMATS
from oomwatch.memory.devices import find_device
from oomwatch.memory.kv_formats import (
    backend_of,
    caveat,
    find_format,
    head_bytes,
    runs_on_sglang,
    unsupported,
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", 4 * 128),
        ("fp8", 2 * 128),
        ("int8_per_token_head", 2 * (128 + 4)),
        ("int4_per_token_head", 2 * (64 + 4)),
        ("nvfp4", 2 * (64 + 8)),
        ("turboquant_k8v4", 128 + 64 + 4),
        ("turboquant_4bit_nc", 64 + 2 + 64 + 4),
        ("turboquant_3bit_nc", 48 + 2 + 48 + 4),
    ],
)
def test_bytes_of_a_head_with_inline_scales(name, expected):
    assert head_bytes(find_format(name), 128, 2) == expected


def test_int8_was_never_a_value():
    assert find_format("int8") is None
    assert find_format("fp8", "sglang") is None
    assert find_format("fp8_e4m3", "sglang") is not None


def where(name, gpu, version, model="llama-3.1-8b"):
    return unsupported(find_format(name), version, find_device(gpu), load_model(None, model).model)


@pytest.mark.parametrize(
    ("name", "gpu", "version", "model", "runs"),
    [
        ("fp8", "h100", (0, 9, 1), "llama-3.1-8b", True),
        ("fp8", "a100-80gb", (0, 9, 1), "llama-3.1-8b", False),
        ("fp8", "a100-80gb", (0, 12, 0), "llama-3.1-8b", True),
        ("fp8", "t4", (0, 24, 0), "llama-3.1-8b", False),
        ("int8_per_token_head", "a100-80gb", (0, 20, 0), "llama-3.1-8b", True),
        ("int8_per_token_head", "a100-80gb", (0, 19, 0), "llama-3.1-8b", False),
        ("int8_per_token_head", "h100", (0, 20, 0), "deepseek-v3", False),
        ("fp8_per_token_head", "a100-80gb", (0, 20, 0), "llama-3.1-8b", False),
        ("nvfp4", "h100", (0, 31, 0), "llama-3.1-8b", False),
        ("nvfp4", "h100", (0, 32, 0), "llama-3.1-8b", True),
        ("nvfp4", "b200", (0, 24, 0), "llama-3.1-8b", True),
        ("fp8_ds_mla", "h200", (0, 12, 0), "deepseek-v3.2", True),
        ("fp8_ds_mla", "h200", (0, 12, 0), "deepseek-v3", False),
        ("fp8", "h200", (0, 12, 0), "deepseek-v3", True),
    ],
)
def test_where_a_format_runs(name, gpu, version, model, runs):
    reason = where(name, gpu, version, model)
    assert (reason is None) is runs, reason


def test_every_format_has_words_for_people():
    model = load_model(None, "llama-3.1-8b").model
    for engine, formats in (("vllm", KV_FORMATS), ("sglang", SGLANG_FORMATS)):
        for fmt in formats:
            assert fmt.quality
            assert backend_of(fmt, find_device("h100"), model, engine)


@pytest.mark.parametrize(
    ("name", "gpu", "model", "backend"),
    [
        ("fp8_e4m3", "h100", "llama-3.1-8b", "fa3"),
        ("fp8_e5m2", "h100", "llama-3.1-8b", "triton"),
        ("fp8_e4m3", "rtx-4090", "llama-3.1-8b", "flashinfer"),
        ("fp8_e4m3", "b200", "llama-3.1-8b", "trtllm_mha"),
        ("fp8_e4m3", "b200", "deepseek-v3", "trtllm_mla"),
        ("fp8_e4m3", "mi300x", "llama-3.1-8b", "aiter"),
    ],
)
def test_backends_of_sglang_go_by_its_own_names(name, gpu, model, backend):
    fmt = find_format(name, "sglang")
    assert backend_of(fmt, find_device(gpu), load_model(None, model).model, "sglang") == backend


@pytest.mark.parametrize(
    ("gpu", "backend"), [("h200", "FLASHMLA"), ("b200", "FLASHINFER_MLA"), ("a100", "TRITON_MLA")]
)
def test_backends_of_latent_models_go_by_the_card(gpu, backend):
    model = load_model(None, "deepseek-v3").model
    assert backend_of(find_format("fp8"), find_device(gpu), model) == backend


def test_four_bits_on_sglang_need_a_card_that_computes_in_them():
    fmt = find_format("nvfp4", "sglang")
    assert [runs_on_sglang(fmt, find_device(gpu)) for gpu in ("h100", "rtx-4090", "b200")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("name", "gpu", "version", "said"),
    [
        ("fp8", "a100-80gb", (0, 12, 0), True),
        ("fp8", "a10", (0, 20, 0), True),
        ("fp8", "l40s", (0, 12, 0), False),
        ("fp8", "h100", (0, 12, 0), False),
        ("auto", "a100-80gb", (0, 12, 0), False),
        ("int8_per_token_head", "a100-80gb", (0, 20, 0), False),
    ],
)
def test_fp8_that_only_one_backend_reads_has_a_caveat(name, gpu, version, said):
    model = load_model(None, "llama-3.1-8b").model
    words = caveat(find_format(name), version, find_device(gpu), model)
    assert ("FlashInfer" in words) is said
    assert ("int8_per_token_head" in words) is (said and version >= (0, 20, 0))
