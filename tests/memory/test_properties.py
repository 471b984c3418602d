"""Laws that hold for every model, card and flag."""

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.engines.commandline import parse_command, rebuild
from oomwatch.errors import UsageError
from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import find_device
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.planner import PlanInput, change, plan
from oomwatch.memory.text import shares
from oomwatch.memory.what_if import kv_table, what_if

MODELS = [
    "llama-3.1-8b",
    "qwen3-32b",
    "gpt-oss-20b",
    "gemma-3-27b",
    "qwen3.5-9b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "llama-2-7b",
]
CARDS = ["l40s", "a100-80gb", "h100-80gb", "h200-141gb", "rtx-4090"]
VERSIONS = ["0.7.3", "0.8.5", "0.10.2", "0.11.0", "0.19.0", "0.22.0", "0.27.0", "0.33.0"]
NARROWER = {"auto": 0, "fp8": 1, "int8_per_token_head": 1, "int4_per_token_head": 2}

inputs = st.builds(
    lambda model, card, version, length: PlanInput(
        model=load_model(None, model).model,
        device=find_device(card),
        version=version,
        arguments={"--max-model-len": str(length)},
    ),
    st.sampled_from(MODELS),
    st.sampled_from(CARDS),
    st.sampled_from(VERSIONS),
    st.integers(256, 65536),
)

attention_models = st.builds(
    lambda layers, heads, groups, dim, window, every: parse_config(
        {
            "model_type": "x",
            "hidden_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": heads * groups,
            "num_key_value_heads": heads,
            "head_dim": dim,
            "intermediate_size": 8192,
            "vocab_size": 64000,
            "max_position_embeddings": 65536,
            "sliding_window": window,
            "sliding_window_pattern": every,
        }
    ),
    st.integers(16, 64),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([0, 512, 4096]),
    st.sampled_from([1, 2, 4, 6]),
)


@settings(max_examples=60, deadline=None)
@given(inputs, st.sampled_from(["--tensor-parallel-size", "--data-parallel-size"]))
def test_more_gpus_never_lower_the_total(item, flag):
    totals = []
    for ranks in (1, 2, 4, 8):
        found = plan(change(item, {flag: str(ranks)}))
        totals.append(found.tokens * found.settings.replicas)
    assert totals == sorted(totals)


commands = st.one_of(
    st.tuples(
        st.just("vllm"),
        st.sampled_from(VERSIONS),
        st.sampled_from(["--gpu-memory-utilization"]),
        st.sampled_from([{}, {"--max-num-seqs": "64"}, {"--kv-cache-memory-bytes": "30000000000"}]),
    ),
    st.tuples(
        st.just("sglang"),
        st.sampled_from(["0.4.6", "0.5.1", "0.5.4", "0.5.23"]),
        st.sampled_from(["--mem-fraction-static"]),
        st.sampled_from([{}, {"--chunked-prefill-size": "16384"}, {"--max-total-tokens": "9000"}]),
    ),
)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(CARDS),
    commands,
    st.sampled_from([None, "0.5", "0.9", "0.97", "0.99", "1.0"]),
    st.sampled_from([1, 4]),
)
def test_the_parts_of_a_start_add_up_to_the_card(model, card, command, share, ranks):
    engine, version, flag, more = command
    widths = {"vllm": "--tensor-parallel-size", "sglang": "--tp-size"}
    item = PlanInput(
        model=load_model(None, model).model,
        device=find_device(card),
        engine=engine,
        version=version,
        arguments={**more, widths[engine]: str(ranks), **({flag: share} if share else {})},
    )
    found = plan(item)
    if not found.fits:
        return
    parts = dict(shares(found))
    assert all(size >= 0 for size in parts.values())
    assert sum(parts.values()) <= found.budget.total_bytes
    for each in what_if(item, found):
        assert each.freed_bytes <= found.budget.total_bytes


