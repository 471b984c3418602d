"""Kill counts of cgroups: a tree of version 2 as files, and a real kill of version 1 elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from oomwatch.sources.memory_events import MemoryEvents

SLICE, ONE, TWO = "/llm.slice", "/llm.slice/one.service", "/llm.slice/two.service"


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count(root: Path, path: str, kills: int) -> None:
    folder = root / path.strip("/")
    folder.mkdir(parents=True, exist_ok=True)
    lines = f"low 0\nhigh 7\nmax 12\noom 3\noom_kill {kills}\noom_group_kill 0\n"
    (folder / "memory.events").write_text(lines)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for path in (SLICE, ONE, TWO):
        count(tmp_path, path, 5)
    return tmp_path


def test_growth_since_the_last_look(tree):
    events = MemoryEvents(root=str(tree))
    assert events.watch({"": ONE}) == ONE
    assert events.watch({"": ONE}) == ONE
    assert events.poll() == []
    count(tree, ONE, 7)
    assert events.look() is True
    count(tree, ONE, 8)
    assert events.poll() == [(ONE, 3)]
    assert events.poll() == []
    assert events.look() is False
    events.close()


def test_each_kill_is_claimed_once(tree):
    events = MemoryEvents(root=str(tree))
    events.watch({"": ONE})
    assert events.claim(ONE) is False
    count(tree, ONE, 7)
    assert [events.claim(ONE) for _ in range(3)] == [True, True, False]
    assert events.poll() == [(ONE, 2)]
    assert events.claim(TWO) is None
    assert events.claim(None) is None
    events.close()


def test_cgroup_that_went_with_its_count_is_told_by_its_parent(tree):
    events = MemoryEvents(root=str(tree))
    events.watch({"": ONE})
    events.watch({"": TWO})
    count(tree, TWO, 6)
    shutil.rmtree(tree / ONE.strip("/"))
    count(tree, SLICE, 5 + 1 + 2)  # one of the kills is that of the other service
    assert sorted(events.poll()) == [(ONE, 2), (TWO, 1)]
    assert events.claim(ONE) is True
    assert events.groups == (TWO,)
    events.close()


def test_cgroup_that_went_without_a_kill(tree):
    events = MemoryEvents(root=str(tree))
    events.watch({"": ONE})
    shutil.rmtree(tree / ONE.strip("/"))
    assert events.poll() == []
    assert events.groups == ()
    assert events.claim(ONE) is None
    # The same name again is another cgroup.
    count(tree, ONE, 1)
    assert events.watch({"": ONE}) == ONE
    assert events.poll() == []
    events.close()


def test_cgroups_that_come_and_go_leave_nothing_open(tree):
    before = descriptors()
    events = MemoryEvents(root=str(tree))
    for number in range(50):
        path = f"{SLICE}/run-{number}.scope"
        count(tree, path, 0)
        events.watch({"": path})
        if number % 2:
            shutil.rmtree(tree / path.strip("/"))
            events.look()
        else:
            events.forget(path)
    assert events.groups == ()
    assert descriptors() == before
    events.watch({"": ONE})
    events.close()
    assert descriptors() == before


@pytest.mark.parametrize(
    "paths",
    [{}, {"": "/gone.service"}, {"": "/../../outside"}, {"cpu": "/x"}, {"memory": "/docker/x"}],
)
def test_nothing_to_count(tree, paths):
    events = MemoryEvents(root=str(tree))
    assert events.watch(paths) is None
    assert events.descriptors == ()
    assert events.poll() == []


@pytest.mark.parametrize("text", ["", "oom_kill\n", "oom_kill x\n", "oom 3\n", "under_oom 0\n"])
def test_kernels_that_count_no_kills(tmp_path, text):
    folder = tmp_path / "memory" / "x"
    folder.mkdir(parents=True)
    (folder / "memory.oom_control").write_text(text)
    events = MemoryEvents(root=str(tmp_path))
    assert events.watch({"memory": "/x"}) is None


def test_both_versions_mounted_at_once(tmp_path):
    (tmp_path / "memory" / "v1").mkdir(parents=True)
    (tmp_path / "memory" / "v1" / "memory.oom_control").write_text("under_oom 0\noom_kill 4\n")
    (tmp_path / "memory" / "v1" / "memory.failcnt").write_text("17\n")
    count(tmp_path / "unified", "/v2", 1)
    events = MemoryEvents(root=str(tmp_path))
    assert events.watch({"memory": "/v1", "": "/v2"}) == "/v1"
    assert events.descriptors == ()  # version 1 wakes nobody
    events.look()
    assert events.limit_hits("/v1") == 17
    assert events.watch({"": "/v2"}) == "/v2"
    assert len(events.descriptors) == 1
    assert events.limit_hits("/v2") is None
    events.close()
