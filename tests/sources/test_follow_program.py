"""Logs that a program prints: a stand-in for docker, and the real journalctl where it can be had."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomwatch.sources.follow_program import (
    ProgramFollower,
    follow_container,
    follow_unit,
)

# What `docker logs` does, on a file of lines that begin with their time: those since a moment,
# that of the moment itself included, then new ones until the container stops.
DOCKER = """#!/bin/sh
echo "$*" >>"$STANDIN/calls"
case "$*" in *gone*) echo "Error: No such container: gone" >&2; exit 1;; esac
since=0000
for word; do case "$word" in --since=*) since=${word#--since=};; esac; done
number=0
while :; do
  while read -r line; do
    if [ "${line%% *}" \\> "$since" ] || [ "${line%% *}" = "$since" ]; then echo "$line"; fi
  done <<EOT
$(tail -n +$((number + 1)) "$STANDIN/lines")
EOT
  number=$(wc -l <"$STANDIN/lines")
  if [ -e "$STANDIN/stopped" ]; then [ -e "$STANDIN/rest" ] && cat "$STANDIN/rest"; exit 0; fi
  sleep 0.02
done
"""


class Runtime:
    """A container whose log can be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "lines").touch()

    def write(self, *lines: str) -> None:
        with (self.folder / "lines").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def stop(self) -> None:
        (self.folder / "stopped").touch()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN", str(tmp_path))
    return Runtime(tmp_path)


@pytest.fixture
def follow() -> Iterator[Callable[..., ProgramFollower]]:
    opened: list[ProgramFollower] = []

    def make(follower: ProgramFollower) -> ProgramFollower:
        opened.append(follower)
        return follower

    yield make
    for follower in opened:
        follower.close()


def read(follower: ProgramFollower, lines: int, now: float | None = None) -> list[str]:
    """So many new lines, or what there is after ten seconds."""
    found: list[str] = []
    deadline = time.monotonic() + 10
    while len(found) < lines and time.monotonic() < deadline:
        for chunk in follower.read(now=now):
            assert chunk.data.endswith(b"\n")
            found += chunk.data.decode().splitlines()
        time.sleep(0.01)
    return found


def read_to_end(follower: ProgramFollower, now: float) -> list[str]:
    """All lines until the program has ended."""
    found = []
    while True:
        found += [line for chunk in follower.read(now=now) for line in chunk.data.splitlines()]
        if follower._child is None:
            return [line.decode() for line in found]
        time.sleep(0.01)


def stamp(second: int, fraction: str = "000000000") -> str:
    return f"2026-11-29T10:00:{second:02}.{fraction}Z"


# ------------------------------------------------------------------------------- containers
def test_lines_come_as_they_are_written(runtime, follow):
    follower = follow(follow_container("chat"))
    runtime.write(f"{stamp(1)} one", f"{stamp(2)} two")
    assert read(follower, 2) == [f"{stamp(1)} one", f"{stamp(2)} two"]
    runtime.write(f"{stamp(3)} three")
    assert read(follower, 1) == [f"{stamp(3)} three"]
    assert follower.position == {"place": stamp(3)}
    assert follower.missed is None
    assert runtime.calls() == ["logs --follow --timestamps chat"]


def test_another_run_goes_on_behind_the_last_line(runtime, follow):
    runtime.write(*(f"{stamp(second)} line {second}" for second in range(5)))
    first = follow(follow_container("chat"))
    read(first, 5)
    first.close()
    runtime.write(f"{stamp(5)} line 5")
    again = follow(follow_container("chat", first.position))
    assert read(again, 1) == [f"{stamp(5)} line 5"]
    assert runtime.calls()[1] == f"logs --follow --timestamps --since={stamp(4)} chat"


def test_without_a_position_the_start_of_the_server_is_the_beginning(runtime, follow):
    runtime.write(f"{stamp(1)} of an earlier server", "2026-11-29T11:00:00.5Z hello")
    follower = follow(follow_container("chat", since=1_795_949_999.0))  # 10:59:59
    assert read(follower, 1) == ["2026-11-29T11:00:00.5Z hello"]


def test_a_time_inside_of_a_line_is_no_place(runtime, follow):
    follower = follow(follow_container("chat"))
    runtime.write(f"{stamp(1)} request at 2099-01-01T00:00:00.000000000Z was late")
    read(follower, 1)
    assert follower.position == {"place": stamp(1)}


def test_a_container_that_stopped_is_asked_seldom(runtime, follow):
    follower = follow(follow_container("chat"))
    runtime.write(f"{stamp(1)} one")
    runtime.stop()
    now, asked = 0.0, []
    assert read_to_end(follower, now) == [f"{stamp(1)} one"]
    assert "ended with status 0" in follower.missed
    while now < 300:
        now += 0.5
        before = len(runtime.calls())
        list(follower.read(now=now))
        if follower._child is not None:
            assert read_to_end(follower, now) == []  # the line of the known moment is not new
        if len(runtime.calls()) > before:
            asked.append(now)
    assert len(asked) < 10
    assert asked[-1] - asked[-2] >= 60


def test_a_container_that_starts_again_is_followed_again(runtime, follow):
    follower = follow(follow_container("chat"))
    runtime.write(f"{stamp(1)} one")
    runtime.stop()
    read_to_end(follower, 0.0)
    (runtime.folder / "stopped").unlink()
    runtime.write(f"{stamp(9)} anew")
    assert read(follower, 1, now=5.0) == [f"{stamp(9)} anew"]
    assert follower.missed is None


