from __future__ import annotations

import pytest
from readings import GIB, host

from oomwatch.config import Config
from oomwatch.detect.host import HostWatch, cgroup_kill
from oomwatch.records import HostSample

CONFIG = Config()


def watch() -> HostWatch:
    return HostWatch(CONFIG.detect, CONFIG.forecast)


def feed(memory: HostWatch, available, begin: int, end: int):
    return [
        (second, trigger.kind, trigger.values["level"])
        for second in range(begin, end)
        for trigger in memory.feed(host(second, available(second)), float(second))
    ]


def test_levels_are_entered_after_their_hold_and_left_above_the_clear_one():
    memory = watch()
    assert feed(memory, lambda _: 8 * GIB, 0, 60) == [(30, "host_headroom", "warn")]
    assert feed(memory, lambda _: 4 * GIB, 60, 120) == [(90, "host_headroom", "critical")]
    feed(memory, lambda _: 12 * GIB, 120, 240)
    assert memory.held(240.0) == {"host_memory"}
    feed(memory, lambda _: 30 * GIB, 240, 300)
    assert memory.held(300.0) == set()


def test_a_short_dip_is_none():
    assert feed(watch(), lambda s: 2 * GIB if s % 60 < 20 else 50 * GIB, 0, 600) == []


def test_a_host_that_hides_its_memory_says_nothing():
    memory = watch()
    for second in range(100):
        assert memory.feed(HostSample(float(second)), float(second)) == []
    assert memory.predict(0.0, 100.0) is None


def test_a_leak_is_forecast():
    memory = watch()
    feed(memory, lambda s: 60 * GIB - s * GIB / 30, 0, 600)
    trigger = memory.predict(5.0, 600.0)
    assert trigger is not None
    assert trigger.kind == "forecast_host"
    assert trigger.at == 5.0
    # 40 GiB are left, of which the last 2 % are not to be had.
    assert trigger.values["eta_seconds"] == pytest.approx(38 * 30, rel=0.05)
    assert trigger.values["available_bytes"] == pytest.approx(40 * GIB, rel=0.05)


def test_steady_use_is_not():
    memory = watch()
    feed(memory, lambda s: (40 + s % 7) * GIB, 0, 600)
    assert memory.predict(0.0, 600.0) is None


def test_a_kill_that_a_cgroup_counted():
    trigger = cgroup_kill("/vllm.slice", 2, 7.0, "vllm-8000")
    assert (trigger.kind, trigger.engine_id, trigger.values["kills"]) == (
        "cgroup_oom",
        "vllm-8000",
        2,
    )
