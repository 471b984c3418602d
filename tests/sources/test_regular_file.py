"""Files of other programs, of any time and in any state."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from oomwatch.cli import cli
from oomwatch.sources.regular_file import changed_at

FAILED = (
    "(EngineCore_DP0 pid=7) ERROR 11-29 10:05:00 [core.py:5] torch.OutOfMemoryError: CUDA out of "
    "memory.\n"
)
KILLED = "Nov 29 10:05:00 box kernel: Out of memory: Killed process 7 (python) total-vm:9kB\n"


@pytest.fixture
def far_off() -> Iterator[Path]:
    """A file of a time that a filesystem in memory can hold, unlike those on disks."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("there is no filesystem in memory")
    with tempfile.NamedTemporaryFile(dir=memory, suffix=".log") as file:
        path = Path(file.name)
        path.write_text(FAILED + KILLED)
        os.utime(path, (2**44, 2**44))
        yield path


def test_a_time_that_no_calendar_has_is_not_taken(far_off: Path) -> None:
    assert changed_at(far_off.stat()) <= time.time()
    os.utime(far_off, (1000, 1000))
    assert changed_at(far_off.stat()) == 1000


@pytest.mark.parametrize("option", ["--log", "--kernel-log"])
def test_a_file_of_such_a_time_is_judged(far_off: Path, option: str) -> None:
    done = CliRunner().invoke(cli, ["diagnose", option, str(far_off)], catch_exceptions=False)
    assert done.exit_code in {0, 1}
    assert "OUT OF MEMORY" in done.stdout
