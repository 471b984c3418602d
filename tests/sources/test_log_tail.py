"""Followed logs, real files: what is kept of them, and which lines tell something."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.sources import log_tail
from oomwatch.sources.follow import FileFollower, FilePosition
from oomwatch.sources.log_tail import LogTail

BANNER = "INFO 11-29 10:00:00 api_server.py:10] vLLM API server version 0.11.0\n"
ACCESS = 'INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK\n'
FAILED = "ERROR 11-29 10:05:00 core.py:5] torch.OutOfMemoryError: CUDA out of memory.\n"

_opened: list[FileFollower] = []


@pytest.fixture(autouse=True)
def close_followers() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def tail_of(path: Path, position: FilePosition | None = None, size: int = 0) -> LogTail:
    _opened.append(FileFollower(str(path), position))
    return LogTail(_opened[-1], str(path), size=size)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def texts(lines) -> list[str]:
    return [line.text for line in lines]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that is soon full."""
    monkeypatch.setattr(log_tail, "HEAD_BYTES", 4096)
    monkeypatch.setattr(log_tail, "LATE_BYTES", 16384)


def test_the_beginning_is_kept_whole(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + "INFO loading weights\n")
    tail = tail_of(path)
    assert list(tail.poll()) == []  # nothing of it tells of trouble
    assert any("loading weights" in text for text in texts(tail.lines()))
    assert "API server version" in tail.lines()[0].text


def test_telling_lines_are_given_once_with_their_number(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER)
    tail = tail_of(path)
    list(tail.poll())
    append(path, ACCESS + FAILED)
    told = list(tail.poll())
    assert [line.number for line in told if "OutOfMemoryError" in line.text] == [3]
    assert list(tail.poll()) == []


def test_lines_that_were_there_before_were_not_seen(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + FAILED)
    tail = tail_of(path)
    list(tail.poll())
    append(path, FAILED)
    list(tail.poll())
    assert [tail.saw(number) for number in (1, 2, 3)] == [False, False, True]
    again = tail_of(path, tail.follower.position)
    append(path, ACCESS)
    list(again.poll())
    append(path, FAILED)
    list(again.poll())
    assert [again.saw(number) for number in (3, 4, 5)] == [False, False, True]
    path.rename(f"{path}.1")
    append(path, FAILED)
    for _ in range(4):
        list(again.poll())
    assert again.saw(1)


def test_the_year_of_a_line_is_that_of_its_reading(tmp_path):
    path = tmp_path / "server.log"
    path.write_text("INFO 11-29 10:00:00 core.py:5] hello\n")
    _opened.append(FileFollower(str(path)))
    wall = [datetime.datetime(2024, 11, 29, 10, 1).astimezone().timestamp()]
    tail = LogTail(_opened[-1], str(path), wall=lambda: wall[0])
    list(tail.poll())
    wall[0] += 366 * 86_400
    append(path, "INFO 11-30 10:00:00 core.py:5] a year later\n")
    list(tail.poll())
    years = [time.localtime(line.at).tm_year for line in tail.lines()]
    assert years == [2024, 2025]


@pytest.mark.usefixtures("small")
def test_after_the_beginning_ordinary_lines_are_let_go(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + ACCESS * 200)
    tail = tail_of(path)
    for _ in range(50):
        append(path, ACCESS * 100)
        assert list(tail.poll()) == []
    kept = len(tail.lines())
    append(path, ACCESS * 500)
    list(tail.poll())
    assert len(tail.lines()) == kept


@pytest.mark.usefixtures("small")
def test_a_traceback_that_comes_in_two_looks_is_whole(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + ACCESS * 200)
    tail = tail_of(path)
    list(tail.poll())
    append(path, "Traceback (most recent call last):\n")
    list(tail.poll())
    append(path, '  File "/x/model.py", line 5, in forward\n    return self.layers(x)\n')
    list(tail.poll())
    append(path, "torch.OutOfMemoryError: CUDA out of memory.\n")
    list(tail.poll())
    kept = texts(tail.lines())[-4:]
    assert "model.py" in kept[1]
    assert "self.layers" in kept[2]
    assert "OutOfMemoryError" in kept[3]


@pytest.mark.usefixtures("small")
def test_what_follows_a_telling_line_is_bounded(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + ACCESS * 200)
    tail = tail_of(path)
    list(tail.poll())
    append(path, FAILED)
    list(tail.poll())
    before = len(tail.lines())
    for _ in range(40):
        append(path, "INFO nothing to see here at all\n" * 100)
        list(tail.poll())
    assert len(tail.lines()) - before < 600


