"""The agent while everything around it breaks: real processes, a scripted driver, real disks.

Each test has a short form, which always runs, and the whole one of `make chaos`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakenvml.library import compiler
from running_agent import configuration

TWO_GPUS = """
driver 580.65.06
gpu 0 GPU-00000000 00000000:10:00.0 NVIDIA H100 80GB HBM3
gpu 1 GPU-00000001 00000000:11:00.0 NVIDIA H100 80GB HBM3
memory 0 0 80G 1G 70G
memory 1 0 80G 1G 60G
"""
KILLS = {"process_exit", "log_failure", "cgroup_oom", "kernel_oom"}


def gaps(times) -> list[float]:
    """Seconds between one sample and the next."""
    ordered = sorted(set(times))
    return [b - a for a, b in itertools.pairwise(ordered)]


def leaked(agent, before) -> tuple[int, int]:
    """Threads and descriptors more than before."""
    now = agent.settled()
    return max(0, now[0] - before[0]), max(0, now[1] - before[1])


def failures(agent, engine):
    """Incidents of an engine that failed."""
    return [i for i in agent.incidents(engine.id) if KILLS & {t.kind for t in i.triggers}]


# ---------------------------------------------------------------- the driver
def test_a_hung_driver_is_a_finding_and_holds_nothing_up(new_agent, fake_nvml, is_long):
    seconds = 60 if is_long else 3
    scenario = TWO_GPUS + f"delay nvmlDeviceGetMemoryInfo_v2 {seconds * 1000} 1 4 5\n"
    agent = new_agent(
        environment=fake_nvml.environment(scenario), detect__driver_unresponsive__after="1s"
    ).start()
    before = agent.settled()
    agent.wait_for(lambda: agent.of_kind("driver_unresponsive"), "the hang is told")
    hung_at = time.time()
    agent.wait_for(
        lambda: any(s.gpu == 1 and s.at > hung_at for s in agent.samples().gpus),
        "GPU 1 is read again",
        seconds + 30,
    )
    samples = agent.samples()
    assert max(gaps(s.at for s in samples.gpus)) > seconds - 1
    assert max(gaps(s.at for s in samples.hosts)) < 3  # others went on
    assert len(agent.of_kind("driver_unresponsive")) == 1
    assert leaked(agent, before) == (0, 0)


def test_a_driver_that_never_comes_back_does_not_hold_up_the_end(new_agent, fake_nvml):
    scenario = TWO_GPUS + "delay nvmlDeviceGetMemoryInfo_v2 -1 1 3 -1\n"
    agent = new_agent(
        environment=fake_nvml.environment(scenario), detect__driver_unresponsive__after="1s"
    ).start()
    agent.wait_for(lambda: agent.of_kind("driver_unresponsive"), "the hang is told")
    status, seconds = agent.stop()
    assert status == 0
    assert seconds < 5


def test_a_gpu_that_is_lost_is_one_incident_and_the_others_go_on(new_agent, fake_nvml, is_long):
    scenario = TWO_GPUS + "clock seconds\nerror nvmlDeviceGetHandleByIndex_v2 15 1 4 -1\n"
    agent = new_agent(environment=fake_nvml.environment(scenario)).start()
    (incident,) = agent.wait_for(lambda: agent.of_kind("gpu_lost"), "the loss is told")
    assert incident.triggers[0].gpu == 1
    seconds = 90 if is_long else 3  # the library is opened again meanwhile
    agent.wait_for(
        lambda: any(s.at > incident.opened_at + seconds for s in agent.samples().gpus),
        "the other one is read",
        seconds + 30,
    )
    assert len(agent.of_kind("gpu_lost")) == 1
    samples = [s for s in agent.samples().gpus if s.used_bytes is not None]
    assert {s.gpu for s in samples if s.at > incident.opened_at + 1} == {0}


# ---------------------------------------------------------------- processes
CHURN = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
begun, count = time.monotonic(), 0
while time.monotonic() < end:
    for _ in range(20):
        os.waitpid(os.posix_spawn("/bin/true", ["VLLM::Worker"], {}), 0)
    count += 20
    time.sleep(max(0, begun + count / 1000 - time.monotonic()))
"""


def test_a_churn_of_processes_is_no_incident_and_leaks_nothing(new_agent, new_engine, is_long):
    engine = new_engine()
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id)
    before = agent.settled()
    subprocess.run([sys.executable, "-c", CHURN, "60" if is_long else "4"], check=True)
    assert leaked(agent, before) == (0, 0)
    assert max(gaps(s.at for s in agent.samples().hosts)) < 5
    assert not agent.incidents(engine.id)
    engine.kill_core()
    agent.wait_for(lambda: failures(agent, engine), "a real end is still seen")
    assert "failed; it starts again" not in agent.said()


