"""Conditions of one engine, from its own counters: a full pool, preemptions, requests that hang.

Thresholds follow the taxonomy: a few preemptions a minute are harmless, so their rate counts and
never the counter of the engine's lifetime; a high pool use alone is good use of memory, so it
counts only with requests that wait or are preempted.
"""

from __future__ import annotations

import collections
from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Point, forecast
from oomwatch.detect.levels import Level, Switch
from oomwatch.detect.rates import WindowedRate
from oomwatch.records import EngineSample, Evidence, Trigger, TriggerKind
from oomwatch.units import format_count, format_duration

_RATE_SECONDS: Final = 60.0
_PRESSED_SECONDS: Final = 30.0
"""Queues of a loaded server empty now and then."""
_LEAST_STILL_SECONDS: Final = 180.0
"""A long prefill moves no counter for a while; no engine takes three minutes over one chunk."""
_FORECAST_POINTS: Final = 4096
_FORECAST_LEAST_SECONDS: Final = 90.0
_PROGRESS: Final = ("generation_tokens_total", "prompt_tokens_total", "request_success_total")


class EngineWatch:
    """All conditions of one engine; fed with each reading of its page."""

    def __init__(self, engine_id: str, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self.engine_id = engine_id
        self._rules = rules
        self._forecasts = forecasts
        full, storm = rules.kv_saturation, rules.preemption_storm
        self._saturation = [
            Switch(Level(name, enter, full.clear_ratio, full.hold_seconds))
            for name, enter in (("warn", full.warn_ratio), ("critical", full.critical_ratio))
        ]
        self._preemption = [
            Switch(Level(name, enter, storm.clear_per_minute, storm.hold_seconds))
            for name, enter in (
                ("warn", storm.warn_per_minute),
                ("critical", storm.critical_per_minute),
            )
        ]
        self._stuck = Switch(Level("stuck", 1, 1, rules.never_fits.hold_seconds))
        self._still = Switch(
            Level("still", 1, 1, max(rules.zombie_engine.hold_seconds, _LEAST_STILL_SECONDS))
        )
        self._rate = WindowedRate(_RATE_SECONDS)
        self._progress: tuple[float, ...] | None = None
        self._usage: collections.deque[Point] = collections.deque(maxlen=_FORECAST_POINTS)
        self._pressed_at: float | None = None
        self.preemptions_per_minute: float | None = None

    @property
    def busy(self) -> bool:
        """Whether it is preempting, or its pool is fuller than the level that warns."""
        return any(switch.on for switch in (*self._saturation, *self._preemption))

    @property
    def kv_usage_ratio(self) -> float:
        """The last known use of the pool; 0 if none is known."""
        return self._usage[-1][1] if self._usage else 0.0

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        families = {
            "kv_pressure": (*self._saturation, *self._preemption),
            "stuck_request": (self._stuck,),
            "zombie": (self._still,),
        }
        rules = self._rules
        return {
            name
            for name, switches in families.items()
            if any(
                s.on or s.flaps(now, rules.flap_window_seconds) >= rules.flap_count
                for s in switches
            )
        }

    def feed(self, sample: EngineSample, now: float) -> list[Trigger]:
        """Take a reading at monotonic time `now`; what it set off."""
        rate = self._rate.feed(now, sample.preemptions_total)
        self.preemptions_per_minute = None if rate is None else rate * 60
        if sample.kv_usage_ratio is not None:
            self._usage.append((now, sample.kv_usage_ratio))
        found = [
            self._saturated(sample, now),
            self._preempting(sample, now),
            self._never_fits(sample, now),
            self._zombie(sample, now),
        ]
        return [trigger for trigger in found if trigger is not None]

    def predict(self, sample: EngineSample) -> Trigger | None:
        """The pool will be full soon, if it goes on like this. Called every few seconds."""
        if not self._usage:
            return None
        begin = self._usage[-1][0] - self._forecasts.window_seconds
        window = [point for point in self._usage if point[0] >= begin]
        ahead = forecast(
            window,
            1.0,
            least_seconds=_FORECAST_LEAST_SECONDS,
            confidence=self._forecasts.confidence_ratio,
        )
        if ahead is None or ahead.eta_seconds > self._forecasts.kv_horizon_seconds:
            return None
        text = (
            f"KV cache {ahead.level:.0%} full and rising: full in "
            f"{format_duration(ahead.eta_seconds)} ({format_duration(ahead.eta_low_seconds)} to "
            f"{format_duration(ahead.eta_high_seconds)})"
        )
        return self._trigger(
            "forecast_kv",
            sample,
            text,
            eta_seconds=ahead.eta_seconds,
            eta_low_seconds=ahead.eta_low_seconds,
            eta_high_seconds=ahead.eta_high_seconds,
            kv_usage_ratio=ahead.level,
        )

    # ---------------------------------------------------------------- conditions
    def _saturated(self, sample: EngineSample, now: float) -> Trigger | None:
        usage = sample.kv_usage_ratio
        if (sample.waiting or 0) > 0 or (self.preemptions_per_minute or 0) > 0:
            self._pressed_at = now
        pressed = self._pressed_at is not None and now - self._pressed_at <= _PRESSED_SECONDS
        low = self._rules.kv_saturation.clear_ratio
        # Full use of the pool that nobody waits for neither begins nor ends anything.
        value = usage if usage is None or pressed or usage < low else low
        switch = _highest(self._saturation, now, value)
        if switch is None or usage is None:
            return None
        text = (
            f"KV cache {usage:.0%} full with {format_count(sample.running)} running and "
            f"{format_count(sample.waiting)} waiting requests"
        )
        return self._trigger(
            "kv_saturation",
            sample,
            text,
            level=switch.level.name,
            kv_usage_ratio=usage,
            running=sample.running,
            waiting=sample.waiting,
            flaps=switch.flaps(now, self._rules.flap_window_seconds),
        )

    def _preempting(self, sample: EngineSample, now: float) -> Trigger | None:
        switch = _highest(self._preemption, now, self.preemptions_per_minute)
        if switch is None:
            return None
        text = f"{self.preemptions_per_minute:.0f} preemptions a minute"
        return self._trigger(
            "preemption_storm",
            sample,
            text,
            level=switch.level.name,
            preemptions_per_minute=self.preemptions_per_minute,
            flaps=switch.flaps(now, self._rules.flap_window_seconds),
        )

    def _never_fits(self, sample: EngineSample, now: float) -> Trigger | None:
        """Nothing runs, something waits, the pool is free, and nothing moves."""
        if sample.running is None or sample.waiting is None:
            value = None
        else:
            idle = sample.running == 0 and sample.waiting >= 1 and self._unmoved(sample)
            value = float(idle and (sample.kv_usage_ratio or 0) < 0.5)
        if self._stuck.feed(now, value) != "entered":
            return None
        text = (
            f"{format_count(sample.waiting)} waiting, none running, and the pool is free: the "
            "request at the head of the queue can never be scheduled"
        )
        return self._trigger("never_fits", sample, text, waiting=sample.waiting)

    def _zombie(self, sample: EngineSample, now: float) -> Trigger | None:
        """The page answers and says that requests run, but no counter has moved for minutes."""
        value = (
            None if sample.running is None else float(sample.running >= 1 and self._unmoved(sample))
        )
        self._progress = _progress(sample)
        if self._still.feed(now, value) != "entered":
            return None
        text = (
            f"the port answers and {format_count(sample.running)} requests are shown as running, "
            f"but no token has come for {format_duration(self._still.level.hold_seconds)}"
        )
        return self._trigger("zombie_engine", sample, text, running=sample.running)

    def _unmoved(self, sample: EngineSample) -> bool:
        return self._progress is not None and _progress(sample) == self._progress

    def _trigger(
        self, kind: TriggerKind, sample: EngineSample, text: str, **values: object
    ) -> Trigger:
        return Trigger(
            kind=kind,
            at=sample.at,
            engine_id=self.engine_id,
            text=text,
            values=values,
            evidence=(Evidence("metrics", self.engine_id, at=sample.at, text=text),),
        )


def _highest(switches: list[Switch], now: float, value: float | None) -> Switch | None:
    """The highest of several levels that was entered by this reading."""
    entered = [switch for switch in switches if switch.feed(now, value) == "entered"]
    return entered[-1] if entered else None


def _progress(sample: EngineSample) -> tuple[float, ...]:
    return tuple(getattr(sample, name) or 0.0 for name in _PROGRESS)
