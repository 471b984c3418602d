from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from oomwatch.causes import CAUSES, class_of
from oomwatch.engines import versions
from oomwatch.engines.flags import as_number, check_flag
from oomwatch.records import EngineFacts, Finding, Remedy
from oomwatch.remedies.catalog import PLANS, direction_of, prescribe
from oomwatch.remedies.context import context_of

GIB = 2**30
ALL_CAUSES = [cause for causes in CAUSES.values() for cause in causes]

MORE_KV = [
    "kv_no_blocks",
    "kv_lt_max_len",
    "kv_saturation",
    "kv_preempt_recompute_storm",
    "kv_preempt_swap_storm",
    "cpu_swap_exhausted",
    "kv_request_never_fits",
    "kv_retract_storm",
    "kv_alloc_fail_decode",
    "kv_alloc_fail_prefill",
    "kv_alloc_fail_hybrid_state",
    "kv_slot_exhausted",
]
LESS_KV = [
    "kv_alloc_overcommit",
    "gpu_busy_margin",
    "sampler_warmup",
    "cuda_graph_capture",
    "torch_compile",
    "lora_slots",
    "unified_memory",
    "mig_slice",
    "prefill_activation_peak",
    "attn_workspace_peak",
    "prompt_logprobs_peak",
    "lora_activation_peak",
    "unified_memory_prefill_growth",
    "mm_encoder_peak",
    "concurrency_burst_peak",
    "moe_dispatch_peak",
    "spec_decode_underprofiled",
    "engine_buffers_unprofiled",
    "fragmentation",
    "sleep_wake_map_fail",
]
LESS_WEIGHTS = ["weights_dont_fit", "quant_load_peak", "quant_repack"]
LESS_HOST = [
    "host_oom_load",
    "host_oom_jit",
    "host_oom_repack",
    "host_pinned_swap",
    "wsl_alloc_limit",
    "host_ram_leak",
    "host_cache_growth",
    "host_oom_kill",
]
FREE_GPU = ["gpu_busy_other_process", "kv_budget_cotenant", "nccl_init", "colocated_tenant"]


def expected_direction(cause: str) -> str:
    table = {"more_kv": MORE_KV, "less_kv": LESS_KV, "less_weights": LESS_WEIGHTS}
    table |= {"less_host": LESS_HOST, "free_gpu": FREE_GPU}
    return next((direction for direction, causes in table.items() if cause in causes), "other")


def finding(cause: str, **values: Any) -> Finding:
    cls = class_of(cause)
    assert cls is not None
    return Finding(cls, cause, 0.9, "It failed.", values=values)


def engine(name: str | None = "vllm", version: str | None = "0.10.2", **facts: Any) -> EngineFacts:
    return EngineFacts(id="e1", engine=name, version=version, model="acme/Big-70B", **facts)


def ways(remedies: tuple[Remedy, ...], facts: EngineFacts, cause: str) -> dict[str, set[int]]:
    force = context_of(finding(cause), facts).force
    found: dict[str, set[int]] = {}
    for remedy in remedies:
        for flag, value in remedy.set.items():
            new, old = as_number(value), as_number(force.get(flag))
            if new is not None and old is not None:
                found.setdefault(flag, set()).add((new > old) - (new < old))
    return found


ENGINES = [
    engine(),
    engine(version="0.6.3", max_model_len=16384),
    engine(version="0.33.0", total_bytes=80 * GIB),
    engine(version="0.2.1"),
    engine(version=None),
    EngineFacts(id="e1", engine="vllm", fork="vllm-ascend", version="0.11.0"),
    engine("sglang", "0.4.4"),
    engine("sglang", "0.5.20", total_bytes=80 * GIB),
    engine("sglang", "0.1.14"),
    engine("sglang", None),
    engine("tgi", "3.2.0"),
    engine("lmdeploy", "0.9.0"),
    engine("llama.cpp", "b9722"),
    engine("pytorch", "2.8"),
    engine(None, None),
]


