"""Sweeps of scripted GPUs: rates, peaks, and drivers that hang, lose a GPU or are loaded anew."""

from __future__ import annotations

from typing import Any

import pytest

from oomwatch.units import GIB

START = """
import json, queue, sys, threading, time
from oomwatch.sources.sampler import GpuSampler
handed = queue.Queue()
def sampler(**settings):
    made = GpuSampler(lambda *what: handed.put(what), proc_root="/nowhere", **settings)
    made.start()
    return made
def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
def figures(reading):
    return [[g.sample.gpu, g.outcome, g.sample.used_bytes, g.sample.used_max_bytes,
             g.sample.free_min_bytes, g.sample.uuid] for g in reading.gpus]
"""
GPU0 = "gpu 0 GPU-aaaa 00000000:3B:00 NVIDIA H100\nmemory 0 0 80G 0 70G\n"
GPU1 = "gpu 1 GPU-bbbb 00000000:5E:00 NVIDIA H100\nmemory 1 0 80G 0 10G\n"


def run(fake_nvml, scenario: str, script: str) -> Any:
    return fake_nvml.run(scenario, START + script)


# ---------------------------------------------------------------- figures
def test_sweeps_with_processes_are_handed_on(fake_nvml):
    found = run(
        fake_nvml,
        "driver 570.1\ncuda 12080\n" + GPU0 + GPU1 + "process 1 0 -1 4242 compute 9G\n",
        """
before = time.monotonic()
s = sampler(interval_seconds=0.01, keep_seconds=0.01)
(reading, monotonic), (later, later_monotonic) = handed.get(timeout=30), handed.get(timeout=30)
s.stop()
print(json.dumps([reading.outcome, reading.driver_version, reading.cuda_version, figures(reading),
    [[p.gpu, p.pid, p.used_bytes] for p in later.processes],
    before <= monotonic < later_monotonic, s.silent_seconds, s.silent_call,
    s._thread.is_alive()]))
""",
    )
    assert found == [
        "ok",
        "570.1",
        "12.8",
        [
            [0, "ok", 70 * GIB, None, None, "GPU-aaaa"],
            [1, "ok", 10 * GIB, None, None, "GPU-bbbb"],
        ],
        [[1, 4242, 9 * GIB]],
        True,
        0.0,
        None,
        False,
    ]


def test_peaks_between_two_kept_sweeps_are_kept(fake_nvml):
    """A peak of one sweep, an hour before the next kept one in the time of this sampler."""
    peak = "memory 0 3 80G 0 79G\nmemory 0 4 80G 0 20G\n"
    found = run(
        fake_nvml,
        GPU0 + peak,
        """
s = sampler(interval_seconds=0.02, keep_seconds=3600)
first, _ = handed.get(timeout=30)
until(lambda: s._peaks and max(p.sweeps for p in s._peaks.values()) >= 6)
s.keep_seconds = 0
second, _ = handed.get(timeout=30)
third, _ = handed.get(timeout=30)
s.stop()
print(json.dumps([figures(first)[0], figures(second)[0], figures(third)[0]]))
""",
    )
    assert found == [
        [0, "ok", 70 * GIB, None, None, "GPU-aaaa"],
        [0, "ok", 20 * GIB, 79 * GIB, 1 * GIB, "GPU-aaaa"],
        [0, "ok", 20 * GIB, None, None, "GPU-aaaa"],
    ]


def test_peaks_of_mig_instances(fake_nvml):
    found = run(
        fake_nvml,
        GPU0 + "mig 0 5 0 MIG-five 40G 0 30G\nmig 0 7 0 MIG-seven 20G 0 1G\n",
        """
s = sampler(interval_seconds=0.02, keep_seconds=3600)
handed.get(timeout=30)
until(lambda: s._peaks and max(p.sweeps for p in s._peaks.values()) >= 2)
s.keep_seconds = 0
reading, _ = handed.get(timeout=30)
s.stop()
print(json.dumps([[i.sample.uuid, i.sample.used_max_bytes] for i in reading.gpus[0].instances]))
""",
    )
    assert found == [["MIG-five", 30 * GIB], ["MIG-seven", 1 * GIB]]


def test_the_rate_may_be_changed_while_it_waits(fake_nvml):
    found = run(
        fake_nvml,
        GPU0,
        """
s = sampler(interval_seconds=1000)
handed.get(timeout=30)
s.keep_seconds = 0
s.interval_seconds = 0.01
print(json.dumps([s.interval_seconds, len([handed.get(timeout=30) for _ in range(5)])]))
s.stop()
""",
    )
    assert found == [0.01, 5]


def test_processes_that_come_and_go_between_sweeps(fake_nvml):
    churn = "".join(f"process 0 {n} {n + 2} {1000 + n} compute 1M\n" for n in range(500))
    found = run(
        fake_nvml,
        GPU0 + churn,
        """
s = sampler(interval_seconds=0.001, keep_seconds=0)
print(json.dumps([[p.pid for p in handed.get(timeout=30)[0].processes] for _ in range(100)]))
s.stop()
""",
    )
    assert found == [[1000]] + [[999 + n, 1000 + n] for n in range(1, 100)]


