"""What keepers remember: Docker's own files, and commands that answer as systemctl and podman do."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from oomwatch.sources.cgroup import CgroupIdentity, identify
from oomwatch.sources.keeper import ask_keeper

ID = "ab" * 32
STATE = {
    "Running": False,
    "Pid": 0,
    "ExitCode": 137,
    "OOMKilled": True,
    "Error": "",
    "FinishedAt": "2026-03-01T10:00:00.5Z",
}


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture(autouse=True)
def only_our_programs(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    for name in ("docker", "podman", "systemctl"):
        program(folder, name, "exit 1")
    return folder


def docker(root: Path, **changes: object) -> CgroupIdentity:
    folder = root / "containers" / ID
    folder.mkdir(parents=True)
    row = {"ID": ID, "Name": "/vllm", "RestartCount": 2, "State": STATE | changes}
    (folder / "config.v2.json").write_text(json.dumps(row))
    return identify(f"/system.slice/docker-{ID}.scope")


def test_container_by_the_files_of_docker(tmp_path):
    kept = ask_keeper(docker(tmp_path), "vllm-8000", docker_root=str(tmp_path))
    assert kept is not None
    told = kept.exit
    assert (told.engine, told.where) == ("vllm-8000", "container vllm")
    assert (told.exit_code, told.signal, told.oom_killed) == (137, 9, True)
    assert told.at == 1772359200.5
    assert told.restarts == 2
    assert kept.pid is None


@pytest.mark.parametrize(
    "changes",
    [{"Running": True, "Pid": 7}, {"FinishedAt": "0001-01-01T00:00:00Z"}, {"FinishedAt": None}],
)
def test_container_that_has_not_ended(tmp_path, changes):
    identity = docker(tmp_path, **changes)
    assert ask_keeper(identity, "vllm-8000", docker_root=str(tmp_path)) is None


def test_container_of_podman(tmp_path, only_our_programs):
    rows = [{"Name": "sglang", "State": STATE | {"ExitCode": 1, "OOMKilled": False}}]
    (tmp_path / "answer.json").write_text(json.dumps(rows))
    program(only_our_programs, "podman", f'[ "$4" = {ID} ] && cat {tmp_path}/answer.json')
    identity = identify(f"/machine.slice/libpod-{ID}.scope/container")
    kept = ask_keeper(identity, "sglang-1", docker_root=str(tmp_path))
    assert kept is not None
    assert (kept.exit.exit_code, kept.exit.signal, kept.exit.oom_killed) == (1, None, False)


@pytest.mark.parametrize("answer", ["[]", "{}", "no json", "[7]", '[{"State": 3}]'])
def test_odd_answers(tmp_path, only_our_programs, answer):
    program(only_our_programs, "podman", f"echo '{answer}'")
    identity = identify(f"/machine.slice/libpod-{ID}.scope")
    assert ask_keeper(identity, "x", docker_root=str(tmp_path)) is None


def unit(folder: Path, **properties: object) -> None:
    lines = "\n".join(f"{name}={value}" for name, value in properties.items())
    program(folder, "systemctl", f'for unit; do :; done; [ "$unit" = v.service ] && echo "{lines}"')


SERVICE = CgroupIdentity("/system.slice/v.service", unit="v.service")


def test_unit_killed_for_memory(only_our_programs):
    ended = time.clock_gettime(time.CLOCK_MONOTONIC) - 3
    unit(
        only_our_programs,
        Result="oom-kill",
        NRestarts=4,
        ExecMainPID=4242,
        ExecMainCode=2,
        ExecMainStatus=9,
        ExecMainExitTimestampMonotonic=round(ended * 1e6),
    )
    kept = ask_keeper(SERVICE, "vllm-1")
    assert kept is not None
    assert kept.pid == 4242
    told = kept.exit
    assert (told.exit_code, told.signal, told.oom_killed, told.restarts) == (137, 9, True, 4)
    assert (told.where, told.detail) == ("unit v.service", "Result=oom-kill")
    assert told.at == pytest.approx(time.time() - 3, abs=60)


def test_unit_that_left_with_a_status(only_our_programs):
    unit(
        only_our_programs,
        Result="exit-code",
        ExecMainPID=4242,
        ExecMainCode=1,
        ExecMainStatus=3,
        ExecMainExitTimestampMonotonic=5,
    )
    kept = ask_keeper(SERVICE, "vllm-1")
    assert kept is not None
    assert (kept.exit.exit_code, kept.exit.signal, kept.exit.oom_killed) == (3, None, None)


def test_unit_that_runs_or_is_not_known(only_our_programs):
    unit(only_our_programs, Result="success", ExecMainPID=7, ExecMainExitTimestampMonotonic=0)
    assert ask_keeper(SERVICE, "vllm-1") is None
    assert ask_keeper(CgroupIdentity("/x", unit="other.service"), "vllm-1") is None
    (only_our_programs / "systemctl").unlink()
    assert ask_keeper(SERVICE, "vllm-1") is None


def test_no_keeper():
    assert ask_keeper(identify("/user.slice"), "vllm-1") is None
    assert ask_keeper(CgroupIdentity("/x", unit="--help; x.service"), "vllm-1") is None