def test_every_cause_has_a_plan_and_every_plan_a_cause() -> None:
    assert sorted(PLANS) == sorted(ALL_CAUSES)


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_direction_of_the_first_remedy(cause: str) -> None:
    assert direction_of(cause) == expected_direction(cause)
    for facts in ENGINES:
        remedies = prescribe(finding(cause), facts)
        assert remedies, facts
        assert remedies[0].direction == expected_direction(cause), facts


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_no_remedy_pulls_the_other_way(cause: str) -> None:
    forbidden = {"more_kv": "less_kv", "less_kv": "more_kv"}.get(expected_direction(cause))
    for facts in ENGINES:
        assert all(remedy.direction != forbidden for remedy in prescribe(finding(cause), facts))


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_no_flag_is_moved_both_ways_or_set_and_unset(cause: str) -> None:
    given = {
        "--kv-cache-memory-bytes": "5000000000",
        "--speculative-config": '{"method":"ngram","num_speculative_tokens":5}',
        "--max-num-seqs": "64",
        "--cudagraph-capture-sizes": ["1", "2"],
    }
    for facts in (*ENGINES, engine(version="0.20.0", arguments=given)):
        remedies = prescribe(finding(cause), facts)
        assert all(not {-1, 1} <= turns for turns in ways(remedies, facts, cause).values())
        set_flags = {flag for remedy in remedies for flag in remedy.set}
        assert not set_flags & {flag for remedy in remedies for flag in remedy.unset}
        assert not any("--no-" + flag[2:] in set_flags for flag in set_flags)


NEVER = {
    ("--kv-cache-dtype", "int8"),
    ("--no-enable-chunked-prefill", True),
    ("--enable-chunked-prefill", "False"),
    ("--no-enable-prefix-caching", True),
    ("--disable-radix-cache", True),
}


@pytest.mark.parametrize(("name", "cards"), [("vllm", (None, 80 * GIB)), ("sglang", (80 * GIB,))])
def test_what_is_called_valid_is_valid_in_every_release(
    name: str, cards: tuple[int | None, ...]
) -> None:
    checked = 0
    for version in versions.table(name)["releases"]:
        for total in cards:
            facts = engine(name, version, total_bytes=total, max_model_len=32768)
            for cause in ALL_CAUSES:
                for remedy in prescribe(finding(cause, seqs=256, blocks=100), facts):
                    for flag, value in remedy.set.items():
                        checked += 1
                        assert remedy.validated, (version, cause, remedy)
                        assert check_flag(name, version, flag, value) is None
                        assert (flag, value) not in NEVER
    assert checked > 2500


@pytest.mark.parametrize("version", ["0.8.5", "0.10.2", "0.17.0"])
@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_swap_space_is_left_alone_on_v1(version: str, cause: str) -> None:
    remedies = prescribe(finding(cause), engine(version=version))
    named = [r for r in remedies if "--swap-space" in r.set]
    assert all(r.set["--swap-space"] == "0" for r in named)
    assert bool(named) is (cause == "host_pinned_swap")


def test_what_cannot_be_checked_says_why() -> None:
    for facts in ENGINES:
        for cause in ALL_CAUSES:
            for remedy in prescribe(finding(cause), facts):
                if remedy.set and not remedy.validated:
                    assert "Not validated: " in remedy.why
                assert remedy.set or remedy.unset or remedy.env or remedy.action
                assert remedy.title
                assert remedy.cost
                assert not remedy.validated or remedy.valid_for


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_actions_begin_with_a_verb(cause: str) -> None:
    for facts in ENGINES:
        for remedy in prescribe(finding(cause), facts):
            assert re.match(r"[A-Z]", remedy.title)
            assert remedy.action is None or re.match(r"[A-Z][a-z]+ ", remedy.action)
            text = f"{remedy.title} {remedy.why} {remedy.action}"
            assert "{" not in re.sub(r'\{"[^}]*\}', "", text), text


def test_an_unknown_cause_has_no_remedy() -> None:
    assert prescribe(Finding("not_oom", "no_such_cause", 0.9, "x"), engine()) == ()


def first(cause: str, facts: EngineFacts, **values: Any) -> Remedy:
    return prescribe(finding(cause, **values), facts)[0]


def by_id(cause: str, facts: EngineFacts, **values: Any) -> dict[str, Remedy]:
    return {remedy.id: remedy for remedy in prescribe(finding(cause, **values), facts)}


# ---------------------------------------------------------------- numbers
def test_length_is_fitted_to_the_printed_estimate() -> None:
    facts = engine(max_model_len=131072)
    remedy = first("kv_lt_max_len", facts, estimated_max_len=42250, max_model_len=131072)
    assert remedy.set == {"--max-model-len": "42240"}
    assert remedy.effect is not None


