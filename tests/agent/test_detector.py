"""The detector with a real store and real logs; messages are put by hand, clocks turned by hand."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oomwatch.agent.detecting import Detecting
from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.explain import Explainer
from oomwatch.agent.messages import (
    Discovered,
    GpusSwept,
    HostRead,
    KernelSaid,
    Mailbox,
    PageRead,
    ProcessEnded,
    Reconfigured,
    Seen,
    TellingLines,
)
from oomwatch.config import Config
from oomwatch.detect.gpu import silent
from oomwatch.detect.incidents import IncidentBook, family
from oomwatch.discovery import DiscoveredEngine, Discovery, EngineMember
from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    RecordedEngine,
    Series,
    StoredIncident,
)
from oomwatch.sources.follow import FileFollower
from oomwatch.sources.lifecycle import Ended
from oomwatch.sources.log_tail import LogTail
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import ProcessInfo, ProcessTree
from oomwatch.store.database import open_reader
from oomwatch.store.incidents import list_incidents
from oomwatch.store.location import parse_store
from oomwatch.store.queries import read_window
from oomwatch.store.writer import StoreWriter

GIB = 1024**3
BEGIN = 1_764_400_000.0
ENGINE = "vllm-8000"
NOBODY = 5_000_000  # no process has a number that high


def stamp(at: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def banner(at: float) -> str:
    when = stamp(at)
    return (
        f"(APIServer pid=41) INFO {when} [api_server.py:1] vLLM API server version 0.11.0\n"
        f"(APIServer pid=41) INFO {when} [utils.py:233] non-default args: {{'model': '/m'}}\n"
        f"(EngineCore_DP0 pid=42) INFO {when} [kv_cache_utils.py:1087] GPU KV cache size: 16,384 "
        "tokens\n(APIServer pid=41) INFO:     Application startup complete.\n"
    )


def refused(at: float) -> str:
    head = f"(EngineCore_DP0 pid=42) ERROR {stamp(at)} [core.py:710]"
    return (
        f"{head} EngineCore encountered a fatal error.\n{head} Traceback (most recent call last):\n"
        f'{head}   File "/v/vllm/v1/worker/gpu_model_runner.py", line 2100, in execute_model\n'
        f"{head}     hidden_states = self.model(\n"
        f'{head}   File "/v/vllm/model_executor/layers/activation.py", line 67, in forward_native\n'
        f"{head}     out = torch.empty(output_shape, dtype=x.dtype, device=x.device)\n"
        f"{head} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
        "a total capacity of 23.65 GiB of which 1.10 GiB is free. Including non-PyTorch memory, "
        "this process has 22.50 GiB memory in use. Of the allocated memory 21.80 GiB is allocated "
        "by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.\n"
    )


def stopped(at: float) -> str:
    return (
        f"(APIServer pid=41) INFO {stamp(at)} [launcher.py:1] Shutting down FastAPI HTTP server.\n"
        "(APIServer pid=41) INFO:     Shutting down\n"
        "(APIServer pid=41) INFO:     Application shutdown complete.\n"
        "(APIServer pid=41) INFO:     Finished server process [41]\n"
    )


class Failing(Explainer):
    """Cannot judge as often as `fails` says, like one that cannot open its files."""

    fails = 0

    def explain(self, *args, **options):
        if self.fails:
            self.fails -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().explain(*args, **options)


class Rig:
    """One run of the agent's detector. Time goes only when `go` is called."""

    def __init__(self, folder: Path, config: Config, at: float = BEGIN) -> None:
        self.folder = folder
        self.wall, self.now = at, 1000.0
        self.store = str(folder / "oomwatch.db")
        self.log = folder / "server.log"
        self.log.touch()
        self.writer = StoreWriter(self.store, "host-a", interval_seconds=0.02)
        self.writer.start()
        self.table = EngineTable()
        with open_reader(parse_store(self.store)) as connection:
            known = list_incidents(connection)
        self.book = IncidentBook("host-a", config.incidents, known, now=self.now)
        self.explainer = Failing("host-a", self._window, wall=lambda: self.wall)
        self.detector = Detector(
            config,
            self.table,
            self.explainer,
            self.writer,
            self.book,
            logs_read_at=lambda: self.logs_read_at,
            wall=lambda: self.wall,
        )
        self.logs_read_at = float("-inf")
        self.tokens = 0.0
        self._tail = LogTail(FileFollower(str(self.log)), str(self.log), wall=lambda: self.wall)

    def _window(self, begin: float, end: float) -> Series:
        self.writer.flush(5)
        with open_reader(parse_store(self.store)) as connection:
            return read_window(connection, begin, end, host="host-a", step=0)

    def close(self) -> None:
        self._tail.follower.close()
        self.writer.stop(10)

    # ---------------------------------------------------------------- what happens
    def find(
        self,
        *starts: int,
        command: tuple[str, ...] = ("vllm", "serve", "/m"),
        started_at: float | None = None,
    ) -> None:
        """Discovery finds these starts of the engine; each has a server and a worker."""
        engines = []
        for start in starts:
            pids = (NOBODY + 10 * start, NOBODY + 10 * start + 1)
            members = tuple(
                EngineMember(ProcessInfo(pid, comm=f"proc-{pid}", start_ticks=pid), role)
                for pid, role in zip(pids, ("server", "engine"), strict=True)
            )
            recorded = RecordedEngine(
                ENGINE,
                "vllm",
                "0.11.0",
                command,
                pids=pids,
                gpus=(0,),
                metrics_url="http://127.0.0.1:8000/metrics",
            )
            engines.append(
                DiscoveredEngine(recorded, members, (), started_at=started_at or self.wall)
            )
        found = Discovery(
            self.wall, tuple(engines), (), NvmlReading(self.wall, "ok"), ProcessTree([])
        )
        self.detector.handle(Discovered(self.now, found))
        for engine in self.table:
            if self._tail not in engine.tails:
                engine.tails.append(self._tail)

    def engine(self) -> WatchedEngine:
        found = self.table.get(ENGINE)
        assert found is not None
        return found

    def say(self, text: str) -> None:
        with self.log.open("a") as file:
            file.write(text)
        if list(self._tail.poll()):
            self.detector.handle(TellingLines(self.now, ENGINE))

    def page(self, tokens: float = 10.0, **figures: float) -> None:
        self.tokens += tokens
        sample = EngineSample(
            self.wall,
            ENGINE,
            **{
                "running": 1.0,
                "waiting": 0.0,
                "kv_usage_ratio": 0.3,
                "generation_tokens_total": self.tokens,
                **figures,
            },
        )
        self.detector.handle(PageRead(self.now, ENGINE, (sample,)))

    def end(self, start: int, *, worker: bool = False, **how: object) -> None:
        pid = NOBODY + 10 * start + worker
        role = "engine" if worker else "server"
        ended = Ended(pid, ENGINE, self.wall, f"proc-{pid}", role, **how)  # type: ignore[arg-type]
        self.detector.handle(ProcessEnded(self.now, ended))

    def go(self, seconds: float, each: Callable[[], None] = lambda: None) -> None:
        """Let time pass, a second at a time; half seconds at first, where much is due."""
        passed = 0.0
        while passed < seconds:
            step = 0.5 if passed < 2 else 1.0
            passed += step
            self.now += step
            self.wall += step
            each()
            self.detector.tick(self.now)

    # ---------------------------------------------------------------- what was made of it
    def stored(self) -> list[StoredIncident]:
        assert self.writer.flush(10)
        with open_reader(parse_store(self.store)) as connection:
            return sorted(list_incidents(connection), key=lambda i: i.opened_at)

    def only(self) -> StoredIncident:
        (one,) = self.stored()
        return one


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(config: Config | None = None, at: float = BEGIN) -> Rig:
        for earlier in made:
            earlier.close()
        made.append(Rig(tmp_path, config or Config(), at))
        return made[-1]

    yield make
    for one in made:
        one.close()


