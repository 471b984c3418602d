import pytest

from oomwatch.memory.engine_facts import INFERRED, plan_input, predict
from oomwatch.records import EngineFacts
from oomwatch.units import GIB

FACTS = EngineFacts(
    id="e1",
    engine="vllm",
    version="0.11.0",
    model="meta-llama/Llama-3.1-8B-Instruct",
    arguments={"--max-model-len": "16000", "--gpu-memory-utilization": "0.9"},
    generation="V1",
    total_bytes=int(79.18 * GIB),
    weights_bytes=int(14.99 * GIB),
    kv_bytes=int(51.38 * GIB),
    max_model_len=16000,
)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def test_a_start_that_was_seen_is_planned_from_its_own_numbers():
    given = plan_input(FACTS, gpu_name="NVIDIA H100 80GB HBM3")
    found = predict(given, {"--kv-cache-dtype": "fp8"})
    assert found.before.kv_available_bytes == FACTS.kv_bytes
    assert found.after.tokens == pytest.approx(2 * found.before.tokens, rel=1e-3)
    assert found.gained_bytes == found.freed_bytes == 0
    assert found.tokens_low <= found.after.tokens <= found.tokens_high


def test_more_share_gains_exactly_that_share():
    given = plan_input(FACTS, gpu_name="h100")
    gained = predict(given, {"--gpu-memory-utilization": "0.95"})
    assert gained.freed_bytes == 0
    assert gained.gained_bytes == pytest.approx(0.05 * FACTS.total_bytes, abs=2)


def test_a_remedy_that_would_not_start_is_known_before():
    given = plan_input(FACTS, gpu_name="h100")
    assert not predict(given, {"--gpu-memory-utilization": "0.2"}).after.fits


def test_the_length_that_the_log_printed_counts_for_auto():
    import dataclasses

    facts = dataclasses.replace(FACTS, arguments={"--max-model-len": "auto"}, max_model_len=12345)
    assert plan_input(facts, gpu_name="h100").arguments["--max-model-len"] == "12345"


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "tgi"},
        {"fork": "vllm-ascend"},
        {"model": "acme/unheard-of"},
        {"total_bytes": None, "weights_bytes": None},  # nothing to infer the card from
    ],
)
def test_what_cannot_be_planned_is_none(changes):
    import dataclasses

    assert plan_input(dataclasses.replace(FACTS, **changes)) is None


def test_a_value_that_cannot_be_planned_predicts_nothing():
    given = plan_input(FACTS, gpu_name="h100")
    assert predict(given, {"--kv-cache-dtype": "int8"}) is None


def test_a_change_of_nothing_predicts_nothing():
    import dataclasses

    facts = dataclasses.replace(FACTS, activation_bytes=7 * GIB, non_torch_bytes=GIB)
    found = predict(plan_input(facts, gpu_name="h100"), {})
    assert found.gained_bytes == found.freed_bytes == 0
    assert found.after.kv_available_bytes == FACTS.kv_bytes


def test_only_what_changes_is_uncertain():
    given = plan_input(FACTS, gpu_name="h100")
    share = predict(given, {"--gpu-memory-utilization": "0.8"})
    assert share.tokens_high - share.tokens_low < 200  # the rounding of the printed GiB
    assert share.freed_bytes == pytest.approx(0.1 * FACTS.total_bytes, abs=2)
    batch = predict(given, {"--max-num-seqs": "64"})
    assert batch.freed_bytes > GIB
    assert batch.tokens_high - batch.tokens_low > share.tokens_high - share.tokens_low


def test_a_card_that_nothing_names_is_inferred_from_the_shares():
    import dataclasses

    given = plan_input(dataclasses.replace(FACTS, total_bytes=None))
    assert given.device.name == INFERRED
    assert given.device.total_bytes == pytest.approx(FACTS.total_bytes, rel=0.02)
    found = predict(given, {"--gpu-memory-utilization": "0.95"})
    exact = predict(plan_input(FACTS, gpu_name="h100"), {"--gpu-memory-utilization": "0.95"})
    assert found.tokens_low < exact.after.tokens < found.tokens_high


def test_more_ranks_free_their_part_of_the_printed_weights():
    found = predict(plan_input(FACTS, gpu_name="h100"), {"--tensor-parallel-size": "2"})
    half, exchange = FACTS.weights_bytes / 2, 0.5 * GIB  # NCCL takes a part of what is freed
    assert half - exchange < found.freed_bytes < 1.01 * half
    assert found.freed_bytes == found.gained_bytes


def test_removing_a_block_override_gives_the_pool_back():
    import dataclasses

    arguments = {**FACTS.arguments, "--num-gpu-blocks-override": "2000"}
    facts = dataclasses.replace(FACTS, arguments=arguments, kv_bytes=2000 * 16 * 2**17)
    found = predict(plan_input(facts, gpu_name="h100"), {}, ("--num-gpu-blocks-override",))
    assert found.before.tokens == 32000
    assert found.after.tokens > 350_000


@pytest.mark.parametrize(("share", "sure"), [("0.2", True), ("0.273", False), ("0.5", False)])
def test_a_refusal_is_sure_only_beyond_the_interval(share, sure):
    import dataclasses

    facts = dataclasses.replace(FACTS, weights_bytes=None, kv_bytes=None)
    given = plan_input(facts, gpu_name="h100")
    assert predict(given, {"--gpu-memory-utilization": share}).surely_refused is sure


def test_weights_that_exceed_the_card_free_no_more_than_it_holds():
    import dataclasses

    facts = dataclasses.replace(
        FACTS, model="meta-llama/Llama-3.3-70B-Instruct", weights_bytes=None, kv_bytes=None
    )
    found = predict(plan_input(facts, gpu_name="h100"), {"--tensor-parallel-size": "4"})
    assert found.before.refusal == "weights_dont_fit"
    assert 0 < found.freed_bytes <= found.after.kv_available_bytes
    held = found.after.budget.weights.bytes + found.freed_bytes
    assert held <= found.after.budget.total_bytes


@pytest.mark.parametrize("kv_gib", [3, 30, 50])
def test_a_smaller_batch_frees_no_more_than_the_log_left_for_it(kv_gib):
    import dataclasses

    facts = dataclasses.replace(FACTS, kv_bytes=kv_gib * GIB, weights_bytes=(65 - kv_gib) * GIB)
    facts = dataclasses.replace(facts, model="Qwen/Qwen3-32B")
    item = plan_input(facts, gpu_name="h100")
    left = 0.9 * FACTS.total_bytes - facts.kv_bytes - facts.weights_bytes
    for flags in ({"--max-num-seqs": "64"}, {"--max-num-batched-tokens": "1024"}):
        found = predict(item, flags)
        assert 0 <= found.freed_bytes <= left
        assert found.gained_bytes <= left
        assert found.kv_high_bytes + facts.weights_bytes <= 0.9 * FACTS.total_bytes + GIB // 200


def test_a_step_of_work_frees_nothing_of_what_sglang_divides():
    import dataclasses

    arguments = {"--mem-fraction-static": "0.85"}  # else it follows from the chunk
    facts = dataclasses.replace(
        FACTS, engine="sglang", version="0.5.4", generation=None, arguments=arguments
    )
    found = predict(plan_input(facts, gpu_name="h100"), {"--chunked-prefill-size": "2048"})
    assert found.gained_bytes == found.freed_bytes == 0
