from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomwatch.engines.commandline import parse_command, parse_namespace, rebuild
from oomwatch.engines.shell import quote, split_commands


@pytest.mark.parametrize(
    ("line", "engine", "expected"),
    [
        ("vllm serve m -tp 4", "vllm", {"--tensor-parallel-size": "4"}),
        ("vllm serve m --tp=4", "vllm", {"--tensor-parallel-size": "4"}),
        (
            "vllm serve m -tp=4 -pp 2",
            "vllm",
            {"--tensor-parallel-size": "4", "--pipeline-parallel-size": "2"},
        ),
        ("vllm serve m --max_num_seqs=64", "vllm", {"--max-num-seqs": "64"}),
        ("vllm serve m --kv-cache-memory=5G", "vllm", {"--kv-cache-memory-bytes": "5G"}),
        ("vllm serve m --no-enable-prefix-caching", "vllm", {"--enable-prefix-caching": False}),
        ("vllm serve m --enforce-eager --seed 1", "vllm", {"--enforce-eager": True, "--seed": "1"}),
        ("vllm serve m --max-model-len -1", "vllm", {"--max-model-len": "-1"}),
        ("vllm serve m --max-num-seqs 8 --max-num-seqs 9", "vllm", {"--max-num-seqs": "9"}),
        (
            "vllm serve m --device-memory-utilization 0.5",
            "vllm",
            {"--gpu-memory-utilization": "0.5"},
        ),
        (
            "vllm serve m --served-model-name a b --seed 1",
            "vllm",
            {"--served-model-name": ["a", "b"], "--seed": "1"},
        ),
        (
            "python3 -m sglang.launch_server --model-path m --tp 8",
            "sglang",
            {"--model-path": "m", "--tp-size": "8"},
        ),
        (
            "sglang serve --model-path m --mem-fraction 0.8",
            "sglang",
            {"--model-path": "m", "--mem-fraction-static": "0.8"},
        ),
        (
            "llama-server -m m -c 8192 -np 4",
            "llama.cpp",
            {"--model": "m", "--ctx-size": "8192", "--parallel": "4"},
        ),
        (
            "text-generation-launcher --model-id m --num-shard 2",
            "tgi",
            {"--model-id": "m", "--num-shard": "2"},
        ),
        ("lmdeploy serve api_server m --tp 2", "lmdeploy", {"--tp": "2"}),
    ],
)
def test_arguments_by_canonical_flag(line: str, engine: str, expected: dict[str, Any]) -> None:
    command = parse_command(line)
    assert command.engine == engine
    assert command.model == "m"
    assert command.arguments == expected


def test_dotted_keys_become_one_json_value() -> None:
    line = """vllm serve m --compilation-config '{"level":3}' --compilation-config.cudagraph_mode NONE -cc.pass.x=1"""
    value = parse_command(line).arguments["--compilation-config"]
    assert json.loads(value) == {"level": 3, "cudagraph_mode": "NONE", "pass": {"x": 1}}


@pytest.mark.parametrize(
    ("version", "flag"),
    [
        ("0.11.0", "--compilation-config"),
        ("0.12.0", "--optimization-level"),
        (None, "--compilation-config"),
    ],
)
def test_optimisation_level_by_version(version: str | None, flag: str) -> None:
    assert parse_command("vllm serve m -O3", version=version).arguments == {flag: "3"}


def test_a_prefix_of_two_options_is_a_problem() -> None:
    command = parse_command("vllm serve m --max-num 3", version="0.10.0")
    assert any("several" in problem for problem in command.problems)


def test_an_option_of_another_release_is_a_problem() -> None:
    command = parse_command("vllm serve m --swap-space 4", version="0.18.0")
    assert command.arguments == {"--swap-space": "4"}
    assert any("--swap-space" in problem for problem in command.problems)


