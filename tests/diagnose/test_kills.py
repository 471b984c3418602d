"""What ties a kill of the kernel's to an engine, and what does not."""

from __future__ import annotations

import dataclasses

import pytest
from logtext import OOM, READY, SERVED, START, inputs_of, lines_of, raised

from oomwatch.diagnose.inputs import KernelInput
from oomwatch.diagnose.judge import diagnose
from oomwatch.diagnose.kills import Tie, Traces, tie
from oomwatch.records import Diagnosis, KernelEvent, ProcessSample
from oomwatch.units import GIB, MIB

BEGAN, LAST = 10_000.0, 12_000.0
SERVICE = "/system.slice/vllm.service"
SESSION = "/user.slice/user-1000.slice/session-4.scope"
STARTED = Traces(known=True, pids=frozenset({171}), began_at=BEGAN, last_at=LAST)
LARGE = {"total_vm_bytes": 90 * GIB, "anon_rss_bytes": 16 * GIB}
SMALL = {"total_vm_bytes": 48 * MIB, "anon_rss_bytes": 38 * MIB}


def kill(comm: str = "python3", at: float | None = LAST + 3, **fields: object) -> KernelEvent:
    known = {"pid": 9_000, "scope": "cgroup", "comm": comm, **LARGE, **fields}
    return KernelEvent("oom_kill", f"Killed process 9000 ({comm})", at=at, fields=known)


@pytest.mark.parametrize(
    ("killed", "expected"),
    [
        (kill(pid=171), Tie.OWN),
        (kill("VLLM::Worker_TP"), Tie.LIKELY),
        (kill("sglang::schedul"), Tie.LIKELY),
        (kill(), Tie.POSSIBLE),
        (kill("pt_main_thread"), Tie.POSSIBLE),
        (kill("cicc", **SMALL), Tie.COMPILER),
        (kill("lmcache_server", scope="host"), Tie.NEIGHBOUR),
        (kill("python3", scope="host", **SMALL), Tie.NEIGHBOUR),
        (kill("lmcache_server"), Tie.STRANGER),
        (kill(**SMALL), Tie.STRANGER),
        (kill("VLLM::Worker_TP", **SMALL), Tie.STRANGER),
        (kill(limit_bytes=48 * MIB), Tie.STRANGER),
        (kill(total_vm_bytes=None, anon_rss_bytes=60 * MIB), Tie.STRANGER),
        (kill(total_vm_bytes=None, anon_rss_bytes=None), Tie.POSSIBLE),
        (kill(pid=171, **SMALL), Tie.STRANGER),  # a container's number by chance
    ],
)
def test_number_name_and_size(killed: KernelEvent, expected: Tie) -> None:
    assert tie(killed, STARTED) is expected


@pytest.mark.parametrize(
    ("at", "one_clock", "expected"),
    [
        (None, False, Tie.POSSIBLE),
        (LAST, True, Tie.POSSIBLE),
        (BEGAN - 30, False, Tie.POSSIBLE),  # the kernel's clock drifts
        (BEGAN - 30, True, Tie.STRANGER),
        (BEGAN - 600, False, Tie.STRANGER),
        (LAST + 7 * 3600 + 5, False, Tie.POSSIBLE),  # the other clock is of another zone
        (LAST + 7 * 3600 + 5, True, Tie.STRANGER),
        (LAST - 8 * 3600, False, Tie.POSSIBLE),
        (LAST + 7 * 3600 + 700, False, Tie.STRANGER),
    ],
)
def test_the_time(at: float | None, one_clock: bool, expected: Tie) -> None:
    traces = dataclasses.replace(STARTED, one_clock=one_clock)
    assert tie(kill(at=at), traces) is expected