def test_length_is_scaled_when_only_bytes_are_printed() -> None:
    facts = engine(version="0.8.2", max_model_len=32768)
    remedy = first("kv_lt_max_len", facts, needed_kv_bytes=4 * GIB, available_kv_bytes=2 * GIB)
    assert remedy.set == {"--max-model-len": "16384"}


def test_length_on_v0_is_the_pool() -> None:
    facts = engine(version="0.5.4", max_model_len=163840)
    remedy = first("kv_lt_max_len", facts, kv_tokens=56000, max_model_len=163840)
    assert remedy.set == {"--max-model-len": "55296"}


@pytest.mark.parametrize(
    ("share", "free_gib", "expected"),
    [
        ("0.9", None, "0.93"),
        ("0.94", None, "0.95"),
        ("0.5", None, "0.90"),
        ("0.9", 73, "0.91"),
        ("0.9", 72, None),
        ("0.95", None, None),
        ("0.97", None, None),
    ],
)
def test_share_is_raised_within_what_is_free(
    share: str, free_gib: int | None, expected: str | None
) -> None:
    facts = engine(
        arguments={"--gpu-memory-utilization": share},
        total_bytes=80 * GIB,
        free_at_start_bytes=None if free_gib is None else free_gib * GIB,
    )
    remedy = by_id("kv_saturation", facts).get("raise-memory-share")
    assert (remedy.set["--gpu-memory-utilization"] if remedy else None) == expected


def test_share_is_not_lowered_below_weights_and_activation() -> None:
    facts = engine(
        total_bytes=80 * GIB,
        weights_bytes=66 * GIB,
        activation_bytes=7 * GIB,
        arguments={"--gpu-memory-utilization": "0.92"},
    )
    assert "lower-memory-share" not in by_id("prefill_activation_peak", facts)
    roomy = engine(
        total_bytes=80 * GIB, weights_bytes=40 * GIB, arguments={"--gpu-memory-utilization": "0.92"}
    )
    assert by_id("prefill_activation_peak", roomy)["lower-memory-share"].set == {
        "--gpu-memory-utilization": "0.87"
    }


def test_share_is_not_lowered_below_one_request() -> None:
    facts = engine(total_bytes=80 * GIB, kv_bytes=10 * GIB, kv_tokens=40000, max_model_len=32768)
    assert "lower-memory-share" not in by_id("sampler_warmup", facts)
    facts = engine(total_bytes=80 * GIB, kv_bytes=30 * GIB, kv_tokens=120000, max_model_len=32768)
    effect = by_id("sampler_warmup", facts)["lower-memory-share"].effect
    assert effect is not None
    assert effect.kv_tokens_after is not None
    assert 32768 < effect.kv_tokens_after < 120000


def test_a_pinned_cache_is_moved_instead_of_the_share() -> None:
    facts = engine(version="0.28.0", arguments={"--kv-cache-memory-bytes": "6G"})
    assert first("kv_alloc_overcommit", facts).set == {"--kv-cache-memory-bytes": str(int(5 * GIB))}
    raised = by_id("kv_saturation", facts)
    assert int(raised["raise-pinned-kv"].set["--kv-cache-memory-bytes"]) > 6 * GIB
    assert "raise-memory-share" not in raised
    assert "does nothing" in raised["raise-pinned-kv"].why
    blocks = engine(arguments={"--num-gpu-blocks-override": "512"})
    assert first("kv_request_never_fits", blocks).unset == ("--num-gpu-blocks-override",)


def test_free_memory_check_is_met_below_free_over_total() -> None:
    facts = engine(total_bytes=80 * GIB)
    remedy = by_id(
        "gpu_busy_other_process",
        facts,
        free_bytes=60.5 * GIB,
        other_pids=(4711,),
        process_name="VLLM::EngineCor",
    )
    assert remedy["fit-share-to-free"].set == {"--gpu-memory-utilization": "0.74"}
    assert "4711" in (remedy["stop-other-process"].action or "")
    assert first("gpu_busy_margin", facts, free_bytes=71.9 * GIB).set == {
        "--gpu-memory-utilization": "0.87"
    }


