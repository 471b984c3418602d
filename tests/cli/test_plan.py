from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time

import jsonschema
import pytest
import yaml

from oomwatch.engines import versions

NUMBER = {"type": ["number", "null"]}
WHOLE = {"type": "integer"}
SCHEMA = {
    "type": "object",
    "required": ["schema", "engine", "version", "model", "gpu", "per_gpu", "kv", "fits", "refusal", "max_model_len_that_fits", "what_if", "uncertainty", "assumptions"],
    "properties": {
        "schema": {"const": "oomwatch.plan/1"},
        "per_gpu": {
            "type": "object",
            "required": ["total_bytes", "budget_bytes", "weights_bytes", "activation_bytes", "cuda_graph_bytes", "non_torch_bytes", "kv_available_bytes"],
            "additionalProperties": WHOLE,
        },
        "kv": {
            "type": "object",
            "required": ["bytes_per_token_per_gpu", "block_size_tokens", "blocks", "tokens", "max_concurrency_at_max_model_len", "bytes_per_request_at_max_model_len"],
            "properties": {"tokens": WHOLE, "max_concurrency_at_max_model_len": NUMBER},
        },
        "fits": {"type": "boolean"},
        "refusal": {"type": ["string", "null"]},
        "what_if": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["change", "tokens", "max_concurrency", "fits", "freed_bytes", "cost", "validated"],
            },
        },
        "uncertainty": {
            "type": "object",
            "properties": {"kv_available_bytes": {"type": "array", "items": WHOLE, "minItems": 2, "maxItems": 2}},
        },
        "assumptions": {"type": "array", "items": {"type": "string"}},
    },
}  # fmt: skip
GOAL = ("--gpu", "h100-80gb", "--engine-version", "0.11.0", "--goal")
LLAMA = ("--gpu", "h100-80gb", "--engine-version", "0.11.0")


def oomwatch_plan(*arguments, **environ):
    env = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HF_HOME": "/nonexistent",
        "COLUMNS": "120",
        **environ,
    }
    return subprocess.run(
        [sys.executable, "-m", "oomwatch", "plan", *arguments],
        env=env,
        text=True,
        encoding="utf-8",
        capture_output=True,
        check=False,
    )


def plan_json(*arguments):
    done = oomwatch_plan("--json", *arguments)
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    if "--goal" not in arguments and not found["fits"]:
        assert done.returncode == 1
    return found


def test_json_keeps_the_contract():
    found = plan_json(
        *LLAMA,
        "--",
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B-Instruct",
        "--max-model-len",
        "16000",
    )
    jsonschema.validate(found, SCHEMA)
    assert found["fits"] is True
    assert found["kv"]["bytes_per_token_per_gpu"] == 128 * 1024
    low, high = found["uncertainty"]["kv_available_bytes"]
    assert low <= found["per_gpu"]["kv_available_bytes"] <= high


def test_a_printed_pool_is_taken_as_it_is():
    found = plan_json(
        "--gpu", "l40s", "--gpu-count", "2", "--gpu-total-gib", "44.42", "--engine-version", "0.10.2", "--available-kv-gib", "25.91", "--weights-gib", "14.5",
        "--", "vllm", "serve", "Qwen/Qwen3-30B-A3B", "--tensor-parallel-size", "2", "--max-model-len", "32768",
    )  # fmt: skip
    assert found["kv"]["tokens"] == 566000
    assert found["per_gpu"]["weights_bytes"] == round(14.5 * 2**30)


def test_environment_before_the_command_counts():
    command = ("vllm", "serve", "meta-llama/Llama-3.1-8B")
    v1 = plan_json("--gpu", "a100-80gb", "--engine-version", "0.8.5", "--", *command)
    v0 = plan_json(
        "--gpu", "a100-80gb", "--engine-version", "0.8.5", "--", "env", "VLLM_USE_V1=0", *command
    )
    # 256 sequences of the old engine against 1024 of the new one
    assert 3 * v0["per_gpu"]["activation_bytes"] < v1["per_gpu"]["activation_bytes"]


