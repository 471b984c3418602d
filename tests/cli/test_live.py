"""`oomwatch diagnose` without inputs: a host that serves, suffers, hangs, or has just died."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_host import AT, LATER, LOG, REFUSED, LiveHost, stamp

from oomwatch.cli import live, readings
from oomwatch.cli.diagnose import exit_status
from oomwatch.diagnose.assemble import one_sample
from oomwatch.diagnose.inputs import PageInput
from oomwatch.errors import NoInputError
from oomwatch.records import Diagnosis, EngineSample, Evidence, StoredIncident
from oomwatch.report.text import render_text
from oomwatch.store.writer import StoreWriter

pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="stand-ins need bash's exec -a")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveHost]:
    monkeypatch.setattr(readings, "WINDOW_SECONDS", 1.0)
    monkeypatch.setattr(live, "_SECOND_LOOK_SECONDS", 0.5)
    made = LiveHost(tmp_path)
    yield made
    made.close()


def detail(diagnosis: Diagnosis, name: str) -> str:
    return "; ".join(s.detail or s.status for s in diagnosis.sources if name in s.name)


def cause(diagnosis: Diagnosis) -> str | None:
    found = [*diagnosis.incidents, *diagnosis.risks]
    return found[0].finding.cause if found else None


# ---------------------------------------------------------------- an engine that runs
def test_an_idle_server_is_healthy_and_its_load_is_told(host):
    pid = host.serve()
    diagnosis = host.diagnose()
    (engine,) = diagnosis.engines
    assert (diagnosis.verdict, engine.phase, engine.kv_tokens) == ("healthy", "serving", 4096)
    assert pid in engine.pids
    assert engine.load is not None
    assert (engine.load.running, engine.load.preemptions_total) == (0, 10)
    assert exit_status(diagnosis) == 0
    text = render_text(diagnosis)
    assert len(text.splitlines()) < 6
    assert "4,096 tokens" in text
    assert "0 running, 0 waiting" in text
    assert "10 preemptions" in text
    assert "Sources" not in text  # all is well, or of no concern on a host without a GPU
    assert "NVIDIA driver" in render_text(diagnosis, verbose=True) or diagnosis.gpus


def test_preemptions_are_seen_between_two_readings(host):
    host.serve(running=3, waiting=9, kv=0.98, preempted=5, tokens=100)
    diagnosis = host.diagnose()
    assert diagnosis.verdict == "at_risk"
    causes = {risk.finding.cause for risk in diagnosis.risks}
    assert causes == {"kv_preempt_recompute_storm", "kv_saturation"}
    evidence = [e for risk in diagnosis.risks for e in risk.finding.evidence]
    assert {e.source for e in evidence} == {"metrics"}
    assert exit_status(diagnosis) == 1
    assert "3 running, 9 waiting" in render_text(diagnosis)  # what it does now stands there too


def test_a_counter_that_stands_is_no_storm(host):
    host.serve(running=1, kv=0.4, preempted=0, tokens=100)
    assert host.diagnose().verdict == "healthy"


def test_the_log_is_newer_than_nothing_and_older_than_the_page(host):
    """A full pool in the log is past when the counters, read now, show an idle server."""
    full = "".join(
        f"(APIServer pid=41) INFO {stamp(50 - n)} [loggers.py:127] Engine 000: Avg prompt "
        "throughput: 0.0 tokens/s, Avg generation throughput: 90.0 tokens/s, Running: 3 reqs, "
        "Waiting: 9 reqs, GPU KV cache usage: 99.0%, Prefix cache hit rate: 0.0%\n"
        for n in range(1, 5)
    )
    host.serve(LOG + full)
    (risk,) = host.diagnose().risks
    assert risk.finding.cause == "kv_saturation"
    assert "was nearly full" in risk.finding.summary


def test_a_server_that_starts_is_undecided_without_alarm(host):
    starting = LOG.splitlines(keepends=True)[0]
    host.serve(starting, port=65535)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, diagnosis.engines[0].phase) == ("unknown", "starting")
    assert exit_status(diagnosis) == 0
    assert "still starting" in detail(diagnosis, "engines")
    assert all(s.status not in ("warning", "error") for s in diagnosis.sources)


def test_metrics_that_hang_are_said_and_do_not_stop_the_rest(host, monkeypatch):
    monkeypatch.setattr(readings, "TIMEOUT_SECONDS", 0.5)
    host.serve(hang=True)
    diagnosis = host.diagnose()
    assert "no answer within 0.5 s" in detail(diagnosis, "http://")
    assert diagnosis.verdict == "healthy"  # by its log
    assert diagnosis.engines[0].kv_tokens == 4096


def test_tokens_that_stand_still_under_load_are_a_risk(host, monkeypatch):
    monkeypatch.setattr(readings, "STANDSTILL_SECONDS", 5.5)
    host.serve(running=2, waiting=1, kv=0.5)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("at_risk", "rpc_timeout_hang")
    assert "not one token" in diagnosis.risks[0].finding.summary


def test_a_stopped_worker_is_named(host):
    host.serve(tokens=50, running=1)
    worker = host.pid_of("VLLM::Worker")
    host.kill(worker, signal.SIGSTOP)
    host.wait_for(lambda: _state(worker) == "T")
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("not_oom", "rpc_timeout_hang")
    assert f"kill -CONT {worker}" in diagnosis.incidents[0].finding.summary
    host.kill(worker, signal.SIGCONT)
    host.wait_for(lambda: _state(worker) != "T")
    assert host.diagnose().verdict == "healthy"


def test_an_unreadable_log_says_why(host):
    host.serve()
    host.log.unlink()
    host.log.mkdir()
    for entry in list(host.proc.iterdir()):  # a log that only the process can open: not here
        if entry.name.isdigit():
            real = entry.readlink()
            entry.unlink()
            entry.mkdir()
            for name in ("stat", "status", "cmdline", "comm", "cgroup", "net"):
                (entry / name).symlink_to(real / name)
    diagnosis = host.diagnose()
    assert "give it with --log" in detail(diagnosis, " log")
    assert diagnosis.engines[0].phase != "exited"


# ---------------------------------------------------------------- what is left of one
def test_orphans_are_named_with_the_command_that_ends_them(host):
    pid = host.serve()
    core, worker = host.pid_of("VLLM::EngineCore"), host.pid_of("VLLM::Worker")
    host.kill(pid)
    diagnosis = host.diagnose()
    assert diagnosis.verdict == "at_risk"
    (risk,) = diagnosis.risks
    assert risk.finding.cause == "gpu_busy_other_process"
    assert set(risk.finding.values["other_pids"]) == {core, worker}
    assert [r.id for r in risk.remedies] == ["end-orphans"]
    assert f"{core}" in (risk.remedies[0].action or "")
    assert diagnosis.engines[0].phase == "exited"


def test_an_orphan_that_goes_by_itself_is_no_finding(host):
    pid = host.serve()
    core, worker = host.pid_of("VLLM::EngineCore"), host.pid_of("VLLM::Worker")
    host.kill(pid)
    host.kill(core)
    host.kill(worker)
    host.wait_for(lambda: all(_is_dead(one) for one in (core, worker)))
    diagnosis = host.diagnose()
    assert not diagnosis.risks


def _is_dead(pid: int) -> bool:
    return _state(pid) in "ZX"


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


DIED = (
    LOG
    + f"(APIServer pid=41) ERROR {stamp(40)} [core_client.py:564] Engine core proc "
    + "EngineCore_DP0 died unexpectedly, shutting down client.\n"
)


def test_a_death_leads_and_the_orphans_are_a_risk_beside_it(host):
    pid = host.serve(DIED)
    worker = host.pid_of("VLLM::Worker")
    host.kill(host.pid_of("VLLM::EngineCore"))
    host.kill(pid)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("not_oom", "killed_by_signal")
    assert "no OOM kill" in " ".join(diagnosis.incidents[0].finding.summary.split())
    assert [r.finding.values["other_pids"] for r in diagnosis.risks] == [[worker]]


def test_nothing_here_is_no_alarm(host):
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, diagnosis.engines) == ("unknown", ())
    assert exit_status(diagnosis) == 0
    assert "no inference server runs here" in detail(diagnosis, "engines")
    assert render_text(diagnosis).count("--log FILE") == 1


def test_the_kernel_tells_of_an_engine_that_left_nothing_else(host):
    at = int(time.time()) - 600
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+0000", time.gmtime(at))
    (host.folder / "kernel.log").write_text(
        f"{stamp} h kernel: Out of memory: Killed process 4242 (VLLM::EngineCor) total-vm:9000000kB"
        ", anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1000kB oom_score_adj:0\n"
    )
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "host_oom_kill")


@pytest.mark.parametrize("seconds_ago", [86400, -5])
def test_a_kill_of_something_else_is_not_about_a_server_that_runs(host, seconds_ago):
    at = time.gmtime(time.time() - seconds_ago)  # before it was started, and while it runs
    stamp = time.strftime("%Y-%m-%dT%H:%M:%S+0000", at)
    (host.folder / "kernel.log").write_text(
        f"{stamp} h kernel: Out of memory: Killed process 4242 (python3) total-vm:9000000kB"
        ", anon-rss:8000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1000kB oom_score_adj:0\n"
    )
    host.serve()
    assert host.diagnose().verdict == "healthy"


# ---------------------------------------------------------------- containers and copies
SERVE = ["vllm", "serve", "/models/m", "--max-model-len", "2048"]


def test_the_container_that_just_exited_is_read(host):
    host.container("chat", words=SERVE, log=REFUSED)
    host.container("older", words=SERVE, log=LOG, ago=90000)
    host.container("web", words=["nginx"], image="nginx:1", ago=60)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "kv_no_blocks")
    said = detail(diagnosis, "engines")
    assert "container chat" in said
    assert "status 1" in said
    assert "--container older" in detail(diagnosis, "container older")
    assert "nginx" not in said
    (incident,) = diagnosis.incidents
    assert incident.finding.evidence[-1].where == "container chat"
    assert diagnosis.engines[0].arguments["--max-model-len"] == "2048"
    assert diagnosis.engines[0].version == "0.11.0"


def test_an_oom_flag_is_evidence_where_the_log_is_silent(host):
    host.container("chat", words=SERVE, log=LOG, OOMKilled=True, ExitCode=137)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "host_oom_kill")
    (evidence,) = diagnosis.incidents[0].finding.evidence
    assert evidence.value == 137
    assert "killed for memory: yes" in (evidence.text or "")


@pytest.mark.parametrize(
    ("status", "verdict", "expected"),
    [
        (137, "not_oom", "killed_by_signal"),
        (139, "not_oom", "native_crash"),
        (143, "healthy", "shutdown_requested"),
        (1, "unknown", None),
        (0, "healthy", None),
    ],
)
def test_an_exit_status_without_a_word_in_the_log(host, status, verdict, expected):
    host.container("chat", words=SERVE, log=LOG, ExitCode=status)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == (verdict, expected)
    assert diagnosis.engines[0].phase == "exited"


def test_a_container_whose_log_is_gone_still_tells_how_it_ended(host):
    host.container("chat", words=SERVE, OOMKilled=True, ExitCode=137)
    for log in (host.folder / "docker").glob("containers/*/*-json.log"):
        log.unlink()
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "host_oom_kill")
    assert "container chat" in detail(diagnosis, "engines")


def test_a_named_container_brings_its_end_along(host):
    host.container("chat", words=SERVE, log=LOG, OOMKilled=True, ExitCode=137)
    diagnosis = host.diagnose(containers=("chat",))
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "host_oom_kill")


def test_a_server_that_runs_is_told_beside_one_that_failed(host):
    host.serve()
    host.container("other", words=SERVE, log=REFUSED)
    diagnosis = host.diagnose()
    assert diagnosis.verdict == "healthy"
    assert "--container other reads it" in detail(diagnosis, "container other")


def test_the_output_that_run_kept_is_read(host):
    (host.folder / "copies" / "oomwatch-run-x.log").write_text(REFUSED)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "kv_no_blocks")
    assert "oomwatch-run-x.log" in detail(diagnosis, "engines")


def test_a_server_under_run_is_read_through_the_copy_that_run_keeps(host):
    runner = host.serve(launcher=[sys.executable, "-m", "oomwatch", "run", "--"])
    diagnosis = host.diagnose()
    (engine,) = diagnosis.engines
    assert (diagnosis.verdict, engine.kv_tokens, engine.version) == ("healthy", 4096, "0.11.0")
    assert runner not in engine.pids
    host.kill(engine.pids[0], signal.SIGKILL)
    host.wait_for(lambda: _is_dead(runner))
    later = host.diagnose()
    assert later.engines[0].kv_tokens == 4096
    assert any("oomwatch-run-" in evidence.where for evidence in _evidence(later)) or (
        "oomwatch-run-" in detail(later, "engines")
    )


def _evidence(diagnosis: Diagnosis) -> list[Evidence]:
    found = [*diagnosis.incidents, *diagnosis.risks]
    return [evidence for one in found for evidence in one.finding.evidence]


def test_the_engines_of_a_data_parallel_server_are_taken_together():
    samples = (
        EngineSample(1.0, "0", running=2, kv_usage_ratio=0.2, generation_tokens_total=10),
        EngineSample(1.0, "1", running=3, waiting=4, kv_usage_ratio=0.9, extra={"x_total": 1.0}),
    )
    together = one_sample(PageInput("page", "vllm", samples))
    assert together is not None
    assert (together.running, together.waiting, together.kv_usage_ratio) == (5, 4, 0.9)
    assert together.generation_tokens_total == 10
    assert together.preemptions_total is None  # unknown of both, not 0
    assert together.extra == {"x_total": 1.0}
    assert one_sample(PageInput("page", "vllm", samples[:1])) == samples[0]
    assert one_sample(PageInput("page", "vllm", ())) is None


def test_a_server_that_runs_again_shows_why_it_died_before(host):
    again = LOG.replace(AT, stamp(20)).replace(LATER, stamp(19)).replace("pid=4", "pid=5")
    host.serve(REFUSED + again)
    diagnosis = host.diagnose()
    assert (diagnosis.verdict, cause(diagnosis)) == ("oom", "kv_no_blocks")
    assert "serving" in render_text(diagnosis)  # and that it serves now


def test_a_pid_that_is_no_engine_is_said(host):
    host.serve()
    with pytest.raises(NoInputError, match=f"process {os.getpid()} is no engine"):
        host.diagnose(pids=(os.getpid(),))


def test_a_full_pool_of_last_week_is_no_news(host):
    full = "".join(
        f"(APIServer pid=41) INFO {stamp(7 * 1440 - n)} [loggers.py:127] Engine 000: Avg prompt "
        "throughput: 0.0 tokens/s, Avg generation throughput: 90.0 tokens/s, Running: 3 reqs, "
        "Waiting: 9 reqs, GPU KV cache usage: 99.0%, Prefix cache hit rate: 0.0%\n"
        for n in range(1, 5)
    )
    old = LOG.replace(AT, stamp(8 * 1440)).replace(LATER, stamp(8 * 1440 - 1))
    host.serve(old + full)
    assert host.diagnose().verdict == "healthy"


# ---------------------------------------------------------------- the agent beside it
def test_open_incidents_of_the_agent_are_pointed_to(host):
    assert not detail(host.diagnose(), "agent")  # there is none
    writer = StoreWriter(host.places.store, socket.gethostname())
    writer.start()
    for name, state in (("inc-1", "open"), ("inc-2", "open"), ("inc-3", "closed")):
        writer.save_incident(StoredIncident(name, name, state, time.time()))
    assert writer.stop()
    diagnosis = host.diagnose()
    assert detail(diagnosis, "agent") == (
        "the agent has 2 open incidents: oomwatch incidents list --open"
    )
    assert "oomwatch incidents list --open" in render_text(diagnosis)