def test_each_start_has_its_own_beginning(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + "INFO first start\n")
    tail = tail_of(path)
    list(tail.poll())
    append(path, FAILED + BANNER + "INFO second start\n")
    list(tail.poll())
    append(path, FAILED + BANNER + "INFO third start\n" + FAILED)
    list(tail.poll())
    assert [len(start.head) for start in tail._starts] == [3, 3, 3]
    for number in range(20):
        append(path, BANNER + f"INFO start {number}\n")
        list(tail.poll())
    assert len(tail._starts) == 3
    assert "start 19" in tail.lines()[-1].text


LOGO = (
    "(APIServer pid=7) INFO 11-29 10:00:00 [api_utils.py:347] \r\n"
    "(APIServer pid=7) INFO 11-29 10:00:00 [api_utils.py:347]        █     █     █▄   ▄█\r\n"
    "(APIServer pid=7) INFO 11-29 10:00:00 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0\r\n"
    "(APIServer pid=7) INFO 11-29 10:00:00 [api_utils.py:347]   █▄█▀ █     █     █     █  model   /m\r\n"
)


@pytest.mark.usefixtures("small")
def test_a_start_that_prints_a_logo_has_its_own_beginning(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOGO + ACCESS * 200)
    tail = tail_of(path)
    list(tail.poll())
    append(path, ACCESS * 50 + FAILED + LOGO + "INFO second start\n")
    list(tail.poll())
    assert [line.text for line in tail._starts[-1].head][-1] == "INFO second start"
    assert len(tail._starts[-1].head) == 3  # from the line with the version on


@pytest.mark.usefixtures("small")
def test_a_request_to_stop_is_kept_of_a_long_log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(LOGO + ACCESS * 200)
    tail = tail_of(path)
    list(tail.poll())
    append(path, ACCESS * 50)
    list(tail.poll())
    stop = "(APIServer pid=7) INFO 11-29 10:05:00 [launcher.py:254] [shutdown] API server: shutdown triggered\n"
    append(path, stop)
    assert "shutdown triggered" in list(tail.poll())[-1].text


def test_two_starts_in_one_look_are_two(tmp_path):
    path = tmp_path / "server.log"
    path.write_text((BANNER + "INFO loading\n" + FAILED) * 3)
    tail = tail_of(path)
    assert len([line for line in tail.poll() if "OutOfMemoryError" in line.text]) == 3
    assert [len(start.head) for start in tail._starts] == [3, 3, 3]


def test_a_banner_that_a_client_sent_begins_nothing(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + "INFO loading\n")
    tail = tail_of(path)
    list(tail.poll())
    append(path, "INFO Received request cmpl-1: prompt: 'vLLM API server version 9'\n" * 5)
    list(tail.poll())
    assert len(tail._starts) == 1


def test_after_a_restart_of_the_agent_the_beginning_is_known_and_not_told(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER + FAILED)
    first = tail_of(path)
    assert list(first.poll())
    position = FilePosition.from_json(first.follower.position.to_json())
    append(path, "INFO and on\n")
    again = tail_of(path, position)
    told = list(again.poll())
    assert not [line for line in told if "OutOfMemoryError" in line.text]
    assert "API server version" in again.lines()[0].text


@pytest.mark.usefixtures("small")
def test_of_a_long_log_the_middle_is_left_out(tmp_path):
    path = tmp_path / "server.log"
    middle = ACCESS * 20_000 + FAILED + ACCESS * 20_000
    path.write_text(BANNER + ACCESS * 100 + middle + FAILED.replace("core.py", "late.py"))
    tail = tail_of(path, size=path.stat().st_size)
    told = []
    for _ in range(20):
        told += list(tail.poll())
    assert "API server version" in tail.lines()[0].text
    assert [line.origin for line in told if "OutOfMemoryError" in line.text] == ["late.py:5"]
    append(path, FAILED.replace("core.py", "later.py"))
    assert [line.origin for line in tail.poll() if line.origin] == ["later.py:5"]


def test_memory_is_bounded_whatever_comes(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(BANNER)
    tail = tail_of(path)
    for _ in range(30):
        append(path, FAILED * 1000)
        for _ in tail.poll():
            pass
    start = tail._starts[-1]
    assert len(start.head) <= 3000 + 1000
    assert len(start.telling) <= 2000


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=20))
def test_any_bytes_in_any_pieces(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("any") / "server.log"
    path.write_bytes(b"")
    tail = tail_of(path)
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece + b"\n")
        list(tail.poll())
    numbers = [line.number for line in tail.lines()]
    assert numbers == sorted(numbers)
    _opened.pop().close()
