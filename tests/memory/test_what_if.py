from oomwatch.memory.budget import Known
from oomwatch.memory.planner import plan
from oomwatch.memory.what_if import kv_table, what_if
from oomwatch.units import GIB


def changes(item):
    return {tuple(x.set.items()) or x.unset: x for x in what_if(item, plan(item))}


def test_every_change_names_its_price_and_is_checked_against_the_version(given):
    for each in what_if(given(version="0.20.0"), plan(given(version="0.20.0"))):
        assert each.cost
        assert each.validated, each.reason
    unknown = what_if(given(version=None), plan(given(version=None)))
    assert unknown
    assert not any(x.validated for x in unknown)


def test_halving_the_cache_format_doubles_the_tokens_and_frees_nothing(given):
    item = given(version="0.19.0")
    fp8 = changes(item)[(("--kv-cache-dtype", "fp8"),)]
    assert abs(fp8.plan.tokens / plan(item).tokens - 2) < 0.001
    assert fp8.freed_bytes == 0


def test_fewer_sequences_free_the_sampler(given):
    item = given(version="0.11.0")
    fewer = changes(item)[(("--max-num-seqs", "256"),)]
    assert 3 * GIB < fewer.freed_bytes < 6 * GIB


def test_a_refused_start_is_offered_a_length_that_fits(given):
    item = given("qwen3-32b", flags={"--max-model-len": "40960"})
    shorter = next(x for x in what_if(item, plan(item)) if "--max-model-len" in x.set)
    assert shorter.plan.fits


def test_the_hybrid_manager_is_offered_back(given):
    item = given("gemma-3-27b", version="0.12.0", flags={"--disable-hybrid-kv-cache-manager": True})
    back = changes(item)[("--disable-hybrid-kv-cache-manager",)]
    assert back.plan.tokens > 3 * plan(item).tokens


def test_more_ranks_than_gpus_are_not_offered(given):
    one = changes(given(gpu_count=1))
    assert (("--tensor-parallel-size", "2"),) not in one
    assert (("--tensor-parallel-size", "2"),) in changes(given(gpu_count=2))


def test_context_parallel_is_offered_to_latent_models(given):
    item = given("deepseek-v3", "h200", version="0.12.0", flags={"--tensor-parallel-size": "8"})
    assert (("--decode-context-parallel-size", "8"),) in changes(item)


def test_sglang_has_its_own_knobs(given):
    item = given(engine="sglang", version="0.5.4")
    flags = {flag for each in what_if(item, plan(item)) for flag in each.set}
    assert "--mem-fraction-static" in flags
    assert not any(x.startswith("--gpu-memory") for x in flags)


def test_the_table_marks_the_format_in_force_and_only_lists_what_runs(given):
    item = given(
        gpu="a100-80gb",
        version="0.20.0",
        flags={"--kv-cache-dtype": "fp8"},
        known=Known(kv_available_bytes=40 * GIB),
    )
    rows = kv_table(item, plan(item))
    assert [r.name for r in rows if r.in_force] == ["fp8"]
    assert "fp8_per_token_head" not in {r.name for r in rows}
    assert all(r.bytes_per_request > 0 for r in rows)
