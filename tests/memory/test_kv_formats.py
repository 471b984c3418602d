import pytest

from oomwatch.memory.config_source import load_model
from oomwatch.memory.data.kv_formats import KV_FORMATS
from oomwatch.memory.devices import find_device
from oomwatch.memory.kv_formats import backend_of, find_format, head_bytes, unsupported


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
    for fmt in KV_FORMATS:
        assert fmt.quality
        assert backend_of(fmt, find_device("h100"), model)
