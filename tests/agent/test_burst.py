"""What makes the agent look more often, and for how long."""

from __future__ import annotations

import pytest

from oomwatch.agent.burst import Burst
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.config.schema import AgentConfig, DetectConfig, ForecastConfig
from oomwatch.detect.engine import EngineWatch
from oomwatch.discovery import DiscoveredEngine
from oomwatch.records import EngineSample, RecordedEngine

ALL = AgentConfig(burst_hold_seconds=30.0)


class Host:
    """One engine that serves, and whether it is a reason."""

    def __init__(self) -> None:
        found = DiscoveredEngine(RecordedEngine("one"), (), ())
        self.engine = WatchedEngine(found, seen_monotonic=0.0, begun_monotonic=0.0)
        self.engine.served_monotonic = 1.0
        self.pool = EngineWatch("one", DetectConfig(), ForecastConfig())
        self.engine.watches["one"] = self.pool
        table = EngineTable()
        table._running["one"] = self.engine
        self.burst = Burst(table, lambda: None)

    def page(self, now: float, usage: float, preemptions: float = 0.0) -> None:
        sample = EngineSample(now, "one", kv_usage_ratio=usage, preemptions_total=preemptions)
        self.pool.feed(sample, now)

    def is_on(self, now: float, config: AgentConfig = ALL) -> bool:
        return self.burst.is_on(config, now)


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_quiet_host_is_read_at_the_usual_rate(host):
    host.page(10.0, 0.5)
    assert not host.is_on(10.0)


def test_a_full_cache_is_a_reason_and_holds_for_a_while(host):
    host.page(10.0, 0.95)
    assert host.is_on(10.0)
    host.page(11.0, 0.5)
    assert host.is_on(39.9)
    assert not host.is_on(40.0)


def test_the_share_that_counts_as_full_is_the_configured_one(host):
    host.page(10.0, 0.95)
    assert not host.is_on(10.0, AgentConfig(burst_kv_usage_ratio=0.99))


def test_preemptions_are_a_reason(host):
    for second in range(120):
        host.page(10.0 + second, 0.5, preemptions=float(second))
    assert host.is_on(130.0)


def test_a_start_is_a_reason_until_it_serves_or_is_over(host):
    host.engine.served_monotonic = None
    assert host.is_on(10.0)
    host.engine.ended_at = 1.0
    assert not host.is_on(50.0)


def test_only_what_is_asked_for_is_a_reason(host):
    host.engine.served_monotonic = None
    host.page(10.0, 0.95)
    assert not host.is_on(10.0, AgentConfig(burst_on=("preemptions", "headroom", "incident")))
