"""Logs of containers and pods: the runtimes' file trees, and their commands as scripts on PATH."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from oomwatch.errors import NoDataError, SourceUnavailable, UsageError
from oomwatch.sources import containers
from oomwatch.sources.containers import read_container, read_pod

ID = "4f1c" * 16
STARTED = 1741759756.5  # 2025-03-12T06:09:16.5Z
COMMAND = ("vllm", "serve", "/models/chat", "--max-model-len", "32768")


@pytest.fixture(autouse=True)
def no_runtimes(monkeypatch, tmp_path):
    """Only what a test puts there: the host's own runtimes are out of sight."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("cat", "sh"):
        (bin_folder / tool).symlink_to(f"/bin/{tool}")
    monkeypatch.setenv("PATH", str(bin_folder))
    for root in ("DOCKER_ROOT", "PODMAN_ROOT", "NERDCTL_ROOT", "PODS_ROOT"):
        monkeypatch.setattr(containers, root, str(tmp_path / root))
    for function in (read_container, read_pod):
        defaults = {
            name: str(tmp_path / "absent") if name.endswith("_root") else value
            for name, value in (function.__kwdefaults__ or {}).items()
        }
        monkeypatch.setattr(function, "__kwdefaults__", defaults)
    return bin_folder


def json_line(second: int, text: str) -> str:
    return json.dumps({"log": text + "\n", "stream": "stderr", "time": f"2025-03-12T06:09:{second:02d}.000000703Z"}) + "\n"  # fmt: skip


def make_docker(
    root: Path, *, name: str = "/vllm", started: str = "2025-03-12T06:09:16.5Z"
) -> Path:
    folder = root / "containers" / ID
    folder.mkdir(parents=True)
    config = {
        "ID": ID,
        "Name": name,
        "Path": COMMAND[0],
        "Args": list(COMMAND[1:]),
        "Config": {"Env": ["VLLM_USE_V1=1", "EMPTY=", "odd"], "Image": "vllm/vllm-openai"},
        "State": {"StartedAt": started, "OOMKilled": True},
    }
    (folder / "config.v2.json").write_text(json.dumps(config))
    (folder / f"{ID}-json.log.2.gz").write_bytes(gzip.compress(json_line(10, "oldest").encode()))
    (folder / f"{ID}-json.log.1").write_text(json_line(12, "older") + json_line(17, "rotated"))
    (folder / f"{ID}-json.log").write_text(json_line(18, "newest"))
    return folder


@pytest.mark.parametrize("name", ["vllm", ID, ID[:12]])
def test_docker_files_since_the_last_start(tmp_path, name):
    folder = make_docker(tmp_path / "docker")
    log = read_container(name, docker_root=str(tmp_path / "docker"))
    lines = list(log.lines)
    assert [(line.text, line.stream) for line in lines] == [
        ("rotated", "stderr"),
        ("newest", "stderr"),
    ]
    assert lines[0].source == str(folder / f"{ID}-json.log.1")
    assert lines[0].number == 2
    assert (log.name, log.command, log.zone) == ("vllm", COMMAND, "UTC")
    assert log.env == {"VLLM_USE_V1": "1", "EMPTY": ""}
    assert log.origin == str(folder / f"{ID}-json.log")


def test_docker_files_of_all_starts(tmp_path):
    make_docker(tmp_path)
    log = read_container("vllm", docker_root=str(tmp_path), last_start=False)
    assert [line.text for line in log.lines] == ["oldest", "older", "rotated", "newest"]


def test_docker_container_that_never_started_is_read_whole(tmp_path):
    make_docker(tmp_path, started="0001-01-01T00:00:00Z")
    lines = read_container("vllm", docker_root=str(tmp_path)).lines
    assert [line.text for line in lines][-1] == "newest"


def test_podman_files(tmp_path):
    base = tmp_path / "overlay-containers"
    data = base / ID / "userdata"
    data.mkdir(parents=True)
    (base / "containers.json").write_text(
        json.dumps([{"id": ID, "names": ["vllm"]}, 7, {"id": "../x"}])
    )
    process = {"args": list(COMMAND), "env": ["A=b"]}
    (data / "config.json").write_text(json.dumps({"process": process}))
    (data / "ctr.log").write_text("2025-03-12T06:09:16.1+00:00 stderr F one\n")
    log = read_container("vllm", podman_root=str(tmp_path))
    (line,) = log.lines
    assert (line.text, line.stream, line.at) == ("one", "stderr", STARTED - 0.4)
    assert (log.command, log.env) == (COMMAND, {"A": "b"})


