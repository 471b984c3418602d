"""Weights against what servers printed as "Model loading took" (GiB)."""

import pytest

from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import find_device
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.planner import plan
from oomwatch.memory.weights import Sharding, allocated, stages, weights_bytes
from oomwatch.units import GIB, MIB


def gib(name, tp=1, gpu="h100", flag=None, **more):
    model = load_model(None, name).model
    return (
        weights_bytes(
            model, Sharding(tensor=tp, **more), device=find_device(gpu), quantization_flag=flag
        )
        / GIB
    )


@pytest.mark.parametrize(
    ("name", "tp", "printed", "tolerance"),
    [
        ("llama-3.1-8b", 1, 14.9888, 0.0002),
        ("qwen3-4b", 1, 7.5552, 0.0002),
        ("qwen3-32b", 1, 61.03, 0.0005),
        ("qwen3-32b", 2, 30.59, 0.0005),
        ("qwen2.5-7b", 2, 7.1217, 0.002),
        ("mistral-small-3.2-24b", 1, 44.76, 0.002),
        ("qwen3.5-9b", 1, 17.66, 0.002),
        ("gpt-oss-20b", 1, 13.72, 0.01),
        ("minimax-m2.5", 4, 53.75, 0.003),
        ("deepseek-r1", 8, 79.739, 0.003),
    ],
)
def test_loads_that_servers_printed(name, tp, printed, tolerance):
    gpu = "a100-80gb" if name == "gpt-oss-20b" else "h100"
    assert gib(name, tp, gpu) == pytest.approx(printed, rel=tolerance)


def test_4_bit_kernels_pad_by_card():
    assert gib("gpt-oss-120b", 1, "h100") == pytest.approx(64.38, rel=0.005)
    assert gib("gpt-oss-120b", 4, "a100-80gb") == pytest.approx(17.22, rel=0.005)
    assert gib("gpt-oss-120b", 4, "a100-80gb") > gib("gpt-oss-120b", 4, "h100")


def test_the_allocator_keeps_small_rests():
    assert allocated(100) == 512
    assert allocated(9 * MIB) == 9 * MIB
    assert allocated(47 * MIB + MIB // 2) == 48 * MIB
    assert allocated(95 * MIB) == 96 * MIB
    assert (
        allocated(28 * MIB + 128 * 1024) == 28 * MIB + 128 * 1024
    )  # a rest of 1.9 MiB is split off


def test_quantizing_while_loading_halves_the_linear_layers():
    assert gib("llama-3.1-70b", 1, flag="fp8") == pytest.approx(67.72, rel=0.002)


def test_tied_embeddings_count_once():
    raw = {
        "model_type": "x",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 64000,
        "max_position_embeddings": 128,
    }
    tied = weights_bytes(parse_config({**raw, "tie_word_embeddings": True}), Sharding())
    untied = weights_bytes(parse_config(raw), Sharding())
    assert untied - tied == pytest.approx(64 * 64000 * 2, rel=0.01)


def test_kv_heads_are_copied_when_ranks_outnumber_them():
    assert gib("qwen3-235b-a22b", 8) * 8 > gib("qwen3-235b-a22b", 4) * 4


def test_expert_parallel_spreads_experts_over_all_ranks():
    spread = gib("qwen3-30b-a3b", 2, data=2, expert=True)
    assert spread == pytest.approx(gib("qwen3-30b-a3b", 2, data=2), rel=0.02)
    assert spread < gib("qwen3-30b-a3b", 2)


def test_pipeline_stages_hold_every_layer_once():
    for layers, pipeline in ((62, 4), (61, 8), (80, 3), (5, 5)):
        parts = stages(layers, pipeline)
        assert [i for part in parts for i in part] == list(range(layers))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_lora_slots_and_draft_layers_add():
    model = load_model(None, "deepseek-v3").model
    base = weights_bytes(model, Sharding(tensor=8))
    assert weights_bytes(model, Sharding(tensor=8), draft_layers=1) - base > 1 * GIB
    llama = load_model(None, "llama-3.1-8b").model
    slots = weights_bytes(llama, Sharding(), lora_slots=4, lora_rank=16) - weights_bytes(
        llama, Sharding()
    )
    assert slots == pytest.approx(4 * 42e6 * 2, rel=0.1)  # 42 million weights at rank 16


def test_eagle_drafts_weigh_what_their_checkpoints_do(given):
    plain, eagle, eagle3 = (
        plan(
            given(
                flags={
                    "--speculative-config": f'{{"method": "{kind}", "num_speculative_tokens": 3}}'
                }
            )
        ).budget.weights
        for kind in ("ngram", "eagle", "eagle3")
    )
    assert (eagle.bytes - plain.bytes) / GIB == pytest.approx(0.47, abs=0.05)  # 0.25 B parameters
    assert (eagle3.bytes - plain.bytes) / GIB == pytest.approx(0.79, abs=0.05)  # 0.42 B parameters
    assert eagle.high - eagle.bytes > plain.high - plain.bytes


def test_siglip_splits_its_mlps_only(given):
    model = given("gemma-3-27b").model
    tower = model.vision
    mlps = 2 * tower.layers * tower.hidden * tower.intermediate
    assert tower.parameters_on(4) == tower.parameters - mlps + mlps // 4
