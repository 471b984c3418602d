"""The embedded recording tells one story, and its figures add up."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.demo import demo_recording
from oomwatch.sources.recording import read_recording
from oomwatch.units import GIB, parse_size


@pytest.fixture(scope="module")
def recording():
    return read_recording(str(demo_recording()))


@pytest.fixture(scope="module")
def log(recording):
    return Path(recording.logs["vllm-0"]).read_text(encoding="utf-8")


def test_it_is_small_and_whole(recording):
    size = sum(path.stat().st_size for path in demo_recording().rglob("*") if path.is_file())
    assert size <= 60_000
    assert recording.problems == ()
    assert recording.redacted is True


def test_memory_of_the_card_adds_up(recording):
    for sample in recording.series.gpus:
        parts = (sample.reserved_bytes, sample.used_bytes, sample.free_bytes)
        assert sum(parts) == sample.total_bytes
    held = {sample.at: sample.used_bytes for sample in recording.series.gpu_processes}
    for sample in recording.series.gpus:
        assert 0 <= sample.used_bytes - held.get(sample.at, 0) <= 8 * 2**20


def test_memory_jumps_in_one_step_while_the_kv_cache_is_far_from_full(recording):
    used = [sample.used_bytes for sample in recording.series.gpus]
    peak = used.index(max(used))
    assert max(used[: peak - 1]) - min(used[: peak - 1]) < 0.1 * GIB
    assert used[peak] - used[peak - 2] > 4 * GIB
    assert used[-1] < 0.1 * GIB
    assert max(sample.kv_usage_ratio for sample in recording.series.engines) < 0.4
    assert recording.series.engines[-1].preemptions_total == 0
    assert all(sample.waiting == 0 for sample in recording.series.engines)


def test_the_allocator_s_figures_add_up(log):
    message = next(line for line in log.splitlines() if "CUDA out of memory" in line)
    tried, total, free, own, allocated, _pools, cached = (
        parse_size(text) for text in re.findall(r"\d+\.\d+ [GM]iB", message)
    )
    assert abs(total - free - own) < 0.02 * GIB
    assert free < tried < 6 * free
    non_torch = own - allocated - cached
    assert 0.5 * GIB < non_torch < 1.5 * GIB
    weights = parse_size(re.search(r"Model loading took ([\d.]+ GiB)", log)[1])
    kv = parse_size(re.search(r"Available KV cache memory: ([\d.]+ GiB)", log)[1])
    graphs = parse_size(re.search(r"took (1\.71 GiB)", log)[1])
    activation = allocated - weights - kv - graphs
    assert 2 * tried < activation < 3 * tried


def test_the_kv_cache_is_that_of_the_model(log):
    # 64 layers, 8 KV heads of 128, K and V in two bytes: 256 KiB a token, 16 tokens a block.
    kv = parse_size(re.search(r"Available KV cache memory: ([\d.]+ GiB)", log)[1])
    tokens = int(re.search(r"KV cache size: ([\d,]+) tokens", log)[1].replace(",", ""))
    assert abs(tokens - kv / (256 * 1024)) < 16
    blocks = int(re.search(r"num_gpu_blocks is: (\d+)", log)[1])
    assert tokens == blocks * 16
    assert f"{tokens / 131072:.2f}x" in log


def test_pids_and_times_agree(recording, log):
    (engine,) = recording.engines
    assert {int(pid) for pid in re.findall(r"pid=(\d+)", log)} == set(engine.pids)
    for samples in (recording.series.gpus, recording.series.hosts, recording.series.engines):
        assert recording.started_at <= samples[0].at <= samples[-1].at <= recording.ended_at


def test_it_can_be_copied_away(tmp_path):
    shutil.copytree(demo_recording(), tmp_path / "copy")
    assert read_recording(str(tmp_path / "copy")).series.gpus


def test_it_is_diagnosed_from_end_to_end():
    options = Options(recordings=(str(demo_recording()),))
    diagnosis = run_diagnosis(options)
    (incident,) = diagnosis.incidents
    assert diagnosis.verdict == "oom"
    assert (incident.finding.cls, incident.finding.cause) == (
        "long_context",
        "prefill_activation_peak",
    )
    assert incident.remedies[0].direction == "less_kv"
    assert int(incident.remedies[0].set["--max-num-batched-tokens"]) < 32_768


def test_the_command_shows_it():
    done = subprocess.run(
        [sys.executable, "-m", "oomwatch", "demo"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OUT OF MEMORY" in done.stdout
    assert "--max-num-batched-tokens 4096" in done.stdout
    assert done.stdout.count("\n\nNo NVIDIA GPU") + done.stdout.count("\n\nAnd this is") == 1
    assert done.stderr == ""
