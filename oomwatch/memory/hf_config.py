"""Reading a model's configuration file into `ModelConfig`.

Takes a Hugging Face ``config.json`` (also nested ``text_config``/``llm_config``) and a Mistral
``params.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from oomwatch.errors import UsageError
from oomwatch.memory.config_reader import Reader
from oomwatch.memory.model_config import (
    DTYPE_BYTES,
    Attention,
    LatentAttention,
    Layer,
    Mixer,
    Mlp,
    ModelConfig,
    Recurrent,
)
from oomwatch.memory.positions import max_model_len, rope_cache_bytes
from oomwatch.memory.vision import read_tower

_MOST_LAYERS: Final = 2000  # no model has more; keeps hostile files from costing time
_QKV_BIAS: Final = frozenset({"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text"})
_QK_NORM: Final = {
    "qwen3": "head",
    "qwen3_moe": "head",
    "qwen3_vl_text": "head",
    "qwen3_vl_moe_text": "head",
    "qwen3_next": "head",
    "qwen3_5_text": "head",
    "qwen3_5_moe_text": "head",
    "gemma3_text": "head",
    "gemma4_text": "head",
    "exaone4": "head",
    "minimax_m2": "full",
    "olmo2": "full",
    "olmo3": "full",
}
_FOUR_NORMS: Final = frozenset({"gemma2", "gemma3_text", "gemma4_text", "glm4"})


KNOWN_TYPES: Final = frozenset(
    {"llama", "mistral", "mixtral", "ministral", "smollm3", "internlm2", "internlm3", "yi"}
    | {"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"}
    | {"qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    | {"qwen3_vl_text", "qwen3_vl_moe_text"}
    | {"gemma", "gemma2", "gemma3_text", "gemma4_text", "phi3", "phi3_v", "phimoe"}
    | {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"}
    | {"glm4", "glm4_moe", "gpt_oss", "exaone4", "llama4_text", "minimax_m2"}
    | {"granite", "granitemoe", "granitemoehybrid", "olmo2", "olmo3", "cohere", "cohere2"}
    | {"starcoder2", "whisper", "mamba2", "kimi_linear"}
)
"""Types whose layers are read as they are built; any other is taken as a plain decoder and said."""
_LAYER_KINDS: Final = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
}


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a configuration file describes.

    Raises UsageError when the file lacks the sizes that nothing can stand in for.
    """
    if "n_layers" in raw and "dim" in raw:
        raw = _from_mistral_params(raw)
    if raw.get("model_type") == "whisper":
        raw = _from_whisper(raw)
    read = Reader(raw)
    hidden = read.size("hidden_size", "d_model", "n_embd")
    count = read.size("num_hidden_layers", "n_layer", "num_layers")
    if count > _MOST_LAYERS:
        raise UsageError(f"the model config has {count} layers, more than any model")
    heads = read.number("num_attention_heads", "n_head")
    if read.model_type not in KNOWN_TYPES:
        read.unknown.append(f"model type {read.model_type or '(none)'}: taken as a plain decoder")
    layers = tuple(_layer(read, index, count, hidden, heads) for index in range(count))
    names = read.items("architectures")
    quantization = read.get("quantization_config", "compression_config")
    return ModelConfig(
        architecture=str(names[0]) if names else "unknown",
        model_type=read.model_type,
        dtype_bytes=DTYPE_BYTES.get(str(read.get("torch_dtype", "dtype", default="bfloat16")), 2),
        hidden=hidden,
        vocab=read.size("vocab_size"),
        tied_embeddings=read.flag("tie_word_embeddings"),
        layers=layers,
        max_model_len=max_model_len(read),
        rope_cache_bytes=rope_cache_bytes(read, layers),
        norms_per_layer=4 if read.model_type in _FOUR_NORMS else 2,
        vision=read_tower(read, hidden),
        quantization=quantization if isinstance(quantization, Mapping) else None,
        mtp_layers=read.number(
            "num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_transformer_layers"
        ),
        encoder_tokens=read.number("_encoder_tokens"),
        extra_parameters=read.number("_encoder_parameters"),
        unknown=tuple(dict.fromkeys(read.unknown)),
    )


