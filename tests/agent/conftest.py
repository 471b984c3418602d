from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_agent import RunningAgent
from stand_in import StandIn


@pytest.fixture(scope="session")
def is_long() -> bool:
    """Whether the chaos is as long as it can be (`make chaos`), rather than a few seconds."""
    return os.environ.get("OOMWATCH_CHAOS") == "long"


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[..., RunningAgent]]:
    """Makes agents, which end with the test."""
    with contextlib.ExitStack() as stack:
        count = iter(range(100))

        def make(*engines: StandIn, **options: Any) -> RunningAgent:
            folder = tmp_path / f"agent{next(count)}"
            folder.mkdir()
            agent = RunningAgent(folder, *engines, **options)
            stack.callback(agent.close)
            return agent

        yield make


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[Callable[..., StandIn]]:
    """Starts stand-in engines on ports that are free; they end with the test."""
    with contextlib.ExitStack() as stack:

        def make(*, cgroup: Path | None = None, **state: Any) -> StandIn:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            engine = StandIn(tmp_path / f"engine{port}", port)
            engine.set(**state)
            stack.callback(engine.close)
            return engine.start(cgroup=cgroup)

        yield make


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB."""
    if os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("a small file system can be mounted by root alone")
    place = tmp_path / "disk"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], check=False, capture_output=True
    ).returncode:
        pytest.skip("a tmpfs may not be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)