# ---------------------------------------------------------------- the metrics page
def test_a_page_that_hangs_or_is_garbage_or_huge(new_agent, new_engine, is_long):
    pages = {name: new_engine() for name in ("hang", "garbage", "huge", "figures")}
    agent = new_agent(*pages.values(), agent__scrape_timeout="2s").start()
    for engine in pages.values():
        agent.wait_for_engine(engine.id)
    before, memory = agent.settled(), agent.memory_mib()
    for name, engine in pages.items():
        engine.set(page=name)
    broken_at = time.time()
    time.sleep(60 if is_long else 6)
    grown = agent.memory_mib("VmHWM") - memory
    good = [s.at for s in agent.samples().engines if s.engine == pages["figures"].id]
    mended_at = time.time()
    for engine in pages.values():
        engine.set(page="figures")
    for engine in pages.values():
        agent.wait_for(
            lambda engine=engine: any(
                s.engine == engine.id and s.at > mended_at for s in agent.samples().engines
            ),
            f"{engine.id} is read again",
        )
    assert grown < 100  # MiB; the page was 200 MB
    assert max(gaps(at for at in good if at > broken_at)) < 4  # the good one was read throughout
    assert max(gaps(s.at for s in agent.samples().hosts)) < 4
    assert leaked(agent, before) == (0, 0)
    assert not [i for e in pages.values() for i in agent.incidents(e.id)]


# ---------------------------------------------------------------- logs
def test_a_log_that_is_rotated_every_second_under_load_loses_no_line(
    new_agent, new_engine, is_long
):
    engine = new_engine(load=5000)
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id)
    before = agent.settled()
    rounds = 60 if is_long else 5
    for turn in range(1, rounds + 1):
        engine.set(told=turn * 10)
        time.sleep(0.5)
        for old in range(5, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                older = engine.log.with_suffix(f".log.{old}")
                older.rename(engine.log.with_suffix(f".log.{old + 1}"))
        engine.log.rename(engine.log.with_suffix(".log.1"))
        time.sleep(0.5)
    expected = list(range(1, rounds * 10 + 1))
    agent.wait_for(lambda: sorted(agent.numbers(engine.id)) == expected, "every line, once")
    engine.set(load=0)
    agent.wait_for(lambda: leaked(agent, before) == (0, 0), "the renamed logs are closed")


# ---------------------------------------------------------------- the disk
def test_a_full_disk_is_said_and_no_sample_is_lost(new_agent, new_engine, small_disk, is_long):
    engine = new_engine()
    agent = new_agent(engine, store=small_disk / "store.db").start()
    agent.wait_for_engine(engine.id)
    before = agent.settled()
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb") as file:
        for _ in range(4096):
            file.write(bytes(1024))
            file.flush()
    agent.wait_for(lambda: "kept in memory only" in agent.said(), "it says so")
    agent.wait_for(lambda: "MEMORY_ONLY" in agent.heard(), "systemd is told")
    engine.set(told=5)
    killed_at = engine.kill_core()
    time.sleep(60 if is_long else 3)
    ballast.unlink()
    agent.wait_for(lambda: "the store is written again" in agent.said(), "it is written again", 60)
    agent.wait_for(lambda: failures(agent, engine), "the incident is stored")
    assert len(failures(agent, engine)) == 1
    assert failures(agent, engine)[0].opened_at < killed_at + 5
    assert max(gaps(s.at for s in agent.samples().hosts)) < 3  # nothing is missing
    assert sorted(agent.numbers(engine.id)) == [1, 2, 3, 4, 5]
    assert leaked(agent, before)[0] == 0
    assert agent.stop()[0] == 0


def test_a_damaged_file_is_put_aside_and_a_new_one_begun(new_agent, new_engine):
    engine = new_engine()
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id, pages=3)
    before = agent.settled()
    with agent.store.open("r+b") as file:
        file.write(os.urandom(64 * 1024))
    damaged_at = time.time()
    agent.wait_for(lambda: list(agent.folder.glob("store.db*broken*")), "it is put aside")
    agent.wait_for(
        lambda: any(s.at > damaged_at for s in agent.samples().hosts), "it is stored again"
    )
    engine.kill_core()
    agent.wait_for(lambda: failures(agent, engine), "an incident is stored")
    assert len(failures(agent, engine)) == 1
    assert leaked(agent, before)[0] == 0
    assert agent.stop()[0] == 0


def test_a_file_deleted_under_it_is_written_anew(new_agent, new_engine):
    engine = new_engine()
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id, pages=3)
    first = min(s.at for s in agent.samples().hosts)
    before = agent.settled()
    for path in agent.folder.glob("store.db*"):
        path.unlink()
    deleted_at = time.time()
    agent.wait_for(
        lambda: any(s.at > deleted_at for s in agent.samples().hosts), "it is stored again"
    )
    samples = agent.samples()
    assert min(s.at for s in samples.hosts) == first  # what was stored before is there
    assert max(gaps(s.at for s in samples.hosts)) < 4
    assert leaked(agent, before) == (0, 0)


