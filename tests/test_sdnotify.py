"""What systemd would receive, on real datagram sockets."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time

import pytest

from oomwatch import sdnotify


@pytest.fixture(params=["path", "abstract"])
def systemd(request, tmp_path):
    """A socket in place of systemd's, and the variable that names it."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@oomwatch-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(name.replace("@", "\0", 1))
        receiver.settimeout(5)
        yield receiver, {"NOTIFY_SOCKET": name}


def received(receiver: socket.socket) -> list[str]:
    return receiver.recv(4096).decode().split("\n")


@pytest.mark.parametrize(
    ("send", "expected"),
    [
        (lambda env: sdnotify.ready(environ=env), ["READY=1"]),
        (
            lambda env: sdnotify.ready("2 engines, 8 GPUs", environ=env),
            ["READY=1", "STATUS=2 engines, 8 GPUs"],
        ),
        (lambda env: sdnotify.status("serving", environ=env), ["STATUS=serving"]),
        (lambda env: sdnotify.status("", environ=env), ["STATUS="]),
        (
            lambda env: sdnotify.stopping("flushing", environ=env),
            ["STOPPING=1", "STATUS=flushing"],
        ),
        (lambda env: sdnotify.watchdog(environ=env), ["WATCHDOG=1"]),
        (lambda env: sdnotify.notify("FDSTORE=1", "X=2", environ=env), ["FDSTORE=1", "X=2"]),
    ],
)
def test_what_is_sent(systemd, send, expected):
    receiver, environ = systemd
    assert send(environ) is True
    assert received(receiver) == expected


def test_a_reload_carries_the_time_of_the_monotonic_clock(systemd):
    receiver, environ = systemd
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert sdnotify.reloading(environ=environ)
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    first, second = received(receiver)
    assert first == "RELOADING=1"
    name, _, value = second.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(value) <= after


def test_a_status_cannot_smuggle_in_another_assignment(systemd):
    receiver, environ = systemd
    sdnotify.status("engine a\nWATCHDOG=1\r\x1b[2J\udcff" + "x" * 5000, environ=environ)
    (line,) = received(receiver)
    assert line.startswith("STATUS=engine a WATCHDOG=1")
    assert line.isprintable()
    assert len(line) < 600


@pytest.mark.parametrize("name", [None, "", "relative", "/", "@", "vsock:2:1", "/no/such/socket"])
def test_nobody_listens(name):
    environ = {} if name is None else {"NOTIFY_SOCKET": name}
    assert sdnotify.ready("x", environ=environ) is False


@pytest.mark.parametrize("name", ["/" + "x" * 200, "/a\0b", "/\udcff"])
def test_an_impossible_address(name):
    assert sdnotify.watchdog(environ={"NOTIFY_SOCKET": name}) is False


def test_a_socket_that_is_a_file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    assert sdnotify.watchdog(environ={"NOTIFY_SOCKET": str(path)}) is False


def test_a_socket_that_has_died(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
    assert sdnotify.watchdog(environ={"NOTIFY_SOCKET": path}) is False


def test_a_full_queue_does_not_hold_the_caller(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler:
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    filler.sendto(b"x", path)
        assert sdnotify.watchdog(environ={"NOTIFY_SOCKET": path}) is False


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "60000000"}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "500000"}, 0.25),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "²"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
    ],
)
def test_watchdog_interval(variables, expected):
    assert sdnotify.watchdog_interval(variables) == expected


def test_the_process_that_systemd_started_speaks_for_itself(tmp_path):
    path = str(tmp_path / "notify")
    code = "from oomwatch import sdnotify as n; print(n.watchdog_interval(), n.ready('up'))"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        receiver.bind(path)
        receiver.settimeout(5)
        environ = os.environ | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000000"}
        with subprocess.Popen(
            [sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE, text=True
        ) as child:
            data, ancillary, _, _ = receiver.recvmsg(4096, 4096)
            out, _ = child.communicate(timeout=30)
    assert re.fullmatch(r"1\.5 True\n", out)
    assert data == b"READY=1\nSTATUS=up"
    (_, _, credentials) = ancillary[0]
    assert int.from_bytes(credentials[:4], sys.byteorder) == child.pid


def test_programs_that_the_service_starts_do_not_speak_for_it(tmp_path):
    path = str(tmp_path / "notify")
    code = """if True:
        import subprocess
        from oomwatch import sdnotify
        sdnotify.keep_to_ourselves()
        print(subprocess.check_output("env", text=True))
        print(sdnotify.watchdog_interval(), sdnotify.ready())
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        environ = os.environ | {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "3000000"}
        out = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
        assert receiver.recv(4096) == b"READY=1"
    assert "1.5 True" in out
    assert "NOTIFY_SOCKET" not in out
    assert "WATCHDOG_USEC" not in out
