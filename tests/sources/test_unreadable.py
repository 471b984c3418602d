"""What another user owns may be refused at any step; that is a reason to give, never a fault."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from oomwatch.sources.cgroup import CgroupIdentity
from oomwatch.sources.ended import find_containers, find_copies
from oomwatch.sources.installed import installed_version
from oomwatch.sources.output import find_logs
from oomwatch.sources.procfs import ProcessInfo, ProcessTree

NOBODY = 65534
IDENTITY = "ab" * 32


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that exists and that this process, for the time of the test, may not enter."""
    folder = tmp_path / "closed"
    for name in ("venv/lib/python3.11/site-packages", "log/pods", "log/containers", "containers"):
        (folder / name).mkdir(parents=True)
    docker = folder / "lib" / "docker" / "containers" / IDENTITY
    docker.mkdir(parents=True)
    (docker / f"{IDENTITY}-json.log").write_text("{}")
    folder.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        with contextlib.suppress(PermissionError):
            next(folder.iterdir())
            pytest.skip("nothing is closed to this user")
        yield folder
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_the_version_of_another_users_server(closed):
    process = ProcessInfo(pid=os.getpid(), cmdline=(f"{closed}/venv/bin/vllm", "serve"))
    assert installed_version([process], "vllm") is None


def test_the_log_of_a_container_says_why_it_is_not_read(closed):
    proc = Path(tempfile.mkdtemp())  # open to all, unlike pytest's folders
    try:
        (proc / "7" / "fd").mkdir(parents=True)
        (proc / "7" / "fd" / "1").symlink_to("pipe:[4711]")
        reason = _log_of_container(closed, proc)
    finally:
        shutil.rmtree(proc)
    assert reason is not None
    assert reason.endswith(f"{IDENTITY}-json.log may not be read by this user")


def _log_of_container(closed: Path, proc: Path) -> str | None:
    process = ProcessInfo(
        pid=7, ppid=1, identity=CgroupIdentity(f"/docker/{IDENTITY}", container=IDENTITY)
    )
    (log,) = find_logs(process, ProcessTree([process]), proc_root=str(proc), var_root=str(closed))
    assert (log.kind, log.name, log.path) == ("container", IDENTITY, None)
    return log.reason


def test_dockers_folder(closed, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    denied: list[str] = []
    assert find_containers(str(closed), denied) == []
    assert denied == [f"{closed}/containers may not be read"]


def test_the_folder_of_copies(closed):
    assert find_copies(str(closed)) == []