def test_nerdctl_files(tmp_path):
    names = tmp_path / "1935db59" / "names" / "default"
    names.mkdir(parents=True)
    (names / "vllm").write_text(ID)
    folder = tmp_path / "1935db59" / "containers" / "default" / ID
    folder.mkdir(parents=True)
    (folder / f"{ID}-json.log").write_text(json_line(16, "one"))
    log = read_container("vllm", nerdctl_root=str(tmp_path))
    assert [line.text for line in log.lines] == ["one"]
    assert log.command is None


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b'{"Config": 7, "State": 8, "Args": 9}']
)
def test_odd_configuration_files_do_not_stop_the_search(tmp_path, content):
    odd = tmp_path / "containers" / "0000"
    odd.mkdir(parents=True)
    (odd / "config.v2.json").write_bytes(content)
    make_docker(tmp_path)
    log = read_container("vllm", docker_root=str(tmp_path))
    assert log.name == "vllm"


def put_script(bin_folder: Path, name: str, body: str) -> None:
    script = bin_folder / name
    script.write_text("#!/bin/sh\n" + body)
    script.chmod(0o755)


INSPECT = json.dumps([{"Id": ID, "Name": "/vllm", "Path": COMMAND[0], "Args": list(COMMAND[1:]), "State": {"StartedAt": "2025-03-12T06:09:16.5Z"}}])  # fmt: skip
DOCKER = f"""
case "$1 $*" in
inspect*) cat <<'END'
{INSPECT}
END
;;
"logs logs --timestamps --since 1741759756.500000000 vllm")
    echo '2025-03-12T06:09:17.000000703Z one'
    echo '2025-03-12T06:09:18.000000703Z ValueError: two' >&2 ;;
*) exit 3 ;;
esac
"""


def test_docker_command(no_runtimes):
    put_script(no_runtimes, "docker", DOCKER)
    log = read_container("vllm")
    assert [(line.text, line.at) for line in log.lines] == [
        ("one", pytest.approx(STARTED + 0.5)),
        ("ValueError: two", pytest.approx(STARTED + 1.5)),
    ]
    assert (log.name, log.command, log.origin) == ("vllm", COMMAND, "docker logs")


def test_podman_command_where_docker_does_not_know_it(no_runtimes):
    put_script(no_runtimes, "docker", "echo 'Error: No such container' >&2; exit 1")
    put_script(no_runtimes, "podman", DOCKER)
    log = read_container("vllm")
    assert log.origin == "podman logs"
    assert len(list(log.lines)) == 2


def test_container_that_logged_nothing(no_runtimes):
    body = f"case $1 in inspect) cat <<'END'\n{INSPECT}\nEND\n;; esac"
    put_script(no_runtimes, "docker", body)
    with pytest.raises(NoDataError, match="container vllm: it has logged nothing"):
        read_container("vllm")


@pytest.mark.parametrize("answer", ["", "[]", "{}", "[7]", "[{}", '[{"State": []}]'])
def test_odd_answers_of_docker(no_runtimes, answer):
    put_script(no_runtimes, "docker", f"case $1 in inspect) echo '{answer}';; *) exit 1;; esac")
    with pytest.raises(SourceUnavailable, match="give its log as a file"):
        read_container("vllm")


def test_unknown_container_is_one_line_with_a_hint():
    with pytest.raises(SourceUnavailable) as caught:
        read_container("vllm")
    assert "\n" not in str(caught.value)
    assert "--log" in str(caught.value)


@pytest.mark.parametrize("name", ["--help", "-f", "", "a b", "a/b", "../x", "a\x1b[31m"])
def test_what_is_no_container(name):
    with pytest.raises(UsageError) as caught:
        read_container(name)
    assert str(caught.value).isprintable()


# ------------------------------------------------------------------------------- pods
def make_pod(root: Path, uid: str = "8d2f") -> Path:
    folder = root / f"llm_chat-0_{uid}" / "server"
    folder.mkdir(parents=True)
    (folder / "0.log").write_text("2025-03-12T06:09:16.1Z stderr F first start\n")
    rotated = gzip.compress(b"2025-03-12T06:09:17.1Z stderr F second start\n")
    (folder / "1.log.20250312-060917.gz").write_bytes(rotated)
    (folder / "1.log.20250312-060918").write_text("2025-03-12T06:09:18.1Z stderr F goes on\n")
    (folder / "1.log").write_text(
        "2025-03-12T06:09:19.1Z stderr P ends \n2025-03-12T06:09:19.2Z stderr F here\n"
    )
    return folder


