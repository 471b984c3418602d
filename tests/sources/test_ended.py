"""Engines that ended: what Docker, Podman, systemd and `oomwatch run` leave of them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.sources.ended import find_containers, find_copies, find_ended, find_units, signal_of

SERVE = ["serve", "/models/m", "--max-model-len", "2048"]


def row(**changes) -> dict:
    new = changes.get("State", {})
    state = {
        "Running": False,
        "Pid": 0,
        "OOMKilled": True,
        "ExitCode": 137,
        "Error": "",
        "StartedAt": "2026-11-29T10:00:00.5Z",
        "FinishedAt": "2026-11-29T11:00:00.25Z",
    }
    return {
        "ID": "ab" * 32,
        "Name": "/chat",
        "Path": "vllm",
        "Args": SERVE,
        "RestartCount": 4,
        "Config": {"Image": "vllm/vllm-openai:v0.11.0"},
        "State": state,
    } | (changes | ({"State": state | new} if isinstance(new, dict) else {}))


def docker(root: Path, *rows: dict | str) -> str:
    for number, one in enumerate(rows):
        folder = root / "containers" / f"{number:064x}"
        folder.mkdir(parents=True)
        text = one if isinstance(one, str) else json.dumps(one)
        (folder / "config.v2.json").write_text(text)
    return str(root)


def program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def path_of(tmp_path, monkeypatch) -> Path:
    """A folder of programs that is all of PATH, but for the shell's own."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


# ---------------------------------------------------------------- containers
@pytest.mark.usefixtures("path_of")
def test_how_a_container_ended(tmp_path):
    (ended,) = find_containers(docker(tmp_path / "docker", row()), [])
    assert (ended.kind, ended.name, ended.engine, ended.version) == (
        "container",
        "chat",
        "vllm",
        "0.11.0",
    )
    assert ended.command == ("vllm", *SERVE)
    assert ended.exit is not None
    assert ended.exit.at == ended.at == 1795950000.25
    assert (ended.exit.exit_code, ended.exit.signal, ended.exit.oom_killed) == (137, 9, True)
    assert ended.exit.restarts == 4
    assert ended.exit.where == "container chat"


@pytest.mark.parametrize(
    ("image", "words", "engine"),
    [
        ("registry/vllm-openai", ["/start.sh", "--model", "m"], "vllm"),
        ("lmsysorg/sglang:v0.5", ["python3", "-m", "sglang.launch_server"], "sglang"),
        ("base", ["bash", "-c", "vllm serve m"], "vllm"),
        ("nginx", ["nginx", "-g", "daemon off;"], None),
    ],
)
@pytest.mark.usefixtures("path_of")
def test_engines_are_told_by_command_or_image(tmp_path, image, words, engine):
    one = row(Path=words[0], Args=words[1:], Config={"Image": image})
    root = docker(tmp_path / "docker", one)
    assert [one.engine for one in find_containers(root, [])] == ([engine] if engine else [])


@pytest.mark.parametrize(
    "one",
    [
        row(State={"Running": True, "Pid": 77}),
        row(State={"FinishedAt": "0001-01-01T00:00:00Z"}),
        row(State={"FinishedAt": None}),
        row(State={"FinishedAt": "yesterday"}),
        row(State=[]),
        row(Path=None, Args=None, Config=None),
        "{",
        "[]",
        '{"State": 7, "Config": [1], "Args": 3}',
    ],
)
@pytest.mark.usefixtures("path_of")
def test_what_runs_never_ran_or_makes_no_sense_is_left_out(tmp_path, one):
    assert find_containers(docker(tmp_path / "docker", one), []) == []


@pytest.mark.usefixtures("path_of")
def test_one_that_waits_for_its_restart_counts(tmp_path):
    root = docker(tmp_path / "docker", row(State={"Running": True, "Restarting": True}))
    assert len(find_containers(root, [])) == 1


@pytest.mark.parametrize("tool", ["docker", "podman"])
def test_the_runtime_is_asked_where_there_are_no_files(tmp_path, path_of, tool):
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps([row(Id="cd" * 32)]) + "\n")
    program(
        path_of,
        tool,
        f'case "$1" in ps) echo {"cd" * 32};; inspect) while read -r l; do echo "$l"; done '
        f"< {answer};; esac",
    )
    assert [one.name for one in find_containers(str(tmp_path / "nothing"), [])] == ["chat"]


def test_files_that_were_read_are_enough(tmp_path, path_of):
    program(path_of, "docker", f"echo asked > {tmp_path}/asked; exit 1")
    root = docker(tmp_path / "docker", row())
    assert len(find_containers(root, [])) == 1
    assert not (tmp_path / "asked").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.usefixtures("path_of")
def test_files_that_may_not_be_read_are_asked_for(tmp_path):
    root = docker(tmp_path / "docker", row())
    (tmp_path / "docker" / "containers").chmod(0)
    denied: list[str] = []
    assert find_containers(root, denied) == []
    assert "may not be read" in denied[0]
    (tmp_path / "docker" / "containers").chmod(0o700)


def test_a_runtime_that_refuses_says_so(tmp_path, path_of):
    program(path_of, "podman", "echo 'permission denied while trying to connect' >&2; exit 1")
    denied: list[str] = []
    assert find_containers(str(tmp_path), denied) == []
    assert denied == ["podman may not be asked (permission denied while trying to connect)"]


