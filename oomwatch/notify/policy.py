"""What is to be told to one receiver about one incident, now: pure, asked again at any time.

It compares how the incident stands with what was told of it, so it does not matter how often, or
after what restart, it is asked: what was told is not told again, and nothing is forgotten that is
still to be told.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Final, Literal

from oomwatch.config.notify import SinkConfig
from oomwatch.notify.changes import change_of
from oomwatch.notify.notice import IncidentNotice, NoticeKind
from oomwatch.notify.recurrence import Recurrence
from oomwatch.notify.routing import is_meant, quiet_until
from oomwatch.records import Silence

HoldReason = Literal["quiet_hours", "silenced", "cooldown", "flapping", "escalation"]

_SET_BACK_SECONDS: Final = 60.0
"""What begins later than this from now is from before the clock was set back."""
_NEVER_TOLD: Final = "over before it was to be told"


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What one receiver was told of one incident, or is about to be."""

    opened: bool = False
    """Whether a first message was sent or waits to be sent."""
    resolved: bool = False
    failed: bool = False
    """Whether the first message was refused or given up: what came after it would mean nothing."""
    change: str | None = None
    """What was told last, as `change_of` writes it."""
    updates: int = 0
    held: HoldReason | None = None
    """Why the first message is held, if it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Around:
    """What else decides: silences, acknowledgements, and what came before."""

    silence: Silence | None = None
    acknowledged: bool = False
    recurrence: Recurrence = dataclasses.field(default_factory=Recurrence)


@dataclasses.dataclass(frozen=True, slots=True)
class Tell:
    """A message of this kind is to be sent now; `again` says how often it has come back."""

    kind: NoticeKind
    again: Recurrence = dataclasses.field(default_factory=Recurrence)


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """A message of this kind waits; `until` is None where only an event can end it."""

    kind: NoticeKind
    reason: HoldReason
    until: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Drop:
    """The message that was held is not needed any more."""

    reason: str


Decision = Tell | Hold | Drop


def decide(
    incident: IncidentNotice, told: Told, sink: SinkConfig, now: float, around: Around
) -> Decision | None:
    """What to do about an incident at a receiver; None for nothing. Times are epoch seconds."""
    if told.failed:
        return None
    if incident.closed_at is not None:
        return _over(incident, told, sink, now, around)
    if told.opened:
        return _changed(incident, told, sink, now, around)
    return _new(incident, told, sink, now, around)


def _new(
    incident: IncidentNotice, told: Told, sink: SinkConfig, now: float, around: Around
) -> Decision | None:
    """An open incident that the receiver does not know."""
    wait, kind = sink.escalate_after_seconds, _first_kind(sink)
    if not is_meant(sink, incident):
        return Drop("not for this receiver") if told.held else None
    if wait and around.acknowledged:
        return Drop("acknowledged") if told.held else None
    if around.silence is not None:
        return Hold(kind, "silenced", around.silence.ends_at)
    was_set_back = incident.opened_at > now + _SET_BACK_SECONDS  # better too early than never
    if now < incident.opened_at + wait and not was_set_back:
        return Hold(kind, "escalation", incident.opened_at + wait)
    again = around.recurrence
    if again.hold_until is not None and now < again.hold_until:
        if again.flapping:
            return Hold(kind, "flapping", again.hold_until)
        if incident.severity != "critical":  # its end was told: nobody knows that it is down again
            return Hold(kind, "cooldown", again.hold_until)
    return _unless_quiet(kind, incident, sink, now, again)


def _changed(
    incident: IncidentNotice, told: Told, sink: SinkConfig, now: float, around: Around
) -> Decision | None:
    """An open incident that the receiver knows: only what it would act upon is worth a message."""
    if told.change == change_of(incident):
        return None
    if around.silence is not None:
        return Hold("updated", "silenced", around.silence.ends_at)
    return _unless_quiet("updated", incident, sink, now)


def _over(
    incident: IncidentNotice, told: Told, sink: SinkConfig, now: float, around: Around
) -> Decision | None:
    if not told.opened:
        if told.held == "quiet_hours":  # nothing else held it: in the morning both are told
            return _unless_quiet(_first_kind(sink), incident, sink, now, around.recurrence)
        return Drop(_NEVER_TOLD) if told.held else None
    if told.resolved or not sink.send_resolved:
        return None
    again = around.recurrence
    if again.comes_back:
        return Hold("resolved", "flapping")
    if again.end_hold_until is not None and now < again.end_hold_until:
        return Hold("resolved", "flapping", again.end_hold_until)
    return _unless_quiet("resolved", incident, sink, now)


def _first_kind(sink: SinkConfig) -> NoticeKind:
    return "escalated" if sink.escalate_after_seconds else "opened"


def _unless_quiet(
    kind: NoticeKind,
    incident: IncidentNotice,
    sink: SinkConfig,
    now: float,
    again: Recurrence | None = None,
) -> Tell | Hold:
    end = None if incident.severity == "critical" else quiet_until(sink.quiet_hours, now)
    return Tell(kind, again or Recurrence()) if end is None else Hold(kind, "quiet_hours", end)


def message_id(*parts: object) -> str:
    """The id of a message, which follows from what it is about."""
    text = json.dumps([str(part) for part in parts])
    return f"msg-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