def test_a_refused_start_is_an_answer_not_an_error():
    found = plan_json(*LLAMA, "--", "vllm", "serve", "Qwen/Qwen3-32B", "--max-model-len", "40960")
    assert (found["fits"], found["refusal"]) == (False, "kv_lt_max_len")
    assert 16000 < found["max_model_len_that_fits"] < 40960
    assert any(x["fits"] for x in found["what_if"])


def test_text_for_people():
    done = oomwatch_plan(
        *LLAMA, "-v", "--", "vllm", "serve", "Qwen/Qwen3-32B", "--max-model-len", "40960"
    )
    assert done.returncode == 1
    for words in (
        "does not start (kv_lt_max_len)",
        "weights 61.0",
        "256.0 KiB per token",
        "--kv-cache-dtype",
        "--max-num-seqs 256",
        "Longest request",
    ):
        assert words in done.stdout
    assert "\x1b" not in done.stdout


def test_colours_only_where_they_are_wanted():
    command = ("--", "vllm", "serve", "Qwen/Qwen3-8B")
    assert "\x1b[" in oomwatch_plan(*LLAMA, "--color", "always", *command, TERM="xterm").stdout
    assert "\x1b[" not in oomwatch_plan(*LLAMA, "--color", "never", *command, TERM="xterm").stdout
    assert "\x1b[" not in oomwatch_plan(*LLAMA, *command, NO_COLOR="1", TERM="xterm").stdout


def test_a_goal_as_a_command_that_the_model_says_starts():
    goal = (*LLAMA, "--gpu-count", "4", "--goal", "concurrency=64", "--context", "16384", "--")
    server = ("vllm", "serve", "Qwen/Qwen3-32B")
    line = oomwatch_plan("--format", "args", *goal[:-1], "--", *server).stdout
    words = shlex.split(line)
    assert words[:3] == list(server)
    again = plan_json(*LLAMA, "--gpu-count", "4", "--", *words)
    assert again["fits"]
    assert again["kv"]["max_concurrency_at_max_model_len"] >= 64


@pytest.mark.parametrize("form", ["compose", "k8s"])
def test_service_files_hold_the_whole_command(form):
    done = oomwatch_plan(
        *LLAMA,
        "--format",
        form,
        "--",
        "vllm",
        "serve",
        "meta-llama/Llama-3.1-8B",
        "--max-model-len",
        "8192",
        "--port",
        "9001",
    )
    assert done.returncode == 0
    text = json.dumps(list(yaml.safe_load_all(done.stdout)))
    for words in ("meta-llama/Llama-3.1-8B", "--max-model-len", "9001", "v0.11.0"):
        assert words in text


