"""Conditions of one engine, from its own counters: a full pool, preemptions, requests that hang.

Thresholds follow the taxonomy: a few preemptions a minute are harmless, so their rate counts and
never the counter of the engine's lifetime; a high pool use alone is good use of memory, so it
counts only with requests that wait or are preempted. A pool that holds few requests loses much by
each preemption and is full again and again: it warns by its peaks, and is critical only where it
stays full. A figure that the page lacks is not known: then nothing that needs it begins or ends.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Final

from oomwatch.config.detection import DetectConfig
from oomwatch.config.schema import ForecastConfig
from oomwatch.detect.forecast import Forecast
from oomwatch.detect.levels import Level, Switch, held_families
from oomwatch.detect.rates import WindowedPeak, WindowedRate
from oomwatch.detect.track import Track
from oomwatch.records import EngineSample, Evidence, Trigger, TriggerKind
from oomwatch.units import format_count, format_duration, format_share

_RATE_SECONDS: Final = 60.0
_PRESSED_SECONDS: Final = 30.0
"""Queues of a loaded server empty now and then."""
_PEAK_SECONDS: Final = 15.0
"""A pool that is full again and again was seen to have room for up to 12 s in between."""
_FREE_POOL_RATIO: Final = 0.5
"""Below this a pool has room for any request that could ever fit."""
_FORECAST_LEAST_SECONDS: Final = 90.0
_NOW_SECONDS: Final = 1.0
"""What will be full within this time is full."""
_NAMES: Final = tuple(
    field.name
    for field in dataclasses.fields(EngineSample)
    if field.name not in {"at", "engine", "extra"}
)
_VALUES: Final = operator.attrgetter(*_NAMES)


class EngineWatch:
    """All conditions of one engine; fed with each reading of its page."""

    def __init__(self, engine_id: str, rules: DetectConfig, forecasts: ForecastConfig) -> None:
        self.engine_id = engine_id
        self._rules = rules
        self._horizon_seconds = forecasts.kv_horizon_seconds
        full, storm = rules.kv_saturation, rules.preemption_storm
        self._often_full = Switch(
            Level("warn", full.warn_ratio, full.clear_ratio, full.hold_seconds)
        )
        self._always_full = Switch(
            Level("critical", full.critical_ratio, full.clear_ratio, full.hold_seconds)
        )
        self._peak = WindowedPeak(_PEAK_SECONDS)
        self._preemption = [
            Switch(Level(name, enter, storm.clear_per_minute, storm.hold_seconds))
            for name, enter in (
                ("warn", storm.warn_per_minute),
                ("critical", storm.critical_per_minute),
            )
        ]
        self._stuck = Switch(Level("stuck", 1, 1, rules.never_fits.hold_seconds))
        self._still = Switch(Level("still", 1, 1, rules.zombie_engine.hold_seconds))
        self._rate = WindowedRate(_RATE_SECONDS)
        self.last: EngineSample | None = None
        """The last reading of its page."""
        self.ahead: Forecast | None = None
        """The last forecast, near or far."""
        self._figures: dict[str, float] = {}
        self._usage = Track(
            forecasts.window_seconds, _FORECAST_LEAST_SECONDS, forecasts.confidence_ratio
        )
        self._pressed_at: float | None = None
        self.preemptions_per_minute: float | None = None

    @property
    def kv_usage_ratio(self) -> float | None:
        """The last known use of the pool."""
        return self._usage.last

    def held(self, now: float) -> set[str]:
        """Families of incidents whose condition holds, or comes and goes too often to be over."""
        families = {
            "kv_pressure": (self._often_full, self._always_full, *self._preemption),
            "stuck_request": (self._stuck,),
            "zombie": (self._still,),
        }
        return held_families(families, now, self._rules)

    def feed(self, sample: EngineSample, now: float) -> list[Trigger]:
        """Take a reading at monotonic time `now`; what it set off."""
        rate = self._rate.feed(now, sample.preemptions_total)
        self.preemptions_per_minute = None if rate is None else rate * 60
        if sample.kv_usage_ratio is not None:
            self._usage.add(now, sample.kv_usage_ratio)
        self.last = sample
        before, self._figures = self._figures, _figures(sample)
        unmoved = before == self._figures
        found = [
            self._saturated(sample, now),
            self._preempting(sample, now),
            self._never_fits(sample, now, unmoved=unmoved),
            self._zombie(sample, now, unmoved=unmoved),
        ]
        return [trigger for trigger in found if trigger is not None]

    def predict(self, now: float) -> Trigger | None:
        """The pool will be full soon, if it goes on like this. Called every few seconds."""
        ahead, sample = self._usage.forecast(now, 1.0), self.last
        self.ahead = ahead
        if ahead is None or sample is None:
            return None
        if not _NOW_SECONDS <= ahead.eta_seconds <= self._horizon_seconds:
            return None
        text = (
            f"KV cache {format_share(ahead.level)} full and rising: full in "
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
        peak = None if usage is None else self._peak.feed(now, usage)
        low = self._rules.kv_saturation.clear_ratio

        def counted(ratio: float | None) -> float | None:
            # Full use of the pool that nobody waits for neither begins nor ends anything.
            return ratio if ratio is None or pressed or ratio < low else low

        often = self._often_full.feed(now, counted(peak))
        always = self._always_full.feed(now, counted(usage))
        if peak is None or "entered" not in {often, always}:
            return None
        switch = self._always_full if always == "entered" else self._often_full
        full = f"{format_share(peak)} full" + ("" if usage == peak else " at its peaks")
        text = (
            f"KV cache {full} with {format_count(sample.running)} running and "
            f"{format_count(sample.waiting)} waiting requests"
        )
        return self._trigger(
            "kv_saturation",
            sample,
            text,
            level=switch.level.name,
            kv_usage_ratio=peak,
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

    def _never_fits(self, sample: EngineSample, now: float, *, unmoved: bool) -> Trigger | None:
        """Nothing runs, something waits, the pool is free, and nothing moves."""
        usage = sample.kv_usage_ratio
        if sample.running is None or sample.waiting is None or usage is None:
            value = None
        else:
            idle = sample.running == 0 and sample.waiting >= 1 and unmoved
            value = float(idle and usage < _FREE_POOL_RATIO)
        if self._stuck.feed(now, value) != "entered":
            return None
        text = (
            f"{format_count(sample.waiting)} waiting, none running, and the pool is free: the "
            "request at the head of the queue can never be scheduled"
        )
        return self._trigger("never_fits", sample, text, waiting=sample.waiting)

    def _zombie(self, sample: EngineSample, now: float, *, unmoved: bool) -> Trigger | None:
        """The page answers and says that requests run, but no figure has moved for minutes.

        All figures count: a long prefill moves no counter of tokens, but it fills the pool.
        """
        known = sample.running is not None and sample.generation_tokens_total is not None
        value = float((sample.running or 0) >= 1 and unmoved) if known else None
        if self._still.feed(now, value) != "entered":
            return None
        text = (
            f"the port answers and {format_count(sample.running)} requests are shown as running, "
            f"but nothing has moved for {format_duration(self._still.level.hold_seconds)}"
        )
        return self._trigger("zombie_engine", sample, text, running=sample.running)

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


def _figures(sample: EngineSample) -> dict[str, float]:
    """All that a page says, by name."""
    values = zip(_NAMES, _VALUES(sample), strict=True)
    return {name: value for name, value in (*values, *sample.extra.items()) if value is not None}