def test_last_words_without_a_line_feed_are_given(runtime, follow):
    (runtime.folder / "rest").write_text(f"{stamp(3)} half a li")
    runtime.write(f"{stamp(1)} one")
    runtime.stop()
    follower = follow(follow_container("chat"))
    assert read_to_end(follower, 0.0) == [f"{stamp(1)} one", f"{stamp(3)} half a li"]


def test_a_complaint_is_no_line_of_the_log(runtime, follow):
    follower = follow(follow_container("gone"))
    assert read_to_end(follower, 0.0) == []
    assert follower.missed == "the program that reads the log: Error: No such container: gone"
    assert follower.position is None
    assert runtime.calls()


def test_times_are_compared_as_times(tmp_path, follow):
    """Podman writes the zone of the host and leaves zeros off."""
    lines = [
        "2026-11-29T12:00:01.5+02:00 known",
        "2026-11-29T12:00:01.49+02:00 older",
        "2026-11-29T10:00:01.51Z newer",
    ]
    (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
    known = {"place": "2026-11-29T12:00:01.5+02:00"}
    made = follow_container("chat", known)
    follower = follow(
        ProgramFollower(lambda _place: ["cat", str(tmp_path / "lines")], made._place_pattern, known)
    )
    assert read_to_end(follower, 0.0) == ["2026-11-29T10:00:01.51Z newer"]


def test_a_program_that_is_not_there_is_tried_later(follow):
    follower = follow(ProgramFollower(lambda _place: ["no-such-program-here"], re.compile(b"x")))
    assert list(follower.read(now=0.0)) == []
    assert follower.missed == "no-such-program-here cannot be run (No such file or directory)"


def test_a_long_line_without_end_is_bounded(tmp_path, follow):
    (tmp_path / "lines").write_bytes(b"x" * (5 << 20))
    follower = follow(
        ProgramFollower(lambda _place: ["cat", str(tmp_path / "lines")], re.compile(b"(y)"))
    )
    size = 0
    while follower._child is not None or size == 0:
        size += sum(len(chunk.data) for chunk in follower.read(now=0.0))
        assert len(follower._partial) <= (2 << 20)
    assert size >= 4 << 20


def test_what_a_killed_program_left_half_is_not_joined_to_the_next(tmp_path, follow):
    whole, half = '{"__CURSOR":"s=1","MESSAGE":"one"}', '{"__CURSOR":"s=2","MESS'
    (tmp_path / "first").write_text(f"{whole}\n{half}")
    (tmp_path / "second").write_text('{"__CURSOR":"s=2","MESSAGE":"two"}\n')
    calls: list[str | None] = []

    def command(place: str | None) -> list[str]:
        calls.append(place)
        return ["cat", str(tmp_path / ("first" if place is None else "second"))]

    from oomwatch.sources.follow_program import CURSOR

    follower = follow(ProgramFollower(command, CURSOR))
    assert read_to_end(follower, 0.0) == [whole]
    assert read_to_end(follower, 100.0) == ['{"__CURSOR":"s=2","MESSAGE":"two"}']
    assert calls == [None, "s=1"]


def test_closing_ends_the_program(runtime, follow):
    follower = follow(follow_container("chat"))
    runtime.write(f"{stamp(1)} one")
    read(follower, 1)
    child = follower._child
    follower.close()
    assert child.poll() is not None
    assert child.stdout.closed


# ------------------------------------------------------------------------------- the journal
REMOTE = Path("/lib/systemd/systemd-journal-remote")


class Journal:
    """A journal of its own, written by the program that receives journals from other hosts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.second = 0

    def write(self, *messages: str, unit: str = "vllm.service") -> None:
        entries = []
        for message in messages:
            self.second += 1
            entries.append(
                f"__REALTIME_TIMESTAMP={1_764_400_000_000_000 + self.second * 1_000_000}\n"
                f"__MONOTONIC_TIMESTAMP={self.second * 1_000_000}\n"
                "_BOOT_ID=4f6b2d0c8a5e4b7d9c3a1e2f5d6c7b8a\n"
                f"_SYSTEMD_UNIT={unit}\nMESSAGE={message}\n"
            )
        text = "\n".join(entries) + "\n"
        subprocess.run(
            [str(REMOTE), "-o", str(self.folder / "test.journal"), "-"],
            input=text.encode(),
            check=True,
            capture_output=True,
        )


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    if not REMOTE.exists() or shutil.which("journalctl") is None:
        pytest.skip("systemd-journal-remote is not installed")
    return Journal(tmp_path)


def test_the_journal_of_a_unit_goes_on_behind_its_cursor(journal, follow):
    journal.write("one", "two")
    journal.write("not ours", unit="other.service")
    first = follow(follow_unit("vllm.service", since=1_764_400_000, directory=str(journal.folder)))
    lines = read(first, 2)
    assert [re.search(r'"MESSAGE"\s*:\s*"(\w+)"', line)[1] for line in lines] == ["one", "two"]
    journal.write("three")
    assert '"three"' in read(first, 1)[0]
    first.close()
    journal.write("four")
    again = follow(follow_unit("vllm.service", first.position, directory=str(journal.folder)))
    (line,) = read(again, 1)
    assert '"four"' in line
