"""The followers of all logs together, on real files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomwatch.agent import logs
from oomwatch.agent.engines import WatchedEngine
from oomwatch.agent.logs import LogFollowers
from oomwatch.config import Config
from oomwatch.discovery import DiscoveredEngine
from oomwatch.records import RecordedEngine
from oomwatch.sources.output import LogLocation

FAILED = "ERROR 11-29 10:05:00 core.py:5] torch.OutOfMemoryError: CUDA out of memory.\n"


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.lines: list[tuple[str | None, str]] = []
        self.positions: dict[str, object] = {}

    def put_events(self, events, engine_id=None) -> None:
        self.lines += [(engine_id, line.text) for line in events]

    def save_position(self, source, position) -> None:
        self.positions[source] = position


class Rig:
    def __init__(self, folder: Path, positions=None) -> None:
        self.folder = folder
        self.sink = Sink()
        self.told: list[str] = []
        self.judged_at = float("inf")
        self.followers = LogFollowers(
            Config().sources,
            self.sink,
            self.told.append,
            positions or {},
            judged_at=lambda _engine_id: self.judged_at,
        )

    def engine(self, name: str, *files: str) -> WatchedEngine:
        places = tuple(LogLocation("file", path=str(self.folder / file)) for file in files)
        found = DiscoveredEngine(RecordedEngine(name), (), places)
        return WatchedEngine(found, seen_monotonic=0.0, begun_monotonic=0.0)

    def write(self, file: str, text: str) -> None:
        with (self.folder / file).open("a") as log:
            log.write(text)

    def close(self) -> None:
        for one in self.followers._followed.values():
            one.tail.follower.close()


BANNER_OF_A_LONG_START = (
    "INFO api_server.py:10] vLLM API server version 0.11.0\n" + "INFO hello\n" * 4000
)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_telling_lines_are_stored_told_of_and_their_place_saved(rig):
    rig.write("a.log", "INFO hello\n")
    assert rig.followers.attach(rig.engine("one", "a.log")) == []
    rig.followers.look()
    assert (rig.sink.lines, rig.told) == ([], [])
    rig.write("a.log", FAILED)
    rig.followers.look()
    assert [name for name, _ in rig.sink.lines] == ["one"]
    assert rig.told == ["one"]
    assert rig.sink.positions[str(rig.folder / "a.log")]["number"] == 3


def test_statistics_of_a_full_pool_are_stored_and_ask_for_no_judgement(rig):
    # Else a failure would wait for the end of a pause that they made longer and longer.
    rig.write("a.log", BANNER_OF_A_LONG_START)
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    full = "(APIServer pid=7) INFO [loggers.py:1] Engine 000: Running: 4 reqs, GPU KV cache usage: 97.1%\n"
    access = 'INFO:     10.0.0.1:5 - "GET /metrics HTTP/1.1" 200 OK\n'
    for _ in range(3):
        rig.write("a.log", access + full)
        rig.followers.look()
        rig.write("a.log", access)
        rig.followers.look()
    assert ["97.1%" in text for _, text in rig.sink.lines] == [True] * 3
    assert rig.told == []
    rig.write("a.log", FAILED)
    rig.followers.look()
    assert rig.told == ["one"]


def test_a_log_that_cannot_be_read_says_why_and_leaves_the_others_alone(rig):
    rig.write("a.log", "INFO hello\n")
    (reason,) = rig.followers.attach(rig.engine("one", "none.log"))
    assert reason.endswith("none.log: No such file or directory")
    two = rig.engine("two", "none.log", "a.log")
    assert rig.followers.attach(two) == []
    assert len(two.tails) == 1


def test_a_pipe_or_a_folder_in_place_of_a_log_is_not_waited_for(rig):
    os.mkfifo(rig.folder / "pipe.log")
    (rig.folder / "folder.log").mkdir()
    pipe, folder = rig.followers.attach(rig.engine("one", "pipe.log", "folder.log"))
    assert pipe.endswith("pipe.log: Not a regular file")
    assert folder.endswith("folder.log: Is a directory")


def test_what_lies_in_place_of_a_log_is_told_once(rig, caplog):
    rig.write("a.log", "INFO hello\n")
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    (rig.folder / "a.log").rename(rig.folder / "a.log.1")
    os.mkfifo(rig.folder / "a.log")
    for _ in range(9):
        rig.followers.look()
    assert [record.message for record in caplog.records] == [
        f"{rig.folder}/a.log: Not a regular file"
    ]
    (rig.folder / "a.log").unlink()
    rig.write("a.log", FAILED)
    for _ in range(2):
        rig.followers.look()
    assert rig.told == ["one"]


def test_the_next_start_goes_on_in_the_same_log(rig):
    rig.write("a.log", "INFO hello\n")
    first, second = rig.engine("one", "a.log"), rig.engine("one", "a.log")
    rig.followers.attach(first)
    rig.followers.look()
    rig.write("a.log", FAILED)
    rig.followers.attach(second)
    rig.followers.look()
    assert first.tails == second.tails
    assert len(rig.sink.lines) == 1


def test_the_log_of_an_engine_that_has_gone_is_let_go_after_a_while(rig, monkeypatch):
    rig.write("a.log", "INFO hello\n" + FAILED)
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    rig.followers.keep({"one"})
    rig.followers.keep(set())
    rig.followers.look()
    assert len(rig.followers._followed) == 1
    monkeypatch.setattr(logs, "_KEEP_SECONDS", 0.0)
    rig.followers.look()
    assert rig.followers._followed == {}
    # Should it come back, it goes on where it was: nothing is told twice.
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    assert len(rig.sink.lines) == len([text for _, text in rig.sink.lines if "hello" in text]) * 2
    rig.write("a.log", FAILED)
    before = len(rig.sink.lines)
    rig.followers.look()
    assert len(rig.sink.lines) == before + 1


def test_another_run_goes_on_from_the_saved_place(tmp_path):
    first = Rig(tmp_path)
    first.write("a.log", FAILED)
    first.followers.attach(first.engine("one", "a.log"))
    first.followers.look()
    first.close()
    again = Rig(tmp_path, first.sink.positions)
    again.followers.attach(again.engine("one", "a.log"))
    again.followers.look()
    assert again.sink.lines == []
    again.write("a.log", FAILED)
    again.followers.look()
    assert len(again.sink.lines) == 1
    again.close()


def test_what_was_not_judged_is_read_again_by_another_run(tmp_path):
    """An agent that is killed between reading a failure and telling of it must not lose it."""
    first = Rig(tmp_path)
    first.write("a.log", "INFO hello\n")
    first.followers.attach(first.engine("one", "a.log"))
    first.followers.look()
    first.judged_at = float("-inf")
    first.write("a.log", FAILED)
    first.followers.look()
    first.write("a.log", FAILED)
    first.followers.look()
    first.close()
    again = Rig(tmp_path, first.sink.positions)
    again.followers.attach(again.engine("one", "a.log"))
    again.followers.look()
    texts = [text for _, text in again.sink.lines]
    assert texts == ["torch.OutOfMemoryError: CUDA out of memory."] * 2
    assert again.told == ["one"]
    again.close()


def test_a_place_is_saved_once_it_was_judged_also_in_a_flood_of_telling_lines(rig):
    path = str(rig.folder / "a.log")
    rig.judged_at = float("-inf")
    rig.write("a.log", FAILED)
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    rig.write("a.log", FAILED)
    rig.followers.look()
    assert path not in rig.sink.positions
    rig.judged_at = rig.followers._followed[path].unjudged[0]
    rig.followers.look()
    assert rig.sink.positions[path]["offset"] == len(FAILED)
    rig.judged_at = float("inf")
    rig.write("a.log", FAILED)
    rig.followers.look()
    assert rig.sink.positions[path]["offset"] == 3 * len(FAILED)


def test_what_nobody_judges_is_not_kept_for_ever(rig, monkeypatch):
    monkeypatch.setattr(logs, "_UNJUDGED_SECONDS", 0.0)
    rig.judged_at = float("-inf")
    rig.write("a.log", FAILED)
    rig.followers.attach(rig.engine("one", "a.log"))
    rig.followers.look()
    assert str(rig.folder / "a.log") in rig.sink.positions


@pytest.mark.parametrize(
    ("kind", "key"),
    [("file", "logs"), ("unit", "journal"), ("container", "containers"), ("pod", "pods")],
)
def test_what_is_switched_off_is_not_read(rig, kind, key):
    import dataclasses

    rig.write("a.log", FAILED)
    engine = rig.engine("one", "a.log")
    place = LogLocation(kind, "name", str(rig.folder / "a.log"))
    engine.found = dataclasses.replace(engine.found, logs=(place,))
    rig.followers.reconfigure(dataclasses.replace(Config().sources, **{key: False}))
    assert rig.followers.attach(engine) == [f"its log is not read: sources.{key} is off"]
    rig.followers.reconfigure(Config().sources)
    assert rig.followers.attach(engine) == []
