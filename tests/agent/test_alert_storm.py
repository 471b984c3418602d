"""Alerts while everything breaks: the real agent, killed in a storm, a receiver that fails, a full
disk. The short form runs always, 200 incidents with `make chaos`.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import pytest
from faulty_receiver import SECRET, FaultyReceiver, by_chance

from oomwatch.store.database import open_reader
from oomwatch.store.incidents import list_incidents
from oomwatch.store.location import parse_store
from oomwatch.store.outbox import PENDING, read_outbox

STARTED = """\
(APIServer pid=41) INFO {when} [api_server.py:1] vLLM API server version 0.11.0
(EngineCore_DP0 pid=42) INFO {when} [gpu_model_runner.py:2653] Model loading took 14.9 GiB and \
9.1 seconds
(EngineCore_DP0 pid=42) INFO {when} [kv_cache_utils.py:1087] GPU KV cache size: 16,384 tokens
(APIServer pid=41) INFO:     Application startup complete.
"""
REFUSED = """\
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710] EngineCore encountered a fatal error.
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710] Traceback (most recent call last):
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710]   File "/v/vllm/v1/worker/gpu_model_runner.py", \
line 2100, in execute_model
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710]     hidden_states = self.model(
(EngineCore_DP0 pid=42) ERROR {when} [core.py:710] torch.OutOfMemoryError: CUDA out of memory. \
Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB of which 1.10 GiB is free. \
Including non-PyTorch memory, this process has 22.50 GiB memory in use. Of the allocated memory \
21.80 GiB is allocated by PyTorch, and 120.00 MiB is reserved by PyTorch but unallocated.
"""
FAULTS = (500, 429, "hang", "lost")


class Engines:
    """Engines of which there is only a log."""

    def __init__(self, folder, count):
        self.logs = [folder / f"e{number}.log" for number in range(count)]
        for log in self.logs:
            self._write(log, STARTED)

    def configuration(self):
        return "".join(f'[[engine]]\nname = "{log.stem}"\nlog = "{log}"\n' for log in self.logs)

    def fail(self, *numbers):
        """Memory is refused to these; when."""
        for number in numbers:
            self._write(self.logs[number], REFUSED)
        return time.time()

    def restart(self, *numbers):
        """These serve again."""
        for number in numbers:
            self._write(self.logs[number], STARTED)

    @staticmethod
    def _write(log, text):
        with log.open("a") as file:
            file.write(text.format(when=time.strftime("%m-%d %H:%M:%S")))


@pytest.fixture
def receivers():
    """Makes receivers, which end with the test."""
    with contextlib.ExitStack() as stack:

        def make(fault=lambda: None):
            receiver = FaultyReceiver(fault)
            stack.callback(receiver.close)
            return receiver

        yield make


@pytest.fixture
def alerting(new_agent):
    """Makes agents that watch engines and tell receivers, by their names."""

    def make(engines, receivers, more="", **options):
        agent = new_agent(
            environment={f"OOMWATCH_NOTIFY_{name.upper()}_SECRET": SECRET for name in receivers},
            notify__retry_interval="100ms",
            export__listen="[]",
            **options,
        )
        sinks = "".join(
            f'[[notify.webhook]]\nname = "{name}"\nurl = "{receiver.url}"\ntimeout = "1s"\n{more}'
            for name, receiver in receivers.items()
        )
        agent.config.write_text(
            f"schema_version = 1\n[discovery]\nenabled = false\n{engines.configuration()}{sinks}"
        )
        return agent

    return make


def messages(agent):
    """What is in the outbox; None where the store cannot be read now."""
    try:
        with open_reader(parse_store(str(agent.store))) as connection:
            return read_outbox(connection, limit=100_000)
    except Exception:  # noqa: BLE001 - it is being written
        return None


def stored(agent):
    """All incidents."""
    return agent.read(list_incidents, limit=1000) or ()


def opened(receiver):
    """Ids of the first messages that it has taken."""
    return {name for name, body, _ in list(receiver.taken) if body["data"]["kind"] == "opened"}


def is_empty(agent):
    """Whether nothing waits any more."""
    rows = messages(agent)
    return rows is not None and not [row for row in rows if row.state in PENDING]


def check_all_told(agent, engines, receiver, sink, numbers):
    """Each of these engines failed once, and that was told once, in order."""
    incidents = {incident.engine_id: incident for incident in stored(agent)}
    assert len(stored(agent)) == len(incidents) == len(numbers)
    for number in numbers:
        incident = incidents[engines.logs[number].stem]
        told = receiver.of(incident.id)
        assert told[0] == "opened", told
        assert told.count("opened") == 1, "twice under two ids"
        if "resolved" in told:
            assert (told[-1], told.count("resolved")) == ("resolved", 1)
        assert ("resolved" in told) == (incident.state == "closed")
    rows = [row for row in messages(agent) if row.sink == sink]
    assert {row.state for row in rows} <= {"delivered", "dropped"}
    assert {row.id for row in rows if row.state == "delivered"} == set(receiver.ids())


# ---------------------------------------------------------------- the storm
def test_killed_in_a_storm_it_tells_every_incident_once_and_in_order(
    alerting, receivers, tmp_path, is_long
):
    count = 200 if is_long else 14
    receiver, engines = receivers(by_chance(11, FAULTS)), Engines(tmp_path, count)
    agent = alerting(engines, {"hook": receiver}, incidents__close_after="1s").start()
    kills = 5 if is_long else 2
    for number in range(count):
        engines.fail(number)
        if number % 3 == 0 and number >= 3:
            engines.restart(number - 3)
        time.sleep(0.05)
        if number % (count // (kills + 1)) == count // (kills + 1) - 1 and kills:
            kills -= 1
            before = len(receiver.attempts)
            agent.wait_for(lambda seen=before: len(receiver.attempts) > seen, "it tells")
            agent.kill()
            agent.start()
    agent.wait_for(lambda: len(stored(agent)) == count, "every incident is stored", 900)
    agent.wait_for(lambda: len(receiver.ids()) > count // 2, "half of it is told", 900)
    failed = len(receiver.attempts) - len(receiver.ids())
    receiver.fault = lambda: None
    healed_at = time.monotonic()
    agent.wait_for(lambda: is_empty(agent), "the outbox is empty", 900)
    print(
        f"{failed} attempts had failed; the outbox was empty "
        f"{time.monotonic() - healed_at:.1f} s after healing"
    )
    check_all_told(agent, engines, receiver, "hook", range(count))
    assert agent.stop()[0] == 0


def test_with_a_full_disk_it_tells_from_memory_and_writes_it_down_later(
    alerting, receivers, tmp_path, small_disk, is_long
):
    count = 200 if is_long else 10
    receiver, engines = receivers(by_chance(12, FAULTS)), Engines(tmp_path, count)
    agent = alerting(engines, {"hook": receiver}, store=small_disk / "store.db").start()
    first = count // 4
    engines.fail(*range(first))
    agent.wait_for(lambda: len(stored(agent)) == first, "the first are stored", 900)
    ballast = small_disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1024))
    agent.wait_for(lambda: "kept in memory only" in agent.said(), "the disk is full")
    for number in range(first, count):
        engines.fail(number)
        time.sleep(0.02)
    agent.wait_for(lambda: len(opened(receiver)) > count // 2, "it tells from memory", 900)
    receiver.fault = lambda: None
    agent.wait_for(lambda: len(opened(receiver)) == count, "all is told from memory", 900)
    assert len(stored(agent)) < count
    agent.kill()  # what it kept in memory is gone; the logs still say it
    agent.start()
    ballast.unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
    agent.wait_for(lambda: len(stored(agent)) == count, "every incident is stored", 900)
    agent.wait_for(lambda: is_empty(agent), "the outbox is empty", 900)
    assert len(opened(receiver)) == count, "told again under other ids"
    check_all_told(agent, engines, receiver, "hook", range(count))
    assert agent.stop()[0] == 0


# ---------------------------------------------------------------- others
def test_a_receiver_that_hangs_holds_up_neither_the_others_nor_the_end(
    alerting, receivers, tmp_path
):
    hung, other, engines = receivers(lambda: "hang"), receivers(), Engines(tmp_path, 3)
    agent = alerting(engines, {"hung": hung, "other": other}, 'timeout = "30s"\n')
    text = agent.config.read_text().replace('timeout = "1s"\n', "")
    agent.config.write_text(text)
    agent.start()
    engines.fail(0, 1, 2)
    agent.wait_for(lambda: len(other.ids()) == 3, "the other is told")
    assert len(hung.attempts) == 1
    status, seconds = agent.stop()
    assert status == 0
    assert seconds < 4
    waiting = [row for row in messages(agent) if row.state == "waiting"]
    assert [row.sink for row in waiting] == ["hung"] * 3
    # The next start sends it under the same id.
    hung.fault = lambda: None
    agent.start()
    agent.wait_for(lambda: is_empty(agent), "the outbox is empty")
    assert hung.attempts[0][0] in hung.ids()
    assert len(hung.ids()) == 3
    assert len(other.taken) == 3


def test_what_is_lost_is_told_to_the_others_and_can_be_sent_again(alerting, receivers, tmp_path):
    gone, other, engines = receivers(lambda: 410), receivers(), Engines(tmp_path, 2)
    agent = alerting(engines, {"gone": gone, "other": other}).start()
    engines.fail(0)
    agent.wait_for(lambda: len(other.ids()) == 2, "it is told that it was lost")
    assert sorted(body["data"]["kind"] for _, body, _ in other.taken) == ["opened", "undelivered"]
    (lost,) = (body["data"] for _, body, _ in other.taken if body["data"]["kind"] == "undelivered")
    assert "gone did not get this message" in lost["note"]
    assert lost["incidents"][0]["engine_id"] == "e0"
    assert "gone is DISABLED" in agent.said()
    engines.fail(1)
    agent.wait_for(lambda: len(other.ids()) == 3, "the other goes on")
    agent.wait_for(
        lambda: sum(row.state == "failed" for row in messages(agent) or ()) == 2, "both failed"
    )
    assert len(gone.attempts) == 1
    gone.fault = lambda: None
    done = oomwatch("notify", "retry", "--all", "--store", agent.store)
    assert done.startswith("2 message(s)")
    agent.wait_for(lambda: len(gone.ids()) == 2, "both are sent again")
    assert gone.attempts[0][0] in gone.ids()
    agent.wait_for(lambda: is_empty(agent), "the outbox is empty")
    assert agent.stop()[0] == 0


def test_silences_begin_and_end_while_it_runs(alerting, receivers, tmp_path):
    receiver, engines = receivers(), Engines(tmp_path, 3)
    agent = alerting(engines, {"hook": receiver}).start()
    said = oomwatch("silence", "add", "--engine", "e[01]", "--for", "1h", "--store", agent.store)
    silence = said.split("  ")[0]
    agent.wait_for(lambda: "people have said: 1 silence" in agent.said(), "it is obeyed")
    engines.fail(0, 1, 2)
    agent.wait_for(lambda: len(stored(agent)) == 3, "all are stored")
    agent.wait_for(receiver.ids, "one is told")
    agent.wait_for(
        lambda: sorted(row.state for row in messages(agent) or ()) == ["delivered", "held", "held"],
        "the others are held",
    )
    agent.kill()
    agent.start()
    oomwatch("silence", "end", silence, "--store", agent.store)
    agent.wait_for(lambda: len(receiver.ids()) == 3, "the others are told")
    assert len(receiver.taken) == 3
    assert agent.stop()[0] == 0


def test_receivers_come_and_go_with_a_reload(alerting, receivers, tmp_path):
    receiver, engines = receivers(), Engines(tmp_path, 2)
    agent = alerting(engines, {"hook": receiver})
    whole = agent.config.read_text()
    agent.config.write_text(whole.partition("[[notify")[0])
    agent.start()
    engines.fail(0)
    agent.wait_for(lambda: len(stored(agent)) == 1, "it is stored")
    agent.config.write_text(whole)
    agent.send(signal.SIGHUP)
    agent.wait_for(receiver.ids, "what is open is told to the new one")
    agent.config.write_text(whole.partition("[[notify")[0])
    agent.send(signal.SIGHUP)
    agent.wait_for(lambda: agent.said().count("was read anew") == 2, "it was read")
    engines.fail(1)
    agent.wait_for(lambda: len(stored(agent)) == 2, "it is stored")
    assert len(receiver.taken) == 1
    assert agent.stop()[0] == 0


def oomwatch(*words):
    """What a command prints."""
    line = [sys.executable, "-m", "oomwatch", *map(str, words)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout
