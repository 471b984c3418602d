"""Blocks and tokens against logs: a printed pool size gives the printed tokens."""

import pytest

from oomwatch.memory.kv_cache import build_layout
from oomwatch.memory.planner import plan
from oomwatch.memory.settings import resolve
from oomwatch.units import GIB, KIB


def layout(item):
    settings = resolve(
        item.engine,
        item.version,
        arguments=item.arguments,
        env=item.env,
        device=item.device,
        model=item.model,
    )
    return build_layout(item.model, settings), settings


@pytest.mark.parametrize(
    ("model", "kib"),
    [
        ("llama-2-7b", 512),
        ("llama-2-70b", 320),
        ("llama-3.1-8b", 128),
        ("llama-3.1-70b", 320),
        ("qwen3-32b", 256),
        ("phi-4", 200),
        ("deepseek-r1", 68.625),
    ],
)
def test_bytes_per_token_that_are_well_known(given, model, kib):
    assert layout(given(model))[0].bytes_per_token / KIB == kib


def test_mha_is_explained_and_gqa_is_not(given):
    assert any("MHA" in x for x in plan(given("llama-2-7b")).assumptions)
    assert not any("MHA" in x for x in plan(given("llama-2-70b")).assumptions)


@pytest.mark.parametrize(
    ("model", "gpu", "version", "flags", "printed"),
    [
        # what public logs print: available GiB, capacity in tokens, maximum concurrency
        ("qwen3-14b", "a100-40gb", "0.10.2", {"--max-model-len": "32768"}, (6.51, 42656, 1.3)),
        (
            "gpt-oss-120b",
            "a100-80gb",
            "0.10.1.1",
            {
                "--tensor-parallel-size": "4",
                "--max-model-len": "16384",
                "--max-num-batched-tokens": "2048",
            },
            (45.32, 4657152, 284.25),
        ),
        (
            "gemma-3-27b",
            "mi300x",
            "0.11.0rc2",
            {"--max-model-len": "4096", "--max-num-batched-tokens": "8192"},
            (109.86, 205005, 50.05),
        ),
        (
            "deepseek-r1",
            "h200",
            "0.11.2",
            {"--tensor-parallel-size": "8", "--max-model-len": "8192"},
            (41.6, 635648, 77.59),
        ),
        (
            "kimi-k2-thinking",
            "h200",
            "0.11.1",
            {"--tensor-parallel-size": "8", "--decode-context-parallel-size": "8"},
            (46.8, 5721088, None),
        ),
        (
            "qwen3.5-9b",
            "l40s",
            "0.19.0",
            {"--max-model-len": "262144", "--enable-prefix-caching": False},
            (20.27, 660603, 2.52),
        ),
        (
            "qwen3.5-27b",
            "rtx-3090",
            "0.20.2",
            {
                "--tensor-parallel-size": "2",
                "--kv-cache-dtype": "fp8_e5m2",
                "--max-model-len": "262144",
                "--enable-prefix-caching": True,
                "--mamba-cache-mode": "align",
            },
            (9.84, 619202, 2.36),
        ),
        ("qwen2.5-14b", "h100", "0.21.0", {"--max-model-len": "4096"}, (41.43, 226240, 55.23)),
    ],
)
def test_tokens_of_printed_pools(given, *, model, gpu, version, flags, printed):
    gib, tokens, concurrency = printed
    item = given(model, gpu, version=version, flags=flags)
    built, settings = layout(item)
    blocks = built.blocks(gib * GIB)
    assert built.tokens(blocks, settings.max_model_len) == pytest.approx(tokens, rel=0.003)
    if concurrency:
        assert built.concurrency(blocks, settings.max_model_len) == pytest.approx(
            concurrency, rel=0.005
        )


def test_the_log_line_of_grouped_layers_is_not_capacity_before_0_20_1(given):
    flags = {
        "--tensor-parallel-size": "4",
        "--max-model-len": "16384",
        "--max-num-batched-tokens": "2048",
    }
    old, settings = layout(given("gpt-oss-120b", "a100-80gb", version="0.10.1.1", flags=flags))
    blocks = old.blocks(45.32 * GIB)
    assert old.line_tokens(blocks, 16384) == pytest.approx(2640144, rel=1e-4)
    new, _ = layout(given("gpt-oss-120b", "a100-80gb", version="0.21.0", flags=flags))
    assert new.line_tokens(blocks, 16384) == new.tokens(blocks, 16384)
    assert settings.groups_layers


def test_old_engines_allocate_sliding_layers_in_full(given):
    grouped = layout(given("gemma-3-27b", version="0.10.0"))[0]
    for version, flags in (
        ("0.8.0", {}),
        ("0.7.0", {}),
        ("0.10.0", {"--disable-hybrid-kv-cache-manager": True}),
    ):
        full = layout(given("gemma-3-27b", version=version, flags=flags))[0]
        assert len(full.groups) == 1
        assert full.bytes_per_token > 5 * grouped.bytes_per_token


def test_state_blocks_are_sized_by_the_state(given):
    built, _ = layout(given("qwen3.5-9b", "l40s", version="0.19.0"))
    assert built.block_tokens == 528
    assert [g.spec.kind for g in built.groups] == ["state"] * 3 + ["full"]
    assert built.state_bytes == 24 * 2146304


