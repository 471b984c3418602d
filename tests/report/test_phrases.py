from __future__ import annotations

import dataclasses
import math

import pytest

from oomwatch.records import Effect, EngineFacts, Evidence, Gpu, Remedy
from oomwatch.report import phrases
from oomwatch.report.flags import typed_env, typed_flags
from oomwatch.report.locale import catalogue
from oomwatch.units import GIB

TEXTS = catalogue("en")


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (1.5 * GIB, "bytes", "1.5 GiB"),
        (GIB, "bytes/s", "1.0 GiB/s"),
        (0.118, "ratio", "11.8 %"),
        (7200, "seconds", "2 h"),
        (131072, "tokens", "131,072 tokens"),
        (0.12345678, None, "0.1235"),
        (True, None, "True"),
        ("fp8", None, "fp8"),
        (math.inf, None, "inf"),
        (None, "bytes", ""),
    ],
)
def test_readings_are_for_people(value: object, unit: str | None, shown: str) -> None:
    assert phrases.reading(Evidence("metrics", "x", None, None, value, unit)) == shown


def test_a_quote_is_not_followed_by_its_own_value() -> None:
    quoted = Evidence("log", "a:1", None, "free 12 blocks", 12)
    assert phrases.statement(quoted, 80) == "free 12 blocks"
    assert phrases.statement(Evidence("nvml", "7", None, "Xorg", GIB, "bytes"), 80) == (
        "Xorg (1.0 GiB)"
    )
    assert phrases.statement(Evidence("metrics", "m", None, None, 3), 80) == "3"


def test_bare_numbers_of_processes_are_pids() -> None:
    assert phrases.where(Evidence("nvml", "4121")) == "PID 4121"
    assert phrases.where(Evidence("nvml", "GPU 0")) == "GPU 0"
    assert phrases.where(Evidence("log", "7")) == "7"


def test_effects_leave_out_what_stays_the_same() -> None:
    assert phrases.effects(None, TEXTS) == []
    assert phrases.effects(Effect(100, 100, 0, 0.5, 1.0), TEXTS) == [
        "full-length requests at once 0.5 → 1"
    ]
    assert phrases.effects(Effect(None, 2000, GIB), TEXTS) == [
        "KV cache ? → 2,000 tokens",
        "frees 1.0 GiB",
    ]


def test_engines_have_the_names_their_users_know() -> None:
    assert phrases.engine_name(EngineFacts("e", "vllm", version="0.11.0")) == "vLLM 0.11.0"
    assert phrases.engine_name(EngineFacts("e", "vllm", fork="vllm-ascend")) == "vllm-ascend"
    assert phrases.engine_name(EngineFacts("pid 7")) == "pid 7"


def test_unknown_sizes_of_a_gpu_are_said() -> None:
    assert phrases.gpu_row(Gpu(None), TEXTS) == ("GPU", "total unknown")
    assert phrases.gpu_row(Gpu(1, total_bytes=GIB), TEXTS) == ("GPU 1", "1.0 GiB in all")


def test_times_no_calendar_has_are_left_out() -> None:
    assert phrases.local_time(0) == "1970-01-01 00:00:00 UTC"
    assert phrases.local_time(1e30) == ""


def test_only_changed_flags_need_a_check() -> None:
    action = Remedy("r", "t", "other", "w", "c", action="x")
    flag = Remedy("r", "t", "other", "w", "c", set={"--x": "1"})
    assert phrases.validity(action, TEXTS, verbose=True) == ""
    assert phrases.validity(flag, TEXTS, verbose=False) == "not verified for the running version"


def test_flags_and_variables_are_quoted_for_a_shell() -> None:
    flags = {"--a": True, "--b": 64, "--c": {"x": [1]}, "--d": "", "--e": "two words", "--f": False}
    assert typed_flags(flags) == [
        "--a",
        "--b 64",
        """--c '{"x":[1]}'""",
        "--d",
        "--e 'two words'",
        "--f false",
    ]
    assert typed_env({"A": "b:c", "D": "$(rm -rf /)"}) == ["A=b:c", "D='$(rm -rf /)'"]


def test_freed_memory_says_where_it_goes() -> None:
    grows = Effect(kv_tokens_before=100, kv_tokens_after=120, freed_bytes=2**30)
    shrinks = Effect(kv_tokens_before=100, kv_tokens_after=80, freed_bytes=2**30)
    alone = Effect(freed_bytes=2**30)
    assert (
        phrases.effects(grows, TEXTS)[-1]
        == "frees 1.0 GiB, which the KV cache gets at the next start"
    )
    assert phrases.effects(shrinks, TEXTS)[-1] == "leaves 1.0 GiB more free beside the KV cache"
    assert phrases.effects(alone, TEXTS) == ["frees 1.0 GiB"]


def test_the_doubt_about_a_flag_is_said_once() -> None:
    step = Remedy("a", "t", "other", "It helps. Not validated: who knows.", "c", set={"--a": "1"})
    assert phrases.reason(step) == "It helps."
    assert (
        phrases.validity(step, TEXTS, verbose=False)
        == "not verified for the running version: who knows"
    )


def step(name: str, **changes: object) -> Remedy:
    return Remedy(name, name, "less_kv", "why", "cost", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("enough", "told"),
    [
        ((None, None, None), "prints steps 2, 3 and 4 together, for none is known to be enough"),
        ((None, True, None), "prints step 3, by these figures enough alone."),
    ],
)
def test_the_steps_that_are_printed_are_named(enough: tuple[bool | None, ...], told: str) -> None:
    names = ("--max-num-batched-tokens", "--max-num-seqs", "--gpu-memory-utilization")
    steps = [step("upgrade", action="Upgrade.")]
    steps += [step(n, set={n: "1"}, enough=e) for n, e in zip(names, enough, strict=True)]
    assert told in phrases.printed_steps(steps, "--format args", TEXTS)
    assert phrases.printed_steps(steps[:1] * 2, "x", TEXTS) == "Alternatives, the best first."


@pytest.mark.parametrize(
    ("printer", "named"),
    [("--format args", "--format env prints"), ("`x flags 3`", "`x flags 3 --format env` prints")],
)
def test_variables_alone_are_printed_by_what_prints_variables(printer: str, named: str) -> None:
    steps = [step("find", env={"A": "1"}), step("no-cuda-graphs", set={"--enforce-eager": True})]
    assert named in phrases.printed_steps(steps, printer, TEXTS)


def test_beside_flags_it_is_said_what_prints_the_variables() -> None:
    steps = [step("find", env={"A": "1"}, set={"--a": "1"}), step("upgrade")]
    told = phrases.printed_steps(steps, "--format args", TEXTS)
    assert "--format args (variables: --format env) prints step 1." in told


def test_a_share_that_the_text_names_is_not_added_to_it() -> None:
    told = Evidence(
        "metrics", "m", text="KV usage 99.8%, preemptions 2", value=0.9987, unit="ratio"
    )
    assert phrases.statement(told, 200) == "KV usage 99.8%, preemptions 2"
    other = dataclasses.replace(told, text="pool")
    assert phrases.statement(other, 200) == "pool (99.9 %)"
