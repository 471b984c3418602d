"""What became of one attempt to send a message, and what a sink is to those who send."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from oomwatch.notify.notice import Notice
from oomwatch.report.locale import Language


@dataclasses.dataclass(frozen=True, slots=True)
class Delivered:
    """The receiver has taken it. `reference` is its name there, for what is said later about it."""

    reference: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """It may go well another time; `after_seconds` is what the receiver asked for."""

    reason: str
    after_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """It will never take this message. With `disable` it will take no other either."""

    reason: str
    disable: bool = False


Outcome = Delivered | Later | Refused


class Sink(Protocol):
    """A receiver of messages. One thread uses it; it may block that thread up to its time-out.

    `reason` texts of outcomes hold no secrets: no URL with a token in it, no body that echoes one.
    """

    name: str
    kind: str
    lang: Language
    """The language that `incident_notice` is to put its texts in for this receiver."""
    groups: bool
    """Whether several incidents of one host go into one message (people) or not (machines)."""
    per_second: float
    """How many messages a second the receiver takes in the long run."""
    refresh_seconds: float | None
    """How often open incidents must be told again, or the receiver takes them for over."""

    def send(self, notice: Notice, thread: str | None) -> Outcome:
        """Send one message; `thread` is the reference of the first one about its incident."""

    def refresh(self, notices: Sequence[Notice]) -> Outcome:
        """Tell again what is open, all in one; only called with `refresh_seconds`."""

    def preview(self, notice: Notice, thread: str | None) -> str:
        """What `send` would send, readable, without secrets; sends nothing."""