def test_prefix_caching_of_states_costs_a_second_block(given):
    off = layout(given("qwen3.5-9b", "l40s", version="0.25.0"))[0]
    on = layout(given("qwen3.5-9b", "l40s", version="0.26.0"))[0]
    assert on.request_blocks(1000) - off.request_blocks(1000) == 3


def test_multi_token_prediction_adds_layers_and_convolution_state(given):
    spec = {"--speculative-config": '{"method": "mtp", "num_speculative_tokens": 2}'}
    plain = layout(given("qwen3.5-9b", "l40s", version="0.19.0"))[0]
    drafted = layout(given("qwen3.5-9b", "l40s", version="0.19.0", flags=spec))[0]
    assert drafted.block_bytes > plain.block_bytes
    assert drafted.state_bytes > plain.state_bytes
    assert drafted.states_per_request == plain.states_per_request + 2


def test_layers_that_share_anothers_cache_cost_nothing(given):
    from oomwatch.memory.hf_config import parse_config

    raw = {
        "model_type": "x",
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    whole = layout(given(parse_config(raw)))[0]
    shared = layout(given(parse_config({**raw, "num_kv_shared_layers": 4})))[0]
    assert shared.bytes_per_token * 2 == whole.bytes_per_token


def test_ranks_beyond_the_kv_heads_copy_them(given):
    per_gpu = [
        layout(given("qwen3-235b-a22b", flags={"--tensor-parallel-size": str(n)}))[
            0
        ].bytes_per_token
        for n in (1, 2, 4, 8, 16)
    ]
    assert [x / KIB for x in per_gpu] == [188, 94, 47, 47, 47]


def test_latent_cache_is_not_divided_by_ranks(given):
    one = layout(given("deepseek-v3", flags={"--tensor-parallel-size": "1"}))[0]
    eight = layout(given("deepseek-v3", flags={"--tensor-parallel-size": "8"}))[0]
    assert one.bytes_per_token == eight.bytes_per_token == 61 * 576 * 2


def test_sparse_latent_cache_has_indexer_keys_and_an_8_bit_default(given):
    plain = layout(
        given("deepseek-v3.2", "h200", version="0.12.0", flags={"--kv-cache-dtype": "bfloat16"})
    )[0]
    assert plain.bytes_per_token == 61 * (1152 + 132)
    default = layout(given("deepseek-v3.2", "h200", version="0.12.0"))[0]
    assert default.bytes_per_token == 61 * (656 + 132)


def test_pipeline_stages_hold_their_own_layers(given):
    whole = layout(given("llama-3.1-70b"))[0]
    item = given("llama-3.1-70b", flags={"--pipeline-parallel-size": "4"})
    _, settings = layout(item)
    assert (
        sum(build_layout(item.model, settings, s).block_bytes for s in range(4))
        == whole.block_bytes
    )


def test_longest_request_is_found_exactly(given):
    built, _ = layout(given("gemma-3-27b"))
    blocks = 5000
    longest = built.longest(blocks, 131072)
    assert built.request_blocks(longest) <= blocks < built.request_blocks(longest + 1)
    assert built.longest(0, 131072) == 0


def test_sglang_counts_tokens_of_attention_layers_only(given):
    built, _ = layout(
        given("qwen3.5-9b", "rtx-3090", engine="sglang", version="0.5.9", flags={"--tp-size": "2"})
    )
    assert built.bytes_per_token == 16384
    assert built.tokens(built.blocks(5.0 * GIB), 4096) == pytest.approx(327310, rel=0.003)


def test_cross_attention_pages_hold_the_encoders_output(given):
    from oomwatch.memory.hf_config import parse_config

    raw = {
        "model_type": "whisper",
        "d_model": 1280,
        "decoder_layers": 32,
        "encoder_layers": 32,
        "decoder_attention_heads": 20,
        "decoder_ffn_dim": 5120,
        "vocab_size": 51866,
        "max_target_positions": 448,
        "max_source_positions": 1500,
    }
    built, _ = layout(given(parse_config(raw), version="0.12.0"))
    assert [g.spec.kind for g in built.groups] == ["full", "cross"]
    assert built.request_blocks(448) == 448 // 16 + -(-1500 // 16)
    assert built.request_blocks(16) == 1 + -(-1500 // 16)


def test_latent_models_kept_whole_heads_before_0_7_1(given):
    old = layout(given("deepseek-v3", version="0.6.6", flags={"--tensor-parallel-size": "8"}))[0]
    off = layout(
        given(
            "deepseek-v3",
            version="0.8.5",
            flags={"--tensor-parallel-size": "8"},
            env={"VLLM_MLA_DISABLE": "1"},
        )
    )[0]
    assert old.bytes_per_token == off.bytes_per_token == 61 * 16 * 256 * 2 * 2


def test_an_eagle_draft_evens_groups_out_instead_of_doubling_them(given):
    eagle = {
        "--speculative-config": '{"method": "eagle3", "model": "d", "num_speculative_tokens": 3}'
    }
    built, settings = layout(given("gpt-oss-20b", version="0.20.0", flags=eagle))
    assert sorted(g.layers for g in built.groups) == [12, 13]
    assert any("draft" in x for x in settings.notes)


def test_a_kv_connector_turns_the_hybrid_cache_off(given):
    built, settings = layout(
        given("gemma-3-27b", version="0.12.0", flags={"--kv-transfer-config": "{}"})
    )
    assert len(built.groups) == 1
    assert any("connector" in x for x in settings.notes)