def _from_mistral_params(raw: Mapping[str, Any]) -> dict[str, Any]:
    moe = raw["moe"] if isinstance(raw.get("moe"), Mapping) else {}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mixtral" if moe else "mistral",
        "hidden_size": raw["dim"],
        "num_hidden_layers": raw["n_layers"],
        "num_attention_heads": raw.get("n_heads"),
        "num_key_value_heads": raw.get("n_kv_heads"),
        "head_dim": raw.get("head_dim"),
        "intermediate_size": raw.get("hidden_dim"),
        "vocab_size": raw.get("vocab_size"),
        "max_position_embeddings": raw.get("max_position_embeddings") or raw.get("max_seq_len"),
        "tie_word_embeddings": raw.get("tied_embeddings", False),
        "num_local_experts": moe.get("num_experts"),
        "num_experts_per_tok": moe.get("num_experts_per_tok"),
        "sliding_window": raw.get("sliding_window", 0),
        "torch_dtype": "bfloat16",
    }


def _from_whisper(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Whisper's decoder as a decoder, its encoder and cross attention as weights beside it."""
    read = Reader(raw)
    width, depth = read.size("d_model"), read.size("decoder_layers")
    encoder = read.size("encoder_layers", default=depth)
    inner = read.size("encoder_ffn_dim", default=4 * width)
    return {
        **raw,
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": read.size("decoder_attention_heads"),
        "intermediate_size": read.size("decoder_ffn_dim", default=4 * width),
        "max_position_embeddings": read.size("max_target_positions", default=448),
        "tie_word_embeddings": True,
        "mlp_gated": False,
        "_encoder_tokens": read.size("max_source_positions", default=1500),
        "_encoder_parameters": encoder * (4 * width * width + 2 * width * inner)
        + depth * 4 * width * width,
    }


# ------------------------------------------------------------------------------- one layer
def _layer(read: Reader, index: int, count: int, hidden: int, heads: int) -> Layer:
    kind = _layer_kind(read, index)
    mixer: Mixer
    if kind == "recurrent":
        mixer = _recurrent(read, hidden)
    elif read.get("kv_lora_rank") and read.get("qk_rope_head_dim"):
        mixer = _latent(read, index, heads)
    else:
        mixer = _attention(read, index, count=count, kind=kind, hidden=hidden, heads=heads)
    return Layer(mixer, _mlp(read, index))


def _layer_kind(read: Reader, index: int) -> str:
    """``full``, ``sliding``, ``chunked`` or ``recurrent``."""
    linear = read.get("linear_attn_config")
    if isinstance(linear, Mapping) and isinstance(linear.get("kda_layers"), list):
        return "recurrent" if index + 1 in linear["kda_layers"] else "full"  # Kimi counts from 1
    types = read.items("layer_types", "layers_block_type")
    if index < len(types):
        name = str(types[index])
        if name not in _LAYER_KINDS:
            read.unknown.append(f"layer type {name[:40]}: taken as full attention")
        return _LAYER_KINDS.get(name, "full")
    interval = read.number("full_attention_interval")
    if interval and read.get("linear_num_value_heads"):
        return "full" if (index + 1) % interval == 0 else "recurrent"
    if read.model_type == "mamba2":
        return "recurrent"
    period = read.number("attn_layer_period")
    if period:  # Jamba
        attends = index % period == read.number("attn_layer_offset")
        return "full" if attends else "recurrent"
    if read.model_type == "llama4_text":
        rotary = read.items("no_rope_layers")
        keeps = rotary[index] if index < len(rotary) else (index + 1) % 4
        return "chunked" if keeps else "full"
    if _window(read) is None:
        return "full"
    if index < read.number("max_window_layers") and read.get("use_sliding_window"):
        return "full"  # Qwen 2: the first layers see everything
    pattern = read.get("sliding_window_pattern", "_sliding_window_pattern")
    if isinstance(pattern, str) and pattern:
        return "sliding" if pattern[index % len(pattern)].upper() == "L" else "full"
    if isinstance(pattern, int) and pattern > 1:
        return "full" if (index + 1) % pattern == 0 else "sliding"
    return "sliding"


def _window(read: Reader) -> int | None:
    """The sliding window in tokens, or None where the file names one that is not in use."""
    window = read.get("sliding_window")
    if not isinstance(window, int) or window <= 0:
        return None
    if read.inner.get("sliding_window", 0) is None:  # said to be off, whatever the defaults are
        return None
    if read.get("use_sliding_window") is False:
        return None
    positions = read.get("max_position_embeddings")
    return None if isinstance(positions, int) and window >= positions else window


def _attention(
    read: Reader, index: int, *, count: int, kind: str, hidden: int, heads: int
) -> Attention:
    if not heads:
        heads = read.size("num_attention_heads")  # says that it is missing
    head_dim = read.size("head_dim", default=max(1, hidden // heads))
    kv_heads = read.size("num_key_value_heads", "multi_query_group_num", default=heads)
    if read.get("multi_query") is True and not read.get("num_key_value_heads"):
        kv_heads = 1
    if kind == "full" and read.get("global_head_dim"):  # Gemma 4: wider heads, fewer of them
        head_dim = read.size("global_head_dim")
        kv_heads = read.size("num_global_key_value_heads", default=kv_heads)
    bias = read.flag("attention_bias") or read.flag("qkv_bias")
    shared = read.number("num_kv_shared_layers")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window_tokens=_window(read) if kind == "sliding" else None,
        chunk_tokens=read.size("attention_chunk_size", default=8192) if kind == "chunked" else None,
        output_gate=read.flag("attn_output_gate"),
        qkv_bias=bias or read.model_type in _QKV_BIAS,
        out_bias=bias,
        qk_norm=_QK_NORM.get(read.model_type),  # type: ignore[arg-type]
        sinks=read.model_type == "gpt_oss",
        shares_kv=bool(shared) and index >= count - shared,
    )


def _latent(read: Reader, index: int, heads: int) -> LatentAttention:
    types = read.items("indexer_types")
    own = index >= len(types) or types[index] != "shared"
    return LatentAttention(
        heads=heads,
        q_lora_rank=read.number("q_lora_rank") or None,
        kv_lora_rank=read.size("kv_lora_rank"),
        nope_dim=read.size("qk_nope_head_dim"),
        rope_dim=read.size("qk_rope_head_dim"),
        value_dim=read.size("v_head_dim"),
        index_heads=read.number("index_n_heads"),
        index_dim=read.number("index_head_dim") if read.get("index_topk") else 0,
        has_indexer=bool(read.get("index_topk")) and own,
    )


def _recurrent(read: Reader, hidden: int) -> Recurrent:
    linear = read.get("linear_attn_config")
    if isinstance(linear, Mapping):
        return _delta_attention(Reader({**linear, "model_type": read.model_type}))
    kernel = read.size("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel", default=4)
    if read.get("linear_num_value_heads"):
        key_dim = read.size("linear_num_key_heads") * read.size("linear_key_head_dim")
        heads, head_dim = read.size("linear_num_value_heads"), read.size("linear_value_head_dim")
        return Recurrent(
            kind="gdn",
            heads=heads,
            head_dim=head_dim,
            state_dim=read.size("linear_key_head_dim"),
            conv_dim=2 * key_dim + heads * head_dim,
            conv_kernel=kernel,
            state_dtype_bytes=DTYPE_BYTES.get(str(read.get("mamba_ssm_dtype", default="auto")), 2),
            key_dim=key_dim,
        )
    state = read.size("mamba_d_state", "ssm_state_size", "state_size")
    heads = read.number("mamba_n_heads", "mamba_num_heads", "num_heads")
    head_dim = read.size("mamba_d_head", "mamba_head_dim", "head_dim", default=64)
    groups = read.size("mamba_n_groups", "n_groups", default=1)
    if not heads:  # Mamba 1 (Jamba): one channel per head, state beside every channel
        read.unknown.append("weights of Mamba 1 layers (taken as Mamba 2)")
        heads, head_dim, groups = read.size("mamba_expand", default=2) * hidden, 1, 0
    return Recurrent(
        kind="mamba2",
        heads=heads,
        head_dim=head_dim,
        state_dim=state,
        conv_dim=heads * head_dim + 2 * groups * state,
        conv_kernel=kernel,
        state_dtype_bytes=DTYPE_BYTES.get(str(read.get("mamba_ssm_dtype", default="auto")), 2),
        groups=groups,
    )


def _delta_attention(read: Reader) -> Recurrent:
    """Kimi delta attention: as many key heads as value heads, a gate per channel."""
    heads, head_dim = read.size("num_heads"), read.size("head_dim")
    return Recurrent(
        kind="kda",
        heads=heads,
        head_dim=head_dim,
        state_dim=head_dim,
        conv_dim=3 * heads * head_dim,
        conv_kernel=read.size("short_conv_kernel_size", default=4),
        state_dtype_bytes=4,
        key_dim=heads * head_dim,
    )


def _mlp(read: Reader, index: int) -> Mlp:
    names = ("intermediate_size", "n_inner", "ffn_hidden_size")
    intermediate = read.size(*names, default=1)
    experts = read.number("n_routed_experts", "num_local_experts", "num_experts")
    if read.model_type == "granitemoehybrid":
        return Mlp(
            dense=read.size("shared_intermediate_size", default=intermediate),
            experts=experts,
            expert_width=intermediate if experts else 0,
            active_experts=read.number("num_experts_per_tok"),
        )
    if not experts or not _is_sparse(read, index):
        if read.get(*names, "intermediate_size_mlp") is None:
            intermediate = 4 * read.size("hidden_size", "d_model", "n_embd")
            read.unknown.append("width of the MLP (4 times the hidden size taken)")
        gated = read.get("mlp_gated", default=read.model_type != "starcoder2")
        return Mlp(
            dense=read.size("intermediate_size_mlp", default=intermediate), gated=bool(gated)
        )
    width = read.size("moe_intermediate_size", "expert_ffn_hidden_size", default=intermediate)
    shared = read.number("shared_expert_intermediate_size", "shared_intermediate_size")
    if not shared:
        shared = read.number("n_shared_experts", "num_shared_experts") * width
    if read.model_type == "llama4_text":
        shared = intermediate
    return Mlp(
        dense=intermediate if read.flag("enable_moe_block") else 0,
        experts=experts,
        expert_width=width,
        active_experts=read.size(
            "num_experts_per_tok",
            "top_k_experts",
            "experts_per_token",
            "num_experts_per_token",
            default=1,
        ),
        shared_width=shared,
        shared_gate=bool(read.get("shared_expert_intermediate_size")),
        expert_bias=read.model_type == "gpt_oss",
        # Routers that score with a sigmoid are kept in 32 bits (three logged loads agree).
        router_dtype_bytes=4 if read.get("scoring_func") == "sigmoid" else 2,
        experts_beside=read.flag("enable_moe_block"),
    )


def _is_sparse(read: Reader, index: int) -> bool:
    """Whether a layer of a mixture-of-experts model has experts."""
    kinds = read.items("mlp_layer_types")
    if index < len(kinds):
        return str(kinds[index]) == "sparse"
    if index < read.number("first_k_dense_replace"):
        return False
    if index in read.items("mlp_only_layers"):
        return False
    period = read.number("expert_layer_period")
    if period:  # Jamba
        return index % period == read.number("expert_layer_offset", default=1)
    listed = read.items("moe_layer_freq")
    if listed:
        return bool(listed[index]) if index < len(listed) else True
    step = read.number("interleave_moe_layer_step") or read.number("decoder_sparse_step")
    if step:
        return (index + 1) % step == 0
    return index % read.size("moe_layer_freq", default=1) == 0