def test_prefill_peak_on_v0_chunks() -> None:
    facts = engine(version="0.7.2", max_model_len=16384)
    assert first("prefill_activation_peak", facts).set == {
        "--enable-chunked-prefill": True,
        "--max-num-batched-tokens": "2048",
    }
    chunked = engine(version="0.7.2", max_model_len=65536)
    assert first("prefill_activation_peak", chunked).set == {"--max-num-batched-tokens": "1024"}


def test_tokens_never_fall_below_the_users_sequences() -> None:
    facts = engine(arguments={"--max-num-batched-tokens": "2048", "--max-num-seqs": "2000"})
    assert first("prefill_activation_peak", facts).set == {
        "--max-num-batched-tokens": "1024",
        "--max-num-seqs": "1024",
    }


def test_tokens_at_their_floor_are_left_alone() -> None:
    facts = engine(arguments={"--max-num-batched-tokens": "256"})
    assert "smaller-batch" not in by_id("prefill_activation_peak", facts)


def test_state_blocks_bound_the_sequences() -> None:
    facts = engine(version="0.25.1", arguments={"--max-num-seqs": "1024"})
    assert first("state_cache_seqs", facts, seqs=1024, blocks=515).set == {"--max-num-seqs": "512"}
    assert first("state_cache_seqs", facts, seqs=1024, blocks=13).set == {"--max-num-seqs": "13"}


def test_sequences_are_lowered_below_what_ran() -> None:
    facts = engine(arguments={"--max-num-seqs": "256"})
    remedy = by_id("concurrency_burst_peak", facts, running=40)["fewer-sequences"]
    assert remedy.set == {"--max-num-seqs": "16"}
    assert "fewer-sequences" not in by_id("prefill_activation_peak", facts, running=2)


def test_ranks_follow_weights_and_heads() -> None:
    facts = engine(total_bytes=80 * GIB, weights_bytes=140 * GIB)
    assert first("weights_dont_fit", facts).set == {"--tensor-parallel-size": "4"}
    odd = engine(model_config={"num_attention_heads": 25})
    assert first("weights_dont_fit", odd).action is not None
    eight = engine(arguments={"--tensor-parallel-size": "8"})
    assert first("weights_dont_fit", eight).set == {"--pipeline-parallel-size": "2"}


def test_swap_space_grows_on_v0_within_the_host() -> None:
    facts = engine(version="0.6.3")
    assert first("cpu_swap_exhausted", facts).set == {"--swap-space": "32"}
    assert first("cpu_swap_exhausted", facts, host_free_bytes=40 * GIB).set == {
        "--swap-space": "20"
    }


def test_layers_are_balanced_from_the_users_partition() -> None:
    facts = engine(
        env={"VLLM_PP_LAYER_PARTITION": "16,32"}, arguments={"--pipeline-parallel-size": "2"}
    )
    remedies = prescribe(finding("parallel_imbalance"), facts)
    assert remedies[0].env == {"VLLM_PP_LAYER_PARTITION": "24,24"}
    assert remedies[1].set == {"--tensor-parallel-size": "2", "--pipeline-parallel-size": "1"}


def test_multimodal_limits_in_the_form_of_the_release() -> None:
    assert first("mm_encoder_peak", engine(version="0.7.3")).set == {
        "--limit-mm-per-prompt": "image=1"
    }
    facts = engine(arguments={"--limit-mm-per-prompt": '{"image": 6}'})
    assert first("mm_encoder_peak", facts).set == {"--limit-mm-per-prompt": '{"image":3,"video":0}'}
    bound = engine(arguments={"--limit-mm-per-prompt": '{"image":1,"video":0}'})
    assert "limit-multimodal" not in by_id("mm_encoder_peak", bound)


def test_graphs_keep_the_users_compilation_settings() -> None:
    facts = engine(version="0.12.0", arguments={"--compilation-config": '{"level":3}'})
    found = by_id("cuda_graph_capture", facts)
    assert found["piecewise-graphs"].set == {
        "--compilation-config": '{"level":3,"cudagraph_mode":"PIECEWISE"}'
    }
    eager = engine(arguments={"--enforce-eager": True})
    assert not {"piecewise-graphs", "fewer-graphs", "no-cuda-graphs"} & set(
        by_id("cuda_graph_capture", eager)
    )


