from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.sources.descriptors import Listening, listeners, read_target, socket_inodes
from oomwatch.sources.procfs import (
    ProcessInfo,
    ProcessTree,
    glance_at,
    hidepid,
    list_processes,
    look_again,
    read_environment,
    read_host,
    read_process,
)
from oomwatch.units import MIB

IDLE = "import sys, time; print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def spawn() -> Iterator:
    children = []

    def start(script: str, *arguments: str, **options) -> subprocess.Popen:
        options = {"stdout": subprocess.PIPE} | options
        child = subprocess.Popen([sys.executable, "-c", script, *arguments], **options)
        children.append(child)
        if child.stdout:
            assert child.stdout.readline() == b"ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


def tree(folder: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


STAT = "{pid} ({comm}) S {ppid} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 4 0 250 0 0 0\n"
STATUS = (
    "Name:\t{comm}\nUid:\t1000\t1000\t1000\t1000\nVmRSS:\t  2048 kB\nRssAnon:\t 1024 kB\n"
    "RssFile:\t 768 kB\nRssShmem:\t 256 kB\nVmSwap:\t 12 kB\n"
)


def fake_process(pid: int, ppid: int, comm: str, cmdline: bytes, cgroup: str) -> dict:
    return {
        f"{pid}/stat": STAT.format(pid=pid, ppid=ppid, comm=comm),
        f"{pid}/status": STATUS.format(comm=comm),
        f"{pid}/cmdline": cmdline.decode("latin-1"),
        f"{pid}/cgroup": cgroup,
    }


# ---------------------------------------------------------------- trees on disk
def test_everything_of_one_process(tmp_path):
    root = tree(
        tmp_path,
        {
            "stat": "cpu 1 2 3\nbtime 1700000000\n",
            **fake_process(
                700,
                1,
                "VLLM::EngineCor",
                b"VLLM::EngineCore" + b" " * 40 + b"\0" * 90,
                "0::/system.slice/vllm.service\n",
            ),
        },
    )
    process = read_process(700, proc_root=root)
    assert process is not None
    assert process.cmdline == ("VLLM::EngineCore",)
    assert process.title == "VLLM::EngineCore"
    assert (process.pid, process.ppid, process.comm, process.state) == (
        700,
        1,
        "VLLM::EngineCor",
        "S",
    )
    assert process.rss_bytes == 2 * MIB
    assert process.shared_bytes == 1 * MIB
    assert process.swap_bytes == 12 * 1024
    assert process.uid == 1000
    assert process.started_at == pytest.approx(
        1700000000 + 250 / os.sysconf("SC_CLK_TCK"), abs=1e-3
    )
    sample = process.sample(at=5.0)
    assert (sample.at, sample.unit, sample.cgroup) == (
        5.0,
        "vllm.service",
        "/system.slice/vllm.service",
    )


def test_a_search_reads_no_memory_and_a_glance_no_owner(tmp_path):
    root = tree(tmp_path, fake_process(7, 3, "x", b"x\0y\0", "0::/a.service\n"))
    listed = list_processes(proc_root=root).get(7)
    glance = glance_at(7, proc_root=root)
    assert listed is not None
    assert glance is not None
    assert (listed.ppid, listed.cmdline, listed.rss_bytes) == (3, ("x", "y"), None)
    assert listed.identity is not None
    assert listed.identity.unit == "a.service"
    assert (glance.ppid, glance.cmdline, glance.rss_bytes) == (3, ("x", "y"), None)
    assert glance_at(8, proc_root=root) is None


def test_the_same_process_is_looked_at_again(tmp_path):
    root = tree(tmp_path, fake_process(7, 3, "python3", b"vllm\0", "0::/a.service\n"))
    known = list_processes(proc_root=root).get(7)
    assert known is not None
    assert look_again(known, proc_root=root) == read_process(7, proc_root=root)
    tree(tmp_path, {"7/status": STATUS.format(comm="python3").replace("2048", "4096")})
    again = look_again(known, proc_root=root)
    assert again is not None
    assert again.rss_bytes == 4 * MIB
    tree(tmp_path, fake_process(7, 1, "VLLM::Worker", b"VLLM::Worker\0", "0::/\n"))
    renamed = look_again(known, proc_root=root)
    assert renamed is not None
    assert (renamed.comm, renamed.title, renamed.ppid) == ("VLLM::Worker", "VLLM::Worker", 1)
    tree(tmp_path, {"7/stat": STAT.format(pid=7, ppid=3, comm="python3").replace("250", "251")})
    assert look_again(known, proc_root=root) is None
    (tmp_path / "7" / "stat").unlink()
    assert look_again(known, proc_root=root) is None


@pytest.mark.parametrize("blank", [b"", b"\0\0", b"  \0"])
def test_a_command_line_of_nothing_has_no_arguments(tmp_path, blank):
    process = read_process(7, proc_root=tree(tmp_path, fake_process(7, 3, "x", blank, "0::/\n")))
    assert process is not None
    assert process.cmdline == ()


def test_a_command_line_longer_than_one_read(spawn):
    child = spawn(IDLE, "x" * 100_000, "last")
    process = read_process(child.pid)
    assert process is not None
    assert process.cmdline is not None
    assert process.cmdline[-2:] == ("x" * 100_000, "last")


@pytest.mark.parametrize("comm", ["a) S 99 (b", "()", ") (", "x y z", "((("])
def test_names_that_imitate_the_stat_format(tmp_path, comm):
    root = tree(tmp_path, fake_process(7, 3, comm, b"x\0", "0::/\n"))
    process = read_process(7, proc_root=root)
    assert process is not None
    assert (process.comm, process.ppid, process.state) == (comm, 3, "S")


def test_missing_files_are_unknown_and_never_zero(tmp_path):
    root = tree(tmp_path, {"9/stat": STAT.format(pid=9, ppid=1, comm="x")})
    process = read_process(9, proc_root=root)
    assert process is not None
    assert process.rss_bytes is None
    assert process.shared_bytes is None
    assert process.cmdline is None
    assert process.started_at is None
    assert read_process(10, proc_root=root) is None
    assert list(list_processes(proc_root=str(tmp_path / "none"))) == []


def test_control_characters_of_names_and_arguments(tmp_path):
    root = tree(tmp_path, fake_process(7, 3, "a\x1b[31m", b"run\0\x1b]0;x\x07\nb\0", "0::/\n"))
    process = read_process(7, proc_root=root)
    assert process is not None
    assert process.title.isprintable()
    assert process.comm is not None
    assert process.comm.isprintable()


def test_kernel_threads_are_left_out(tmp_path):
    root = tree(
        tmp_path,
        fake_process(2, 0, "kthreadd", b"", "0::/\n")
        | fake_process(30, 2, "kworker/0:1", b"", "0::/\n")
        | fake_process(31, 1, "sh", b"sh\0", "0::/\n")
        | {"self/mountinfo": "", "version": "x"},
    )
    assert [process.pid for process in list_processes(proc_root=root)] == [31]


@given(st.binary(max_size=200), st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_bytes_are_survived(tmp_path_factory, stat_bytes, status_bytes):
    folder = tmp_path_factory.mktemp("proc")
    (folder / "5").mkdir()
    (folder / "5" / "stat").write_bytes(stat_bytes)
    (folder / "5" / "status").write_bytes(status_bytes)
    (folder / "5" / "cmdline").write_bytes(status_bytes)
    process = read_process(5, proc_root=str(folder))
    assert process is None or process.pid == 5


def test_tree_of_processes():
    processes = ProcessTree(
        ProcessInfo(pid, ppid) for pid, ppid in ((1, 0), (10, 1), (11, 10), (12, 10), (13, 12))
    )
    assert [process.pid for process in processes.children(10)] == [11, 12]
    assert [process.pid for process in processes.descendants(10)] == [11, 12, 13]
    assert [process.pid for process in processes.ancestors(13)] == [12, 10, 1]
    loop = ProcessTree([ProcessInfo(1, 2), ProcessInfo(2, 1)])
    assert [process.pid for process in loop.descendants(1)] == [2]
    assert len(loop.ancestors(1)) == 2


def test_hidepid_of_the_mount(tmp_path, monkeypatch):
    mount = "24 29 0:22 / /proc rw,nosuid - proc proc rw,hidepid={}\n"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for option, expected in (("invisible", "invisible"), ("2", "2"), ("0", None), ("off", None)):
        root = tree(tmp_path / option, {"self/mountinfo": mount.format(option)})
        assert hidepid(proc_root=root) == expected
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert hidepid(proc_root=str(tmp_path / "2")) is None


def test_host_memory(tmp_path):
    root = tree(
        tmp_path,
        {
            "meminfo": "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\n",
            "vmstat": "nr_free_pages 5\noom_kill 3\n",
        },
    )
    host = read_host(proc_root=root, at=1.0)
    assert (host.mem_total_bytes, host.mem_available_bytes) == (1000 * 1024, 400 * 1024)
    assert host.swap_used_bytes == 30 * 1024
    nothing = read_host(proc_root=str(tmp_path / "none"), at=1.0)
    assert nothing.mem_total_bytes is None
    assert nothing.swap_used_bytes is None


# ---------------------------------------------------------------- real processes
def test_real_child(spawn):
    before = time.time()
    child = spawn("x = bytearray(40 << 20); " + IDLE, env=os.environ | {"VLLM_TEST": "a=b"})
    process = read_process(child.pid)
    assert process is not None
    assert process.ppid == os.getpid()
    assert process.cmdline is not None
    assert process.cmdline[1] == "-c"
    assert process.rss_bytes is not None
    assert process.rss_bytes > 40 * MIB
    assert process.started_at is not None
    assert abs(process.started_at - before) < 30
    assert (read_environment(child.pid) or {})["VLLM_TEST"] == "a=b"
    assert child.pid in {process.pid for process in list_processes()}
    assert child.pid in {process.pid for process in list_processes().children(os.getpid())}


def test_real_child_that_renames_itself(spawn):
    if ctypes.CDLL(None).prctl is None:
        pytest.skip("no prctl")
    child = spawn(
        "import ctypes; ctypes.CDLL(None).prctl(15, b'VLLM::EngineCore', 0, 0, 0); " + IDLE
    )
    process = read_process(child.pid)
    assert process is not None
    assert process.comm == "VLLM::EngineCor"


def test_zombie_has_no_memory(spawn):
    child = spawn("print('ready', flush=True)")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = read_process(child.pid)
    assert process is not None
    assert process.state == "Z"
    assert process.rss_bytes is None


def test_child_that_is_gone(spawn):
    child = spawn("print('ready', flush=True)")
    child.wait()
    assert read_process(child.pid) is None
    assert read_target(child.pid, 1).kind == "gone"
    assert listeners(child.pid) == []


def test_where_output_goes(spawn, tmp_path):
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        child = spawn("import time; time.sleep(60)", stdout=file, stderr=subprocess.DEVNULL)
    target = read_target(child.pid, 1)
    assert (target.kind, target.path) == ("file", str(log))
    assert read_target(child.pid, 2).kind == "null"
    log.write_text("still there")
    log.unlink()
    deleted = read_target(child.pid, 1)
    assert deleted.kind == "deleted"
    assert deleted.path is not None
    assert Path(deleted.path).read_text() == "still there"


def test_output_to_pipe_socket_and_terminal(spawn):
    child = spawn(IDLE)
    target = read_target(child.pid, 1)
    assert target.kind == "pipe"
    assert child.stdout is not None
    assert target.inode == os.fstat(child.stdout.fileno()).st_ino
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = spawn("import time; time.sleep(60)", stdout=theirs.fileno())
        assert read_target(child.pid, 1).kind == "socket"
    primary, secondary = os.openpty()
    child = spawn("import time; time.sleep(60)", stdout=secondary)
    assert read_target(child.pid, 1).kind == "terminal"
    os.close(primary)
    os.close(secondary)


def test_listening_sockets(spawn):
    child = spawn(
        "import socket\n"
        "a = socket.create_server(('127.0.0.1', 0)); b = socket.socket(); b.bind(('127.0.0.1', 0))\n"
        "try: c = socket.create_server(('::1', 0), family=socket.AF_INET6)\n"
        "except OSError: c = None\n"
        "print('ready', flush=True)\n"
        "print(a.getsockname()[1], c.getsockname()[1] if c else 0, flush=True)\n"
        "import time; time.sleep(60)"
    )
    assert child.stdout is not None
    ports = {int(port) for port in child.stdout.readline().split()} - {0}
    found = listeners(child.pid)
    assert {listener.port for listener in found} == ports
    assert {listener.host for listener in found} <= {"127.0.0.1", "::1"}
    assert len(socket_inodes(child.pid)) >= 2


def test_the_table_of_a_namespace_is_read_once_for_all_its_processes(tmp_path):
    row = "   0: 0100007F:{port:04X} 00000000:0000 {state} 0:0 0:0 0 0 0 {inode} 1 0\n"
    for pid, namespace, port in ((1, "a", 8001), (2, "a", 8002), (3, "b", 8003)):
        folder = tmp_path / str(pid)
        for name in ("fd", "ns", "net"):
            (folder / name).mkdir(parents=True)
        (folder / "ns/net").symlink_to(f"net:[{namespace}]")
        (folder / "fd/3").symlink_to(f"socket:[{port}]")
        rows = "".join(
            row.format(port=p, state=state, inode=inode)
            for p, state, inode in ((8001, "0A", 8001), (8002, "0A", 8002), (port, "01", 7))
        )
        (folder / "net/tcp").write_text(f"header\n{rows}")
    listening = Listening(str(tmp_path))
    assert [one.port for one in listening.of(1)] == [8001]
    (tmp_path / "2/net/tcp").unlink()
    assert [one.port for one in listening.of(2)] == [8002]
    assert listening.of(3) == []


def test_process_of_another_user_is_partly_hidden(spawn):
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    child = spawn(IDLE)
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        process = read_process(child.pid)
        partly = (
            process is not None
            and process.rss_bytes is not None
            and read_environment(child.pid) is None
            and read_target(child.pid, 1).kind == "forbidden"
            and listeners(child.pid) == []
        )
        os._exit(0 if partly else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
