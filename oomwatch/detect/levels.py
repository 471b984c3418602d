"""Hysteresis: when a noisy quantity counts as high, and when it no longer does."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final, Literal

from oomwatch.config.detection import DetectConfig

Change = Literal["entered", "left"]
_LEAST_READINGS: Final = 3
"""Two readings with a long silence between them are no proof that it was so all the time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A condition holds from `enter` on, once for `hold_seconds`, until below `leave` as long."""

    name: str
    enter: float
    leave: float
    hold_seconds: float


class Switch:
    """One `Level` over time. Times are monotonic seconds; a value of None is 'not known'.

    What is not known changes nothing: neither does it enter, nor does it leave; a hold that has
    begun starts over. A hold takes three readings or more, unless it is zero.
    """

    def __init__(self, level: Level) -> None:
        self.level = level
        self.since: float | None = None
        """When the condition began to hold; None while it does not."""
        self._turning: float | None = None
        self._readings = 0
        self._entries: collections.deque[float] = collections.deque(maxlen=64)

    @property
    def on(self) -> bool:
        """Whether the condition holds."""
        return self.since is not None

    def feed(self, now: float, value: float | None) -> Change | None:
        """Take a reading; what it changed."""
        if value is None:
            self._turning = None
            return None
        turning = value < self.level.leave if self.on else value >= self.level.enter
        if not turning:
            self._turning = None
            return None
        if self._turning is None:
            self._turning, self._readings = now, 0
        self._readings += 1
        hold = self.level.hold_seconds
        if hold > 0 and (now - self._turning < hold or self._readings < _LEAST_READINGS):
            return None
        began, self._turning = self._turning, None
        if self.on:
            self.since = None
            return "left"
        self.since = began
        self._entries.append(now)
        return "entered"

    def flaps(self, now: float, seconds: float) -> int:
        """Times it was entered within the last `seconds`."""
        return sum(1 for at in self._entries if now - at <= seconds)


def held_families(
    families: Mapping[str, Iterable[Switch]], now: float, rules: DetectConfig
) -> set[str]:
    """Those with a switch that is on, or that comes and goes too often to be over."""
    return {
        name
        for name, switches in families.items()
        if any(
            one.on or one.flaps(now, rules.flap_window_seconds) >= rules.flap_count
            for one in switches
        )
    }