@pytest.mark.parametrize(
    ("arguments", "env", "values", "expected"),
    [
        ({}, {}, {}, None),
        ({}, {}, {"tried_bytes": GIB, "reserved_unallocated_bytes": GIB // 2}, None),
        (
            {},
            {},
            {"tried_bytes": GIB, "reserved_unallocated_bytes": 2 * GIB},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        ),
        (
            {},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            {"tried_bytes": 1, "reserved_unallocated_bytes": 2},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        (
            {},
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            {"tried_bytes": 1, "reserved_unallocated_bytes": 2},
            None,
        ),
        (
            {"--enable-sleep-mode": True},
            {},
            {"tried_bytes": 1, "reserved_unallocated_bytes": 2},
            None,
        ),
    ],
)
def test_expandable_segments_only_with_reserved_memory(
    arguments: Any, env: Any, values: Any, expected: Any
) -> None:
    remedy = by_id("prefill_activation_peak", engine(arguments=arguments, env=env), **values).get(
        "expandable-segments"
    )
    assert (remedy.env if remedy else None) == expected


def test_a_full_state_pool_has_steps_that_act_on_states() -> None:
    cause, ratio = "kv_alloc_fail_hybrid_state", {"--mem-fraction-static": "0.85"}
    counted = engine("sglang", "0.5.15", arguments={**ratio, "--max-mamba-cache-size": "28"})
    # 28 slots whatever the share; no cap above them acts, nor one above the few that ran.
    assert set(by_id(cause, counted, pool="mamba")) == {"more-state-slots", "upgrade"}
    few = by_id(cause, engine("sglang", "0.5.15", arguments=ratio), pool="mamba", running=1)
    assert "fewer-sequences" not in few
    found = by_id(cause, engine("sglang", "0.5.15", arguments=ratio), pool="mamba", running=64)
    assert "chunk-below-pool" not in found
    assert found["fewer-sequences"].set == {"--max-running-requests": "48"}
    assert found["fewer-sequences"].why.startswith("The state pool does not hold")
    assert found["raise-memory-share"].why.startswith("The state pool and the KV cache get")


def test_sglang_takes_its_own_figure_and_pools() -> None:
    facts = engine(
        "sglang", "0.5.15", arguments={"--mem-fraction-static": "0.8", "--page-size": "64"}
    )
    assert first("kv_no_blocks", facts, suggested_fraction=0.871).set == {
        "--mem-fraction-static": "0.88"
    }
    assert first("kv_alloc_fail_decode", facts).set == {"--page-size": "1"}
    assert first("kv_retract_storm", facts).set == {"--schedule-conservativeness": "1.3"}
    assert first("kv_alloc_fail_hybrid_state", facts, pool="mamba").set == {
        "--mamba-full-memory-ratio": "1.2"
    }
    window = engine("sglang", "0.5.15", arguments={"--swa-full-tokens-ratio": "0.1"})
    assert first("kv_alloc_fail_hybrid_state", window, pool="swa").set == {
        "--swa-full-tokens-ratio": "0.2"
    }
    assert by_id("cuda_graph_capture", facts)["fewer-graphs"].set == {
        "--cuda-graph-max-bs-decode": "16"
    }


def test_sglang_fraction_is_not_raised_without_slack() -> None:
    tight = engine(
        "sglang",
        "0.5.15",
        total_bytes=80 * GIB,
        available_gpu_bytes=4 * GIB,
        arguments={"--mem-fraction-static": "0.8"},
    )
    assert "raise-memory-share" not in by_id("kv_retract_storm", tight)
    slack = engine(
        "sglang",
        "0.5.15",
        total_bytes=80 * GIB,
        available_gpu_bytes=8 * GIB,
        arguments={"--mem-fraction-static": "0.8"},
    )
    assert by_id("kv_retract_storm", slack)["raise-memory-share"].set == {
        "--mem-fraction-static": "0.82"
    }


def test_slots_of_llama_cpp() -> None:
    facts = engine("llama.cpp", "b9722", arguments={"--ctx-size": "8192", "--parallel": "4"})
    found = by_id("kv_slot_exhausted", facts)
    assert found["fewer-sequences"].set == {"--parallel": "2"}
    assert found["larger-context"].set == {"--ctx-size": "16384"}


def test_hostile_process_names_stay_harmless() -> None:
    action = first(
        "colocated_tenant", engine(), process_name="\x1b[31m<evil>\n" * 50, other_pids=("x", 3)
    ).action
    assert action is not None
    assert action.isprintable()
    assert len(action) < 300


@pytest.mark.parametrize("cause", ALL_CAUSES)
def test_one_value_for_a_flag(cause: str) -> None:
    for facts in ENGINES:
        seen: set[str] = set()
        for remedy in prescribe(finding(cause, free_bytes=20 * GIB, total_bytes=24 * GIB), facts):
            again = bool(remedy.set) and not (remedy.env or remedy.unset) and {*remedy.set} <= seen
            assert not again, (facts, remedy.title)
            seen |= {*remedy.set}


@pytest.mark.parametrize("cause", ["attn_workspace_peak", "host_ram_leak", "profile_race_false"])
def test_upgrade_is_no_first_step_without_a_version(cause: str) -> None:
    assert first(cause, engine(version=None)).id != "upgrade"
    assert "upgrade" in by_id(cause, engine(version=None))
    assert first(cause, engine(version="0.10.1")).id == "upgrade"


def test_a_refused_allocation_of_unknown_cause_gets_safe_steps() -> None:
    steps = by_id("irregular_unknown", engine(), gpu_refused=True)
    assert "--gpu-memory-utilization" in str(steps["room-until-known"].action)
    assert "room-until-known" not in by_id("irregular_unknown", engine())


def test_only_flags_are_called_not_validated() -> None:
    fork = EngineFacts(id="e1", engine="vllm", fork="vllm-ascend", version="0.11.0")
    for cause in ALL_CAUSES:
        for remedy in prescribe(finding(cause), fork):
            assert ("Not validated" in remedy.why) == bool(remedy.set or remedy.unset)


def test_fp8_quarters_a_float32_cache() -> None:
    held = {"kv_tokens": 1000, "max_model_len": 4096}
    wide = engine(version="0.10.2", in_force={"--dtype": "float32"}, **held)
    for facts, factor, word in ((wide, 4, "quarter"), (engine(**held), 2, "Half")):
        step = by_id("kv_lt_max_len", facts)["fp8-kv-cache"]
        assert step.effect is not None
        assert step.effect.kv_tokens_after == 1000 * factor
        assert word in step.why


def test_no_gpus_are_added_on_a_host_without() -> None:
    cpu = engine(version="0.10.2", in_force={"--device": "cpu"})
    assert "more-ranks" not in by_id("kv_no_blocks", cpu)
    assert "more-ranks" in by_id("kv_no_blocks", engine())


def test_sequences_stay_at_what_the_cache_holds_at_full_length() -> None:
    facts = engine(arguments={"--max-num-seqs": "256"}, max_concurrency=90.4)
    for cause in ("kv_saturation", "prefill_activation_peak"):
        step = by_id(cause, facts, running=100).get("fewer-sequences")
        assert step is not None
        assert int(step.set["--max-num-seqs"]) == 90
    roomy = engine(arguments={"--max-num-seqs": "64"}, max_concurrency=90.4)
    assert "fewer-sequences" not in by_id("kv_saturation", roomy, running=60)


def refused_length(**facts: Any) -> dict[str, Remedy]:
    """14 GiB needed and 4.91 GiB there, of a model whose sizes are not known."""
    values = {
        "needed_kv_bytes": 14 * GIB,
        "available_kv_bytes": 4.91 * GIB,
        "estimated_max_len": 45960,
        "max_model_len": 131072,
    }
    known = engine(version="0.11.0", weights_bytes=14 * GIB, max_model_len=131072, **facts)
    return by_id("kv_lt_max_len", known, **values)


@pytest.mark.parametrize("total_bytes", [24 * GIB, None])
def test_steps_that_cannot_cure_alone_say_so_and_come_last(total_bytes: int | None) -> None:
    steps = refused_length(total_bytes=total_bytes)
    assert steps["shorter-context"].enough is True
    order = [step.enough is False for step in steps.values()]
    assert order == sorted(order)
    for name in ("fp8-kv-cache", "raise-memory-share"):
        step = steps[name]
        assert step.enough is False
        assert "Not enough by itself: 9.1 GiB are missing" in step.why
    assert "gives about 7.0 GiB" in steps["fp8-kv-cache"].why
    assert "Not enough" not in steps["shorter-context"].why
    assert (steps["smaller-batch"].enough is False) == (total_bytes is not None)


def test_a_share_that_closes_the_gap_is_enough() -> None:
    facts = engine(version="0.11.0", total_bytes=80 * GIB, arguments={"--max-model-len": "131072"})
    values = {"needed_kv_bytes": 14 * GIB, "available_kv_bytes": 12.5 * GIB}
    step = by_id("kv_lt_max_len", facts, **values)["raise-memory-share"]
    assert step.enough is True


def test_other_causes_are_not_called_arithmetic() -> None:
    for facts in ENGINES:
        for remedy in prescribe(finding("prefill_activation_peak"), facts):
            assert remedy.enough is None


def test_a_smaller_batch_cuts_prompts_where_that_was_off() -> None:
    given = {"--max-model-len": "32768", "--max-num-batched-tokens": "32768"}
    whole = engine(version="0.11.0", arguments={**given, "--enable-chunked-prefill": False})
    step = by_id("prefill_activation_peak", whole)["smaller-batch"]
    assert step.set == {"--enable-chunked-prefill": True, "--max-num-batched-tokens": "16384"}
    cut = by_id("prefill_activation_peak", engine(version="0.11.0", arguments=given))
    assert cut["smaller-batch"].set == {"--max-num-batched-tokens": "16384"}


PEAK_VALUES: dict[str, Any] = {
    "tried_bytes": 3.12 * GIB,
    "free_bytes": 0.625 * GIB,
    "total_bytes": 80 * GIB,
}


def test_a_smaller_batch_covers_what_was_missing() -> None:
    facts = engine(version="0.11.0", arguments={"--max-num-batched-tokens": "32768"})
    step = by_id("prefill_activation_peak", facts, **PEAK_VALUES)["smaller-batch"]
    assert step.set == {"--max-num-batched-tokens": "4096"}
    assert "takes 399 MiB then instead of 3.1 GiB; 640 MiB were free." in step.why
    slow = engine(version="0.11.0", arguments={"--max-num-batched-tokens": "4096"})
    step = by_id("prefill_activation_peak", slow, **PEAK_VALUES)["smaller-batch"]
    assert step.set == {"--max-num-batched-tokens": "2048"}
    assert "take the next step with it" in step.why
    share = by_id("prefill_activation_peak", facts, **PEAK_VALUES)["lower-memory-share"]
    assert "2.5 GiB were missing" in share.why


def test_sglang_goes_to_chunks_of_4096_and_then_2048() -> None:
    for old, new in ((32768, "4096"), (8192, "4096"), (4096, "2048")):
        facts = engine("sglang", "0.5.6", arguments={"--chunked-prefill-size": old})
        steps = by_id("prefill_activation_peak", facts, max_model_len=131072)
        assert steps["smaller-batch"].set == {"--chunked-prefill-size": new}
        assert "shorter-context" not in steps


def test_the_doubt_about_flags_names_the_option_that_settles_it() -> None:
    step = first("prefill_activation_peak", engine("sglang", None))
    assert not step.validated
    assert "--engine-version" in step.why


@pytest.mark.parametrize("pin", ["--kv-cache-memory-bytes", "--num-gpu-blocks-override"])
@pytest.mark.parametrize("cause", ["kv_no_blocks", "kv_lt_max_len"])
def test_a_pinned_pool_gains_nothing_by_a_smaller_step(cause: str, pin: str) -> None:
    step = {"smaller-batch", "fewer-sequences", "no-cuda-graphs"}
    measured = engine(version="0.20.0", arguments={"--max-num-batched-tokens": "8192"})
    pinned = engine(version="0.20.0", arguments={**measured.arguments, pin: "4096"})
    values = {"max_model_len": 8192, "estimated_max_len": 4096}
    assert step & {remedy.id for remedy in prescribe(finding(cause, **values), measured)}
    assert not step & {remedy.id for remedy in prescribe(finding(cause, **values), pinned)}


def test_what_is_tuned_beside_a_pool_needs_room_rather_than_no_compiler() -> None:
    compiling = engine(version="0.20.0", arguments={"--max-num-batched-tokens": "8192"})
    tuning = dataclasses.replace(compiling, kv_tokens=400_000)
    assert first("torch_compile", compiling).id == "no-cuda-graphs"
    assert first("torch_compile", tuning).id == "smaller-batch"
