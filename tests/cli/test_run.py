"""`oomwatch run`: the server first, the explanation after it, and the server's status."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomwatch.cli.run import run_server
from oomwatch.demo import demo_recording
from oomwatch.errors import SourceUnavailable
from oomwatch.records import Diagnosis, Finding, Incident
from oomwatch.sources.ended import find_copies

OOM = Diagnosis(
    verdict="oom",
    generated_at=0.0,
    incidents=(Incident(id="1", finding=Finding("startup", "kv_no_blocks", 0.9, "no blocks")),),
)
HEALTHY = Diagnosis(verdict="healthy", generated_at=0.0)
UNKNOWN = Diagnosis(verdict="unknown", generated_at=0.0)


class Judge:
    """Stands where the diagnosis stands, gives one answer, and remembers what it was shown."""

    def __init__(self, answer):
        self.answer = answer
        self.log = b""
        self.path = Path()
        self.server = ()

    def __call__(self, ended):
        assert 0 <= time.time() - ended.started_at < 60
        self.path, self.server = Path(ended.name), ended.command
        self.log = self.path.read_bytes()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def run(judge, *server, log_copy=None):
    return run_server(
        server,
        log_copy=log_copy,
        report_format="text",
        diagnose=judge,
        render=lambda diagnosis, report_format: f"REPORT {diagnosis.verdict} {report_format}\n",
    )


def _forget(copy):
    copy.unlink()
    copy.with_suffix(".json").unlink()


def shell(script):
    return ("sh", "-c", script)


def test_a_failure_is_explained_after_the_output(capfd):
    judge = Judge(OOM)
    assert run(judge, *shell("echo out; echo err >&2; exit 7")) == 7
    captured = capfd.readouterr()
    assert captured.out == "out\n"
    assert captured.err.startswith("err\nREPORT oom text\n")
    assert captured.err.endswith(f"oomwatch: the output is kept in {judge.path}\n")
    assert sorted(judge.log.splitlines()) == [b"err", b"out"]
    assert judge.server == shell("echo out; echo err >&2; exit 7")
    assert judge.path.exists()
    _forget(judge.path)


def test_success_is_silent_and_leaves_nothing(capfd):
    judge = Judge(HEALTHY)
    assert run(judge, *shell("echo fine")) == 0
    assert capfd.readouterr() == ("fine\n", "")
    assert not judge.path.exists()


def test_exit_0_with_an_incident_is_told(capfd):
    judge = Judge(OOM)
    assert run(judge, "true") == 0
    assert "REPORT oom" in capfd.readouterr().err


def test_an_unexplained_failure_is_told_and_an_unexplained_success_is_not(capfd):
    judge = Judge(UNKNOWN)
    assert run(judge, "false") == 1
    assert "REPORT unknown" in capfd.readouterr().err
    assert run(judge, "true") == 0
    assert capfd.readouterr().err == ""


def test_death_by_a_signal_is_explained(capfd):
    judge = Judge(UNKNOWN)
    assert run(judge, *shell("kill -9 $$")) == 137
    stderr = capfd.readouterr().err
    assert stderr == "oomwatch: the server was ended by SIGKILL\nREPORT unknown text\n"
    assert not judge.path.exists()  # it printed nothing


def test_a_signal_without_a_name(capfd):
    assert run(Judge(UNKNOWN), *shell("kill -40 $$")) == 168
    assert "ended by signal 40" in capfd.readouterr().err


def test_a_named_copy_stays(tmp_path, capfd):
    copy = tmp_path / "copy.log"
    assert run(Judge(HEALTHY), *shell("echo fine"), log_copy=copy) == 0
    assert copy.read_text() == "fine\n"
    assert copy.stat().st_mode & 0o777 == 0o600
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("error", [SourceUnavailable("gone"), RuntimeError("a \x1b[31mbug")])
def test_a_failing_diagnosis_does_not_hide_the_status(capfd, error):
    judge = Judge(error)
    assert run(judge, *shell("echo x; exit 9")) == 9
    stderr = capfd.readouterr().err
    assert stderr.startswith("oomwatch: the output could not be diagnosed: ")
    assert "\x1b" not in stderr
    assert "Traceback" not in stderr
    _forget(judge.path)


@pytest.mark.parametrize(
    ("server", "status", "message"),
    [
        (("/no/such/program",), 127, "oomwatch: /no/such/program: command not found\n"),
        (("/etc/hostname",), 126, "oomwatch: /etc/hostname: cannot be started: "),
    ],
)
def test_a_command_that_cannot_be_started(capfd, server, status, message):
    judge = Judge(OOM)
    assert run(judge, *server) == status
    assert capfd.readouterr().err.startswith(message)
    assert judge.path == Path()


def test_a_copy_that_cannot_be_written(tmp_path, capfd):
    assert run(Judge(OOM), "true", log_copy=tmp_path / "no" / "copy.log") == 2
    assert "cannot keep a copy" in capfd.readouterr().err


def test_asked_to_stop_only_a_memory_failure_is_told(tmp_path):
    program = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_run as t
sys.exit(t.run(t.Judge(getattr(t, sys.argv[1])), "sh", "-c", "echo ready; exec sleep 60",
               log_copy=t.Path(sys.argv[2])))
"""
    for answer, told in (("UNKNOWN", False), ("OOM", True)):
        process = subprocess.Popen(
            [sys.executable, "-c", program, answer, str(tmp_path / "copy.log")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGTERM
        assert (b"REPORT" in stderr) is told


# ---------------------------------------------------------------- the whole command
def oomwatch(*arguments, **options):
    command = [sys.executable, "-m", "oomwatch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_a_server_that_runs_out_of_memory(tmp_path):
    log = demo_recording() / "logs" / "server.log"
    copy = tmp_path / "copy.log"
    done = oomwatch("run", "--log-copy", str(copy), "--", "sh", "-c", f"cat {log}; exit 1")
    assert done.returncode == 1
    assert done.stdout == log.read_text()
    assert "prefill_activation_peak" in done.stderr
    assert "--max-num-batched-tokens" in done.stderr
    assert f"{copy}:" in done.stderr  # evidence can be looked up
    assert copy.read_text() == log.read_text()


def test_json_on_stderr(tmp_path):
    log = demo_recording() / "logs" / "server.log"
    done = oomwatch(
        "run",
        "--format",
        "json",
        "--log-copy",
        str(tmp_path / "copy"),
        "sh",
        "-c",
        f"cat {log}; false",
    )
    report = json.loads(done.stderr)
    assert report["verdict"] == "oom"
    assert report["incidents"][0]["cause"] == "prefill_activation_peak"


def test_options_after_the_command_are_the_server_s():
    done = oomwatch("run", "echo", "--format", "json", "--help")
    assert (done.returncode, done.stdout) == (0, "--format json --help\n")


def test_no_command_is_wrong_use():
    done = oomwatch("run")
    assert done.returncode == 2
    assert "SERVER" in done.stderr


STARTING = (
    "(APIServer pid=1) INFO 11-20 09:14:02 [api_server.py:1839] vLLM API server version 0.11.0\\n"
    "(EngineCore_DP0 pid=171) INFO 11-20 09:14:25 [gpu_model_runner.py:2602] Starting to load "
    "model /models/m...\\n"
)


def test_a_kill_is_told_and_remembered_for_a_later_diagnose(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = oomwatch("run", "--format", "json", *shell(f'printf "{STARTING}"; kill -9 $$'))
    assert done.returncode == 137
    report = json.loads(done.stderr[done.stderr.index("{") : done.stderr.rindex("}") + 1])
    (incident,) = report["incidents"]
    assert (report["verdict"], incident["cause"]) == ("not_oom", "killed_by_signal")
    assert report["engines"][0]["phase"] == "exited"
    (copy,) = find_copies(str(tmp_path))
    assert (copy.exit.exit_code, copy.exit.signal) == (137, signal.SIGKILL)
    assert (copy.command[0], len(copy.pids)) == ("sh", 1)
    assert 0 <= copy.exit.at - copy.started_at < 60


def test_a_server_that_failed_in_silence_was_not_healthy(tmp_path):
    served = "(APIServer pid=1) INFO:     Application startup complete.\\n"
    script = f'printf "{STARTING}{served}"; exit 3'
    copy = str(tmp_path / "copy.log")
    done = oomwatch("run", "--format", "json", "--log-copy", copy, *shell(script))
    report = json.loads(done.stderr)
    assert (done.returncode, report["verdict"]) == (3, "unknown")
    assert any("status 3" in (source["detail"] or "") for source in report["sources"])