# ---------------------------------------------------------------- the clock
@pytest.mark.parametrize("step", [3600, -3600])
def test_a_clock_that_is_set_changes_nothing_that_counts(new_agent, new_engine, tmp_path, step):
    if compiler() is None:
        pytest.skip("no C compiler to build the library with that shifts a program's clock")
    library, shift = tmp_path / "clockstep.so", tmp_path / "shift"
    source = Path(__file__).with_name("clockstep.c")
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True
    )
    shift.write_text("0")
    engine = new_engine()
    agent = new_agent(
        engine, environment={"LD_PRELOAD": str(library), "CLOCKSTEP": str(shift)}
    ).start()
    agent.wait_for_engine(engine.id, pages=3)
    before = agent.settled()
    shift.write_text(str(step))
    stepped_at = time.time() + step
    agent.wait_for(
        lambda: len([s for s in agent.samples().hosts if abs(s.at - stepped_at) < 60]) > 3,
        "samples of the new time are stored",
    )
    assert not agent.incidents(engine.id)
    killed_at = engine.kill_core() + step
    agent.wait_for(lambda: failures(agent, engine), "a failure is seen")
    (incident,) = failures(agent, engine)
    assert abs(incident.opened_at - killed_at) < 10
    assert leaked(agent, before)[0] == 0
    assert agent.stop()[0] == 0


# ---------------------------------------------------------------- the agent itself
def test_killed_again_and_again_it_loses_nothing_and_tells_nothing_twice(
    new_agent, new_engine, is_long
):
    engine = new_engine()
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id)
    engine.set(orphaned=True)
    engine.kill_core()
    agent.wait_for(lambda: failures(agent, engine), "the failure is seen")
    chance = random.Random(4)  # noqa: S311 - a time to kill is no secret
    committed: set[float] = set()
    turns = 100 if is_long else 5
    for turn in range(1, turns + 1):
        engine.set(told=turn * 3)
        time.sleep(chance.uniform(0, 2.5))
        committed |= {s.at for s in agent.samples().hosts}
        agent.kill()
        assert committed <= {s.at for s in agent.samples().hosts}, f"lost after kill {turn}"
        # The last start is let come up: what is asked to stop before it listens just dies.
        agent.start(ready=turn == turns or chance.random() < 0.7)
    told = engine._state["told"]
    agent.wait_for(
        lambda: sorted(agent.numbers(engine.id)) == list(range(1, told + 1)), "every line, once"
    )
    assert len(failures(agent, engine)) == 1
    assert agent.stop()[0] == 0
    assert committed <= {s.at for s in agent.samples().hosts}


def test_it_ends_in_time_with_everything_written(new_agent, new_engine, fake_nvml):
    scenario = TWO_GPUS + "delay nvmlDeviceGetMemoryInfo_v2 -1 1 3 -1\n"
    engine, hung = new_engine(load=1000), new_engine()
    agent = new_agent(engine, hung, environment=fake_nvml.environment(scenario)).start()
    agent.wait_for_engine(engine.id)
    agent.wait_for_engine(hung.id)
    hung.set(page="hang")
    engine.set(told=50)
    time.sleep(1.2)
    before = time.time()
    status, seconds = agent.stop()
    assert status == 0
    assert seconds < 4  # two seconds, and as many for a machine that does much else
    assert agent.numbers(engine.id) == list(range(1, 51))
    assert max(s.at for s in agent.samples().hosts) > before - 2.5
    assert "did not take everything" not in agent.said()
    assert "STOPPING=1" in agent.heard()


def test_a_wrong_configuration_is_said_and_the_old_one_stays(new_agent, new_engine):
    engine = new_engine()
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id)
    agent.config.write_text(configuration([engine], "[agent]\nscrape_interval = 5\n"))
    agent.send(signal.SIGHUP)
    agent.wait_for(lambda: "the old one stays" in agent.said(), "it says so")
    agent.wait_for(lambda: "the new one is wrong" in agent.heard(), "systemd is told")
    told = agent.heard()
    assert told.index("RELOADING=1") < told.index("the new one is wrong")
    assert "scrape_interval" in agent.said()
    again = time.time()
    agent.wait_for(
        lambda: sum(s.at > again for s in agent.samples().engines) > 2, "it goes on as before"
    )
    agent.config.write_text(configuration([engine], '[agent]\nscrape_interval = "500ms"\n'))
    agent.send(signal.SIGHUP)
    agent.wait_for(lambda: "was read anew" in agent.said(), "a right one is taken")
    assert not agent.incidents(engine.id)


def test_the_end_does_not_wait_behind_reloads(new_agent):
    agent = new_agent().start()
    for _ in range(60):  # each takes longer than this pause
        agent.send(signal.SIGHUP)
        time.sleep(0.002)
    status, seconds = agent.stop()
    assert status == 0
    assert seconds < 4
    assert 1 <= agent.said().count("was read anew") < 20
