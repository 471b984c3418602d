"""Threads of the agent whose work fails."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oomwatch.agent import repeat
from oomwatch.agent.repeat import Repeat, keep_running


class Work:
    """Reads what is not there, then what is not there either; tells when it was done so often."""

    def __init__(self, folder: Path, times: int) -> None:
        self._folder = folder
        self._left = times
        self.done = threading.Event()

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self.done.set()
            return
        (self._folder / ("first" if self._left > 2 else "second")).read_bytes()


def run_to_its_end(work: Work) -> None:
    keep_running("search", work, threading.Event())


def repeat_it(work: Work) -> None:
    thread = Repeat("search", 0.0, work)
    thread.start()
    assert work.done.wait(30)
    thread.close()


@pytest.mark.parametrize("run", [run_to_its_end, repeat_it])
def test_a_fault_is_told_once_and_work_goes_on(
    run: Callable[[Work], None],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(repeat, "_AGAIN_SECONDS", 0.0)
    run(Work(tmp_path, times=9))
    told = [str(record.exc_info[1]) for record in caplog.records if record.exc_info]
    assert [Path(text.split("'")[1]).name for text in told] == ["first", "second"]
