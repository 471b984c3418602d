"""Real files, really rotated: every line comes once, in order, whatever happens to its file."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomwatch.sources.follow import FileFollower, FilePosition


class Writer:
    """A server's log and what happens to it; numbered lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.file = path.open("ab", buffering=0)

    def write(self, lines: int) -> None:
        for _ in range(lines):
            self.count += 1
            self.file.write(b"line %d %s\n" % (self.count, b"x" * (self.count % 97)))

    def shift(self) -> None:
        """Make room for `.1`, as logrotate does."""
        for number in range(8, 0, -1):
            for ending in ("", ".gz"):
                old = self.path.with_name(f"{self.path.name}.{number}{ending}")
                if old.exists():
                    old.replace(self.path.with_name(f"{self.path.name}.{number + 1}{ending}"))

    def rename(self) -> None:
        self.shift()
        self.path.replace(f"{self.path}.1")
        self.file.close()
        self.file = self.path.open("ab", buffering=0)

    def copytruncate(self) -> None:
        self.shift()
        shutil.copy2(self.path, f"{self.path}.1")
        os.truncate(self.path, 0)

    def compress(self) -> None:
        self.rename()
        old = Path(f"{self.path}.1")
        with gzip.open(f"{self.path}.1.gz", "wb") as packed:
            packed.write(old.read_bytes())
        shutil.copystat(old, f"{self.path}.1.gz")
        old.unlink()


_OPENED: list[FileFollower] = []


def follow(path: str, position: FilePosition | None = None) -> FileFollower:
    """A follower that is closed when the test ends."""
    _OPENED.append(FileFollower(path, position))
    return _OPENED[-1]


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


def numbers(follower: FileFollower, looks: int = 6) -> list[int]:
    """Numbers of the lines that are new, over several looks."""
    found: list[int] = []
    for look in range(looks):
        for chunk in follower.read(now=float(look * 10)):
            found += [int(line.split()[1]) for line in chunk.data.splitlines()]
    return found


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    writer = Writer(tmp_path / "server.log")
    yield writer
    writer.file.close()


def test_new_lines_come_once(writer: Writer) -> None:
    follower = follow(str(writer.path))
    writer.write(3)
    assert numbers(follower) == [1, 2, 3]
    assert numbers(follower) == []
    writer.write(2)
    assert numbers(follower) == [4, 5]


def test_a_file_that_comes_later(tmp_path: Path) -> None:
    follower = follow(str(tmp_path / "server.log"))
    assert numbers(follower) == []
    (tmp_path / "server.log").write_bytes(b"line 1\nline 2\n")
    assert numbers(follower) == [1, 2]


@pytest.mark.parametrize("rotate", [Writer.rename, Writer.copytruncate])
@pytest.mark.parametrize("times", [1, 3])
def test_rotation(writer: Writer, rotate: Callable[[Writer], None], times: int) -> None:
    follower = follow(str(writer.path))
    writer.write(5)
    assert numbers(follower) == [1, 2, 3, 4, 5]
    for _ in range(times):
        writer.write(2)
        rotate(writer)
        writer.write(3)
    found = numbers(follower)
    if rotate is Writer.copytruncate and times > 1:
        # Only the copy that holds where reading stopped can be told from any other file.
        assert found[:2] == [6, 7]
        assert found[-3:] == [writer.count - 2, writer.count - 1, writer.count]
        assert found == sorted(set(found))
    else:
        assert found == list(range(6, writer.count + 1))


def test_a_refilled_file_is_not_taken_for_the_old_one(writer: Writer) -> None:
    follower = follow(str(writer.path))
    writer.write(5)
    numbers(follower)
    os.truncate(writer.path, 0)
    writer.write(50)  # longer than before
    assert numbers(follower) == list(range(6, 56))


def test_deleted_and_made_anew(writer: Writer) -> None:
    follower = follow(str(writer.path))
    writer.write(5)
    numbers(follower)
    writer.write(1)
    writer.path.unlink()
    writer.write(1)  # into the file that has no name any more
    assert numbers(follower) == [6, 7]
    writer.file.close()
    writer.file = writer.path.open("ab", buffering=0)
    writer.write(2)
    assert numbers(follower) == [8, 9]


def test_a_writer_that_holds_on_to_the_renamed_file(writer: Writer) -> None:
    follower = follow(str(writer.path))
    writer.write(2)
    numbers(follower, looks=1)
    writer.path.replace(f"{writer.path}.1")
    Path(writer.path).touch()
    assert numbers(follower, looks=1) == []
    writer.write(3)
    assert numbers(follower, looks=1) == [3, 4, 5]


