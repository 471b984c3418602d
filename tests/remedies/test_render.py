from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from oomwatch.errors import UsageError
from oomwatch.records import Direction, EngineFacts, Remedy
from oomwatch.remedies.render import FORMATS, absence, combined, flags_alone, render


def remedy(name: str, direction: Direction = "less_kv", **changes: Any) -> Remedy:
    return Remedy(name, name, direction, "why", "cost", **changes)


BATCH = remedy("smaller-batch", set={"--max-num-batched-tokens": "2048"})
SHARE = remedy("lower-memory-share", set={"--gpu-memory-utilization": "0.85"})
SEGMENTS = remedy("expandable-segments", env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
EAGER = remedy("no-cuda-graphs", set={"--enforce-eager": True})
ACTION = remedy("upgrade", action="Upgrade.")
NO_DRAFT = remedy("no-speculation", unset=("--speculative-config",))
PEAK = (ACTION, BATCH, SHARE, EAGER, SEGMENTS)

SERVED = EngineFacts(
    id="e",
    engine="vllm",
    version="0.12.0",
    command=("vllm", "serve", "m", "--max_num_batched_tokens=8192", "--port", "80"),
)
BARE = EngineFacts(id="e", engine="vllm", version="0.12.0")


def test_the_best_and_what_combines_with_it() -> None:
    changes = combined(PEAK)
    assert changes.set == {"--max-num-batched-tokens": "2048", "--gpu-memory-utilization": "0.85"}
    assert changes.env == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert combined((EAGER, BATCH)).set == {
        "--enforce-eager": True,
        "--max-num-batched-tokens": "2048",
    }
    assert not combined((ACTION,))


def test_another_direction_does_not_combine() -> None:
    raised = remedy("raise-memory-share", "more_kv", set={"--gpu-memory-utilization": "0.95"})
    assert combined((BATCH, raised)).set == {"--max-num-batched-tokens": "2048"}


def test_a_pinned_cache_leaves_the_share_out() -> None:
    pinned = remedy("lower-pinned-kv", set={"--kv-cache-memory-bytes": "1000"})
    assert combined((pinned, SHARE)).set == {"--kv-cache-memory-bytes": "1000"}


def test_args_rewrites_the_known_command() -> None:
    words = shlex.split(render(PEAK, SERVED, "args"))
    assert words == shlex.split(
        "env PYTORCH_ALLOC_CONF=expandable_segments:True vllm serve m"
        " --max-num-batched-tokens 2048 --port 80 --gpu-memory-utilization 0.85"
    )
    assert "\n" not in render(PEAK, SERVED, "args")


def test_args_without_a_command_are_the_flags() -> None:
    assert (
        render(PEAK, BARE, "args") == "--max-num-batched-tokens 2048 --gpu-memory-utilization 0.85"
    )
    assert render((ACTION,), BARE, "args") == ""
    assert render((ACTION,), SERVED, "args") == ""


def test_a_step_that_is_enough_alone_is_taken_alone() -> None:
    small = remedy("smaller-batch", "more_kv", set={"--max-num-batched-tokens": "1024"})
    length = remedy("shorter-context", "more_kv", set={"--max-model-len": "4096"}, enough=True)
    seqs = remedy("fewer-sequences", "more_kv", set={"--max-num-seqs": "4"}, enough=False)
    assert combined((small, length, seqs)).set == {"--max-model-len": "4096"}
    assert combined((small, seqs)).set == {
        "--max-num-batched-tokens": "1024",
        "--max-num-seqs": "4",
    }


def test_flags_to_append_are_the_changed_ones() -> None:
    assert flags_alone(PEAK) == "--max-num-batched-tokens 2048 --gpu-memory-utilization 0.85"
    assert flags_alone((ACTION, SEGMENTS)) == ""


@pytest.mark.parametrize(
    ("remedies", "fmt", "says"),
    [
        ((BATCH,), "env", "no remedy here is an environment variable"),
        ((SEGMENTS,), "args", "--format env prints the variables"),
        ((NO_DRAFT,), "args", "remove --speculative-config"),
        ((ACTION,), "compose", "no remedy here is a flag or an environment variable"),
        ((), "env", "there is no remedy"),
    ],
)
def test_why_nothing_is_printed(remedies: tuple[Remedy, ...], fmt: str, says: str) -> None:
    assert says in absence(remedies, fmt)


def test_json_values_survive_the_shell() -> None:
    value = '{"image":1,"video":0}'
    line = render((remedy("limit-multimodal", set={"--limit-mm-per-prompt": value}),), BARE, "args")
    assert shlex.split(line) == ["--limit-mm-per-prompt", value]


def test_unset_removes_from_the_command() -> None:
    facts = EngineFacts(
        id="e",
        engine="vllm",
        command=("vllm", "serve", "m", "--speculative-config", "{}", "--seed", "1"),
    )
    assert render((NO_DRAFT,), facts, "args") == "vllm serve m --seed 1"


def test_env_lines() -> None:
    assert render(PEAK, BARE, "env") == "PYTORCH_ALLOC_CONF=expandable_segments:True"
    assert render((BATCH,), BARE, "env") == ""


def test_compose_and_kubernetes_parse() -> None:
    compose = yaml.safe_load(render(PEAK, SERVED, "compose"))["services"]["vllm"]
    assert compose["environment"] == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert compose["command"][:3] == ["vllm", "serve", "m"]
    container = yaml.safe_load(render(PEAK, SERVED, "k8s"))["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["command"] == compose["command"]
    assert container["env"] == [{"name": "PYTORCH_ALLOC_CONF", "value": "expandable_segments:True"}]
    flags_only = yaml.safe_load(render(PEAK, BARE, "k8s"))["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert flags_only["args"][:2] == ["--max-num-batched-tokens", "2048"]


def test_what_follows_the_image_is_what_a_container_gets() -> None:
    line = "docker run --gpus all vllm/vllm-openai:v0.12.0 --model m --max-num-batched-tokens 8192"
    facts = EngineFacts(id="e", engine="vllm", version="0.12.0", command=tuple(line.split()))
    service = yaml.safe_load(render((BATCH,), facts, "compose"))["services"]["vllm"]
    assert service["command"] == ["--model", "m", "--max-num-batched-tokens", "2048"]
    container = yaml.safe_load(render((BATCH,), facts, "k8s"))["spec"]["template"]["spec"][
        "containers"
    ][0]
    assert container["args"] == service["command"]
    assert render((BATCH,), facts, "args").startswith("docker run --gpus all vllm/vllm-openai")


def test_shared_memory_is_a_setting_of_the_container() -> None:
    shm = (remedy("more-shared-memory", "other", action="Run it with --shm-size=16g."),)
    assert yaml.safe_load(render(shm, BARE, "compose")) == {
        "services": {"vllm": {"shm_size": "16gb"}}
    }
    pod = yaml.safe_load(render(shm, BARE, "k8s"))["spec"]["template"]["spec"]
    assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"


def test_python_keywords_are_python() -> None:
    remedies = (
        remedy(
            "a",
            set={
                "--limit-mm-per-prompt": '{"image":1}',
                "--enforce-eager": True,
                "--no-enable-prefix-caching": True,
                "--kv-cache-dtype": "fp8",
                "--gpu-memory-utilization": "0.85",
                "--max-num-seqs": "64",
            },
            env={"A": "b"},
        ),
    )
    text = render(remedies, BARE, "python")
    assert text.startswith("# before importing vllm: os.environ['A'] = 'b'")
    assert eval(f"dict(\n{text}\n)") == {  # noqa: S307 - it has to be Python
        "limit_mm_per_prompt": {"image": 1},
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.85,
        "max_num_seqs": 64,
    }


def test_wrong_use() -> None:
    with pytest.raises(UsageError, match="args"):
        render(PEAK, BARE, "toml")
    with pytest.raises(UsageError, match="vLLM"):
        render(PEAK, EngineFacts(id="e", engine="sglang"), "python")


@pytest.mark.parametrize("fmt", FORMATS)
def test_nothing_to_change(fmt: str) -> None:
    assert render((), EngineFacts(id="e"), fmt) == ""