@pytest.mark.parametrize("form", ["args", "compose", "k8s"])
def test_a_configuration_that_cannot_start_is_not_printed(form):
    done = oomwatch_plan(
        *LLAMA, "--format", form, "--", "vllm", "serve", "meta-llama/Llama-3.1-70B"
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "would not start (weights_dont_fit)" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--gpu", "h100"),
        ("--gpu", "h100", "--", "sleep", "5"),
        ("--gpu", "rtx-9999", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--", "vllm", "serve", "acme/unheard-of"),
        ("--gpu", "h100", "--model-config", "/nonexistent", "--", "vllm", "serve", "x"),
        (
            "--gpu",
            "h100",
            "--",
            "vllm",
            "serve",
            "Qwen/Qwen3-8B",
            "--kv-cache-dtype",
            "\x1b[31mint8",
        ),
        ("--gpu", "h100", "--goal", "speed", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--pid", "999999999"),
        ("--gpu-total-gib", "nan", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--available-kv-gib", "NaN", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--weights-gib", "inf", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--engine-version", "banana", "--", "vllm", "serve", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--", "text-generation-launcher", "--model-id", "Qwen/Qwen3-8B"),
        ("--gpu", "h100", "--model-config", "/dev/zero", "--", "vllm", "serve", "x"),
    ],
)
def test_wrong_use_is_one_line(arguments):
    done = oomwatch_plan(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "\x1b" not in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_that_the_release_refuses_are_named_and_not_printed_on():
    words = ("--", "vllm", "serve", "Qwen/Qwen3-8B", "--swap-space", "4")
    new = ("--gpu", "h100-80gb", "--engine-version", "0.19.0")
    assert any("--swap-space" in line for line in plan_json(*new, *words)["advice"])
    refused = oomwatch_plan(*new, "--format", "args", *words)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "would not start: --swap-space" in refused.stderr


QWEN = ("vllm", "serve", "Qwen/Qwen3-8B")
SGLANG = ("python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B")


@pytest.mark.parametrize("form", [(), ("--json",), ("--format", "args")])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ((*LLAMA, "--", *QWEN), 0),
        ((*LLAMA, "--", *SGLANG, "--served-model-name", "x"), 0),  # no table has all of SGLang's
        ((*LLAMA, "--", "vllm", "serve", "Qwen/Qwen3-32B", "--max-model-len", "40960"), 1),
        ((*LLAMA, "--", *QWEN, "--kv-cache-dtype", "nvfp4"), 1),  # not of this release
        (("--gpu", "h100", "--", *QWEN, "--max-model-lenght", "4096"), 1),  # of none
        (("--gpu", "h100", "--", *SGLANG, "--max-model-len", "4096"), 1),  # of vLLM
        ((*GOAL, "concurrency=8", "--context", "8192", "--", *QWEN), 0),
        ((*GOAL, "concurrency=100000", "--", *QWEN), 1),
        (("--gpu", "l4", "--gpu-count", "1", "--goal", "context=max", "--", *QWEN[:2], "Qwen/Qwen3-32B"), 1),
        (("--gpu", "h1000", "--", *QWEN), 2),
    ],
)  # fmt: skip
def test_the_exit_status_says_whether_it_starts(arguments, status, form):
    assert oomwatch_plan(*form, *arguments).returncode == status


def test_a_refused_flag_is_the_first_thing_said():
    words = ("--gpu", "h100", "--", *QWEN, "--max-model-lenght", "4096")
    done = oomwatch_plan(*words)
    assert done.stdout.startswith("does not start (bad_arguments): --max-model-lenght")
    assert "Without it" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("release", [(), ("--engine-version", "0.11.0")])
def test_the_flag_that_was_meant_is_named(release):
    words = ("--gpu", "h100", *release, "--", *QWEN, "--max-model-lenn", "4096")
    assert "did you mean --max-model-len?" in " ".join(oomwatch_plan(*words).stdout.split())
    assert "did you mean --max-model-len?" in oomwatch_plan("--format", "args", *words).stderr
    assert "did you mean --max-model-len?" in " ".join(plan_json(*words)["advice"])


@pytest.mark.parametrize(
    ("card", "way"), [("l40s", "--goal concurrency=1"), ("l4", "no combination")]
)
def test_flags_are_promised_only_where_there_are_some(card, way):
    server = ("--", "vllm", "serve", "Qwen/Qwen3-32B")
    done = oomwatch_plan("--gpu", card, "--format", "args", *server)
    assert way in done.stderr
    if "--goal" in way:
        line = oomwatch_plan("--gpu", card, *way.split(), "--format", "args", *server)
        assert "--quantization fp8" in line.stdout


def test_a_goal_out_of_reach_is_said_so_without_flags_that_change_nothing():
    goal = ("--gpu-count", "1", "--gpu", "h100", "--goal", "concurrency=1000", "--context", "40960")
    done = oomwatch_plan(*goal, "--", "vllm", "serve", "Qwen/Qwen3-32B")
    assert done.stdout.startswith("out of reach; the nearest: 1.9")
    assert "on 1 GPU\n" in done.stdout
    assert "--max-num-seqs" not in done.stdout.splitlines()[1]
    line = oomwatch_plan("--format", "args", *goal, "--", "vllm", "serve", "Qwen/Qwen3-32B")
    assert "1.90 requests of 40,960 tokens at most" in line.stderr


