from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECK = [sys.executable, "-m", "oomwatch", "check"]

# Answers on /metrics as a server does, with an engine core below it.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen(["VLLM::EngineCore", "60"], executable="/bin/sleep")
PAGE = (b'# TYPE vllm:num_requests_running gauge\\n'
        b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\\n')
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(PAGE)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*CHECK, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def sources(done: subprocess.CompletedProcess) -> dict[str, list[dict]]:
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == "oomwatch.check/1"
    found: dict[str, list[dict]] = {}
    for item in answer["sources"]:
        found.setdefault(item["name"].strip(), []).append(item)
    return found


@pytest.fixture
def server(tmp_path) -> Iterator[tuple[int, int, Path]]:
    """A server's pid, port and log."""
    program, log = tmp_path / "vllm", tmp_path / "out.log"
    program.write_text(SERVER)
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, str(program), "serve", "m", "--port", "0"],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        while not log.read_text().endswith("\n"):
            assert child.poll() is None
        yield child.pid, int(log.read_text()), log
    finally:
        os.killpg(child.pid, 9)
        child.wait()


def test_every_source_has_a_status_and_what_is_missing_a_hint():
    found = sources(check("--json"))
    expected = ["gpu", "processes", "host memory", "kernel log", "journal", "containers", "pods"]
    assert list(found)[:8] == [*expected, "engines"]
    for item, *_ in found.values():
        assert item["status"] in ("ok", "warning", "error", "not_available")
        assert item["detail"]
        if item["status"] in ("warning", "error"):
            assert item["hint"]


def test_text_is_a_line_a_source_without_escapes_in_a_pipe():
    done = check()
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    lines = done.stdout.splitlines()
    assert any(line.startswith(("okay", "not available")) and " gpu " in line for line in lines)
    assert all(len(line) <= 160 for line in lines)


def test_engine_with_its_metrics_and_log(server):
    pid, port, log = server
    items = sources(check("--json"))[f"vllm-{port}"]
    assert [item["status"] for item in items] == ["ok", "ok"]
    assert items[0]["detail"] == (f"metrics at http://127.0.0.1:{port}/metrics, 3 requests running")
    assert items[1]["detail"] == f"log at {log}"
    assert f"pid {pid}" in " ".join(check().stdout.split())  # wherever its lines break


@pytest.mark.parametrize(
    ("scenario", "status", "words"),
    [
        ("gpu 0 GPU-a 0:3b:0 NVIDIA H100\nmemory 0 0 80G 1G 70G\n", "ok", "70.0 GiB of 80.0 GiB"),
        ("error nvmlInitWithFlags 18\n", "error", "differ in version"),
        ("error nvmlInitWithFlags 9\n", "not_available", "not loaded"),
        ("gpu 0 GPU-a 0:1:0 NVIDIA GB10\n", "warning", "host's memory"),
        ("driver 580.1\n", "not_available", "sees no GPU"),
    ],
)
def test_gpu_outcomes(fake_nvml, scenario, status, words):
    (item,) = sources(check("--json", **fake_nvml.environment(scenario)))["gpu"]
    assert item["status"] == status
    assert words in item["detail"]


def test_journal_and_runtimes_that_may_not_be_read(tmp_path):
    journalctl = tmp_path / "journalctl"
    journalctl.write_text(
        "#!/bin/sh\necho 'Hint: You are currently not seeing messages from other users.' >&2\n"
    )
    journalctl.chmod(0o755)
    found = sources(check("--json", PATH=f"{tmp_path}:{os.environ['PATH']}"))
    (journal,) = found["journal"]
    assert journal["status"] == "warning"
    assert "systemd-journal" in journal["detail"]
    assert journal["hint"]


def test_hostile_names_print_no_escapes(tmp_path):
    program = tmp_path / "vllm"
    program.write_text("import time; print('ready', flush=True); time.sleep(60)\n")
    child = subprocess.Popen(
        [sys.executable, str(program), "serve", "\x1b]0;owned\x07\u202em", "--port", "\x1b[31m1"],
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        text = check().stdout
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert f"pid {child.pid}" in " ".join(text.split())
    assert all(line.isprintable() for line in text.splitlines())
