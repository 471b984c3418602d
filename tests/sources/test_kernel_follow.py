"""The kernel's messages as they come: a pipe in place of /dev/kmsg, a stand-in for journalctl."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomwatch.errors import NoDataError, PermissionDeniedError
from oomwatch.records import KernelEvent
from oomwatch.sources.kernel_follow import follow_kernel

REPORT = (
    "python3 invoked oom-killer: gfp_mask=0x140cca(GFP_HIGHUSER_MOVABLE), order=0, oom_score_adj=0",
    "CPU: 3 PID: 4242 Comm: python3 Not tainted 6.1.0-18-amd64 #1",
    "Mem-Info:",
    "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,"
    "task_memcg=/system.slice/vllm.service,task=python3,pid=4242,uid=998",
    "Out of memory: Killed process 4242 (python3) total-vm:9123456kB, anon-rss:8123456kB, "
    "file-rss:0kB, shmem-rss:0kB, UID:998 pgtables:16000kB oom_score_adj:0",
)


class Followed:
    """`follow_kernel` in a thread of its own."""

    def __init__(self, path: str) -> None:
        self.stop = threading.Event()
        self.events: queue.Queue[KernelEvent | Exception] = queue.Queue()
        self.thread = threading.Thread(target=self._run, args=(path,))
        self.thread.start()

    def _run(self, path: str) -> None:
        try:
            for event in follow_kernel(self.stop, path=path):
                self.events.put(event)
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self.events.put(error)

    def next(self) -> KernelEvent | Exception:
        return self.events.get(timeout=10)

    def end(self) -> None:
        self.stop.set()
        self.thread.join(10)
        assert not self.thread.is_alive()


class Device:
    """A pipe that gives records as /dev/kmsg does."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.sequence = 0
        self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # so that writing needs no wait
        self.writer = os.open(path, os.O_WRONLY)

    def say(self, *lines: str, priority: int = 6) -> None:
        for line in lines:
            self.sequence += 1
            record = f"{priority},{self.sequence},{self.sequence * 1000},-;{line}\n"
            os.write(self.writer, record.encode() + b" SUBSYSTEM=memory\n")

    def close(self) -> None:
        os.close(self.reader)
        with contextlib.suppress(OSError):
            os.close(self.writer)


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Device]:
    made = Device(tmp_path / "kmsg")
    yield made
    made.close()


@pytest.fixture
def follow() -> Iterator[type[Followed]]:
    opened: list[Followed] = []

    def start(path: Path) -> Followed:
        opened.append(Followed(str(path)))
        return opened[-1]

    yield start
    for followed in opened:
        followed.end()


def test_a_kill_is_one_event_with_the_time_of_now(device, follow):
    followed = follow(device.path)
    before = time.time()
    device.say(*REPORT)
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert (event.kind, event.fields["pid"], event.fields["comm"]) == ("oom_kill", 4242, "python3")
    assert event.fields["scope"] == "host"
    # The records say that the host has been up for some milliseconds: of no use for "when".
    assert before - 1 <= event.at <= time.time() + 1
    device.say("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", priority=2)
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert (event.kind, event.fields["xid"]) == ("xid", 79)
    assert followed.events.empty()


def test_a_report_that_comes_in_pieces_is_one_event(device, follow):
    followed = follow(device.path)
    for line in REPORT:
        device.say(line)
        time.sleep(0.05)
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert event.fields["invoked_by"] == "python3"
    assert event.fields["pid"] == 4242


def test_each_kill_is_told(device, follow):
    followed = follow(device.path)
    for pid in (1001, 1002, 1003):
        device.say(*(line.replace("4242", str(pid)) for line in REPORT))
    found = [followed.next() for _ in range(3)]
    assert [event.fields["pid"] for event in found] == [1001, 1002, 1003]


def test_ordinary_messages_are_none(device, follow):
    followed = follow(device.path)
    device.say("usb 1-1: new high-speed USB device number 2", "audit: type=1400 apparmor=DENIED")
    device.say("\x1b[31mnot ; a , record", "")
    device.say(*REPORT)
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert event.kind == "oom_kill"
    assert followed.events.empty()


def test_a_device_that_is_always_ready_still_tells(device, follow):
    followed = follow(device.path)
    device.say(*REPORT)
    os.close(device.writer)  # from now on the pipe is ready, with nothing to read
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert event.kind == "oom_kill"


# ------------------------------------------------------------------------------- the journal
JOURNALCTL = """#!/bin/sh
case "$*" in
*--follow*) cat "$STANDIN/entries"; exec sleep 600;;
esac
cat "$STANDIN/probe"; cat "$STANDIN/complaint" >&2
"""


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "journalctl"
    program.parent.mkdir()
    program.write_text(JOURNALCTL)
    program.chmod(0o755)
    for name in ("entries", "probe", "complaint"):
        (tmp_path / name).write_text("")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(tmp_path))
    return tmp_path


def entry(number: int, message: str) -> str:
    return (
        f'{{"__CURSOR":"s=a;i={number}","__REALTIME_TIMESTAMP":"1764400000{number:06}",'
        f'"_TRANSPORT":"kernel","SYSLOG_IDENTIFIER":"kernel","PRIORITY":"4","MESSAGE":"{message}"}}\n'
    )


def test_where_the_device_may_not_be_read_the_journal_is(journalctl, follow, tmp_path):
    (journalctl / "probe").write_text("hello\n")
    entries = "".join(entry(number, line) for number, line in enumerate(REPORT))
    (journalctl / "entries").write_text(entries)
    followed = follow(tmp_path / "no-such-device")
    event = followed.next()
    assert isinstance(event, KernelEvent)
    assert (event.kind, event.fields["pid"]) == ("oom_kill", 4242)
    assert event.at == pytest.approx(1_764_400_000, abs=1)


def test_without_the_right_to_either_it_says_what_to_allow(journalctl, tmp_path):
    (journalctl / "complaint").write_text(
        "Hint: You are currently not seeing messages from other\n"
    )
    with pytest.raises(PermissionDeniedError, match=r"No such file.*CAP_SYSLOG.*systemd-journal"):
        next(follow_kernel(threading.Event(), path=str(tmp_path / "no-such-device")))


def test_without_a_journal_both_are_named(journalctl, tmp_path):
    with pytest.raises(NoDataError, match=r"/dev/kmsg: No such file.*no journal is kept"):
        next(follow_kernel(threading.Event(), path=str(tmp_path / "no-such-device")))
    assert journalctl.exists()