# ---------------------------------------------------------------- services
UNITS = """Id=vllm.service
ActiveState=failed
SubState=failed
Result=oom-kill
NRestarts=2
ExecMainCode=2
ExecMainStatus=9
ExecMainExitTimestampMonotonic={soon}
ExecStart={{ path=/opt/v/bin/vllm ; argv[]=/opt/v/bin/vllm serve /models/m --max-num-seqs 8 ; \
ignore_errors=no ; start_time=[n/a] ; stop_time=[n/a] ; pid=0 ; code=(null) ; status=0/0 }}

Id=sglang.service
ActiveState=activating
SubState=auto-restart
Result=exit-code
NRestarts=11
ExecMainCode=1
ExecMainStatus=1
ExecMainExitTimestampMonotonic={soon}
ExecStart={{ path=/usr/bin/python3 ; argv[]=/usr/bin/python3 -m sglang.launch_server ; \
ignore_errors=no ; start_time=[n/a] }}

Id=running.service
ActiveState=active
SubState=running
ExecMainExitTimestampMonotonic=0
ExecStart={{ path=/opt/v/bin/vllm ; argv[]=/opt/v/bin/vllm serve m ; ignore_errors=no ; }}

Id=never.service
ActiveState=inactive
ExecMainExitTimestampMonotonic=0
ExecStart={{ path=/opt/v/bin/vllm ; argv[]=/opt/v/bin/vllm serve m ; ignore_errors=no ; }}

Id=cron.service
ActiveState=failed
ExecMainExitTimestampMonotonic={soon}
ExecStart={{ path=/usr/sbin/cron ; argv[]=/usr/sbin/cron -f ; ignore_errors=no ; }}
"""


def systemctl(tmp_path: Path, path_of: Path, text: str) -> str:
    (tmp_path / "units").write_text(text)
    program(path_of, "systemctl", f'while IFS= read -r l; do echo "$l"; done < {tmp_path}/units')
    return str(tmp_path)


def test_services_that_failed_or_wait_for_their_restart(tmp_path, path_of):
    soon = int((time.clock_gettime(time.CLOCK_MONOTONIC) - 0.001) * 1e6)
    root = systemctl(tmp_path, path_of, UNITS.format(soon=soon))
    killed, failed = find_units(root, [])
    assert (killed.name, killed.engine) == ("vllm.service", "vllm")
    assert killed.command is not None
    assert killed.command[-2:] == ("--max-num-seqs", "8")
    assert killed.exit is not None
    assert (killed.exit.exit_code, killed.exit.signal, killed.exit.oom_killed) == (137, 9, True)
    assert abs(killed.at - time.time()) < 30
    assert failed.exit is not None
    assert (failed.name, failed.exit.exit_code, failed.exit.signal) == ("sglang.service", 1, None)
    assert (failed.exit.restarts, failed.exit.detail) == (11, "Result=exit-code")


def test_without_systemd_nobody_is_asked(tmp_path, path_of):
    systemctl(tmp_path, path_of, UNITS.format(soon=1))
    assert find_units(str(tmp_path / "not-running"), []) == []


def test_systemd_that_refuses_is_said(tmp_path, path_of):
    program(path_of, "systemctl", "echo 'Failed to connect to bus' >&2; exit 1")
    denied: list[str] = []
    assert find_units(str(tmp_path), denied) == []
    assert denied == ["systemd may not be asked (Failed to connect to bus)"]


# ---------------------------------------------------------------- copies, and all of them
def test_copies_of_this_user_only(tmp_path):
    (tmp_path / "oomwatch-run-a.log").write_text("x")
    (tmp_path / "oomwatch-run-empty.log").write_text("")
    (tmp_path / "other.log").write_text("x")
    (tmp_path / "oomwatch-run-link.log").symlink_to(tmp_path / "other.log")
    assert [one.name for one in find_copies(str(tmp_path))] == [
        str(tmp_path / "oomwatch-run-a.log")
    ]


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"exit": {}}', '{"exit": null, "engine": 1}'])
def test_an_end_beside_a_copy_that_cannot_be_understood_is_passed_over(tmp_path, damage):
    (tmp_path / "oomwatch-run-a.log").write_text("x")
    (tmp_path / "oomwatch-run-a.json").write_text(damage)
    assert [one.exit for one in find_copies(str(tmp_path))] == [None]


@pytest.mark.usefixtures("path_of")
def test_the_last_to_end_comes_first(tmp_path):
    copy = tmp_path / "oomwatch-run-a.log"
    copy.write_text("x")
    os.utime(copy, (1795950100, 1795950100))
    root = docker(
        tmp_path / "docker",
        row(Name="/old", State={"FinishedAt": "2026-11-28T11:00:00Z"}),
        row(ID="ef" * 32),
    )
    found = find_ended(docker_root=root, systemd_root=str(tmp_path / "no"), copies=str(tmp_path))
    assert [one.name for one in found] == [str(copy), "chat", "old"]


@pytest.mark.parametrize(
    ("status", "signal"), [(137, 9), (139, 11), (1, None), (0, None), (255, None), (None, None)]
)
def test_the_signal_of_a_status(status, signal):
    assert signal_of(status) == signal


PATHS = [None, "vllm", "", "\x1b[31m", 7]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(
    changes=st.fixed_dictionaries(
        {"State": JSON, "Config": JSON, "Args": JSON, "Name": JSON, "Path": st.sampled_from(PATHS)}
    )
)
def test_no_file_of_a_container_raises(tmp_path_factory, changes):
    one = row(**changes)
    root = docker(tmp_path_factory.mktemp("d") / "docker", one)
    assert len(find_containers(root, [])) <= 1


@settings(max_examples=60, deadline=None)
@given(block=st.text(max_size=200), status=st.text(max_size=8))
def test_no_answer_of_systemd_raises(block, status):
    from oomwatch.sources.ended import _from_properties

    known = UNITS.split("\n\n", 1)[0].format(soon=5)
    assert _from_properties(block) is None
    _from_properties(known.replace("ExecMainStatus=9", f"ExecMainStatus={status}") + block)