def test_what_was_killed_after_the_end_is_of_another_start() -> None:
    traces = dataclasses.replace(STARTED, ended_at=LAST, one_clock=True)
    assert tie(kill("VLLM::EngineCor", at=LAST + 300, pid=171), traces) is Tie.STRANGER


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        (SERVICE, f"{SERVICE}/worker", Tie.OWN),
        (SERVICE, SERVICE, Tie.OWN),
        (SERVICE, "/system.slice/jupyter.service", Tie.STRANGER),
        (SERVICE, SESSION, Tie.STRANGER),
        (SESSION, SESSION, Tie.POSSIBLE),  # a session holds whatever somebody starts
        ("/", SESSION, Tie.POSSIBLE),  # seen from inside a container
        (None, SESSION, Tie.POSSIBLE),
    ],
)
def test_the_cgroup(own: str | None, theirs: str, expected: Tie) -> None:
    process = ProcessSample(LAST, 171, name="python3", cgroup=own)
    traces = dataclasses.replace(STARTED, processes=(process,))
    assert tie(kill(task_memcg=theirs), traces) is expected


def test_containers_are_compared_by_their_ids() -> None:
    process = ProcessSample(LAST, 171, cgroup="/", container="ab" * 32)
    traces = dataclasses.replace(STARTED, processes=(process,))
    assert tie(kill("bash", container="ab" * 32, **SMALL), traces) is Tie.OWN
    assert tie(kill("VLLM::EngineCor", container="cd" * 32), traces) is Tie.STRANGER


@pytest.mark.parametrize(("watched", "expected"), [(False, Tie.NEIGHBOUR), (True, Tie.STRANGER)])
def test_a_kernel_log_alone_is_what_is_asked_about(watched: bool, expected: Tie) -> None:
    assert tie(kill("postgres"), Traces(watched=watched)) is expected
    assert tie(kill(**SMALL), Traces(watched=watched)) is Tie.STRANGER


# ---------------------------------------------------------------- the whole way
LOADING = "".join(START.splitlines(keepends=True)[:3])
ENDED = next(line.at for line in lines_of(LOADING.splitlines(keepends=True)[-1])) or 0.0


def judged(text: str, *kills: KernelEvent, live: bool = False) -> Diagnosis:
    inputs = dataclasses.replace(inputs_of(text), kernel=(KernelInput("dmesg", kills, live=live),))
    return diagnose(inputs)


def causes(diagnosis: Diagnosis) -> list[str]:
    return [incident.finding.cause for incident in diagnosis.incidents]


def test_a_stranger_is_not_blamed_for_a_log_that_stops() -> None:
    found = judged(LOADING, kill("python", at=ENDED + 20, **SMALL))
    assert (found.verdict, causes(found)) == ("unknown", [])
    assert causes(judged(LOADING, kill("python", at=ENDED + 20))) == ["host_oom_load"]


def test_the_surer_the_tie_the_surer_the_answer() -> None:
    answers = [
        judged(LOADING, kill(at=ENDED + 20)),
        judged(LOADING, kill("VLLM::EngineCor", at=ENDED + 20)),
        judged(LOADING, kill(at=ENDED + 20, pid=171)),
    ]
    sure = [found.incidents[0].finding.confidence for found in answers]
    assert sure == sorted(set(sure))


@pytest.mark.parametrize("comm", ["python3", "VLLM::EngineCor"])
def test_a_log_without_process_numbers_is_no_excuse(comm: str) -> None:
    text = "".join(
        f"[2025-11-20 09:14:0{n}] {line}\n"
        for n, line in enumerate(
            (
                "server_args=ServerArgs(model_path='/m', port=30000)",
                "Load weight begin. avail mem=77.65 GB",
            )
        )
    )
    at = next(line.at for line in lines_of(text)) or 0.0
    assert causes(judged(text, kill("chrome", at=at + 9))) == []
    assert causes(judged(text, kill(comm, at=at + 9, **SMALL))) == []
    assert causes(judged(text, kill(comm, at=at + 9))) == ["host_oom_load"]


def test_a_failure_of_the_gpu_is_not_the_killers_work() -> None:
    text = (
        START + READY + SERVED + raised(f"torch.OutOfMemoryError: {OOM}", "gpu_model_runner.py:f")
    )
    assert "host_oom_kill" not in causes(judged(text, kill(at=ENDED + 900)))


def test_of_two_starts_with_the_same_numbers_the_one_that_lived_then() -> None:
    later = START.replace(" 09:", " 11:") + READY
    found = judged(LOADING + later, kill(pid=171, at=ENDED + 20))
    (incident,) = found.incidents
    assert (incident.finding.cause, incident.finding.engine_id) == ("host_oom_load", "vllm-0#1")