def test_pod_files_of_the_last_start(tmp_path):
    folder = make_pod(tmp_path)
    log = read_pod("llm/chat-0", pods_root=str(tmp_path))
    assert [line.text for line in log.lines] == ["second start", "goes on", "ends here"]
    assert (log.name, log.origin) == ("llm/chat-0/server", str(folder / "1.log"))


def test_pod_files_of_all_starts(tmp_path):
    make_pod(tmp_path)
    lines = read_pod("llm/chat-0", pods_root=str(tmp_path), last_start=False).lines
    assert [line.text for line in lines] == ["first start", "second start", "goes on", "ends here"]


NO_DAEMON = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?"
NONE_SUCH = "Error response from daemon: No such container: vllm"


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "no container runtime is seen on this host"),
        ({"docker": NO_DAEMON}, r"no daemon is running \(docker\)"),
        ({"docker": NONE_SUCH}, "nor known to their commands"),
        ({"docker": NO_DAEMON, "podman": 'no container with name or ID "vllm"'}, "nor known to"),
        ({"docker": "context deadline exceeded"}, "docker says: context deadline exceeded"),
    ],
)
def test_a_missing_runtime_is_not_called_a_missing_container(no_runtimes, tmp_path, said, reason):
    for tool, words in said.items():
        put_script(no_runtimes, tool, f"echo '{words}' >&2; exit 1")
    roots = {f"{tool}_root": str(tmp_path / tool) for tool in ("docker", "podman", "nerdctl")}
    with pytest.raises(SourceUnavailable, match=reason):
        read_container("vllm", **roots)


def test_kubectl_without_a_cluster(no_runtimes):
    words = "The connection to the server localhost:8080 was refused"
    put_script(no_runtimes, "kubectl", f'echo "{words}" >&2; exit 1')
    with pytest.raises(SourceUnavailable, match="knows of no cluster here"):
        read_pod("llm/chat-0")


def test_pod_that_was_made_anew(tmp_path):
    old = make_pod(tmp_path, "0001")
    new = make_pod(tmp_path, "0000")
    os.utime(old.parent, (1, 1))
    log = read_pod("llm/chat-0", pods_root=str(tmp_path))
    assert log.origin == str(new / "1.log")


def test_pod_of_several_containers(tmp_path):
    folder = make_pod(tmp_path)
    proxy = folder.parent / "proxy"
    proxy.mkdir()
    (proxy / "0.log").write_text("2025-03-12T06:09:16.1Z stdout F x\n")
    log = read_pod("llm/chat-0", pods_root=str(tmp_path))
    assert log.notes == ("container server of the pod; it also has proxy",)
    other = read_pod("llm/chat-0/proxy", pods_root=str(tmp_path))
    assert [line.text for line in other.lines] == ["x"]


SPEC = json.dumps({"spec": {"containers": [{"name": "server", "command": list(COMMAND[:2]), "args": list(COMMAND[2:]), "env": [{"name": "A", "value": "b"}, {"name": "SECRET", "valueFrom": {}}]}, {"name": "proxy"}]}})  # fmt: skip
KUBECTL = f"""
case "$*" in
"get pod chat-0 --namespace llm -o json") cat <<'END'
{SPEC}
END
;;
"logs chat-0 --namespace llm -c server --timestamps") ;;
"logs chat-0 --namespace llm -c server --timestamps --previous")
    echo '2025-03-12T06:09:17.000000703Z RuntimeError: before the restart' ;;
*) echo "error: unexpected $*" >&2; exit 1 ;;
esac
"""


def test_kubectl_reads_the_start_before_where_this_one_wrote_nothing(no_runtimes):
    put_script(no_runtimes, "kubectl", KUBECTL)
    log = read_pod("llm/chat-0")
    assert [line.text for line in log.lines] == ["RuntimeError: before the restart"]
    assert (log.command, log.env, log.origin) == (COMMAND, {"A": "b"}, "kubectl logs")
    assert log.notes == ("container server of the pod; it also has proxy",)


def test_what_kubectl_complains_about(no_runtimes):
    put_script(no_runtimes, "kubectl", 'echo "Error from server (NotFound)" >&2; exit 1')
    with pytest.raises(SourceUnavailable, match=r"kubectl says: Error from server \(NotFound\)"):
        read_pod("llm/chat-0")


def test_unknown_pod():
    with pytest.raises(SourceUnavailable, match="run this on its node"):
        read_pod("llm/chat-0")


@pytest.mark.parametrize("name", ["chat-0", "", "a/b/c/d", "-n/x", "a/../b", "a/\x1b[31m"])
def test_what_is_no_pod(name):
    with pytest.raises(UsageError) as caught:
        read_pod(name)
    assert str(caught.value).isprintable()
