import pytest

from oomwatch.causes import class_of
from oomwatch.errors import UsageError
from oomwatch.memory.budget import Known
from oomwatch.memory.planner import change, plan
from oomwatch.units import GIB


@pytest.mark.parametrize(
    ("model", "gpu", "version", "flags", "more", "cause"),
    [
        ("llama-3.1-70b", "h100", "0.11.0", {}, {}, "weights_dont_fit"),
        (
            "llama-3.1-70b",
            "h100",
            "0.11.0",
            {"--quantization": "fp8", "--max-model-len": "16000"},
            {},
            "kv_no_blocks",
        ),
        ("qwen3-32b", "h100", "0.11.0", {"--max-model-len": "40960"}, {}, "kv_lt_max_len"),
        (
            "llama-3.1-8b",
            "rtx-3090",
            "0.6.4",
            {"--max-model-len": "29000", "--max-num-seqs": "4"},
            {},
            "kv_lt_max_len",
        ),
        (
            "qwen3.5-9b",
            "l40s",
            "0.24.0",
            {"--max-num-seqs": "4096", "--max-model-len": "8192"},
            {},
            "state_cache_seqs",
        ),
        ("gpt-oss-20b", "t4", "0.11.0", {}, {}, "profile_activation_peak"),
    ],
)
def test_refusals_and_their_causes(given, *, model, gpu, version, flags, more, cause):
    found = plan(given(model, gpu, version=version, flags=flags, **more))
    assert (found.fits, found.refusal) == (False, cause)
    assert found.refusal_text
    assert class_of(cause) == "startup"


@pytest.mark.parametrize(
    ("model", "gpu", "version", "flags"),
    [
        ("llama-3.1-8b", "rtx-3090", "0.6.4", {"--max-model-len": "20000", "--max-num-seqs": "4"}),
        ("llama-3.1-8b", "rtx-3090", "0.6.4", {"--max-model-len": "35000", "--max-num-seqs": "4"}),
        ("qwen3-32b", "h100", "0.11.0", {"--max-model-len": "16000"}),
        (
            "gpt-oss-120b",
            "h100",
            "0.11.0",
            {"--max-model-len": "16000", "--gpu-memory-utilization": "0.95"},
        ),
    ],
)
def test_starts_that_happened_are_not_refused(given, model, gpu, version, flags):
    assert plan(given(model, gpu, version=version, flags=flags)).fits


def test_the_longest_length_starts_and_one_block_more_does_not(given):
    item = given("qwen3-32b", flags={"--max-model-len": "40960"})
    longest = plan(item).max_model_len_that_fits
    assert plan(change(item, {"--max-model-len": str(longest)})).fits
    assert not plan(change(item, {"--max-model-len": str(longest + 16)})).fits


def test_the_null_block_counts_from_0_29(given):
    known = Known(kv_available_bytes=2 * GIB)
    flags = {"--max-model-len": "16384"}
    assert plan(given(version="0.28.0", flags=flags, known=known)).fits
    assert not plan(given(version="0.29.0", flags=flags, known=known)).fits


def test_a_change_of_a_known_start_begins_at_what_it_printed(given):
    item = given(
        known=Known(kv_available_bytes=50 * GIB), flags={"--gpu-memory-utilization": "0.9"}
    )
    wider = plan(change(item, {"--gpu-memory-utilization": "0.95"}))
    gained = wider.kv_available_bytes - 50 * GIB
    assert gained == pytest.approx(0.05 * item.device.total_bytes, abs=2)
    same = plan(change(item, {"--max-model-len": "16384"}))
    assert same.kv_available_bytes == 50 * GIB


def test_printed_weights_stay_unless_the_change_moves_them(given):
    item = given(known=Known(weights_bytes=20 * GIB))
    assert plan(change(item, {"--max-num-seqs": "64"})).budget.weights.bytes == 20 * GIB
    assert plan(change(item, {"--tensor-parallel-size": "2"})).budget.weights.bytes < 9 * GIB


def test_an_unknown_version_and_an_unmeasured_card_are_said(given):
    said = plan(given(gpu="rtx-4080", version=None)).assumptions
    assert any("version unknown" in x for x in said)
    assert any("data sheet" in x for x in said)


def test_an_unknown_quantization_widens_the_interval(given):
    from oomwatch.memory.data.models import MODELS
    from oomwatch.memory.hf_config import parse_config

    odd = parse_config(
        {**MODELS["llama-3.1-8b"], "quantization_config": {"quant_method": "new", "bits": 4}}
    )
    plain = plan(given())
    strange = plan(given(odd))
    assert strange.kv_high_bytes - strange.kv_low_bytes > 2 * (
        plain.kv_high_bytes - plain.kv_low_bytes
    )


