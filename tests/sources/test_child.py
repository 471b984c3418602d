"""Running a real program: bytes, streams, terminals, signals, statuses."""

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import time

import pytest

RUNNER = """
import json, sys
from pathlib import Path
from oomwatch.sources.child import run_child
from oomwatch.sources.log_copy import LogCopy
path = Path(sys.argv[1])
with LogCopy(path) as copy:
    end = run_child(sys.argv[2:], copy)
path.with_suffix(".json").write_text(json.dumps([end.status, end.signal, end.stop_requested]))
sys.exit(end.status)
"""


def runner(tmp_path, *command):
    return [sys.executable, "-c", RUNNER, str(tmp_path / "copy.log"), *command]


def python(code):
    return [sys.executable, "-u", "-c", textwrap.dedent(code)]


def run(tmp_path, *command, **options):
    return subprocess.run(
        runner(tmp_path, *command), capture_output=True, timeout=60, check=False, **options
    )


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


# ---------------------------------------------------------------- bytes
def test_bytes_of_both_streams_are_unchanged(tmp_path):
    code = """
    import os
    os.write(1, bytes(range(256)) * 3 + b"\\r\\nend")
    os.write(2, b"\\x1b[31merror\\xff\\r")
    """
    done = run(tmp_path, *python(code))
    assert done.stdout == bytes(range(256)) * 3 + b"\r\nend"
    assert done.stderr == b"\x1b[31merror\xff\r"
    copy = (tmp_path / "copy.log").read_bytes()
    assert bytes(range(256)) in copy
    assert b"\x1b[31merror" in copy


def test_much_output_is_passed_whole(tmp_path):
    code = "import sys\nfor n in range(60000): print(n, 'x' * 50)"
    done = run(tmp_path, *python(code))
    expected = "".join(f"{n} {'x' * 50}\n" for n in range(60000)).encode()
    assert done.stdout == expected
    assert (tmp_path / "copy.log").read_bytes() == expected


def test_joined_streams_keep_their_order(tmp_path):
    code = "import os\nfor n in range(500): os.write(1 + n % 2, b'%d\\n' % n)"
    done = subprocess.run(
        runner(tmp_path, *python(code)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"".join(b"%d\n" % n for n in range(500))


def test_input_reaches_the_program(tmp_path):
    done = run(tmp_path, "cat", input=b"a question\n")
    assert done.stdout == b"a question\n"


def test_a_closed_reader_ends_the_program_by_sigpipe(tmp_path):
    process = subprocess.Popen(runner(tmp_path, "yes"), stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait(30) == 128 + signal.SIGPIPE


def test_closed_descriptors_do_no_harm(tmp_path):
    shell = [
        "sh",
        "-c",
        '"$@" <&- >&-',
        "sh",
        *runner(tmp_path, "sh", "-c", "echo hi; echo ho >&2"),
    ]
    done = subprocess.run(shell, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"ho\n")


# ---------------------------------------------------------------- statuses
@pytest.mark.parametrize("status", [0, 1, 3, 127, 255])
def test_exit_status(tmp_path, status):
    assert run(tmp_path, "sh", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
def test_death_by_a_signal(tmp_path, number):
    done = run(tmp_path, "sh", "-c", f"kill -{int(number)} $$")
    assert done.returncode == 128 + number
    assert (tmp_path / "copy.json").read_text() == f"[{128 + number}, {int(number)}, false]"


def test_a_worker_that_outlives_the_server_does_not_hold_us_for_ever(tmp_path):
    done = run(tmp_path, "sh", "-c", "(sleep 300 & echo $!) ; echo last words")
    pid, words = done.stdout.split(b"\n", 1)
    os.kill(int(pid), signal.SIGKILL)
    assert words == b"last words\n"
    assert done.returncode == 0


# ---------------------------------------------------------------- signals
COUNTING = """
import signal, time, sys
seen = []
def note(number, frame):
    print("got", number, flush=True)
    if number == signal.SIGTERM:
        sys.exit(42)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, note)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


def heed_signals():
    """Whoever runs the tests, perhaps under nohup, may have them ignored."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def test_signals_to_us_are_passed_on(tmp_path):
    words = runner(tmp_path, *python(COUNTING))
    process = subprocess.Popen(words, stdout=subprocess.PIPE, preexec_fn=heed_signals)  # noqa: PLW1509 - no threads
    assert process.stdout
    assert process.stdout.readline() == b"ready\n"
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
        assert process.stdout.readline() == b"got %d\n" % number
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == b"got 15\n"
    assert process.wait(30) == 42
    assert (tmp_path / "copy.json").read_text() == "[42, null, true]"
    process.stdout.close()


def test_the_program_starts_with_default_signals(tmp_path):
    code = """
    import signal
    print(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    """
    assert run(tmp_path, *python(code)).stdout == b"set()\n"
    done = run(tmp_path, "sh", "-c", "grep SigIgn /proc/self/status")
    assert int(done.stdout.split()[1], 16) & (1 << (signal.SIGPIPE - 1)) == 0


def test_nohup_holds_for_the_program_too(tmp_path):
    code = "import signal; print(signal.getsignal(signal.SIGHUP))"
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *runner(tmp_path, *python(code))]
    done = subprocess.run(shell, capture_output=True, timeout=60, check=False)
    assert done.stdout.strip() == b"1"  # SIG_IGN


# ---------------------------------------------------------------- terminals
class Terminal:
    """A terminal with our runner in its foreground."""

    def __init__(self, command, columns=93):
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)  # noqa: S606 - the child of a fork, no shell wanted
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 33, columns, 0, 0))
        self.seen = b""

    def read_until(self, text):
        deadline = time.monotonic() + 30
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    data = os.read(self.master, 4096)
                except OSError:
                    break
                if not data:
                    break
                self.seen += data
        assert text in self.seen, self.seen

    def close(self):
        _, status = os.waitpid(self.pid, 0)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status)


