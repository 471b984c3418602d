"""`oomwatch record` on real processes: what it wrote is diagnosed as the host was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_host import AT, LOG, PREFIX, LiveHost

from oomwatch.cli.diagnose import run_diagnosis
from oomwatch.cli.options import Options
from oomwatch.records import Diagnosis
from oomwatch.sources.recording import read_recording

PROMPT = "violet elephants on roller skates"
REQUEST = f"{PREFIX} [logger.py:41] Received request cmpl-1: prompt: '{PROMPT}', params: x\n"
REFUSED = "".join(
    f"(EngineCore_DP0 pid=42) ERROR {AT} [core.py:710] {line}\n"
    for line in (
        "EngineCore encountered a fatal error.",
        "Traceback (most recent call last):",
        '  File "/v/vllm/v1/worker/gpu_model_runner.py", line 2100, in execute_model',
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
        "total capacity of 23.65 GiB of which 1.10 GiB is free. Including non-PyTorch memory, "
        "this process has 22.50 GiB memory in use.",
    )
)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LiveHost]:
    folder = tmp_path / "host"
    folder.mkdir()
    made = LiveHost(folder)
    yield made
    made.close()


def record(path: Path, *words: str) -> subprocess.Popen[str]:
    config = path.parent / "empty.toml"
    config.write_text("schema_version = 1\n[sources]\nkernel = false\n")
    return subprocess.Popen(
        [sys.executable, "-m", "oomwatch", "record", "-o", str(path), *words],
        env=os.environ | {"OOMWATCH_CONFIG": str(config)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = child.communicate(timeout=120)
    return child.returncode, out, err


def judged(path: Path) -> Diagnosis:
    return run_diagnosis(Options(recordings=(str(path),)))


def first_cause(diagnosis: Diagnosis) -> str | None:
    found = [*diagnosis.incidents, *diagnosis.risks]
    return found[0].finding.cause if found else None


@pytest.mark.parametrize(
    "state",
    [
        {"running": 1, "kv": 0.3, "tokens": 40},
        {"running": 2, "waiting": 30, "kv": 0.99, "preempted": 5, "tokens": 40},
    ],
    ids=["healthy", "pressed"],
)
def test_a_recording_shows_what_the_host_showed(host, tmp_path, state):
    pid = host.serve(LOG + REQUEST, **state)
    child = record(tmp_path / "r.tar.gz", "--pid", str(pid), "--for", "12s", "--interval", "500ms")
    status, out, err = ended(child)
    assert status == 0, err
    assert f"oomwatch diagnose --recording {tmp_path / 'r.tar.gz'}" in out
    live, recorded = host.diagnose(pids=(pid,)), judged(tmp_path / "r.tar.gz")
    assert (recorded.verdict, first_cause(recorded)) == (live.verdict, first_cause(live))
    recording = read_recording(str(tmp_path / "r.tar.gz"))
    (engine,) = recording.engines
    assert engine.command[1:] == ("serve", "/models/m", "--port", "0") or "serve" in engine.command
    assert pid in engine.pids
    assert len(recording.series.engines) >= 5
    assert len(recording.series.hosts) >= 5
    assert {sample.pid for sample in recording.series.processes} >= {pid}
    assert recording.pages
    text = Path(recording.logs[engine.id]).read_text()
    assert "GPU KV cache size: 4,096 tokens" in text
    assert PROMPT not in text


def test_it_ends_a_while_after_an_incident(host, tmp_path):
    pid = host.serve(LOG, running=1, kv=0.3, tokens=40)
    path = tmp_path / "r"
    child = record(path, "--until-incident", "--after", "4s", "--pid", str(pid))
    core = host.pid_of("VLLM::EngineCore")
    assert child.stderr is not None
    assert "recording" in child.stderr.readline()
    time.sleep(2.0)
    with host.log.open("a") as file:
        file.write(REFUSED)
    host.kill(core)
    status, _, err = ended(child)
    assert status == 0, err
    assert "incident" in err
    diagnosis = judged(path)
    assert diagnosis.verdict == "oom"
    recording = read_recording(str(path))
    assert any(each.signal == signal.SIGKILL for each in recording.exits) or recording.exits
    assert recording.engines[0].ended is True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_all_that_was_seen(host, tmp_path, number):
    pid = host.serve(LOG, running=1, kv=0.3, tokens=40)
    child = record(tmp_path / "r", "--pid", str(pid))
    assert child.stderr is not None
    child.stderr.readline()
    time.sleep(2.0)
    child.send_signal(number)
    status, out, err = ended(child)
    assert status == 0, err
    assert "diagnose --recording" in out
    assert read_recording(str(tmp_path / "r")).series.hosts
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []


def test_an_unknown_process_is_said(tmp_path):
    child = record(tmp_path / "r", "--pid", str(os.getpid()))
    status, _, err = ended(child)
    assert status == 3
    assert "is no engine that is known" in err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("words", [("--for", "10"), ("--interval", "fast"), ("--after", "x")])
def test_a_time_that_is_none_is_refused(tmp_path, words):
    status, _, err = ended(record(tmp_path / "r", *words))
    assert status == 2
    assert "is no time" in err