def test_a_printed_pool_is_rounded_so_one_block_decides_nothing(given):
    exact = 2 * GIB - 1  # one block short of one request
    flags = {"--max-model-len": "16384"}
    assert not plan(given(flags=flags, known=Known(kv_available_bytes=exact))).fits
    printed = Known(kv_available_bytes=exact, kv_rounding_bytes=GIB // 200)
    assert plan(given(flags=flags, known=printed)).fits


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"--tensor-parallel-size": "3"}, "32 attention heads"),
        ({"--tensor-parallel-size": "64"}, "32 attention heads"),
        ({"--pipeline-parallel-size": "64"}, "32 layers"),
    ],
)
def test_a_split_that_the_engine_refuses(given, flags, words):
    found = plan(given(flags=flags))
    assert found.refusal == "config_error"
    assert words in found.refusal_text
    assert class_of("config_error") is not None


def test_more_ranks_than_kv_heads_copy_them(given):
    assert plan(given("llama-3.1-70b", flags={"--tensor-parallel-size": "16"})).fits


@pytest.mark.parametrize(("version", "whole"), [("0.13.0", 1), ("0.15.1", 2), ("0.16.0", 1)])
def test_the_fit_check_of_pipelines_by_version(given, version, whole):
    flags = {"--pipeline-parallel-size": "2", "--max-model-len": "131072"}
    known = Known(kv_available_bytes=10 * GIB)  # half the layers of one request take 8 GiB
    found = plan(given(version=version, flags=flags, known=known))
    assert found.fits is (whole == 1)
    assert (found.refusal == "kv_lt_max_len") is (whole == 2)


def test_what_is_beyond_the_model_or_the_tables_is_said(given):
    long = plan(given(flags={"--max-model-len": "200000"}))
    assert any("more than the model's own" in each for each in long.assumptions)
    new = plan(given(version="99.1.0"))
    assert any("outside the releases" in each for each in new.assumptions)


def test_more_ranks_than_gpus_are_a_wrong_command_and_no_lack_of_memory(given):
    found = plan(given(flags={"--tensor-parallel-size": "4"}, gpu_count=2))
    assert (found.fits, found.refusal) == (False, "config_error")
    assert "4 GPUs and 2 are there" in found.refusal_text


@pytest.mark.parametrize(
    ("version", "length", "flags", "refused"),
    [
        ("0.11.0", "32768", {"--enable-chunked-prefill": False}, True),
        ("0.11.0", "16384", {"--enable-chunked-prefill": False}, False),
        ("0.11.0", "32768", {}, False),
        ("0.6.3", "32768", {}, True),
        ("0.6.3", "32768", {"--enable-chunked-prefill": "True"}, False),
    ],
)
def test_prompts_that_are_not_cut_need_a_step_as_long(given, *, version, length, flags, refused):
    arguments = {"--max-model-len": length, "--max-num-batched-tokens": "16384", **flags}
    found = plan(given("llama-3.1-8b", "h100", version=version, flags=arguments))
    assert (found.refusal == "config_error") is refused
    assert ("--enable-chunked-prefill" in (found.refusal_text or "")) is refused


@pytest.mark.parametrize(
    ("version", "flags", "refusal"),
    [
        ("0.11.0", {"--gpu-memory-utilization": "1.0"}, "gpu_busy_margin"),
        ("0.33.0", {"--kv-cache-memory-bytes": "100000000000"}, "kv_alloc_overcommit"),
        ("0.33.0", {"--num-gpu-blocks-override": "1000000"}, "kv_alloc_overcommit"),
        ("0.33.0", {"--kv-cache-memory-bytes": "40000000000"}, None),
    ],
)
def test_what_the_card_cannot_hold_is_refused(given, version, flags, refusal):
    assert plan(given("qwen3-8b", version=version, flags=flags)).refusal == refusal


def test_weights_and_a_pool_that_exceed_the_card_are_not_of_one_start(given):
    known = Known(weights_bytes=60 * GIB, kv_available_bytes=70 * GIB)
    with pytest.raises(UsageError, match="are not of one start"):
        plan(given("qwen3-8b", known=known))


def test_a_limit_of_tokens_is_all_that_sglang_takes(given):
    flags = {"--max-total-tokens": "100000"}
    found = plan(given("qwen3-8b", engine="sglang", version="0.5.4", flags=flags))
    assert found.tokens == 100000
    assert found.pool_bytes == 100000 * found.layout.bytes_per_token