def test_under_a_terminal_the_program_sees_one(tmp_path):
    code = """
    import os, sys
    print([os.isatty(n) for n in (0, 1, 2)])
    print(input("name? "), os.get_terminal_size().lines)
    """
    terminal = Terminal(runner(tmp_path, *python(code)))
    terminal.read_until(b"name? ")
    os.write(terminal.master, b"pat\n")
    terminal.read_until(b"pat 33")
    assert terminal.close() == 0
    assert b"[True, True, True]\r\n" in terminal.seen
    assert b"\r\r\n" not in terminal.seen
    assert b"\r" not in (tmp_path / "copy.log").read_bytes()


def test_control_c_reaches_the_program_once(tmp_path):
    terminal = Terminal(runner(tmp_path, *python(COUNTING)))
    terminal.read_until(b"ready")
    os.write(terminal.master, b"\x03")
    terminal.read_until(b"got 2")
    terminal_pid = terminal.pid
    os.kill(terminal_pid, signal.SIGTERM)
    terminal.read_until(b"got 15")
    assert terminal.close() == 42
    assert terminal.seen.count(b"got 2") == 1
    assert (tmp_path / "copy.json").read_text() == "[42, null, true]"


def test_a_resized_terminal_is_resized_for_the_program(tmp_path):
    code = """
    import os, signal, time
    signal.signal(signal.SIGWINCH, lambda *_: print("columns", os.get_terminal_size().columns))
    print("ready", flush=True)
    while True: time.sleep(0.01)
    """
    terminal = Terminal(runner(tmp_path, *python(code)))
    terminal.read_until(b"ready")
    fcntl.ioctl(terminal.master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 55, 0, 0))
    terminal.read_until(b"columns 55")
    os.kill(terminal.pid, signal.SIGTERM)
    terminal.close()


def test_only_one_stream_on_a_terminal(tmp_path):
    code = "import os; print([os.isatty(n) for n in (1, 2)])"
    error_file = tmp_path / "err"
    command = ["/bin/sh", "-c", f'"$@" 2>{error_file}', "sh", *runner(tmp_path, *python(code))]
    terminal = Terminal(command)
    terminal.read_until(b"[True, False]")
    assert terminal.close() == 0
