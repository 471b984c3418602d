import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.memory.quantization import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    MXFP4,
    NF4,
    NVFP4,
    PLAIN,
    read_quantization,
)

Q = "model.layers.3.self_attn.q_proj"
GATE = "model.layers.3.mlp.gate_proj"


def group(**weights):
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, FP8_BLOCK),
        ({"quant_method": "fp8"}, FP8_TENSOR),
        (
            {
                "quant_method": "compressed-tensors",
                **group(num_bits=8, type="float", strategy="channel"),
            },
            FP8_CHANNEL,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                **group(num_bits=8, type="int", strategy="channel"),
            },
            INT8_CHANNEL,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                **group(num_bits=4, type="float", group_size=16),
            },
            NVFP4,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, FP8_TENSOR),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, NF4),
    ],
)
def test_methods_and_their_formats(config, expected):
    found = read_quantization(config)
    assert found.of(Q) == expected
    assert found.of("lm_head") is PLAIN
    assert found.of("model.embed_tokens") is PLAIN
    assert found.known


def test_four_bits_with_groups_cost_what_the_files_cost():
    awq = read_quantization({"quant_method": "awq", "bits": 4, "group_size": 128}).of(Q)
    assert sum(awq.tensors(4096, 4096)) / 4096**2 == pytest.approx(0.5195, abs=1e-4)
    ordered = read_quantization(
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}
    ).of(Q)
    assert sum(ordered.tensors(64, 4096)) - sum(awq.tensors(64, 4096)) == 8 * 4096


def test_exclusions_by_name_prefix_glob_and_expression():
    excluded = read_quantization(
        {"quant_method": "fp8", "modules_to_not_convert": ["model.layers.3.self_attn"]}
    )
    assert excluded.of(Q) is PLAIN
    assert excluded.of(GATE) == FP8_TENSOR
    globbed = read_quantization(
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["model.language_model.layers.*.self_attn*"],
        }
    )
    assert globbed.of(Q) is PLAIN
    assert globbed.of(GATE) == NVFP4
    expressed = read_quantization(
        {
            "quant_method": "compressed-tensors",
            **group(num_bits=4, type="int", group_size=32),
            "ignore": ["re:.*self_attn.*", "lm_head"],
        }
    )
    assert expressed.of(Q) is PLAIN
    assert expressed.of(GATE).bits == 4


def test_a_router_named_gate_does_not_exclude_gate_proj():
    found = read_quantization(
        {"quant_method": "fp8", "modules_to_not_convert": ["gate", "lm_head"]}
    )
    assert found.of(GATE) == FP8_TENSOR


def test_mixed_precision_goes_by_layer():
    found = read_quantization(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.language_model.layers.3.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.language_model.layers.3.mlp.experts": {"quant_algo": "NVFP4"},
            },
        }
    )
    assert found.of(Q) == FP8_TENSOR
    assert found.of("layers.3.mlp.experts") == NVFP4
    assert found.of("layers.4.mlp.experts") is PLAIN


def test_auto_round_keeps_named_layers_in_16_bits():
    found = read_quantization(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "sym": True,
            "extra_config": {Q: {"bits": 16}},
        }
    )
    assert found.of(Q) is PLAIN
    assert found.of(GATE).bits == 4


def test_mxfp4_quantizes_the_experts_only():
    found = read_quantization({"quant_method": "mxfp4"})
    assert found.of("layers.0.mlp.experts") == MXFP4
    assert found.of("layers.0.self_attn.q_proj") is PLAIN


def test_a_flag_quantizes_only_what_is_not_quantized():
    assert read_quantization(None, "fp8").of(Q) == FP8_TENSOR
    assert read_quantization(None, "bitsandbytes").of(Q) == NF4
    assert read_quantization({"quant_method": "awq", "bits": 4}, "awq_marlin").of(Q).bits == 4
    assert read_quantization(None, None).of(Q) is PLAIN


def test_an_unknown_method_is_said_so():
    assert not read_quantization({"quant_method": "quip-sharp", "bits": 2}).known
    assert not read_quantization(None, "something-new").known


def test_kv_scheme_of_the_checkpoint():
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    with_scheme = {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": scheme}
    assert read_quantization(with_scheme).kv_cache_dtype == "fp8_e4m3"
    assert read_quantization({"quant_method": "fp8"}).kv_cache_dtype is None


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 200) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
KEYS = [
    "quant_method",
    "bits",
    "group_size",
    "config_groups",
    "ignore",
    "quantized_layers",
    "quantization",
    "modules_to_not_convert",
    "extra_config",
    "kv_cache_scheme",
    "quant_algo",
]
METHODS = [
    "fp8",
    "awq",
    "gptq",
    "modelopt",
    "compressed-tensors",
    "mxfp4",
    "auto-round",
    "bitsandbytes",
    "?",
]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(METHODS), st.dictionaries(st.sampled_from(KEYS), values, max_size=5))
def test_any_configuration_gives_a_format(method, config):
    found = read_quantization({**config, "quant_method": method})
    for name in (Q, GATE, "lm_head"):
        assert all(size >= 0 for size in found.of(name).tensors(256, 256))