def kinds(incident: StoredIncident) -> list[str]:
    return [trigger.kind for trigger in incident.triggers]


def cause(incident: StoredIncident) -> str:
    assert incident.diagnosis is not None
    return incident.diagnosis["incidents"][0]["cause"]


# ------------------------------------------------------------------------------- failures
def test_a_log_that_tells_of_a_failure_is_one_incident_with_its_cause(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say(refused(run.wall))
    run.go(1)
    one = run.only()
    assert (one.state, one.engine_id, kinds(one)) == ("open", ENGINE, ["log_failure"])
    assert cause(one) == "prefill_activation_peak"
    run.end(1, worker=True, exit_code=1)
    run.end(1, exit_code=1)
    run.go(10)
    assert "process_exit" in kinds(run.only())
    assert cause(run.only()) == "prefill_activation_peak"


def test_it_is_in_a_hurry_only_while_a_failure_is_to_be_judged(rig):
    host = rig()
    host.find(1)
    host.say(banner(host.wall))
    host.go(3)
    calm = host.detector.pause_seconds()
    host.say(refused(host.wall))
    assert host.detector.pause_seconds() < calm
    host.go(3)
    assert host.only().triggers
    assert host.detector.pause_seconds() == calm
    host.end(1, worker=True, signal=9)
    assert host.detector.pause_seconds() < calm


@pytest.mark.parametrize("fails", [1, 3])
def test_a_failure_is_told_though_it_could_not_be_judged_at_first(rig, fails):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.explainer.fails = fails
    run.say(refused(run.wall))
    run.go(40)
    assert run.explainer.fails == 0
    one = run.only()
    assert kinds(one) == ["log_failure"]
    assert cause(one) == "prefill_activation_peak"


@pytest.mark.parametrize("fails", [1, 1000])
def test_an_end_is_told_though_it_cannot_be_judged(rig, fails):
    run = rig()
    run.find(1)
    run.explainer.fails = fails
    run.end(1, exit_code=1)
    run.go(40)
    assert kinds(run.only()) == ["process_exit"]
    assert run.engine().settled


def test_what_set_an_incident_off_is_told_before_it_can_be_explained(rig):
    run = rig()
    run.find(1)
    run.explainer.fails = 1
    run.end(1, worker=True, exit_code=137, signal=9, oom_killed=True)
    assert kinds(run.only()) == ["cgroup_oom"]
    assert run.only().diagnosis is None
    run.go(10)
    assert run.only().diagnosis is not None


class Handing:
    """Where messages go; it refuses as many as `fails` says."""

    def __init__(self, fails: int) -> None:
        self.fails, self.taken, self.done = fails, [], threading.Event()

    def handle(self, message):
        self.taken.append(message)
        if len(self.taken) <= self.fails:
            raise KeyError("a fault")
        self.done.set()

    def pause_seconds(self):
        return 0.05

    def tick(self, now):
        pass


@pytest.mark.parametrize(
    ("fails", "taken"), [(2, ["ended", "ended", "ended"]), (3, ["ended", "ended", "ended", "next"])]
)
def test_a_message_over_which_the_detector_fails_is_handed_over_twice_more(fails, taken, caplog):
    mailbox, detector, stop = Mailbox(10), Handing(fails), threading.Event()
    detecting = Detecting(mailbox, detector, stop, again_seconds=(0.01, 0.01))
    thread = threading.Thread(target=detecting.run)
    thread.start()
    try:
        mailbox.put("ended")
        deadline = time.monotonic() + 10
        while len(detector.taken) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        if fails == 3:
            mailbox.put("next")
        assert detector.done.wait(10)
    finally:
        stop.set()
        thread.join(10)
    assert detector.taken == taken
    assert caplog.text.count("tried again") == 2


def test_a_killed_worker_is_an_incident_and_ends_with_the_next_start_that_serves(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.end(1, worker=True, exit_code=137, signal=9)
    run.go(1)
    assert "process_exit" in kinds(run.only())
    run.end(1, exit_code=1)
    run.go(5)
    run.find(2)
    run.go(20)
    assert run.only().state == "open"  # it does not serve yet
    run.go(25, run.page)
    assert run.only().state == "open"  # not for long enough
    run.go(15, run.page)
    one = run.only()
    assert one.state == "closed"
    assert one.diagnosis is None or one.diagnosis["resolution"]["command_changed"] is False


def test_a_kill_that_the_cgroup_counted_is_told_at_once(rig):
    run = rig()
    run.find(1)
    run.end(1, worker=True, exit_code=137, signal=9, oom_killed=True)
    assert kinds(run.only()) == ["cgroup_oom"]
    event = KernelEvent(
        "oom_kill", "Killed process", at=1.0, fields={"pid": NOBODY + 11, "scope": "cgroup"}
    )
    run.detector.handle(KernelSaid(run.now, event))
    one = run.only()
    assert kinds(one) == ["cgroup_oom", "kernel_oom"]
    assert one.window_to < run.wall + 3600  # its clock was off, and is not believed


def test_a_stop_on_request_is_none_though_workers_are_killed(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say(stopped(run.wall))
    run.end(1, worker=True, exit_code=137, signal=9)
    run.end(1, exit_code=0)
    run.go(20)
    run.find()
    run.go(20)
    assert [[t.text for t in i.triggers] for i in run.stored()] == []


def saturated(at: float) -> str:
    return (
        f"(APIServer pid=41) INFO {stamp(at)} [loggers.py:127] Engine 000: Avg prompt throughput: "
        "10.0 tokens/s, Avg generation throughput: 90.0 tokens/s, Running: 12 reqs, "
        "Waiting: 8 reqs, GPU KV cache usage: 99.8%, Prefix cache hit rate: 0.0%\n"
    )


def test_nor_is_a_stop_of_a_server_whose_pool_is_full(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    for _ in range(12):
        run.go(10, run.page)
        run.say(saturated(run.wall))
    triggered = "[launcher.py:254] [shutdown] API server: shutdown triggered"
    run.say(f"(APIServer pid=41) INFO {stamp(run.wall)} {triggered}\n")
    run.end(1, worker=True, exit_code=137, signal=9)
    run.go(10)
    run.say(saturated(run.wall))  # it waits for connections to close
    run.go(10)
    run.end(1, exit_code=0)
    run.go(20)
    assert run.stored() == []


def test_a_log_that_is_due_waits_for_the_last_words_of_what_has_ended(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say("WARNING memory is low\n")
    run.go(0.5)
    run.say("WARNING memory is low\n")  # to be judged a second after the last time
    run.go(0.5)
    run.end(1, worker=True, exit_code=137, signal=9)
    run.go(0.5)
    run.say(stopped(run.wall))
    run.end(1, exit_code=0)
    run.go(20)
    assert run.stored() == []


def test_the_end_of_the_last_start_in_the_log_of_the_next_does_not_keep_it_open(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.end(1, worker=True, exit_code=137, signal=9)
    run.go(1)
    last_words = refused(run.wall)
    run.end(1, exit_code=1)
    run.go(5)
    run.find(2)
    run.go(20)
    run.page()
    run.say(last_words)  # its keeper writes the log late
    run.go(40)  # it serves, and nobody asks it for anything
    assert [one.state for one in run.stored()] == ["closed"]


def died(at: float) -> str:
    return (
        f"(APIServer pid=41) ERROR {stamp(at)} [core_client.py:564] Engine core proc EngineCore_DP0 "
        "died unexpectedly, shutting down client.\n"
    )


@pytest.mark.parametrize("away", [20, 3000, 90_000])
def test_the_end_of_the_last_start_is_no_failure_of_the_next(rig, away):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.end(1, worker=True, exit_code=137, signal=9)
    run.say(died(run.wall))
    run.end(1, exit_code=1)
    run.go(5)
    run.find()
    run.go(away)
    run.find(2)
    run.say("WARNING memory is low\n")  # before its banner
    run.go(5)
    run.say(banner(run.wall).replace("pid=4", "pid=5"))
    run.go(60, run.page)
    run.end(2, exit_code=143, signal=15)
    run.go(5)
    one = run.only()
    assert (one.state, cause(one)) == ("closed", "killed_by_signal")
    assert [trigger.kind for trigger in one.triggers].count("log_failure") == 1


def test_a_start_that_fails_as_the_last_one_did_is_a_failure(rig):
    run = rig()
    for start in (1, 2):
        run.find(start)
        run.say(banner(run.wall).replace("pid=4", f"pid={start}4"))
        run.go(60, run.page)
        run.say(died(run.wall).replace("pid=4", f"pid={start}4"))
        run.end(start, exit_code=1)
        run.go(5)
    assert [one.state for one in run.stored()] == ["closed", "open"]


def test_a_terminated_server_without_a_log_is_none(rig):
    run = rig()
    run.find(1)
    run.go(30, run.page)
    run.end(1, exit_code=143, signal=15)
    run.go(20)
    assert run.stored() == []


@pytest.mark.parametrize(("read", "told"), [(0.2, []), (0.3, ["process_exit"])])
def test_an_end_is_told_once_the_logs_are_read(rig, read, told):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.logs_read_at = run.now + read
    run.end(1, worker=True, exit_code=137, signal=9)
    run.go(0.5)
    assert [kind for one in run.stored() for kind in kinds(one) if "exit" in kind] == told
    run.go(0.5)  # nor is it waited for longer
    assert "process_exit" in kinds(run.only())


def test_an_end_is_judged_although_the_next_start_is_there_already(rig):
    run = rig()
    run.find(1)
    run.go(30, run.page)
    run.end(1, exit_code=137, signal=9)
    run.find(2)
    run.go(2)
    assert "process_exit" in kinds(run.only())


def test_an_end_that_nobody_saw_is_found_by_the_search(rig):
    run = rig()
    run.find(1)
    run.go(30, run.page)
    run.find()
    run.go(2)
    assert kinds(run.only()) == ["process_exit"]


def test_a_restart_loop_is_one_incident_until_it_serves(rig):
    run = rig()
    for start in range(1, 6):
        run.find(start)
        run.say(banner(run.wall) + refused(run.wall))
        run.go(3)
        run.end(start, exit_code=1)
        run.go(30)
    one = run.only()
    assert one.state == "open"
    assert "restart_loop" in kinds(one)
    run.find(9, command=("vllm", "serve", "/m", "--max-num-batched-tokens", "2048"))
    run.go(60, run.page)
    one = run.only()
    assert one.state == "closed"
    assert one.diagnosis["resolution"]["command_changed"] is True
    assert one.diagnosis["resolution"]["restarted"] is True


def test_the_verdict_on_a_failure_is_not_that_on_an_earlier_one(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say(refused(run.wall))
    run.end(1, exit_code=1)
    run.go(5)
    run.find(2)
    run.say(banner(run.wall).replace("pid=4", "pid=5"))
    run.go(60, run.page)
    run.end(2, worker=True, exit_code=137, signal=9)
    run.go(5)
    found = [one.diagnosis for one in run.stored()]
    assert [(one["verdict"], one["incidents"][0]["cause"]) for one in found] == [
        ("oom", "prefill_activation_peak"),
        ("not_oom", "killed_by_signal"),
    ]


def test_starts_that_served_are_no_loop(rig):
    run = rig()
    for start in range(1, 4):  # each is killed once it has served for a minute
        run.find(start)
        run.say(banner(run.wall))
        run.go(60, run.page)
        run.end(start, worker=True, exit_code=137, signal=9)
        run.end(start, exit_code=1)
        run.go(5)
    assert [one.state for one in run.stored()] == ["closed", "closed", "open"]
    run.find(4)
    assert ["restart_loop" in kinds(one) for one in run.stored()] == [False, False, False]


def test_a_failure_that_leaves_the_server_running_ends_when_it_works_on(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say(refused(run.wall))
    run.go(120, lambda: run.page(tokens=0))
    assert run.only().state == "open"  # the port answers, but no token comes
    run.go(5, run.page)
    assert run.only().state == "closed"


def test_the_failure_of_an_engine_that_is_given_up_ends_after_a_day(rig):
    run = rig()
    run.find(1)
    run.end(1, exit_code=137, signal=9)
    run.go(2)
    run.find()
    run.now += 86_000
    run.go(2)
    assert run.only().state == "open"
    run.now += 3600
    run.go(2)
    assert run.only().state == "closed"


# ------------------------------------------------------------------------------- again
@pytest.mark.parametrize("over", [False, True])
def test_reading_it_all_again_after_a_restart_of_the_agent_opens_nothing(rig, over):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(30, run.page)
    run.say(refused(run.wall))
    run.go(2)
    if over:
        run.go(60, run.page)
    before = run.only()
    assert before.state == ("closed" if over else "open")
    again = rig(at=run.wall + 5)  # its follower begins at the first line again
    again.find(1, started_at=BEGIN)
    again.say("")
    again.go(60, lambda: again.page(tokens=0))
    after = again.only()
    assert (after.id, after.state, len(after.triggers)) == (
        before.id,
        before.state,
        len(before.triggers),
    )


@pytest.mark.parametrize("hours", [-8, 5])
def test_a_failure_is_told_whatever_zone_its_log_is_of(rig, hours):
    run = rig()
    run.find(1)
    run.say(banner(run.wall + hours * 3600))
    run.go(30, run.page)
    run.say(refused(run.wall + hours * 3600))
    run.go(2)
    opened = run.only()
    assert kinds(opened) == ["log_failure"]
    assert abs(opened.opened_at - run.wall) < 10


def test_pressure_goes_on_over_a_restart_of_the_agent(rig):
    run = rig()
    run.find(1)
    full = {"kv_usage_ratio": 0.96, "waiting": 5.0}
    run.go(60, lambda: run.page(**full))
    before = run.only()
    again = rig(at=run.wall + 5)
    again.go(20)
    again.find(1)
    again.go(90, lambda: again.page(**full))
    assert (again.only().id, again.only().state) == (before.id, "open")
    again.go(200, again.page)
    assert again.only().state == "closed"


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_changes_nothing(rig, step):
    run = rig()
    run.find(1)
    run.go(30, run.page)
    run.end(1, exit_code=137, signal=9)
    run.go(2)
    run.wall += step
    run.go(2)
    run.find(2)
    run.go(60, run.page)
    one = run.only()
    assert one.state == "closed"
    assert one.closed_at >= one.opened_at
    run.go(60, run.page)
    assert len(run.stored()) == 1


# ------------------------------------------------------------------------------- pressure
def test_a_full_pool_whose_server_dies_is_over_and_not_because_it_serves_again(rig):
    run = rig()
    run.find(1)
    run.say(banner(run.wall))
    run.go(60, lambda: run.page(kv_usage_ratio=0.96, waiting=5.0))
    assert kinds(run.only()) == ["kv_saturation"]
    run.end(1, worker=True, signal=9)
    run.end(1, exit_code=1)
    run.go(120)
    full = next(one for one in run.stored() if "kv_saturation" in kinds(one))
    assert full.state == "closed"
    assert "resolution" not in full.diagnosis


def test_a_full_pool_is_an_incident_of_its_own_and_ends_with_it(rig):
    run = rig()
    run.find(1)
    run.go(60, lambda: run.page(kv_usage_ratio=0.96, waiting=5.0))
    assert [family(i) for i in run.stored()] == ["kv_pressure"]
    run.end(1, exit_code=137, signal=9)
    run.go(2)
    assert sorted(map(family, run.stored())) == ["failure", "kv_pressure"]
    run.go(40)
    assert {family(i): i.state for i in run.stored()} == {
        "failure": "open",
        "kv_pressure": "closed",
    }


def test_each_pool_of_an_engine_is_watched(rig):
    run = rig()
    run.find(1)

    def pages() -> None:
        one = EngineSample(run.wall, ENGINE, kv_usage_ratio=0.2, waiting=0.0, running=1.0)
        two = dataclasses.replace(one, engine=f"{ENGINE}/1", kv_usage_ratio=0.97, waiting=4.0)
        run.detector.handle(PageRead(run.now, ENGINE, (one, two)))

    run.go(60, pages)
    assert run.only().engine_id == ENGINE


def test_a_pool_that_fills_is_forecast_and_told_of_as_one(rig):
    run = rig()
    run.find(1)
    begin = run.now
    run.go(400, lambda: run.page(kv_usage_ratio=(run.now - begin) / 600))
    one = run.only()
    assert set(kinds(one)) == {"forecast_kv"}
    assert one.opened_at - BEGIN <= 420
    assert one.diagnosis is not None
    assert one.diagnosis["verdict"] == "at_risk"
    (risk,) = one.diagnosis["risks"]
    assert risk["cause"] == "kv_saturation"
    assert "full and rising" in risk["summary"]
    assert "--gpu-memory-utilization" in json.dumps(risk["remedies"])
    run.go(200, lambda: run.page(kv_usage_ratio=0.2))
    over = run.only()
    assert over.state == "closed"
    assert over.diagnosis is not None
    assert over.diagnosis["resolution"]["restarted"] is False


def test_the_driver_is_silent_until_it_sweeps_again(rig):
    run = rig()
    run.detector.handle(Seen(run.now, silent(run.wall, 12.0)))
    run.go(120)
    assert run.only().state == "open"
    run.detector.handle(GpusSwept(run.now, (), ()))
    run.go(5)
    assert run.only().state == "closed"


def test_a_lost_gpu_is_told_once_and_lost_until_it_is_back(rig):
    run = rig()
    sample = GpuSample(BEGIN, 0, total_bytes=80 * GIB, free_bytes=40 * GIB)
    run.go(100, lambda: run.detector.handle(GpusSwept(run.now, (sample,), (), {1: "fell off"})))
    assert kinds(run.only()) == ["gpu_lost"]
    run.go(40, lambda: run.detector.handle(GpusSwept(run.now, (sample,), ())))
    assert run.only().state == "closed"


def test_an_orphan_that_holds_memory_is_told_and_over_when_it_has_gone(rig):
    run = rig()
    orphan = DiscoveredEngine(
        RecordedEngine(ENGINE, "vllm", pids=(77,), gpus=(0,)), (), (), orphan=True
    )
    found = Discovery(run.wall, (orphan,), (), NvmlReading(run.wall, "ok"), ProcessTree([]))
    run.detector.handle(Discovered(run.now, found))
    holding = GpuProcessSample(BEGIN, 0, 77, "VLLM::EngineCore", 30 * GIB)
    sample = GpuSample(BEGIN, 0, total_bytes=80 * GIB, free_bytes=40 * GIB)
    run.go(90, lambda: run.detector.handle(GpusSwept(run.now, (sample,), (holding,))))
    assert kinds(run.only()) == ["orphan_holder"]
    run.go(90, lambda: run.detector.handle(GpusSwept(run.now, (sample,), ())))
    assert run.only().state == "closed"


def test_little_host_memory(rig):
    run = rig()
    low = HostSample(BEGIN, 100 * GIB, 6 * GIB)
    run.go(60, lambda: run.detector.handle(HostRead(run.now, low)))
    assert kinds(run.only()) == ["host_headroom"]


# ------------------------------------------------------------------------------- settings
@pytest.mark.parametrize("mode", ["off", "observe"])
def test_what_is_not_to_alert_opens_nothing(rig, mode):
    config = Config()
    rule = dataclasses.replace(config.detect.kv_saturation, mode=mode)
    quiet = dataclasses.replace(
        config, detect=dataclasses.replace(config.detect, kv_saturation=rule)
    )
    run = rig(quiet)
    run.find(1)
    run.go(60, lambda: run.page(kv_usage_ratio=0.96, waiting=5.0))
    assert run.stored() == []
    assert run.detector.triggers_total["kv_saturation"] == (mode == "observe")


def test_other_thresholds_hold_from_the_next_message_on(rig):
    run = rig()
    run.find(1)
    run.go(60, lambda: run.page(kv_usage_ratio=0.7, waiting=5.0))
    assert run.stored() == []
    config = Config()
    rule = dataclasses.replace(config.detect.kv_saturation, warn_ratio=0.6, clear_ratio=0.5)
    lower = dataclasses.replace(
        config, detect=dataclasses.replace(config.detect, kv_saturation=rule)
    )
    run.detector.handle(Reconfigured(run.now, lower))
    run.go(60, lambda: run.page(kv_usage_ratio=0.7, waiting=5.0))
    assert kinds(run.only()) == ["kv_saturation"]


def test_a_burst_is_asked_for_after_an_incident(rig):
    run = rig()
    assert not run.detector.opened_lately(60.0, run.now)
    run.detector.handle(Seen(run.now, silent(run.wall, 12.0)))
    assert run.detector.opened_lately(60.0, run.now + 59)
    assert not run.detector.opened_lately(60.0, run.now + 61)


# ------------------------------------------------------------------------------- the mailbox
def test_readings_are_dropped_before_what_happens_once():
    mailbox = Mailbox(2000)
    for number in range(1000):
        mailbox.put(HostRead(float(number), HostSample(0.0)))
    assert len(mailbox) == 512
    assert mailbox.dropped_total == 488
    mailbox.put(TellingLines(1.0, ENGINE))
    assert len(mailbox) == 513
    assert mailbox.take(0.01) == HostRead(0.0, HostSample(0.0))


def test_an_empty_one_gives_nothing():
    assert Mailbox(10).take(0.01) is None