@settings(max_examples=60, deadline=None)
@given(inputs)
def test_a_smaller_format_never_lowers_the_tokens(item):
    rows = {row.name: row for row in kv_table(item, plan(item))}
    for narrow, rank in NARROWER.items():
        for wide, other in NARROWER.items():
            if rank > other and narrow in rows and wide in rows:
                # A hybrid's page is a state rounded up to 16 tokens, which scales can make larger.
                rounding = 0.01 if item.model.is_hybrid else 0.0
                assert rows[narrow].tokens >= rows[wide].tokens * (1 - rounding)
                assert rows[narrow].bytes_per_request <= rows[wide].bytes_per_request * (
                    1 + rounding
                )


@settings(max_examples=40, deadline=None)
@given(attention_models, st.sampled_from(CARDS), st.sampled_from(VERSIONS))
def test_laws_hold_for_models_nobody_released(model, card, version):
    item = PlanInput(model=model, device=find_device(card), version=version)
    found = plan(item)
    wider = plan(change(item, {"--gpu-memory-utilization": "0.97"}))
    assert wider.tokens >= found.tokens
    assert found.kv_low_bytes <= found.kv_available_bytes <= found.kv_high_bytes
    for length in (1, 1000, 65536):
        assert found.layout.request_bytes(length) <= found.layout.request_bytes(length + 1)
    assert found.max_model_len_that_fits <= model.max_model_len
    if found.fits:
        assert found.max_concurrency >= 1
        assert found.max_model_len_that_fits == found.settings.max_model_len


@settings(max_examples=25, deadline=None)
@given(inputs)
def test_what_if_is_the_plan_of_the_changed_command(item):
    line = f"vllm serve some/model --max-model-len {item.arguments['--max-model-len']}"
    parsed = parse_command(line, version=item.version)
    for each in what_if(item, plan(item)):
        again = parse_command(rebuild(parsed, each.set, each.unset), version=item.version)
        scratch = plan(
            PlanInput(
                model=item.model,
                device=item.device,
                version=item.version,
                arguments=again.arguments,
            )
        )
        assert (scratch.tokens, scratch.fits, scratch.kv_available_bytes) == (
            each.plan.tokens,
            each.plan.fits,
            each.plan.kv_available_bytes,
        )


VALUES = st.one_of(
    st.integers(-10, 10**13).map(str),
    st.sampled_from(
        [
            "",
            "auto",
            "16k",
            "1e9",
            "0",
            "-1",
            "nan",
            "inf",
            '{"method": "mtp", "num_speculative_tokens": 3}',
            "[1]",
            "fp8",
            "none",
            "{}",
        ]
    ),
    st.booleans(),
)
FLAGS = [
    "--max-model-len",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--gpu-memory-utilization",
    "--tensor-parallel-size",
    "--pipeline-parallel-size",
    "--data-parallel-size",
    "--kv-cache-dtype",
    "--block-size",
    "--speculative-config",
    "--kv-cache-memory-bytes",
    "--num-gpu-blocks-override",
    "--compilation-config",
    "--limit-mm-per-prompt",
    "--enable-lora",
    "--max-loras",
    "--quantization",
    "--cudagraph-capture-sizes",
    "--decode-context-parallel-size",
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(VERSIONS),
    st.dictionaries(st.sampled_from(FLAGS), VALUES, max_size=4),
)
def test_any_flags_end_in_a_plan_or_in_one_line(model, version, flags):
    item = PlanInput(
        model=load_model(None, model).model,
        device=find_device("h100"),
        version=version,
        arguments=flags,
    )
    with contextlib.suppress(UsageError):
        found = plan(item)
        assert found.tokens >= 0
        assert found.fits is (found.refusal is None)


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "--tp-size",
                "--dp-size",
                "--mem-fraction-static",
                "--context-length",
                "--chunked-prefill-size",
                "--kv-cache-dtype",
                "--page-size",
                "--max-running-requests",
                "--enable-dp-attention",
            ]
        ),
        VALUES,
        max_size=4,
    )
)
def test_any_sglang_flags_end_in_a_plan_or_in_one_line(flags):
    item = PlanInput(
        model=load_model(None, "qwen3.5-9b").model,
        device=find_device("h100"),
        engine="sglang",
        version="0.5.9",
        arguments=flags,
    )
    with contextlib.suppress(UsageError):
        assert plan(item).tokens >= 0
