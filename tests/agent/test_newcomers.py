"""When the host is searched for engines: with real processes that come, go and become servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.newcomers import Newcomers
from oomwatch.discovery import DiscoveredEngine
from oomwatch.records import RecordedEngine

Spawn = Callable[..., "subprocess.Popen[bytes]"]
SERVE = ("serve", "/models/m")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Of all processes of this machine those that a test has started."""
    folder = tmp_path / "proc"
    folder.mkdir()
    return folder


@pytest.fixture
def spawn(proc: Path, tmp_path: Path) -> Iterator[Spawn]:
    program = tmp_path / "vllm"
    program.write_text("import time; time.sleep(300)\n")
    children: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        words = words or (sys.executable, str(program), *SERVE)
        child = subprocess.Popen(words, stdin=subprocess.PIPE)
        children.append(child)
        # Popen returns while the kernel is still replacing the program.
        while Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[0] != words[0].encode():
            time.sleep(0.001)
        (proc / str(child.pid)).symlink_to(f"/proc/{child.pid}")
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def newcomers(proc: Path) -> Newcomers:
    """After the first look, which is always a search."""
    made = Newcomers(EngineTable(), proc_root=str(proc))
    assert made.call_for_search(0.0, set())
    return made


def test_nothing_new_is_no_reason_and_now_and_then_all_is_searched(newcomers):
    calls = [newcomers.call_for_search(0.0, set()) for _ in range(12)]
    assert calls == [n % 6 == 5 for n in range(12)]


def test_a_server_that_came_is_a_reason(newcomers, spawn):
    spawn()
    assert newcomers.call_for_search(0.0, set())


def test_any_other_process_is_none(newcomers, spawn):
    spawn("sleep", "300")
    assert not newcomers.call_for_search(0.0, set())


def test_a_launcher_that_becomes_the_server_is_a_reason(newcomers, spawn, tmp_path):
    script = f"read go; exec {sys.executable} {tmp_path}/vllm {' '.join(SERVE)}"
    child = spawn("bash", "-c", script)
    assert not newcomers.call_for_search(0.0, set())
    assert child.stdin is not None
    child.stdin.write(b"go\n")
    child.stdin.flush()
    while b"vllm\0serve" not in Path(f"/proc/{child.pid}/cmdline").read_bytes():
        time.sleep(0.01)
    assert newcomers.call_for_search(0.0, set())


def test_a_child_of_an_engine_is_a_reason(proc, spawn):
    table = EngineTable()
    found = DiscoveredEngine(RecordedEngine("one", pids=(os.getpid(),)), (), ())
    engine = WatchedEngine(found, seen_monotonic=0.0, begun_monotonic=0.0)
    engine.served_monotonic = 1.0
    table._running["one"] = engine
    newcomers = Newcomers(table, proc_root=str(proc))
    newcomers.call_for_search(5.0, set())
    assert not newcomers.call_for_search(5.0, set())
    spawn("sleep", "300")
    assert newcomers.call_for_search(5.0, set())


def test_the_processes_of_an_engine_that_serves_are_no_reason(proc, spawn):
    child = spawn()
    table = EngineTable()
    found = DiscoveredEngine(RecordedEngine("one", pids=(child.pid,)), (), ())
    engine = WatchedEngine(found, seen_monotonic=0.0, begun_monotonic=0.0)
    engine.served_monotonic = 1.0
    newcomers = Newcomers(table, proc_root=str(proc))
    newcomers.call_for_search(4.0, set())
    table._running["one"] = engine  # by that search
    assert not newcomers.call_for_search(5.0, {child.pid})
    del table._running["one"]
    assert newcomers.call_for_search(6.0, {child.pid})


def test_an_engine_that_starts_is_looked_at_again(proc):
    table = EngineTable()
    found = DiscoveredEngine(RecordedEngine("one", pids=(1,)), (), ())
    engine = WatchedEngine(found, seen_monotonic=0.0, begun_monotonic=0.0)
    table._running["one"] = engine
    newcomers = Newcomers(table, proc_root=str(proc))
    newcomers.call_for_search(5.0, set())
    assert newcomers.call_for_search(5.0, set())
    engine.served_monotonic = 6.0
    assert not newcomers.call_for_search(7.0, set())


def test_who_begins_to_hold_gpu_memory_is_a_reason_once(newcomers, spawn):
    child = spawn("sleep", "300")
    newcomers.call_for_search(0.0, set())
    newcomers.call_for_search(0.0, set())
    newcomers.call_for_search(0.0, set())
    assert newcomers.call_for_search(0.0, {child.pid})
    assert not newcomers.call_for_search(0.0, {child.pid})


def test_who_is_gone_is_not_looked_at_again(newcomers, spawn):
    child = spawn()
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not newcomers.call_for_search(0.0, set())


def test_a_glance_sees_an_engine_that_came_and_nothing_else(newcomers, spawn):
    assert not newcomers.has_come()
    spawn("sleep", "300")
    assert not newcomers.has_come()
    spawn()
    assert newcomers.has_come()
    assert newcomers.call_for_search(0.0, set())
    assert not newcomers.has_come()
