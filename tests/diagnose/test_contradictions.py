import pytest

from oomwatch.diagnose.contradictions import contradictions, other_values
from oomwatch.engines.commandline import parse_command

PRINTED = {"--max-model-len": 131072, "--gpu-memory-utilization": 0.9, "--dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("vllm serve Qwen/Qwen3-14B --max-model-len 131072", "/models/Qwen3-14B"),
        ("vllm serve Qwen/Qwen3-14B --max-model-len 128K", "Qwen/Qwen3-14B"),
        ("vllm serve Qwen/Qwen3-14B --max-model-len -1", None),
        ("vllm serve Qwen/Qwen3-14B --dtype auto", "/hub/models--Qwen--Qwen3-14B/snapshots/4af1"),
        ("vllm serve $MODEL --gpu-memory-utilization 0.90", "Qwen/Qwen3-14B"),
    ],
)
def test_other_spellings_of_one_start_do_not_contradict(command, model):
    assert contradictions(parse_command(command), PRINTED, model) == []


def test_another_model_and_another_number_are_named():
    parsed = parse_command("vllm serve acme/other --max-model-len 4096")
    found = contradictions(parsed, PRINTED, "/models/Qwen3-14B")
    assert found == [
        "it serves acme/other, the log /models/Qwen3-14B",
        "it has --max-model-len 4096, the log 131072",
    ]


def test_the_printed_value_is_taken():
    assert other_values({"--max-model-len": "4096"}, PRINTED) == {"--max-model-len": 131072}
