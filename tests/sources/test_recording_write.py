"""Writing recordings: whole or not at all, read back the same, and without anybody's secrets."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oomwatch.engines.prefixes import PROCESS_PREFIXES, RECORD_PREFIXES
from oomwatch.engines.sglang.patterns import PATTERNS as SGLANG
from oomwatch.engines.vllm.patterns import PATTERNS as VLLM
from oomwatch.errors import OomwatchError, UsageError
from oomwatch.records import (
    EngineExit,
    EngineSample,
    Gpu,
    GpuProcessSample,
    GpuSample,
    HostSample,
    LogLine,
    ProcessSample,
    RecordedEngine,
)
from oomwatch.sources.log_render import render_line
from oomwatch.sources.logfile import read_log
from oomwatch.sources.recording import read_recording
from oomwatch.sources.recording_write import ENDINGS, RecordingWriter
from oomwatch.sources.redaction import NOTHING, Privacy, Redactor

T0 = 1_764_400_000.0
ENGINE = RecordedEngine(
    id="vllm-0",
    engine="vllm",
    version="0.11.0",
    command=("vllm", "serve", "/models/m"),
    env={"VLLM_USE_V1": "1"},
    pids=(41, 42),
    gpus=(0,),
    metrics_url="http://127.0.0.1:8000/metrics",
    started_at=T0 - 60,
)
SAMPLES = (
    GpuSample(T0, 0, "GPU-1", "H100", 100, 60, 30, 10, 0.5, 40.0, 300.0, used_max_bytes=70),
    GpuProcessSample(T0, 0, 42, "VLLM::EngineCore", 50, "compute"),
    ProcessSample(T0, 42, 41, "python", ("VLLM::EngineCore",), 7, 3, 0, "/x", state="S"),
    ProcessSample(T0 + 1, 42, 41, "python", ("VLLM::EngineCore",), 8, 3, 0, "/x", state="S"),
    HostSample(T0, 1000, 400, 0, 2),
    EngineSample(T0, "vllm-0", running=3, kv_usage_ratio=0.5, extra={"ttft_count": 4.0}),
)


def write(path: Path, redactor: Redactor | None = None, log: bytes = b"") -> Path:
    writer = RecordingWriter(str(path), redactor or Redactor())
    writer.add_samples(SAMPLES)
    if log:
        writer.add_log(writer.log_name("vllm-0"), log)
    writer.add_kernel_line("2026-11-29T03:00:00,000000+00:00 NVRM: Xid (PCI:0000:3b:00): 79, x")
    writer.add_page(T0 + 0.5, "vllm-0", b"vllm:num_requests_running 3\n")
    return writer.finish(
        host="gpu-box",
        started_at=T0,
        ended_at=T0 + 9,
        engines=[ENGINE],
        gpus=[Gpu(0, "GPU-1", "H100", 100)],
        exits=[EngineExit("vllm-0", "process 41 (vllm)", T0 + 5, 137, 9, oom_killed=False)],
    )


# ---------------------------------------------------------------- read back
@pytest.mark.parametrize("name", ["plain", *(f"packed{ending}" for ending in ENDINGS)])
def test_what_was_written_is_read_back(tmp_path, name):
    path = write(tmp_path / name, log=b"INFO 11-29 03:00:00 [a.py:1] hello\n")
    recording = read_recording(str(path))
    assert recording.problems == ()
    assert (recording.host, recording.started_at, recording.ended_at) == ("gpu-box", T0, T0 + 9)
    assert recording.redacted is True
    (engine,) = recording.engines
    assert (engine.command, engine.pids, engine.started_at) == (
        ENGINE.command,
        ENGINE.pids,
        T0 - 60,
    )
    assert recording.exits == (
        EngineExit("vllm-0", "process 41 (vllm)", T0 + 5, 137, 9, oom_killed=False),
    )
    series = recording.series
    assert series.gpus[0].used_max_bytes == 70
    assert series.gpus[0].total_bytes == 100
    assert series.gpu_processes == (SAMPLES[1],)
    assert series.processes[0] == SAMPLES[2]
    assert (series.processes[1].rss_bytes, series.processes[1].cmdline) == (8, None)
    assert series.hosts == (SAMPLES[4],)
    assert series.engines == (SAMPLES[5],)
    assert [line.text for line in read_log(recording.logs["vllm-0"])] == ["hello"]
    assert "Xid" in Path(recording.kernel_log).read_text()
    assert [(page.at, page.engine) for page in recording.pages] == [(T0 + 0.5, "vllm-0")]
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_only_the_user_may_read_it(tmp_path):
    old = os.umask(0)
    try:
        folder, packed = write(tmp_path / "plain", log=b"x\n"), write(tmp_path / "packed.tar.gz")
    finally:
        os.umask(old)
    for path in (folder, folder / "logs"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (packed, folder / "gpu.jsonl", folder / "logs" / "vllm-0.log"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_the_kind_of_archive_is_told_by_the_name(tmp_path):
    assert tarfile.is_tarfile(write(tmp_path / "a.tar"))
    assert write(tmp_path / "a.tar.gz").read_bytes().startswith(b"\x1f\x8b")
    packed = write(tmp_path / "a.tar.zst").read_bytes()
    assert zstandard.ZstdDecompressor().decompressobj().decompress(packed)
    with tarfile.open(tmp_path / "a.tar") as archive:
        members = archive.getmembers()
    assert {member.uname for member in members} == {""}
    assert "a/manifest.json" in {member.name for member in members}


def test_an_unfinished_one_has_no_name_and_can_be_given_up(tmp_path):
    writer = RecordingWriter(str(tmp_path / "r.tar"), Redactor())
    writer.add_samples(SAMPLES)
    assert not (tmp_path / "r.tar").exists()
    writer.abandon()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OomwatchError, match="has ended"):
        writer.add_samples(SAMPLES)


def test_what_is_there_is_not_written_over(tmp_path):
    (tmp_path / "r.tar").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        RecordingWriter(str(tmp_path / "r.tar"), Redactor())
    with pytest.raises(OomwatchError, match="No such file"):
        RecordingWriter(str(tmp_path / "absent" / "r.tar"), Redactor())
    assert (tmp_path / "r.tar").read_text() == "mine"


def test_several_threads_may_write(tmp_path):
    writer = RecordingWriter(str(tmp_path / "r"), Redactor())
    work = [
        threading.Thread(target=lambda: [writer.add_samples([HostSample(T0)]) for _ in range(200)])
        for _ in range(4)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    writer.finish(host=None, started_at=T0, ended_at=T0)
    assert len(read_recording(str(tmp_path / "r")).series.hosts) == 800


def test_more_logs_than_files_may_be_open(tmp_path):
    writer = RecordingWriter(str(tmp_path / "r"), Redactor())
    for turn in range(2):
        for number in range(40):
            writer.add_log(writer.log_name("engine", number), f"line {turn}\n".encode())
    writer.finish(host=None, started_at=T0, ended_at=T0)
    for number in range(40):
        name = writer.log_name("engine", number)
        assert (tmp_path / "r" / name).read_text() == "line 0\nline 1\n"


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts a tmpfs")
@pytest.mark.parametrize("name", ["r", "r.tar", "r.tar.zst"])
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, name):
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("no tmpfs may be mounted here")
    try:
        writer = RecordingWriter(str(tmp_path / name), Redactor())
        line = os.urandom(500).hex().encode() + b"\n"
        lines = line * 1000
        with pytest.raises(OomwatchError, match="No space left on device") as caught:
            writer.add_log("logs/a.log", lines)
        assert "\n" not in str(caught.value)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_fills_up_while_packing_leaves_no_half_archive(tmp_path):
    writer = RecordingWriter(str(tmp_path / "r.tar"), Redactor())
    writer.add_log("logs/a.log", b"x" * 60_000 + b"\n")
    writer.add_log("logs/b.log", b"y" * 60_000 + b"\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OomwatchError, match="File too large"):
            writer.finish(host=None, started_at=T0, ended_at=T0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- lines as text again
def test_lines_read_the_same_after_rendering(tmp_path):
    path = tmp_path / "a.log"
    known = (*PROCESS_PREFIXES, *RECORD_PREFIXES, *VLLM, *SGLANG)
    lines = [entry.sample for entry in known]
    path.write_text("\n".join(lines) + "\n")
    before = [line for line in read_log(str(path)) if line.text]
    path.write_text("".join(render_line(line) + "\n" for line in before))
    after = list(read_log(str(path)))
    assert [line.text for line in after] == [line.text for line in before]
    assert [bool(line.prefixed) for line in after] == [bool(line.prefixed) for line in before]
    assert [line.level for line in after] == [line.level for line in before]


@pytest.mark.parametrize(
    "line",
    [
        LogLine("x", 1, "t", T0 + 0.25, "ERROR", "EngineCore_DP0", 7, "DP0", "core.py:7"),
        LogLine("x", 1, "t", T0, "INFO", "Worker_TP1", 7, "TP1", "core.py:7"),
        LogLine("x", 1, "t", T0, None, None, None, "DP0 TP3"),
        LogLine("x", 1, "t", T0, "ERROR", None, None, None, None),
        LogLine("x", 1, "t", T0, None, "EngineCore", 7, None, None),
    ],
)
def test_a_prefix_comes_back(tmp_path, line):
    line = dataclasses.replace(line, prefixed=True)
    path = tmp_path / "a.log"
    path.write_text(render_line(line) + "\n")
    (read,) = read_log(str(path))
    for name in ("text", "at", "level", "process", "pid", "rank", "origin", "prefixed"):
        assert getattr(read, name) == getattr(line, name), name


# ---------------------------------------------------------------- redaction
NAME = st.from_regex(r"[a-z]{6,10}q[0-9]{2}", fullmatch=True)
TOKEN = st.from_regex(r"hf_[A-Za-z0-9]{34}", fullmatch=True)
PROMPT = st.from_regex(r"[A-Z][a-z]{7}zx[0-9]{5}", fullmatch=True)
WRAPPERS = st.sampled_from(
    [
        "{}",
        "2026-11-29T03:00:00.25Z stdout F {}",
        "Nov 29 03:00:00 gpu-box vllm[41]: {}",
        "\x1b[36m(EngineCore_DP0 pid=42)\x1b[0;0m {}",
        "vllm-1  | {}",
        "JSON",
    ]
)
LINES = st.sampled_from(
    [
        "INFO 11-29 03:00:00 [logger.py:41] Received request cmpl-1: prompt: '{prompt}', params: x",
        "INFO 11-29 03:00:00 [request_logger.py:9] Generated response chat-1: output: '{prompt}'",
        "[2026-11-29 03:00:00 TP0] Receive: obj=GenerateReqInput(text='{prompt}', rid='1')",
        "[2026-11-29 03:00:00] Finish: obj=GenerateReqInput(text='{prompt}'), out={{'text': 'x'}}",
        "INFO 11-29 03:00:00 [logger.py:41] Received request cmpl-1: prompt: 'a\n{prompt}\nb'",
        "fastapi.exceptions.RequestValidationError: [{{'body': '{prompt}'}}]",
        " Value error [type=value_error, input_value='{prompt}', input_type=str]",
        "INFO 11-29 03:00:00 [a.py:1] non-default args: {{'api_key': ['{token}'], 'hf_token': '{token}'}}",
        "INFO 11-29 03:00:00 [a.py:1] download with token {token} for {user}",
        "OSError: /home/{user}/models/m is not there, nor /Users/{user}/m",
        "INFO 11-29 03:00:00 [a.py:1] cache of {user}: /data/{user}/cache, USER={user}",
        'INFO:     10.0.0.1:5 - "GET /v1?api_key={token} HTTP/1.1" 401 Unauthorized',
    ]
)


def everything(root: Path) -> str:
    """Names and contents of all files."""
    found = []
    for path in sorted(root.rglob("*")):
        found.append(str(path.relative_to(root)))
        if path.is_file():
            found.append(path.read_text())
    return "\n".join(found)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    secrets=st.tuples(NAME, TOKEN, PROMPT),
    lines=st.lists(st.tuples(LINES, WRAPPERS), min_size=1, max_size=6),
    cut=st.integers(1, 6),
)
def test_no_planted_secret_is_in_any_file_or_name(tmp_path, secrets, lines, cut):
    user, token, prompt = secrets
    path = tmp_path / "r"
    shutil.rmtree(path, ignore_errors=True)
    writer = RecordingWriter(str(path), Redactor(users=[user]))
    engine = f"{user}-llm"
    texts = [wrapped(line.format(prompt=prompt, token=token, user=user), w) for line, w in lines]
    for start in range(0, len(texts), cut):
        data = "".join(text + "\n" for text in texts[start : start + cut])
        writer.add_log(writer.log_name(engine), data.encode())
    stored = [LogLine("x", n, text, T0) for n, text in enumerate("\n".join(texts).split("\n"))]
    client = [
        LogLine("x", 1, f"Received request 1: prompt: '{prompt}'", T0, "INFO", prefixed=True),
        *[line for line in stored if prompt not in line.text],
    ]
    writer.add_lines(writer.log_name(engine, 1), client)
    writer.add_kernel_line(f"oom-kill: task=python /home/{user}/x {token}")
    writer.add_page(T0, engine, f'vllm:x{{model_name="/home/{user}/m",t="{token}"}} 1\n'.encode())
    command = ("vllm", "serve", f"/home/{user}/m", "--api-key", "sesame1", "--hf-token", token)
    writer.add_samples(
        [
            ProcessSample(T0, 42, 1, "python", command, 1, cgroup=f"/user/{user}", unit=engine),
            GpuProcessSample(T0, 0, 42, f"/home/{user}/bin/python"),
            EngineSample(T0, engine, running=1),
        ]
    )
    recorded = RecordedEngine(
        id=engine,
        command=command,
        env={"HF_TOKEN": token, "USER": user, "HOME": f"/home/{user}", "VLLM_API_KEY": "sesame1"},
        metrics_url=f"http://{user}:sesame1@127.0.0.1/metrics",
    )
    exit_ = EngineExit(engine, f"unit {user}.service", detail=f"token={token}")
    writer.finish(host="h", started_at=T0, ended_at=T0, engines=[recorded], exits=[exit_])
    text = everything(path)
    for secret in (user, token, prompt, "sesame1"):
        assert secret not in text
    read = read_recording(str(path))
    assert read.redacted is True
    assert read.logs[read.engines[0].id].endswith(".log")
    assert read.series.engines[0].engine == read.engines[0].id


def wrapped(text: str, wrapper: str) -> str:
    if wrapper != "JSON":
        return "\n".join(wrapper.format(part) for part in text.split("\n"))
    row = {"stream": "stderr", "time": "2026-11-29T03:00:00.25Z"}
    return "\n".join(json.dumps({"log": part + "\n", **row}) for part in text.split("\n"))


def test_the_same_name_is_the_same_word_everywhere():
    redactor = Redactor()
    assert redactor.text("/home/anna/x and /home/bert/y") == "/home/user1/x and /home/user2/y"
    assert redactor.text("bert and anna") == "user2 and user1"
    assert redactor.text("/home/ubuntu/m on ubuntu") == "/home/user3/m on ubuntu"


def test_what_the_server_says_of_itself_stays(tmp_path):
    log = (
        b"INFO 11-29 03:00:00 [logger.py:41] Received request 1: prompt: 'CUDA out of memory'\n"
        b"(EngineCore_DP0 pid=42) ERROR 11-29 03:00:01 [core.py:708] torch.OutOfMemoryError: CUDA "
        b"out of memory. Tried to allocate 2.00 GiB.\n"
        b"Killed\n"
    )
    writer = RecordingWriter(str(tmp_path / "r"), Redactor())
    writer.add_log("logs/a.log", log)
    writer.finish(host=None, started_at=T0, ended_at=T0)
    kept = (tmp_path / "r" / "logs" / "a.log").read_bytes().splitlines(keepends=True)
    assert kept[0].endswith(b"[logger.py:41] Received request [redacted]\n")
    assert kept[1:] == log.splitlines(keepends=True)[1:]


def test_without_redaction_only_keys_and_tokens_are_taken_out(tmp_path):
    log = b"Received request 1: prompt: 'hi' by /home/anna token=abc123secret\n"
    path = write(tmp_path / "r", Redactor(NOTHING), log)
    kept = (path / "logs" / "vllm-0.log").read_text()
    assert kept == "Received request 1: prompt: 'hi' by /home/anna token=abc123secret\n".replace(
        "token=abc123secret", kept.split()[-1]
    )
    assert read_recording(str(path)).redacted is False
    command = Redactor(NOTHING).words(["vllm", "--api-key", "sesame"])
    assert command == ["vllm", "--api-key", "***"]


def test_names_of_hosts_are_replaced_where_that_is_wanted():
    redactor = Redactor(Privacy(host_names=True), hosts=["gpu-box"])
    assert redactor.text("Nov 29 gpu-box kernel: x") == "Nov 29 host1 kernel: x"
    assert Redactor(hosts=["gpu-box"]).text("gpu-box") == "gpu-box"