@pytest.mark.parametrize(
    "line",
    [
        "A=1 B='x y' vllm serve m --seed 1 > log.txt 2>&1 &",
        "export A=1; export B='x y'; vllm serve m --seed 1",
        "A=1 B='x y' nohup /opt/venv/bin/vllm serve m --seed 1",
        "cd /srv && env A=1 B='x y' vllm serve m \\\n   --seed 1 | tee log",
        "A=1 B='x y' bash -lc 'exec vllm serve m --seed 1'",
        "docker run -d --gpus all -e A=1 --env 'B=x y' -v /a:/b --shm-size=16g vllm/vllm-openai:v0.9.1 m --seed 1",
        "sudo podman run --rm -it -eA=1 -e 'B=x y' img/vllm:latest vllm serve m --seed 1",
        "nerdctl run -e A=1 -e 'B=x y' --entrypoint /bin/vllm img serve m --seed 1",
    ],
)
def test_wrappers(line: str) -> None:
    command = parse_command(line)
    assert (command.engine, command.model) == ("vllm", "m")
    assert command.arguments["--seed"] == "1"
    if "bash" not in line:
        assert {k: command.env.get(k) for k in "AB"} == {"A": "1", "B": "x y"}


def test_container_facts() -> None:
    line = "docker run --gpus all --shm-size=16g -m 64g vllm/vllm-openai:v0.9.1 --model m"
    command = parse_command(line)
    assert command.version == "0.9.1"
    assert command.model == "m"
    assert command.container == {"--gpus": "all", "--shm-size": "16g", "--memory": "64g"}


@pytest.mark.parametrize(
    ("line", "fork"),
    [
        ("python -m sgl_jax.launch_server --model-path m", "sgl-jax"),
        ("vllm serve m --omni --port 1", "vllm-omni"),
        ("docker run quay.io/ascend/vllm-ascend:v0.11.0 vllm serve m", "vllm-ascend"),
    ],
)
def test_forks(line: str, fork: str) -> None:
    assert parse_command(line).fork == fork


def test_argument_vector_of_a_process() -> None:
    words = ["/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m", "--max-num-seqs", "4"]
    command = parse_command(words, env={"VLLM_USE_V1": "0"})
    assert command.argv == tuple(words)
    assert command.env == {"VLLM_USE_V1": "0"}
    assert command.arguments == {"--max-num-seqs": "4"}


def test_bare_arguments_need_the_engine() -> None:
    assert parse_command("--max-num-seqs 4").engine is None
    assert parse_command("--max-num-seqs 4", engine="vllm").arguments == {"--max-num-seqs": "4"}


