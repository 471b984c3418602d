"""Terms of the budget against what starts of public logs printed (GiB)."""

import pytest

from oomwatch.memory.budget import Known, divide
from oomwatch.memory.planner import plan
from oomwatch.memory.settings import resolve
from oomwatch.memory.term import Term
from oomwatch.units import GIB

LENGTH = {"--max-model-len": "16000", "--gpu-memory-utilization": "0.9", "--block-size": "128"}


def budget(item):
    settings = resolve(
        item.engine,
        item.version,
        arguments=item.arguments,
        env=item.env,
        device=item.device,
        model=item.model,
    )
    return divide(item.model, item.device, settings, item.known)


@pytest.mark.parametrize(
    ("model", "flags", "printed"),
    [
        ("llama-3.1-8b", {}, 4.76),
        ("qwen3-32b", {}, 5.64),
        ("qwen3-0.6b", {}, 5.56),
        ("gpt-oss-120b", {}, 7.38),
        ("llama-3.1-70b", {"--tensor-parallel-size": "2", "--quantization": "fp8"}, 4.84),
    ],
)
def test_activation_peaks_of_1024_sequences(given, model, flags, printed):
    assert budget(given(model, flags={**LENGTH, **flags})).activation.bytes / GIB == pytest.approx(
        printed, abs=0.06
    )


@pytest.mark.parametrize(("length", "printed"), [("20000", 2.07), ("29000", 2.99), ("35000", 0.06)])
def test_the_old_engine_peaks_with_the_length(given, length, printed):
    flags = {"--max-model-len": length, "--max-num-seqs": "4"}
    found = budget(given(gpu="rtx-3090", version="0.6.4", flags=flags)).activation.bytes / GIB
    assert found == pytest.approx(printed, abs=0.02)


@pytest.mark.parametrize(
    ("model", "gpu", "version", "flags", "printed"),
    [
        ("llama-3.1-8b", "h100", "0.11.0", LENGTH, 51.38),
        ("qwen3-32b", "h100", "0.11.0", LENGTH, 4.45),
        ("qwen3-32b", "h100", "0.11.0", {**LENGTH, "--tensor-parallel-size": "2"}, 34.49),
        (
            "qwen3-4b",
            "rtx-2060",
            "0.8.5",
            {"--max-model-len": "10000", "--max-num-seqs": "1", "--gpu-memory-utilization": "0.95"},
            3.06,
        ),
        ("gpt-oss-20b", "a100-80gb", "0.19.0", {"--gpu-memory-utilization": "0.65"}, 36.56),
        (
            "qwen3.5-9b",
            "l40s",
            "0.19.0",
            {"--max-num-batched-tokens": "8192", "--gpu-memory-utilization": "0.9"},
            20.27,
        ),
    ],
)
def test_kv_memory_from_scratch_lies_in_its_interval(given, *, model, gpu, version, flags, printed):
    kv = budget(given(model, gpu, version=version, flags=flags)).kv
    assert kv.low / GIB <= printed <= kv.high / GIB
    assert kv.bytes / GIB == pytest.approx(printed, abs=0.3)


def test_what_a_log_said_replaces_the_model(given):
    known = Known(
        weights_bytes=11 * GIB,
        activation_bytes=2 * GIB,
        non_torch_bytes=GIB,
        kv_available_bytes=7 * GIB,
    )
    found = budget(given(known=known))
    assert (found.weights, found.activation, found.kv) == (
        Term.exact(11 * GIB),
        Term.exact(2 * GIB),
        Term.exact(7 * GIB),
    )
    without = budget(given(known=Known(weights_bytes=11 * GIB)))
    assert (
        without.kv.bytes
        == without.requested_bytes - 11 * GIB - without.activation.bytes - without.non_torch.bytes
    )


def test_a_fixed_pool_ignores_the_share(given):
    for share in ("0.3", "0.9"):
        flags = {
            "--kv-cache-memory-bytes": "5713920000",
            "--gpu-memory-utilization": share,
            "--max-model-len": "32768",
        }
        found = plan(given("qwen3-8b", version="0.19.1", flags=flags))
        assert found.kv_available_bytes == 5713920000
        assert found.tokens == 38736  # printed


def test_files_that_weigh_more_than_the_model_decide(given):
    plain = budget(given())
    same = budget(given(known=Known(checkpoint_bytes=16_060_000_000)))
    heavier = budget(given(known=Known(checkpoint_bytes=24_000_000_000)))
    assert same.weights.bytes == plain.weights.bytes
    assert heavier.weights.bytes == pytest.approx(24e9, rel=0.02)
    assert heavier.weights.high - heavier.weights.low > same.weights.high - same.weights.low