def test_slow_facts_are_not_asked_each_time(fake_nvml):
    """A name that fails from the second sweep on is not noticed for as long as it is remembered."""
    found = run(
        fake_nvml,
        GPU0 + "error nvmlDeviceGetName 15 0 2 -1\n",
        """
s = sampler(interval_seconds=0.01, keep_seconds=0)
early = [handed.get(timeout=30)[0].outcome for _ in range(4)]
s._library._learnt_at -= 3600
late = [handed.get(timeout=30)[0].outcome for _ in range(50)]
s.stop()
print(json.dumps([sorted(set(early)), "gpu_lost" in late]))
""",
    )
    assert found == [["ok"], True]


# ---------------------------------------------------------------- drivers in trouble
def test_a_hung_call_holds_up_its_thread_only(fake_nvml):
    found = run(
        fake_nvml,
        GPU0 + GPU1 + "delay nvmlDeviceGetMemoryInfo_v2 -1 1\n",
        """
s = sampler(interval_seconds=0.01)
until(lambda: s.silent_seconds > 0.2)
first = s.silent_seconds
until(lambda: s.silent_seconds > first)
call = s.silent_call
s.stop()
print(json.dumps([call, handed.empty(), s._thread.is_alive(), s._thread.daemon]))
""",
    )
    assert found == ["nvmlDeviceGetMemoryInfo of GPU 1", True, True, True]


def test_it_goes_on_when_a_call_comes_back_late(fake_nvml):
    found = run(
        fake_nvml,
        GPU0 + "delay nvmlDeviceGetMemoryInfo_v2 400\n",
        """
s = sampler(interval_seconds=0.01, keep_seconds=0)
until(lambda: s.silent_seconds > 0.05)
print(json.dumps([figures(handed.get(timeout=30)[0])[0][2] for _ in range(2)]))
s.stop()
""",
    )
    assert found == [70 * GIB] * 2


def test_a_lost_gpu_leaves_the_others(fake_nvml):
    """GPU 0 is lost in the third sweep and back in the sixth."""
    found = run(
        fake_nvml,
        GPU0 + GPU1 + "error nvmlDeviceGetMemoryInfo_v2 15 0 1 4\n",
        """
s = sampler(interval_seconds=0.01, keep_seconds=0, reopen_seconds=0)
readings = [handed.get(timeout=30)[0] for _ in range(8)]
s.stop()
print(json.dumps([[r.outcome, r.detail, figures(r)] for r in readings]))
""",
    )
    outcomes = [outcome for outcome, _, _ in found]
    assert outcomes[0] == "ok"
    assert "gpu_lost" in outcomes
    lost = found[outcomes.index("gpu_lost")]
    assert lost[1] == "GPU 0: it has fallen off the bus"
    assert lost[2][0] == [0, "gpu_lost", None, None, None, "GPU-aaaa"]
    assert lost[2][1][:3] == [1, "ok", 10 * GIB]


@pytest.mark.parametrize(
    ("code", "outcome"),
    [(1, "error"), (9, "no_driver"), (18, "library_mismatch"), (15, "gpu_lost"), (999, "error")],
)
def test_the_library_is_opened_again_when_no_gpu_answers(fake_nvml, code, outcome):
    """From the second to the third second nothing answers; the sampler survives it."""
    found = run(
        fake_nvml,
        f"clock seconds\n{GPU0}error nvmlDeviceGetHandleByIndex_v2 {code} -1 1 2\n",
        """
s = sampler(interval_seconds=0.05, keep_seconds=0)
seen = []
while len(seen) < 3:
    reading, _ = handed.get(timeout=30)
    if not seen or seen[-1] != reading.outcome:
        seen.append(reading.outcome)
s.stop()
print(json.dumps(seen))
""",
    )
    assert found == ["ok", outcome, "ok"]


def test_a_gpu_that_is_no_longer_listed(fake_nvml):
    """The count falls when the library is opened again without the lost GPU."""
    found = run(
        fake_nvml,
        GPU0 + GPU1,
        """
s = sampler(interval_seconds=0.01, keep_seconds=0)
first, _ = handed.get(timeout=30)
s._library._known["GPU-cccc"] = 2
readings = [handed.get(timeout=30)[0] for _ in range(3)]
s.stop()
print(json.dumps([first.outcome, readings[-1].outcome, readings[-1].detail]))
""",
    )
    assert found == ["ok", "gpu_lost", "GPU 2 (GPU-cccc): the driver no longer lists it"]


def test_no_driver_is_said_and_asked_for_ever_more_rarely(fake_nvml):
    found = run(
        fake_nvml,
        "error nvmlInitWithFlags 9\n",
        """
s = sampler(interval_seconds=0.01, keep_seconds=0)
readings = [handed.get(timeout=30)[0] for _ in range(3)]
pause = s._pause_seconds()
s.stop()
print(json.dumps([[r.outcome for r in readings], [len(r.gpus) for r in readings], pause]))
""",
    )
    assert found[0] == ["no_driver"] * 3
    assert found[1] == [0, 0, 0]
    assert found[2] >= 0.08


def test_an_error_of_whoever_takes_the_figures_ends_nothing(fake_nvml):
    found = run(
        fake_nvml,
        GPU0,
        """
import logging
logging.disable()
seen = threading.Semaphore(0)
def take(*what):
    seen.release()
    raise ValueError("full")
s = GpuSampler(take, interval_seconds=0.01, keep_seconds=0)
s.start()
print(json.dumps([seen.acquire(timeout=30) for _ in range(3)]))
s.stop()
""",
    )
    assert found == [True] * 3
