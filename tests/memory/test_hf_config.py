import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.errors import UsageError
from oomwatch.memory.data.models import MODELS
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.model_config import Attention, LatentAttention, Recurrent

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


def windows(model):
    return [x.mixer.window_tokens for x in model.layers]


def test_every_built_in_model_is_understood():
    for name, raw in MODELS.items():
        model = parse_config(raw)
        assert model.unknown == (), name
        assert model.layers


def test_head_size_comes_from_the_file_not_from_the_hidden_size():
    model = parse_config({**SMALL, "head_dim": 32})
    assert model.layers[0].mixer.head_dim == 32
    assert parse_config(SMALL).layers[0].mixer.head_dim == 8


def test_a_sliding_window_that_is_not_used_is_none():
    for more in ({"use_sliding_window": False}, {"sliding_window": 8192}, {"sliding_window": None}):
        model = parse_config({**SMALL, "sliding_window": 512, **more})
        assert windows(model) == [None] * 4
    assert windows(parse_config({**SMALL, "sliding_window": 512})) == [512] * 4


@pytest.mark.parametrize(
    "pattern",
    [
        {"sliding_window_pattern": "LLLG"},
        {"sliding_window_pattern": 4},
        {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ],
)
def test_patterns_of_sliding_layers_in_all_three_spellings(pattern):
    model = parse_config({**SMALL, "sliding_window": 512, **pattern})
    assert windows(model) == [512, 512, 512, None]


def test_defaults_that_released_gemma_files_leave_out():
    model = parse_config(MODELS["gemma-3-27b"])
    assert model.vocab == 262208
    assert model.tied_embeddings
    assert sum(w is None for w in windows(model)) == 10
    assert model.max_model_len == 131072  # the linear factor is already in it


def test_latent_attention_and_its_indexer():
    model = parse_config(MODELS["deepseek-v3.2"])
    mixer = model.layers[10].mixer
    assert isinstance(mixer, LatentAttention)
    assert mixer.latent_dim == 576
    assert model.is_sparse_latent
    assert not parse_config(MODELS["deepseek-v3"]).is_sparse_latent
    assert model.layers[0].mlp.experts == 0
    assert model.layers[3].mlp.experts == 256


def test_gated_delta_net_layers():
    model = parse_config(MODELS["qwen3.5-27b"])
    kinds = [isinstance(x.mixer, Recurrent) for x in model.layers[:4]]
    assert kinds == [True, True, True, False]
    assert model.layers[0].mixer.conv_dim == 2 * 16 * 128 + 48 * 128
    assert model.layers[0].mixer.state_dtype_bytes == 4


def test_mistral_params_file():
    model = parse_config(
        {
            "dim": 64,
            "n_layers": 2,
            "n_heads": 8,
            "n_kv_heads": 2,
            "head_dim": 16,
            "hidden_dim": 96,
            "vocab_size": 500,
            "max_seq_len": 2048,
        }
    )
    assert isinstance(model.layers[0].mixer, Attention)
    assert model.layers[0].mixer.head_dim == 16
    assert model.max_model_len == 2048
    assert windows(model) == [None, None]


def test_kv_sharing_layers_are_marked():
    model = parse_config({**SMALL, "num_kv_shared_layers": 2})
    assert [x.mixer.shares_kv for x in model.layers] == [False, False, True, True]


def test_yarn_files_list_the_product_or_the_original():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert parse_config({**SMALL, "rope_scaling": yarn}).max_model_len == 16384
    listed = {**SMALL, "max_position_embeddings": 16384, "rope_scaling": yarn}
    assert parse_config(listed).max_model_len == 16384


@pytest.mark.parametrize(
    "raw",
    [{}, {"hidden_size": 64}, {**SMALL, "num_hidden_layers": 0}, {**SMALL, "vocab_size": "many"}],
)
def test_a_file_without_sizes_is_refused_in_one_line(raw):
    with pytest.raises(UsageError, match="no usable"):
        parse_config(raw)


def test_an_unknown_context_length_is_said():
    raw = {k: v for k, v in SMALL.items() if k != "max_position_embeddings"}
    raw["model_type"] = "something-new"
    assert any("context" in x for x in parse_config(raw).unknown)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                *SMALL,
                "layer_types",
                "rope_scaling",
                "vision_config",
                "text_config",
                "quantization_config",
                "num_experts",
                "sliding_window",
                "sliding_window_pattern",
                "num_kv_shared_layers",
                "moe_layer_freq",
            ]
        ),
        json_values,
        max_size=6,
    )
)
def test_hostile_files_end_in_a_model_or_in_one_line(changes):
    with contextlib.suppress(UsageError):
        parse_config({**SMALL, **changes})


def test_a_model_type_that_was_never_compared_is_said():
    unknown = parse_config({**SMALL, "model_type": "rwkv9"}).unknown
    assert any("rwkv9" in x for x in unknown)
    types = parse_config({**SMALL, "layer_types": ["kda", "full_attention"] * 2}).unknown
    assert any("kda" in x for x in types)


def test_qwen2_uses_its_window_only_in_the_upper_layers():
    raw = {
        **SMALL,
        "model_type": "qwen2",
        "sliding_window": 512,
        "use_sliding_window": True,
        "max_window_layers": 3,
    }
    assert windows(parse_config(raw)) == [None, None, None, 512]


def test_kimi_delta_layers_keep_a_state():
    from oomwatch.memory.config_source import load_model

    model = load_model(None, "kimi-linear-48b-a3b").model
    states = [x.mixer for x in model.layers if isinstance(x.mixer, Recurrent)]
    assert (len(model.layers), len(states), model.latent_dim) == (27, 20, 576)
    assert {(s.kind, s.heads, s.conv_dim, s.state_dtype_bytes) for s in states} == {
        ("kda", 32, 12288, 4)
    }
    assert model.unknown == ()


def test_what_is_garbage_or_missing_is_said():
    plain = {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100,
        "num_attention_heads": 4, "max_position_embeddings": 512,
    }  # fmt: skip
    assert any("width of the MLP" in x for x in parse_config(plain).unknown)
    odd = {**plain, "intermediate_size": 128, "num_key_value_heads": 0}
    assert any("num_key_value_heads" in x for x in parse_config(odd).unknown)
    with pytest.raises(UsageError, match="layers"):
        parse_config({**plain, "num_hidden_layers": 10**7})