@pytest.mark.parametrize(
    "between",
    [None, Writer.rename, Writer.copytruncate, Writer.compress],
    ids=["nothing", "rename", "copytruncate", "compress"],
)
def test_goes_on_in_another_process(
    writer: Writer, between: Callable[[Writer], None] | None
) -> None:
    first = follow(str(writer.path))
    writer.write(40)
    numbers(first)
    saved = json.loads(json.dumps(first.position.to_json() if first.position else None))
    first.close()
    writer.write(3)
    if between is not None:
        between(writer)
        writer.write(2)
    second = follow(str(writer.path), FilePosition.from_json(saved))
    assert numbers(second) == list(range(41, writer.count + 1))
    assert second.missed is None


def test_says_so_when_the_place_is_gone(writer: Writer) -> None:
    first = follow(str(writer.path))
    writer.write(40)
    numbers(first)
    position = first.position
    writer.path.write_bytes(b"")
    writer.write(2)
    second = follow(str(writer.path), position)
    list(second.read(limit=1))
    assert "lost" in (second.missed or "")


def test_line_numbers_are_those_of_the_file(writer: Writer) -> None:
    follower = follow(str(writer.path))
    writer.write(5)
    assert [chunk.number for chunk in follower.read()] == [1]
    writer.write(2)
    chunk = next(follower.read())
    assert (chunk.number, chunk.fresh) == (6, False)
    writer.rename()
    writer.write(1)
    for _ in range(5):
        for chunk in follower.read():
            assert (chunk.number, chunk.fresh) == (1, True)


def test_an_unfinished_line_waits_and_is_then_given(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"done\nhalf of a")
    follower = follow(str(path))
    assert [chunk.data for chunk in follower.read(now=0)] == [b"done\n"]
    with path.open("ab") as file:
        file.write(b" line\nkilled he")
    assert [chunk.data for chunk in follower.read(now=0.5)] == [b"half of a line\n"]
    assert [chunk.data for chunk in follower.read(now=1.0)] == []
    assert [chunk.data for chunk in follower.read(now=3.0)] == [b"killed he"]


def test_an_unfinished_line_of_a_renamed_file_comes_before_the_next_file(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"done\nkilled he")
    follower = follow(str(path))
    assert [chunk.data for chunk in follower.read(now=0)] == [b"done\n"]
    path.replace(f"{path}.1")
    path.write_bytes(b"anew\n")
    found = [chunk.data for _ in range(4) for chunk in follower.read(now=0.1)]
    assert found == [b"killed he\n", b"anew\n"]


def test_an_endless_line_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"x" * (5 << 20))
    follower = follow(str(path))
    sizes = [len(chunk.data) for chunk in follower.read(limit=8 << 20)]
    assert sum(sizes) >= 4 << 20
    assert max(sizes) <= 2 << 20


def test_begins_in_the_middle_with_a_whole_line(writer: Writer) -> None:
    writer.write(100)
    follower = follow(str(writer.path))
    follower.skip_to(writer.path.stat().st_size // 2)
    found = numbers(follower)
    assert found == list(range(found[0], 101))
    assert found[0] > 1


def test_the_hole_before_a_writer_that_goes_on_where_it_was_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("wb", buffering=0) as writer:  # as a shell's ">" opens it
        writer.seek(64 << 20)
        writer.write(b"line 1\n")
        follower = follow(str(path))
        assert numbers_behind_zeros(follower) == [1]
        follower.skip_to(1)  # what lies behind already is not read again
        os.truncate(path, 0)
        assert numbers_behind_zeros(follower) == []
        writer.write(b"line 2\n")
        assert numbers_behind_zeros(follower) == [2]
        second = follow(str(path), follower.position)
        writer.write(b"line 3\n")
        assert numbers_behind_zeros(second) == [3]
        assert second.missed is None


def numbers_behind_zeros(follower: FileFollower) -> list[int]:
    """Numbers of the lines of one look, of a file of which a hole would give more than that."""
    data = b"".join(chunk.data for chunk in follower.read(limit=1 << 20))
    return [int(line.split()[1]) for line in data.strip(b"\0").splitlines()]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_told_each_time_and_not_kept_open(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "server.log")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match=r"regular file|directory"):
            list(follow(str(tmp_path / "server.log")).read())
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("seed", range(12))
def test_no_line_is_lost_or_doubled_whatever_happens(writer: Writer, seed: int) -> None:
    """Random writes, rotations and restarts of the reader, looked at in between."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    follower = follow(str(writer.path))
    writer.write(1)
    found = numbers(follower)
    for _ in range(120):
        writer.write(chance.randrange(0, 30))
        match chance.randrange(8):
            case 0:
                writer.rename()
            case 1:
                writer.compress()
            case 2:
                found += numbers(follower, looks=1)
                writer.copytruncate()
            case 3:
                position = follower.position
                follower.close()
                follower = follow(
                    str(writer.path),
                    FilePosition.from_json(position.to_json()) if position else None,
                )
        found += numbers(follower, looks=4)
    found += numbers(follower)
    assert found == list(range(1, writer.count + 1))


def test_no_descriptor_is_left_open(writer: Writer) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    follower = follow(str(writer.path))
    for _ in range(20):
        writer.write(5)
        writer.compress()
        numbers(follower)
    follower.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