def test_what_a_chosen_format_asks_for_is_said():
    goal = ("--gpu-count", "4", "--goal", "concurrency=64", "--context", "16384")
    words = (*goal, "--", "vllm", "serve", "Qwen/Qwen3-32B")
    done = oomwatch_plan("--gpu", "a100-80gb", *words)
    assert "--kv-cache-dtype fp8" in done.stdout.splitlines()[1]
    assert "only FlashInfer reads it, else the start is refused" in " ".join(done.stdout.split())
    assert "FlashInfer" in plan_json("--gpu", "a100-80gb", *words)["goal"]["caveats"][0]
    assert "FlashInfer" not in oomwatch_plan("--gpu", "l40s", *words).stdout


def test_no_more_requests_run_than_are_let():
    done = oomwatch_plan(*LLAMA, "--", *QWEN, "--max-model-len", "2048", "--max-num-seqs", "16")
    assert "of which --max-num-seqs lets 16 run at once" in done.stdout


def test_sglang_has_its_own_backends_and_formats():
    done = oomwatch_plan("-v", "--gpu", "h100", "--", *SGLANG)
    formats = done.stdout.partition("KV formats")[2]
    assert "fa3" in formats
    assert "triton" in formats
    assert "FLASH" not in formats
    assert "nvfp4" not in done.stdout  # no backend of this card reads it
    assert "--kv-cache-dtype fp8_e4m3" in done.stdout
    notes = {line.split()[-1] for line in formats.splitlines()[2:5]}
    assert all(f"\n  {note}  " in formats for note in notes)


def test_an_unnamed_card_needs_only_its_memory():
    found = plan_json(
        "--gpu-total-gib",
        "47.5",
        "--engine-version",
        "0.11.0",
        "--",
        "vllm",
        "serve",
        "Qwen/Qwen3-8B",
    )
    assert found["per_gpu"]["total_bytes"] == round(47.5 * 2**30)


