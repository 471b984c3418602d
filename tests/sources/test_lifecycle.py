"""Real processes that end in every way, ours and others'."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomwatch.records import EngineExit, KernelEvent
from oomwatch.sources.keeper import KeptExit
from oomwatch.sources.lifecycle import Ended, ExitWatch, explain_end
from oomwatch.sources.memory_events import MemoryEvents
from oomwatch.sources.pidfd import ExitStatus, exit_status, read_state

KERNEL = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
PATIENCE = 20.0


@contextlib.contextmanager
def child(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        yield process
        process.kill()


def ticks(pid: int) -> int:
    state = read_state(pid)
    assert state is not None
    return state.start_ticks


def stranger() -> int:
    """A process that is no child of ours."""
    done = subprocess.run(
        ["sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


def until_ended(watch: ExitWatch) -> list[Ended]:
    """What the watch says of the next processes to end."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if ended := watch.wait(PATIENCE):
            return ended
    pytest.fail("nothing ended")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(params=[True, False], ids=["pidfd", "polled"])
def watch(request) -> Iterator[ExitWatch]:
    watch = ExitWatch(use_pidfd=request.param)
    yield watch
    watch.close()


# ---------------------------------------------------------------- how it ended
@pytest.mark.parametrize(
    ("command", "code", "by_signal"),
    [
        ("exit 0", 0, None),
        ("exit 3", 3, None),
        ("kill -KILL $$", 137, 9),
        ("kill -SEGV $$", 139, 11),
        ("kill -TERM $$", 143, 15),
    ],
)
def test_status_of_a_process_that_nobody_has_fetched_yet(watch, command, code, by_signal):
    with child("sh", "-c", f"read go; ulimit -c 0; {command}") as process:
        watch.watch(process.pid, ticks(process.pid), "vllm-1", name="VLLM::EngineCor", role="core")
        assert watch.wait(0) == []
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        (ended,) = until_ended(watch)
        assert (ended.pid, ended.engine_id) == (process.pid, "vllm-1")
        assert (ended.name, ended.role) == ("VLLM::EngineCor", "core")
        assert (ended.exit_code, ended.signal) == (code, by_signal)
        assert ended.oom_killed is (None if by_signal == 9 else False)
        assert len(watch) == 0
        assert watch.wait(0) == []


def test_a_process_that_renames_itself_ends_under_its_last_name(watch):
    with child("sleep", "60") as process:
        started = ticks(process.pid)
        watch.watch(process.pid, started, "vllm-1", name="python3", role="helper")
        watch.watch(process.pid, started, "vllm-1", name="VLLM::EngineCor", role="engine")
        assert len(watch) == 1
        process.kill()
        (ended,) = until_ended(watch)
        assert (ended.name, ended.role) == ("VLLM::EngineCor", "engine")


def test_status_of_another_parent_s_process():
    watch = ExitWatch()
    pid = stranger()
    watch.watch(pid, ticks(pid), "vllm-1")
    os.kill(pid, signal.SIGKILL)
    (ended,) = until_ended(watch)
    watch.close()
    if KERNEL >= (6, 15):
        assert (ended.exit_code, ended.signal) == (137, 9)
    else:  # fetched before we could look, or not
        assert (ended.exit_code, ended.signal) in [(137, 9), (None, None)]


def test_wait_status_taken_apart():
    assert exit_status(0) == ExitStatus(0, None)
    assert exit_status(3 << 8) == ExitStatus(3, None)
    assert exit_status(11 | 0x80) == ExitStatus(139, 11)  # with a core dump


# ---------------------------------------------------------------- which process
def test_process_that_ended_before_it_was_watched(watch):
    with child("true") as process:
        started = ticks(process.pid)
        process.wait()
        watch.watch(process.pid, started, "vllm-1")
        (ended,) = until_ended(watch)
        assert (ended.pid, ended.exit_code, ended.signal) == (process.pid, None, None)


def test_number_that_now_belongs_to_another_process(watch):
    with child("sleep", "1000") as process:
        started = ticks(process.pid)
        watch.watch(process.pid, started - 1, "old")
        watch.watch(process.pid, started, "new")
        (ended,) = until_ended(watch)
        assert (ended.pid, ended.engine_id, ended.exit_code) == (process.pid, "old", None)
        assert watch.wait(0.3) == []
        process.kill()
        (ended,) = until_ended(watch)
        assert ended.engine_id == "new"


