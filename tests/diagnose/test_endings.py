from __future__ import annotations

import pytest
from logtext import READY, SERVED, START, inputs_of, lines_of

from oomwatch.diagnose.endings import Ending, endings
from oomwatch.diagnose.events import LogEvent, extract
from oomwatch.diagnose.judge import diagnose


def ending(line: str) -> Ending | None:
    items = [item for item in extract(lines_of(line + "\n")) if isinstance(item, LogEvent)]
    return next(iter(endings(items, items)), None)


@pytest.mark.parametrize(
    ("line", "signal"),
    [
        ("Killed", "SIGKILL"),
        ("/run.sh: line 3:    12 Killed                  vllm serve m", "SIGKILL"),
        ("container exited with code 137", "SIGKILL"),
        (
            "(EngineCore pid=1) ERROR 11-20 10:20:01 [m.py:1] Worker proc VllmWorker-1 died unexpectedly (exit code: -9)",
            "SIGKILL",
        ),
        (
            "ERROR 10-14 08:42:23 m.py:120] Worker VllmWorkerProcess pid 318 died, exit code: -11",
            "SIGSEGV",
        ),
        ("vllm.service: Main process exited, code=killed, status=9/KILL", "SIGKILL"),
        ("vllm.service: Main process exited, code=dumped, status=11/SEGV", "SIGSEGV"),
        (
            "(A pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -4}",
            "SIGILL",
        ),
        ("Fatal Python error: Segmentation fault", "SIGSEGV"),
        ("Fatal Python error: Bus error", "SIGBUS"),
        ("!!!!!!! Segfault encountered !!!!!!!", "SIGSEGV"),
        ("*** SIGSEGV received at time=1745722347 on cpu 48 ***", "SIGSEGV"),
        ("/start.sh: line 9:    44 Segmentation fault      (core dumped) python3 -m x", "SIGSEGV"),
        ("Illegal instruction (core dumped)", "SIGILL"),
        ("double free or corruption (!prev)", "SIGABRT"),
        ("Shard process was signaled to shutdown with signal 9 rank=0", "SIGKILL"),
        ("Error: llama runner process has terminated: signal: killed", "SIGKILL"),
        ("container exited with code 143", "SIGTERM"),
        ("container exited with code 1", None),
    ],
)
def test_every_printing_of_an_end_names_its_signal(line: str, signal: str | None) -> None:
    found = ending(line)
    assert found is not None
    assert found.signal == signal
    assert found.killed == (signal == "SIGKILL")


@pytest.mark.parametrize(
    "line",
    [
        "Killed time: 3 s",
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due to high memory usage. (2) SIGSEGV",
        "the answer is 137",
    ],
)
def test_other_words_are_no_end(line: str) -> None:
    assert ending(line) is None


@pytest.mark.parametrize(
    ("tail", "cause"),
    [
        ("Container vllm failed liveness probe, will be restarted\n", "killed_by_orchestrator"),
        ("The node was low on resource: memory.\nKilled\n", "killed_by_orchestrator"),
        (
            "slurmstepd: error: *** JOB 1 ON n CANCELLED AT 2025-11-20T12:00:21 DUE TO PREEMPTION ***\nKilled\n",
            "killed_by_orchestrator",
        ),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.batch.\n", "host_oom_kill"),
        ("      Reason:       OOMKilled\n", "host_oom_kill"),
        ("Killed\n", "killed_by_signal"),
        ("Terminated\n", "shutdown_requested"),
        (
            "(APIServer pid=1) ERROR 11-20 10:12:44 [core_client.py:564] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.\n",
            "irregular_unknown",
        ),
        ("free(): invalid pointer\nFatal Python error: Aborted\n", "native_crash"),
        ("Liveness probe failed: HTTP probe failed with statuscode: 503\n" + SERVED, None),
    ],
)
def test_who_ended_a_serving_engine(tail: str, cause: str | None) -> None:
    found = diagnose(inputs_of(START + READY + SERVED + tail))
    assert [i.finding.cause for i in found.incidents] == ([cause] if cause else [])


def test_probes_that_fail_during_a_start_are_no_reason() -> None:
    found = diagnose(
        inputs_of(START + "Startup probe failed: connection refused\n" + READY + SERVED)
    )
    assert (found.verdict, found.incidents) == ("healthy", ())
