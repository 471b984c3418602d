"""`oomwatch replay`: the agent's own judgement on recordings, at their time and at any speed."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from stored_incidents import COMMAND, killed, refused, saturated, started

from oomwatch.cli import cli
from oomwatch.demo import demo_recording
from oomwatch.errors import UsageError
from oomwatch.records import (
    EngineExit,
    EngineSample,
    Gpu,
    GpuProcessSample,
    GpuSample,
    HostSample,
    ProcessSample,
    RecordedEngine,
)
from oomwatch.sources.log_render import kernel_line
from oomwatch.sources.recording import read_recording
from oomwatch.sources.recording_stream import ReplayFollower, stream_samples
from oomwatch.sources.recording_write import RecordingWriter
from oomwatch.sources.redaction import Redactor
from oomwatch.units import GIB

AT = 1_764_400_000.0
DEMO = str(demo_recording())


def replay(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["replay", *words], catch_exceptions=False, env={"TZ": "UTC"})
    return done.exit_code, done.stdout


def shown(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def healthy(now: float) -> list[object]:
    seconds = now - AT + 600
    return [
        EngineSample(
            now,
            "vllm-0",
            running=1,
            waiting=0,
            kv_usage_ratio=0.2,
            preemptions_total=3,
            generation_tokens_total=30 * seconds,
            prompt_tokens_total=50 * seconds,
        )
    ]


def recorded(path: Path, *, log: str, samples=healthy, exits=(), kernel=(), seconds=(-600, 120)):
    """A recording of the ten minutes before `AT` and two after."""
    writer = RecordingWriter(str(path), Redactor())
    for second in range(*seconds):
        now = AT + second
        writer.add_samples(
            [
                GpuSample(now, 0, used_bytes=20 * GIB, free_bytes=3 * GIB, reserved_bytes=GIB),
                GpuProcessSample(now, 0, 42, "VLLM::EngineCore", 19 * GIB),
                ProcessSample(now, 42, 41, "VLLM::EngineCor", ("VLLM::EngineCore",), GIB),
                HostSample(now, 256 * GIB, 100 * GIB, 0, 0),
                *samples(now),
            ]
        )
    writer.add_log(writer.log_name("vllm-0"), log.encode())
    for event in kernel:
        writer.add_kernel_line(kernel_line(event))
    writer.finish(
        host="gpu-box",
        started_at=AT + seconds[0],
        ended_at=AT + seconds[1],
        engines=[
            RecordedEngine(
                "vllm-0",
                "vllm",
                "0.11.0",
                COMMAND,
                pids=(41, 42),
                gpus=(0,),
                metrics_url="http://127.0.0.1:8000/metrics",
                started_at=AT - 3600,
            )
        ],
        gpus=[Gpu(0, "GPU-1", "NVIDIA A10", 24 * GIB)],
        exits=exits,
    )
    return str(path)


def test_the_demo_is_seen_as_it_happened():
    status, out = replay(DEMO)
    assert status == 0
    lines = out.splitlines()
    assert "begins: vllm-0" in lines[0]
    assert re.search(
        r"14:32:0\d UTC  opened  inc-\w{12}  vllm-0  prefill_activation_peak: ", lines[1]
    )
    assert lines[-1].endswith("1 of 1 incidents are not over")
    assert replay(DEMO, "--", "agent") == (status, out)


def test_a_failure_in_a_log_opens_one_incident_at_its_time(tmp_path):
    path = recorded(tmp_path / "r", log=started(AT - 3600) + refused(AT) + refused(AT + 1))
    _, out = replay(path)
    opened = [line for line in out.splitlines() if "  opened  " in line]
    assert len(opened) == 1
    assert "prefill_activation_peak" in opened[0]
    at = time.mktime(time.strptime(opened[0][:19], "%Y-%m-%d %H:%M:%S"))
    assert AT <= at <= AT + 3


def test_nothing_opens_where_nothing_happens(tmp_path):
    _, out = replay(recorded(tmp_path / "r", log=started(AT - 3600)))
    assert out.splitlines()[-1].endswith("0 of 0 incidents are not over")


def test_pressure_opens_and_closes(tmp_path):
    pressed = saturated(AT)

    def samples(now: float) -> list[object]:
        return pressed(now) if AT - 400 < now < AT - 100 else healthy(now)

    path = recorded(tmp_path / "r", log=started(AT - 3600), samples=samples, seconds=(-600, 300))
    _, out = replay(path)
    told = [line.split("  ")[1] for line in out.splitlines()[1:-1]]
    assert "opened" in told
    assert "closed" in told
    assert "0 of" in out.splitlines()[-1]


def test_a_kill_is_one_incident_over_all_its_witnesses(tmp_path):
    exits = [
        EngineExit("vllm-0", "process 42 (VLLM::EngineCor)", AT + 1, 137, 9, oom_killed=True),
        EngineExit("vllm-0", "process 41 (vllm)", AT + 2, 1),
    ]
    path = recorded(tmp_path / "r", log=started(AT - 3600), exits=exits, kernel=killed(AT))
    _, out = replay(path)
    opened = [line for line in out.splitlines() if "  opened  " in line]
    assert len(opened) == 1
    assert "host_oom_kill" in out


@pytest.mark.parametrize("ending", ["", ".tar.zst"])
def test_any_command_runs_on_it(tmp_path, ending):
    path = recorded(tmp_path / f"r{ending}", log=started(AT - 3600) + refused(AT))
    status, out = replay(path, "--", "diagnose", "--format", "json")
    assert status == 1
    assert json.loads(out)["incidents"][0]["cause"] == "prefill_activation_peak"
    status, out = replay(path, "--", "incidents", "list", "--json")
    (incident,) = json.loads(out)["incidents"]
    assert (status, incident["cause"], incident["host"]) == (
        0,
        "prefill_activation_peak",
        "gpu-box",
    )
    assert "--max-num-batched-tokens" in replay(path, "--", "flags")[1]
    assert "OOMWATCH_STORE__PATH" not in os.environ


def test_what_the_agent_would_have_stored_can_be_kept(tmp_path):
    path, store = recorded(tmp_path / "r", log=refused(AT)), tmp_path / "kept.db"
    incident = re.search(r"inc-\w+", replay(path, "--store", str(store))[1])
    words = ["diagnose", "--incident", incident[0], "--store", str(store), "--json"]
    done = CliRunner().invoke(cli, words)
    assert json.loads(done.stdout)["incidents"][0]["cause"] == "prefill_activation_peak"
    begin, end = shown(AT - 300), shown(AT)
    words = ["db", "export", "--store", str(store), "--kind", "gpu", "--since", begin]
    done = CliRunner().invoke(cli, [*words, "--until", end])
    times = [json.loads(line)["t"] for line in done.stdout.splitlines()]
    assert times == [AT + second for second in range(-300, 1)]


def test_speed_is_that_of_the_recording(tmp_path):
    path = recorded(tmp_path / "r", log=started(AT - 3600), seconds=(-60, 0))
    began = time.monotonic()
    replay(path, "--speed", "60")
    assert time.monotonic() - began >= 1.0


@pytest.mark.parametrize("speed", ["max", "100000"])
def test_a_clock_that_was_set_is_not_waited_for(tmp_path, speed):
    """As on a host without a clock of its own, which begins each time in 1970."""
    path = recorded(tmp_path / "r", log=started(AT - 3600) + refused(AT), seconds=(-60, 60))
    manifest = tmp_path / "r" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"started_at": 30.0}))
    _, out = replay(path, "--speed", speed)
    assert out.splitlines()[-1].endswith("0 of 1 incidents are not over")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--speed", "fast"), "--speed 'fast'"),
        (("--speed", "0"), "--speed '0'"),
        (("--", "plan"), "plan: only agent, diagnose"),
        (("--", "agent", "--store", "x"), "agent takes no options here"),
    ],
)
def test_wrong_use_is_said(words, message):
    done = CliRunner().invoke(cli, ["replay", DEMO, *words])
    assert isinstance(done.exception, UsageError)
    assert message in str(done.exception)


# ---------------------------------------------------------------- the stream below it
def test_samples_come_in_order_of_time_and_whole(tmp_path):
    recording = read_recording(recorded(tmp_path / "r", log="x\n", kernel=killed(AT)))
    found = list(stream_samples(recording))
    times = [item.at for item in found]
    assert times == sorted(times)
    assert len(found) == 5 * 720 + 1
    processes = [item for item in found if isinstance(item, ProcessSample)]
    assert {item.cmdline for item in processes} == {("VLLM::EngineCore",)}
    assert {item.total_bytes for item in found if isinstance(item, GpuSample)} == {24 * GIB}


def test_lines_are_due_at_their_time(tmp_path):
    text = "".join(
        f"2026-11-29T07:00:{second:02d}Z stdout F INFO 11-29 07:00:{second:02d} [a.py:1] {second}\n"
        "  without a time\n"
        for second in range(30)
    )
    path = tmp_path / "r"
    recording = read_recording(recorded(path, log=text))
    now = [1_795_935_600.0 - 1]
    follower = ReplayFollower(recording.logs["vllm-0"], recording, lambda: now[0])
    assert list(follower.read()) == []
    now[0] += 10.5
    (chunk,) = follower.read()
    assert (chunk.number, chunk.fresh) == (1, True)
    assert chunk.data.count(b"\n") == 20
    now[0] += 100
    (chunk,) = follower.read()
    assert (chunk.number, chunk.data.count(b"\n"), follower.due_at) == (21, 40, None)
    follower.close()