def test_first_thread_that_ends_before_the_others_is_not_the_end(watch):
    script = (
        "import ctypes, sys, threading\n"
        "threading.Thread(target=sys.stdin.read).start()\n"
        "print(flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    with child(sys.executable, "-c", script) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while "Z" not in Path(f"/proc/{process.pid}/status").read_text():
            time.sleep(0.01)
        watch.watch(process.pid, ticks(process.pid), "vllm-1")
        assert watch.wait(0.3) == []
        process.kill()
        (ended,) = until_ended(watch)
        assert ended.signal == 9


def test_forgotten_process_is_not_told_of(watch):
    with child("sleep", "1000") as process:
        watch.watch(process.pid, ticks(process.pid), "vllm-1")
        watch.forget(process.pid, ticks(process.pid))
        watch.forget(process.pid, 1)
        process.kill()
        process.wait()
        assert watch.wait(0.2) == []


def test_each_wait_is_for_what_is_watched_by_then(watch):
    with child("sleep", "1000") as first, child("sleep", "1000") as second:
        watch.watch(first.pid, ticks(first.pid), "vllm-1")
        assert watch.wait(0) == []
        watch.watch(second.pid, ticks(second.pid), "vllm-2")
        assert watch.wait(0) == []
        watch.forget(first.pid, ticks(first.pid))
        first.kill()
        first.wait()
        assert watch.wait(0.2) == []
        second.kill()
        assert [ended.engine_id for ended in until_ended(watch)] == ["vllm-2"]
        assert watch.wait(0.2) == []


def test_processes_under_a_tree_that_is_not_ours(tmp_path):
    """Numbers of another pid namespace must not be opened in ours."""
    before = descriptors()
    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    fields = ["S", "1", *["0"] * 15, "1", "0", "4711", *["0"] * 30]
    (folder / "stat").write_text(f"{os.getpid()} (engine (x)) {' '.join(fields)}\n")
    watch = ExitWatch(proc_root=str(tmp_path))
    watch.watch(os.getpid(), 4711, "vllm-1")
    assert watch.wait(0.2) == []
    assert descriptors() == before + 1  # the one that wakes
    (folder / "stat").unlink()
    assert [ended.engine_id for ended in until_ended(watch)] == ["vllm-1"]
    watch.close()


# ---------------------------------------------------------------- threads and descriptors
def test_watching_from_another_thread_wakes_the_one_that_waits(watch):
    found: list[Ended] = []
    thread = threading.Thread(target=lambda: found.extend(until_ended(watch)))
    thread.start()
    with child("sleep", "1000") as process:
        watch.watch(process.pid, ticks(process.pid), "vllm-1")
        process.kill()
        thread.join(PATIENCE)
    assert [ended.engine_id for ended in found] == ["vllm-1"]


def test_closing_ends_the_wait_and_all_descriptors():
    before = descriptors()
    watch = ExitWatch()
    with child("sleep", "1000") as process:
        watch.watch(process.pid, ticks(process.pid), "vllm-1")
        waiting = threading.Thread(target=watch.wait, args=(1000,))
        waiting.start()
        watch.close()
        watch.close()
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        watch.watch(process.pid, ticks(process.pid), "vllm-1")
        assert watch.wait(1000) == []
    assert descriptors() == before


def test_many_short_lives_leave_no_descriptor_behind(watch):
    before = descriptors()
    expected, seen = set(), set()
    for number in range(600):
        pid = os.fork()
        if pid == 0:
            os._exit(number % 7)
        expected.add(pid)
        watch.watch(pid, ticks(pid), f"engine-{number % 7}")
        if number % 20 == 19:
            while len(watch):
                for ended in watch.wait(PATIENCE):
                    assert ended.engine_id == f"engine-{ended.exit_code}"
                    seen.add(ended.pid)
                    os.waitpid(ended.pid, 0)
    assert seen == expected
    watch.wait(0)
    assert descriptors() == before


def test_more_processes_than_descriptors():
    before = descriptors()
    watch = ExitWatch(most_descriptors=2)
    with child("sleep", "1000") as a, child("sleep", "1000") as b, child("sleep", "1000") as c:
        held = descriptors()
        for process in (a, b, c):
            watch.watch(process.pid, ticks(process.pid), "vllm-1")
        assert descriptors() == held + 2
        assert watch.wait(0.2) == []
        for process in (a, b, c):
            process.kill()
        seen = set()
        while len(watch):
            seen |= {(ended.pid, ended.signal) for ended in until_ended(watch)}
        assert seen == {(process.pid, 9) for process in (a, b, c)}
    watch.close()
    assert descriptors() == before


def test_no_process_is_taken_for_ended_when_no_file_can_be_opened():
    script = """
import json, os, resource, subprocess
from oomwatch.sources.lifecycle import ExitWatch
from oomwatch.sources.pidfd import read_state
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(20)]
ticks = [read_state(one.pid).start_ticks for one in children]
watch = ExitWatch()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (12, limits[1]))
for one, started in zip(children, ticks):
    watch.watch(one.pid, started, "e")
early = watch.wait(0.3)
for one in children:
    one.kill()
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
seen = set()
while len(watch):
    seen |= {(ended.pid, ended.signal) for ended in watch.wait(20)}
print(json.dumps([early, seen == {(one.pid, 9) for one in children}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [[], True]


# ---------------------------------------------------------------- killed for memory
MEMORY_V1 = Path("/sys/fs/cgroup/memory")
EAT = """
import sys
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
print(flush=True)
sys.stdin.readline()
eaten = [bytearray(b"x") * 2**20 for _ in range(int(sys.argv[2]))]
print(flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    folder = MEMORY_V1 / f"oomwatch-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(48 * 2**20))
    except OSError:
        pytest.skip("no memory cgroup (version 1) may be made here")
    yield folder
    folder.rmdir()


@contextlib.contextmanager
def eater(folder: Path, mebibytes: int) -> Iterator[subprocess.Popen[str]]:
    """A process in the cgroup, which eats when it is told to."""
    with child(sys.executable, "-c", EAT, str(folder), str(mebibytes)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_real_kill_of_the_memory_cgroup(small_cgroup):
    events = MemoryEvents()
    watch = ExitWatch(events)
    with eater(small_cgroup, 4000) as victim, eater(small_cgroup, 1) as bystander:
        watch.watch(victim.pid, ticks(victim.pid), "vllm-1")
        watch.watch(bystander.pid, ticks(bystander.pid), "vllm-1")
        assert events.groups == (f"/{small_cgroup.name}",)
        assert events.poll() == []
        go(victim)
        (ended,) = until_ended(watch)
        assert (ended.pid, ended.signal, ended.oom_killed) == (victim.pid, 9, True)
        assert events.poll() == [(f"/{small_cgroup.name}", 1)]
        assert events.poll() == []
        hits = events.limit_hits(f"/{small_cgroup.name}")
        assert hits is not None
        assert hits > 0
        bystander.kill()
        (ended,) = until_ended(watch)
        assert (ended.pid, ended.signal, ended.oom_killed) == (bystander.pid, 9, False)
    watch.close()
    events.close()


def test_the_kill_is_told_of_the_process_that_was_killed(small_cgroup):
    # The server's end is seen first, as under systemd; nobody knows the status of either.
    events = MemoryEvents()
    watch = ExitWatch(events, use_pidfd=False)
    with eater(small_cgroup, 1) as server, eater(small_cgroup, 4000) as core:
        watch.watch(server.pid, ticks(server.pid), "vllm-1", role="server")
        watch.watch(core.pid, ticks(core.pid), "vllm-1", role="engine")
        go(core)
        core.wait(PATIENCE)
        server.terminate()
        server.wait(PATIENCE)
        ended: list[Ended] = []
        while len(ended) < 2:
            ended += until_ended(watch)
    told = [(one.pid, one.exit_code, one.oom_killed) for one in ended]
    assert told == [(server.pid, None, None), (core.pid, None, True)]
    watch.close()
    events.close()


# ---------------------------------------------------------------- what others add
ENDED = Ended(4242, "vllm-1", 1000.0)


def test_the_kernel_log_names_the_victim():
    kill = KernelEvent("oom_kill", "Killed process 4242", at=1001.0, fields={"pid": 4242})
    told = explain_end(ENDED, kernel=[kill])
    assert (told.oom_killed, told.signal, told.exit_code) == (True, 9, 137)
    assert told.detail == "Killed process 4242"
    other = KernelEvent("oom_kill", "Killed process 1", at=1001.0, fields={"pid": 1})
    long_ago = KernelEvent("oom_kill", "Killed process 4242", at=10.0, fields={"pid": 4242})
    assert explain_end(ENDED, kernel=[other, long_ago]) == ENDED


def test_a_crash_in_the_kernel_log():
    crash = KernelEvent("native_crash", "python3[4242]: segfault", fields={"pid": 4242})
    told = explain_end(ENDED, kernel=[crash])
    assert (told.detail, told.oom_killed) == ("python3[4242]: segfault", None)


@pytest.mark.parametrize(
    ("pid", "code", "by_signal", "at", "expected"),
    [
        (4242, 137, 9, 1000.5, (137, 9, True)),
        (4242, 1, None, 1000.5, (1, None, False)),  # another process of the unit was killed
        (17, 137, 9, 1000.5, (None, None, True)),  # the main process is another one
        (4242, 137, 9, 10.0, (None, None, None)),  # an earlier start
    ],
)
def test_the_keeper_s_word(pid, code, by_signal, at, expected):
    told = EngineExit("vllm-1", "unit v.service", at, code, by_signal, oom_killed=True)
    found = explain_end(ENDED, kept=KeptExit(told, pid))
    assert (found.exit_code, found.signal, found.oom_killed) == expected


def test_a_process_that_left_is_not_the_one_that_the_count_tells_of():
    counted = Ended(4242, "vllm-1", 1000.0, oom_killed=True)
    left = EngineExit("vllm-1", "unit v.service", 1000.5, 1, None, oom_killed=True)
    found = explain_end(counted, kept=KeptExit(left, 4242))
    assert (found.exit_code, found.oom_killed) == (1, False)
    killed = EngineExit("vllm-1", "unit v.service", 1000.5, 137, 9, oom_killed=True)
    assert explain_end(counted, kept=KeptExit(killed, 4242)).oom_killed is True


def test_what_was_seen_stays():
    seen = Ended(4242, "vllm-1", 1000.0, exit_code=1, oom_killed=False)
    told = EngineExit(
        "vllm-1", "unit v.service", 1000.0, 137, 9, oom_killed=True, detail="Result=x"
    )
    found = explain_end(seen, kept=KeptExit(told, 4242))
    assert (found.exit_code, found.signal, found.oom_killed) == (1, None, False)
    assert found.detail == "unit v.service: Result=x"
