import pytest

from oomwatch.errors import UsageError
from oomwatch.memory.settings import resolve


def settings(item):
    return resolve(
        item.engine,
        item.version,
        arguments=item.arguments,
        env=item.env,
        device=item.device,
        model=item.model,
    )


def test_defaults_of_large_and_small_cards(given):
    large, small = settings(given()), settings(given(gpu="l40s"))
    assert (large.max_num_seqs, large.max_num_batched_tokens) == (1024, 8192)
    assert (small.max_num_seqs, small.max_num_batched_tokens) == (256, 2048)


@pytest.mark.parametrize(
    ("version", "gpu", "env", "v0"),
    [
        ("0.7.2", "h100", {}, True),
        ("0.7.2", "h100", {"VLLM_USE_V1": "1"}, False),
        ("0.8.5", "h100", {}, False),
        ("0.8.5", "t4", {}, True),
        ("0.8.5", "h100", {"VLLM_USE_V1": "0"}, True),
        ("0.11.0", "t4", {}, False),
    ],
)
def test_which_engine_runs(given, version, gpu, env, v0):
    assert settings(given(gpu=gpu, version=version, env=env)).v0 is v0


def test_fp8_cache_sends_old_releases_back_to_v0(given):
    flags = {"--kv-cache-dtype": "fp8"}
    assert settings(given(gpu="a100-80gb", version="0.9.0", flags=flags)).v0
    assert not settings(given(gpu="h100", version="0.9.0", flags=flags)).v0
    assert not settings(given(gpu="a100-80gb", version="0.11.0", flags=flags)).v0


def test_v0_profiles_the_whole_length_until_chunking_sets_in(given):
    batch = [
        settings(
            given(gpu="rtx-3090", version="0.6.4", flags={"--max-model-len": n})
        ).max_num_batched_tokens
        for n in ("1000", "29000", "35000")
    ]
    assert batch == [2048, 29000, 512]


def test_the_share_grew_in_0_20(given):
    assert settings(given(version="0.19.0")).utilization == 0.9
    assert settings(given(version="0.20.0")).utilization == 0.92
    assert (
        settings(given(version="0.20.0", flags={"--gpu-memory-utilization": "0.5"})).utilization
        == 0.5
    )


def test_graphs_come_out_of_the_budget_from_0_20(given):
    assert not settings(given(version="0.19.0")).estimates_graphs
    assert settings(
        given(version="0.19.0", env={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "1"})
    ).estimates_graphs
    assert settings(given(version="0.20.0")).estimates_graphs
    assert not settings(
        given(version="0.20.0", env={"VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0"})
    ).estimates_graphs


def test_number_of_graphs(given):
    assert settings(given(version="0.10.0")).graph_count == 67
    assert settings(given(version="0.10.0", flags={"--enforce-eager": True})).graph_count == 0
    assert settings(given(version="0.11.1", flags={"--max-num-seqs": "4"})).graph_count == 4
    listed = {"--compilation-config": '{"cudagraph_capture_sizes": [1, 2, 4]}'}
    assert settings(given(version="0.12.0", flags=listed)).graph_count == 3


def test_gpus_of_a_command(given):
    flags = {
        "--tensor-parallel-size": "4",
        "--pipeline-parallel-size": "2",
        "--data-parallel-size": "3",
    }
    assert settings(given(flags=flags)).gpus == 24
    sglang = {"--tp-size": "8", "--dp-size": "8", "--enable-dp-attention": True}
    item = settings(given(engine="sglang", version="0.5.4", flags=sglang))
    assert item.gpus == 8
    assert item.attention_ranks == 1


def test_modelopt_checkpoints_name_their_cache_format(given):
    from oomwatch.memory.hf_config import parse_config

    raw = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 64, "vocab_size": 1000, "max_position_embeddings": 128,
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}},
    }  # fmt: skip
    model = parse_config(raw)
    assert settings(given(model, version="0.13.0")).kv_format(model).key_bits == 8
    assert settings(given(model, version="0.10.0")).kv_format(model).key_bits == 16


@pytest.mark.parametrize(
    "flags",
    [
        {"--max-model-len": "long"},
        {"--gpu-memory-utilization": "most"},
        {"--max-num-seqs": "1e400"},
        {"--tensor-parallel-size": True},
    ],
)
def test_values_that_are_no_numbers_are_one_line(given, flags):
    with pytest.raises(UsageError):
        settings(given(flags=flags))


def test_an_engine_without_a_model_is_said_so(given):
    with pytest.raises(UsageError, match="tgi"):
        settings(given(engine="tgi"))


def test_a_cache_format_nobody_has(given):
    item = given(flags={"--kv-cache-dtype": "int8"})
    with pytest.raises(UsageError, match="int8"):
        settings(item).kv_format(item.model)


@pytest.mark.parametrize(
    "flags",
    [
        {"--gpu-memory-utilization": "0"},
        {"--gpu-memory-utilization": "1.7"},
        {"--tensor-parallel-size": "0"},
        {"--max-num-seqs": "0"},
        {"--kv-cache-memory-bytes": "abc"},
        {"--kv-cache-memory-bytes": "-1"},
        {"--cpu-offload-gb": "-3"},
    ],
)
def test_values_that_no_server_starts_with(given, flags):
    with pytest.raises(UsageError, match=next(iter(flags))):
        settings(given(flags=flags))


def test_whole_prompts_on_sglang(given):
    flags = {"--chunked-prefill-size": "-1"}
    assert settings(
        given(engine="sglang", version="0.5.10", flags=flags)
    ).max_num_batched_tokens > (8192)


@pytest.mark.parametrize("value", ["[[[", "7", '{"method": [1], "num_speculative_tokens": "x"}'])
def test_a_draft_that_cannot_be_read_is_no_draft(given, value):
    assert settings(given(flags={"--speculative-config": value})).draft_layers == 0


def test_formats_without_a_documented_size(given):
    item = given(version="0.33.0", flags={"--kv-cache-dtype": "octave_k3v4"})
    found = settings(item)
    with pytest.raises(UsageError, match="bytes per token of octave_k3v4"):
        found.kv_format(item.model)


def test_latent_kernels_take_one_latent_only(given):
    import dataclasses

    item = given("deepseek-v2-lite", version="0.11.0")
    assert settings(item).block_size_for(item.model) == 64
    layers = tuple(
        dataclasses.replace(x, mixer=dataclasses.replace(x.mixer, kv_lora_rank=256))
        for x in item.model.layers
    )
    other = dataclasses.replace(item.model, layers=layers)
    assert settings(item).block_size_for(other) == 16