def test_planning_loads_nothing_heavy():
    code = (
        "import sys; from oomwatch.cli.plan import command;"
        "command(['--json','--gpu','h100','--','vllm','serve','Qwen/Qwen3-8B'], standalone_mode=False);"
        "print(sorted({'requests','rich','yaml','sqlalchemy','psutil','pynvml'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.fixture
def running(tmp_path):
    """A process whose command line is that of a server and whose output went to a log."""
    (tmp_path / "serve").write_text("import sys, time\nprint('up', flush=True)\ntime.sleep(60)\n")
    log = tmp_path / "server.log"
    log.write_text(
        "INFO 11-20 10:00:00 [api_server.py:1839] vLLM API server version 0.11.0\n"
        "(EngineCore_DP0 pid=77) INFO 11-20 10:00:09 [gpu_model_runner.py:2653] Model loading took 14.9889 GiB and 4.1 seconds\n"
        "(EngineCore_DP0 pid=77) INFO 11-20 10:00:20 [gpu_worker.py:298] Available KV cache memory: 30.00 GiB\n"
    )
    with log.open("a") as output:
        process = subprocess.Popen(
            ["vllm", "serve", "meta-llama/Llama-3.1-8B", "--max-model-len", "8192"],
            executable=sys.executable,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )
    for _ in range(200):
        if "up" in log.read_text():
            break
        time.sleep(0.05)
    yield process.pid
    process.kill()
    process.wait()


def test_a_running_engine_fills_in_what_its_log_said(running):
    found = plan_json("--pid", str(running), "--gpu", "h100")
    assert found["version"] == "0.11.0"
    assert found["per_gpu"]["kv_available_bytes"] == 30 * 2**30
    assert found["per_gpu"]["weights_bytes"] == pytest.approx(14.9889 * 2**30, rel=1e-6)
    assert found["kv"]["tokens"] == 30 * 2**30 // (128 * 1024)
    fp8 = next(x for x in found["what_if"] if x["change"].get("--kv-cache-dtype") == "fp8")
    assert fp8["tokens"] == 2 * found["kv"]["tokens"]


L4 = ("--gpu", "l4", "--", "vllm", "serve", "Qwen/Qwen2.5-7B-Instruct")


def test_without_a_version_the_newest_known_release_is_planned():
    newest = versions.newest("vllm")
    assumed, named = plan_json(*L4), plan_json("--engine-version", newest, *L4)
    assert assumed["kv"]["tokens"] == named["kv"]["tokens"]
    assert [assumed["version"], named["version"]] == [None, newest]
    assert all(x["validated"] for x in assumed["what_if"])
    assert sum(newest in x and "--engine-version" in x for x in assumed["assumptions"]) == 1
    assert not any("--engine-version" in x for x in named["assumptions"])


def test_a_version_that_nobody_named_is_not_put_in_an_image_and_refuses_nothing():
    new = ("--gpu", "h100-80gb", "--format", "compose", "--", "vllm", "serve", "Qwen/Qwen3-8B")
    done = oomwatch_plan(*new, "--swap-space", "4")
    assert done.returncode == 0
    assert versions.newest("vllm") not in done.stdout


@pytest.mark.parametrize("more", [(), ("-v",)])
def test_eighty_columns_read_well(more):
    done = oomwatch_plan(*more, *L4, COLUMNS="80")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    bar = next(line.strip() for line in lines if line.startswith("  WW"))
    assert {"W", "A", "K"} <= set(bar)
    assert len(lines) < (80 if more else 35)
    assert ("GiB/request" in done.stdout) == bool(more)


def test_colour_makes_the_bar_of_blocks():
    done = oomwatch_plan("--color", "always", *L4, TERM="xterm")
    assert "█" in done.stdout
    assert "WWW" not in done.stdout


def test_a_model_that_is_too_large_is_told_the_fewest_gpus():
    words = ("--", "vllm", "serve", "meta-llama/Llama-3.1-70B")
    done = oomwatch_plan(*LLAMA, "--gpu-count", "4", *words, COLUMNS="80")
    assert "fewest h100-80gb that start it: 4 (--tensor-parallel-size 4)" in done.stdout
    assert "no start" not in done.stdout
    assert "between" not in done.stdout  # no interval of a KV cache that is not there
    found = plan_json(*LLAMA, "--gpu-count", "4", *words)
    ranks = [x for x in found["what_if"] if "--tensor-parallel-size" in x["change"]]
    assert [(x["change"]["--tensor-parallel-size"], x["fits"]) for x in ranks] == [("4", True)]
    assert found["fewest_gpus"] == 4
    never = oomwatch_plan("--gpu", "l4", "--", "vllm", "serve", "meta-llama/Llama-3.1-405B")
    assert "No number of l4 up to 16" in never.stdout


def test_the_answer_to_a_goal_comes_first():
    goal = (*LLAMA, "--gpu-count", "4", "--goal", "concurrency=max", "--context", "8192")
    lines = oomwatch_plan(*goal, "--", "vllm", "serve", "meta-llama/Llama-3.1-70B").stdout
    assert lines.startswith("reaches the goal: ")
    assert shlex.split(lines.splitlines()[1])[:2] == ["vllm", "serve"]
    assert "--gpu-memory-utilization 0.93 " in lines
    assert lines.index("does not start") > lines.index("vllm serve")


def test_more_gpus_than_there_are_is_an_error_of_the_command():
    words = ("--", "vllm", "serve", "Qwen/Qwen3-8B", "--tensor-parallel-size", "4")
    done = oomwatch_plan(*LLAMA, "--gpu-count", "2", *words)
    assert "(config_error): it asks for 4 GPUs and 2 are there" in done.stdout


def test_known_names_are_listed_and_pointed_at():
    models = oomwatch_plan("--list-models").stdout.split()
    cards = oomwatch_plan("--list-gpus").stdout.split()
    assert "qwen2.5-7b" in models
    assert {"h100-80gb", "l4"} <= set(cards)
    unknown = oomwatch_plan("--gpu", "h100", "--", "vllm", "serve", "Qwen/Qwen2.5-7B-Instruct-1M")
    assert unknown.returncode == 2
    assert "nearest known is qwen2.5-7b" in unknown.stderr
    assert "--list-models" in unknown.stderr
    card = oomwatch_plan("--gpu", "h900", "--", "vllm", "serve", "Qwen/Qwen3-8B")
    assert "--list-gpus" in card.stderr
