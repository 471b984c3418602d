"""When to read more often: while something happens that is over in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable
from oomwatch.config.schema import AgentConfig

_LATELY_SECONDS: Final = 60.0


class Burst:
    """Whether GPUs and servers are read at the rate of a burst; monotonic seconds."""

    def __init__(self, table: EngineTable, detector: Callable[[], Detector | None]) -> None:
        self._table = table
        self._detector = detector
        self._until = 0.0

    def is_on(self, config: AgentConfig, now: float) -> bool:
        """Ask again each second: what was a reason holds for `burst_hold` after it ended."""
        if any(self._reasons(config, now)):
            self._until = now + config.burst_hold_seconds
        return now < self._until

    def _reasons(self, config: AgentConfig, now: float) -> Iterator[bool]:
        on = config.burst_on
        engines = [engine for engine in self._table if engine.ended_at is None]
        yield "start" in on and any(engine.is_starting(now) for engine in engines)
        pools = [pool for engine in engines for pool in engine.watches.values()]
        yield "kv_usage" in on and any(
            (pool.kv_usage_ratio or 0) > config.burst_kv_usage_ratio for pool in pools
        )
        yield "preemptions" in on and any((pool.preemptions_per_minute or 0) > 0 for pool in pools)
        detector = self._detector()
        if detector is not None:
            soonest = detector.headroom_lasts_seconds()
            yield (
                "headroom" in on and soonest is not None and soonest < config.burst_headroom_seconds
            )
            yield "incident" in on and detector.opened_lately(_LATELY_SECONDS, now)