def test_a_prompt_that_mentions_a_server_starts_none() -> None:
    assert (
        parse_command(["curl", "-d", "how do I run vllm serve with --max-num-seqs 4?"]).engine
        is None
    )


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("max_num_seqs: 8\nenforce-eager: true\nseed: 3\nserved-model-name: [a, b]\n")
    line = f"vllm serve m --config {path} --seed 4"
    assert "--max-num-seqs" not in parse_command(line).arguments
    arguments = parse_command(line, read_files=True).arguments
    assert arguments["--max-num-seqs"] == "8"
    assert arguments["--enforce-eager"] is True
    assert arguments["--served-model-name"] == ["a", "b"]
    assert arguments["--seed"] == "4"


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"- 1\n", b"a: [", b"{" * 5000])
def test_a_bad_config_file_is_a_problem(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(content)
    command = parse_command(["vllm", "serve", "m", "--config", str(path)], read_files=True)
    assert command.problems
    missing = parse_command(["vllm", "serve", "m", "--config", str(tmp_path)], read_files=True)
    assert missing.problems


@pytest.mark.parametrize(
    ("text", "engine", "expected"),
    [
        (
            "args: Namespace(host=None, model='a b', x='it\\'s', cors=['*', 1], level=<Level.NONE: 0>, cc=Config(a=[1, 2], b='),'), lora=True, u=0.85, n=-1)",
            "vllm",
            {
                "--model": "a b",
                "--x": "it's",
                "--cors": ["*", 1],
                "--level": "<Level.NONE: 0>",
                "--cc": "Config(a=[1, 2], b='),')",
                "--lora": True,
                "--gpu": None,
                "--u": 0.85,
                "--n": -1,
            },
        ),
        (
            "non-default args: {'max_num_seqs': 1024, 'd': {'a': {'b': None}}}",
            "vllm",
            {"--max-num-seqs": 1024, "--d": {"a": {"b": None}}},
        ),
        (
            "server_args=ServerArgs(model_path='m', tp_size=8, chunked_prefill_size=-1",
            "sglang",
            {"--model-path": "m", "--tp-size": 8, "--chunked-prefill-size": -1},
        ),
        ("server_args={'tp_size': 8, 'cut': 'in the mid", "sglang", {"--tp-size": 8}),
        ("nothing of the kind", "vllm", {}),
    ],
)
def test_namespaces(text: str, engine: str, expected: dict[str, Any]) -> None:
    found = parse_namespace(text, engine=engine)
    for key, value in expected.items():
        assert found.get(key) == value, key
    assert "--host" not in found


def test_rebuild_replaces_in_place_and_appends() -> None:
    line = "A=1 vllm serve m --max_num_seqs=64 -tp 2 --swap-space 4 --seed 1"
    rebuilt = rebuild(
        line, {"--max-num-seqs": "32", "--enforce-eager": True}, ["--swap-space"], {"B": "x y"}
    )
    assert shlex.split(
        rebuilt
    ) == "env A=1|B=x y|vllm serve m --max-num-seqs 32 -tp 2 --seed 1 --enforce-eager".replace(
        "env A", "env|A"
    ).replace(
        "|vllm serve m --max-num-seqs 32 -tp 2 --seed 1 --enforce-eager",
        "|vllm|serve|m|--max-num-seqs|32|-tp|2|--seed|1|--enforce-eager",
    ).split("|")


def test_rebuild_inside_a_container() -> None:
    line = "docker run -e A=1 --gpus all vllm/vllm-openai:v0.9.1 --model m --max-num-seqs 8"
    rebuilt = rebuild(line, {"--max-num-seqs": "4"}, [], {"A": "2"})
    assert (
        rebuilt
        == "docker run -e A=1 --gpus all -e A=2 vllm/vllm-openai:v0.9.1 --model m --max-num-seqs 4"
    )


def test_rebuild_swaps_a_switch_for_its_negation() -> None:
    rebuilt = rebuild(
        "vllm serve m --enable-chunked-prefill", {"--no-enable-chunked-prefill": True}
    )
    assert rebuilt == "vllm serve m --no-enable-chunked-prefill"


FLAGS = st.sampled_from(
    ["--max-num-seqs", "--max-model-len", "--seed", "--gpu-memory-utilization", "--quantization"]
)
VALUES = st.text(min_size=1, max_size=12).filter(lambda text: not text.startswith("-"))


@settings(max_examples=60)
@given(st.dictionaries(FLAGS, VALUES, max_size=4), st.dictionaries(FLAGS, VALUES, max_size=3))
def test_rebuilt_commands_hold_what_was_set(old: dict[str, str], new: dict[str, str]) -> None:
    argv = ["vllm", "serve", "m"] + [word for pair in old.items() for word in pair]
    again = parse_command(shlex.split(rebuild(argv, new)))
    assert again.arguments == {**old, **new}
    assert again.model == "m"


@settings(max_examples=60)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=8))
def test_quoting_survives_a_shell(words: list[str]) -> None:
    assert shlex.split(quote(words)) == words
    assert split_commands(quote(words)) == ([words], True)


def test_redirections_are_not_arguments() -> None:
    text = "a > 'log file' b 2>&1 c >>x '>' 2>/dev/null; d"
    assert split_commands(text) == ([["a", "b", "c", ">"], ["d"]], True)


@settings(max_examples=150)
@given(st.text(max_size=300))
@example("'" * 99)
@example("docker run -e")
@example("bash -c 'bash -c x'")
@example("vllm serve --a.b.c..= -O9 -cc.=1 --=x -- -")
@example("export")
@example("env env env")
def test_hostile_text_never_raises(text: str) -> None:
    for line in (text, f"vllm serve {text}", f"docker run {text}", f"sglang serve {text}"):
        command = parse_command(line)
        assert all(problem.isprintable() for problem in command.problems)
        rebuild(command, {"--max-num-seqs": "1"})
    parse_command(text.split())
    for form in (text, f"Namespace({text}", f"{{'a': {text}"):
        parse_namespace(form)
