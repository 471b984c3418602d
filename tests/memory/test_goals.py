import pytest

from oomwatch.errors import UsageError
from oomwatch.memory.goals import Goal, goal_that_starts, parse_goal, reach
from oomwatch.memory.planner import change, plan


def solve(item, goal):
    return reach(item, plan(item), goal)


def test_goals_as_typed():
    assert parse_goal("concurrency=64", 16384, 8192) == Goal(64.0, 16384)
    assert parse_goal("concurrency=64", None, 8192) == Goal(64.0, 8192)
    assert parse_goal("concurrency=max", 4096, 8192) == Goal(None, 4096)
    assert parse_goal("context=max", None, 8192) == Goal(1.0, None)
    for text in ("context", "context=-1", "tokens=5", "concurrency=many", ""):
        with pytest.raises(UsageError, match="--goal"):
            parse_goal(text, None, 8192)


def test_a_goal_that_is_met_already_changes_only_the_length(given):
    answer = solve(given(version="0.19.0"), Goal(4.0, 8192))
    assert answer.reached
    assert set(answer.set) == {"--max-model-len"}


def test_the_answer_starts_and_reaches_the_goal(given):
    item = given("qwen3-32b", version="0.19.0", gpu_count=4)
    answer = solve(item, Goal(64.0, 16384))
    assert answer.reached
    assert answer.plan.fits
    assert answer.plan.max_concurrency >= 64
    again = plan(change(item, answer.set))
    assert again.tokens == answer.plan.tokens


def test_cheap_changes_come_before_more_gpus(given):
    item = given("qwen3-32b", version="0.19.0", gpu_count=8, flags={"--max-model-len": "40960"})
    answer = solve(item, Goal(1.0, 40960))
    assert "--tensor-parallel-size" not in answer.set


def test_the_longest_context(given):
    item = given("qwen3-32b", version="0.19.0")
    answer = solve(item, Goal(1.0, None))
    assert answer.plan.fits
    assert answer.plan.settings.max_model_len > plan(item).max_model_len_that_fits


def test_an_unreachable_goal_gives_the_nearest(given):
    answer = solve(given("qwen3-32b", version="0.19.0", gpu_count=1), Goal(10000.0, 32768))
    assert not answer.reached
    assert answer.plan.fits


def test_a_model_that_never_fits_is_said_so(given):
    with pytest.raises(UsageError, match="no combination"):
        solve(given("llama-3.1-405b", "rtx-4090", version="0.19.0", gpu_count=1), Goal(1.0, 1024))


def test_the_share_of_the_card_leaves_something_for_what_is_not_profiled(given):
    answer = solve(given("qwen3-32b", version="0.19.0"), Goal(None, 4096))
    assert float(answer.set["--gpu-memory-utilization"]) <= 0.93


def test_as_many_requests_as_are_wanted_are_let_run(given):
    for engine, version, flag in (
        ("vllm", "0.19.0", "--max-num-seqs"),
        ("sglang", "0.5.4", "--max-running-requests"),
    ):
        item = given(engine=engine, version=version, flags={flag: "16"})
        answer = solve(item, Goal(64.0, 2048))
        assert answer.reached
        assert int(answer.set[flag]) >= 64


def test_flags_that_bring_nothing_are_left_out_of_the_nearest(given):
    item = given("qwen3-32b", version="0.19.0", gpu_count=1)
    answer = solve(item, Goal(1000.0, 32768))
    assert not answer.reached
    assert "--max-num-seqs" not in answer.set
    for flag in set(answer.set) - {"--max-model-len"}:
        fewer = {other: value for other, value in answer.set.items() if other != flag}
        assert plan(change(item, fewer)).max_concurrency < 0.99 * answer.plan.max_concurrency


def test_weights_in_fp8_are_tried_where_nothing_else_starts(given):
    answer = solve(given("qwen3-32b", "l40s", version="0.19.0", gpu_count=1), Goal(1.0, 16384))
    assert answer.reached
    assert answer.set["--quantization"] == "fp8"
    assert answer.caveats[0].startswith("--quantization fp8")
    wide = solve(given("qwen3-32b", "l40s", version="0.19.0", gpu_count=4), Goal(1.0, 16384))
    assert "--quantization" not in wide.set


@pytest.mark.parametrize(
    ("card", "version"),
    [
        ("l40s", "0.11.0"),  # this release loads all of it in 16 bits first
        ("a40", "0.19.0"),  # this card does not compute in FP8
    ],
)
def test_fp8_weights_are_not_promised_where_they_are_not_made(given, card, version):
    item = given("qwen3-32b", card, version=version, gpu_count=1)
    assert goal_that_starts(item, plan(item)) is None


def test_a_goal_is_named_whose_flags_start(given):
    item = given("qwen3-32b", "l40s", version="0.19.0", gpu_count=1)
    assert goal_that_starts(item, plan(item)) == "concurrency=1"
