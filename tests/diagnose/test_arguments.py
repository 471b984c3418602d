from __future__ import annotations

import pytest

from oomwatch.diagnose.rules.arguments import nearest_flags, refused_arguments


@pytest.mark.parametrize(
    ("refused", "engine", "near"),
    [
        ("unrecognized arguments: --max-model-lenght 4096", None, ["--max-model-len"]),
        ("unrecognized arguments: --max_num_seq 4", "vllm", ["--max-num-seqs"]),
        ("unrecognized arguments: --mem-fraction-statc 1", "sglang", ["--mem-fraction-static"]),
        ("Error: No such option: --max-num-sq", "vllm", ["--max-num-seqs"]),
        ("unrecognized arguments: --swap-space 8", "vllm", []),  # of another release
        ("unrecognized arguments: --zzz", "vllm", []),
        ("argument --kv-cache-dtype: invalid choice: 'int8'", "vllm", []),
        ("unrecognized arguments: --max-model-lenght 4096", "tgi", []),
    ],
)
def test_the_flag_that_was_meant(refused: str, engine: str | None, near: list[str]) -> None:
    assert nearest_flags(refused, engine) == near


def test_the_sentence_says_what_the_server_said_without_its_name() -> None:
    said = refused_arguments(
        "vllm serve: error: unrecognized arguments: --max-model-lenght 1", None
    )
    assert said == (
        "The server refused its command line and loaded nothing: unrecognized arguments: "
        "--max-model-lenght 1; did you mean --max-model-len?"
    )