def test_an_image_encoder_adds_to_the_peak_unless_it_is_off(given):
    on = budget(given("qwen3.5-9b", "l40s", version="0.19.0"))
    off = budget(
        given("qwen3.5-9b", "l40s", version="0.19.0", flags={"--language-model-only": True})
    )
    assert on.activation.bytes > off.activation.bytes
    assert on.activation.high - on.activation.low > off.activation.high - off.activation.low


def test_sglang_gives_the_pools_a_share_of_free_memory(given):
    flags = {"--mem-fraction-static": "0.9"}
    found = budget(
        given(
            engine="sglang", version="0.5.4", flags=flags, known=Known(free_at_start_bytes=78 * GIB)
        )
    )
    assert found.kv.bytes == pytest.approx(0.9 * 78 * GIB - found.weights.bytes, abs=1)


def test_activations_and_graphs_of_sglang_live_in_what_the_fraction_leaves(given):
    found = plan(given("qwen2.5-7b", "rtx-4090", engine="sglang", version="0.5.23"))
    budget = found.budget
    assert budget.kv.bytes == pytest.approx(budget.requested_bytes - budget.weights.bytes, abs=2)
    left = budget.total_bytes - budget.requested_bytes - budget.non_torch.bytes
    assert 0 < budget.activation.bytes + budget.graphs.bytes < left
    assert found.kv_low_bytes < found.kv_available_bytes < found.kv_high_bytes
    assert found.warnings == ()


def test_the_default_fraction_leaves_what_a_longer_chunk_takes(given):
    def usable(**flags):
        item = given("qwen2.5-7b", "rtx-4090", engine="sglang", version="0.5.23", flags=flags)
        return budget(item).requested_bytes / item.device.total_bytes

    assert usable() == pytest.approx(0.70, abs=0.02)
    less = {"--chunked-prefill-size": "8192"}
    assert usable(**less) == pytest.approx(usable() - 4096 * 1.5 / 24084, abs=0.01)


def test_a_fraction_that_leaves_no_room_for_a_step_is_warned_of(given):
    flags = {"--mem-fraction-static": "0.99"}
    found = plan(given("qwen3-8b", engine="sglang", version="0.5.23", flags=flags))
    assert found.fits
    assert "--mem-fraction-static" in found.warnings[0]
    budget = found.budget
    parts = budget.weights, budget.activation, budget.graphs, budget.non_torch, budget.kv
    assert sum(part.bytes for part in parts) <= budget.total_bytes


def test_graphs_beside_a_share_that_leaves_nothing_are_warned_of(given):
    flags = {"--quantization": "fp8", "--max-model-len": "1024", "--max-num-seqs": "256"}
    assert plan(given("llama-3.1-70b", version="0.11.0", flags=flags)).warnings == ()
    flags["--gpu-memory-utilization"] = "0.995"
    full = plan(given("llama-3.1-70b", version="0.11.0", flags=flags))
    assert full.fits
    assert "CUDA graphs" in full.warnings[0]


def test_nothing_beside_a_pool_that_was_set_by_hand_is_sure(given):
    flags = {"--kv-cache-memory-bytes": str(62 * GIB)}
    found = plan(given("qwen3-8b", version="0.33.0", flags=flags))
    assert found.fits
    assert "the size of the KV cache that is set" in found.warnings[0]


def test_a_pool_that_was_read_leaves_the_peak_only_the_rest(given):
    known = Known(weights_bytes=int(14.27 * GIB), kv_available_bytes=int(6.24 * GIB))
    flags = {"--gpu-memory-utilization": "0.98", "--max-num-seqs": "1024"}
    item = given("qwen2.5-7b", "l4", version="0.10.2", flags=flags, known=known)
    found = budget(item)
    rest = found.requested_bytes - found.weights.bytes - found.kv.bytes - found.non_torch.bytes
    assert found.activation.bytes == rest


def test_sglang_takes_states_before_tokens(given):
    flags = {"--tp-size": "2", "--mem-fraction-static": "0.8"}
    found = budget(given("qwen3.5-9b", "rtx-3090", engine="sglang", version="0.5.9", flags=flags))
    assert found.state_pool_bytes / (found.state_pool_bytes + found.kv.bytes) == pytest.approx(
        0.9 / 1.9, rel=1e-6
    )
