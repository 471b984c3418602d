"""The policy applied: what was told, what is held until when, and what follows from it now."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Final

from oomwatch.config.notify import NotifySettings, SinkConfig
from oomwatch.notify.changes import change_of
from oomwatch.notify.notes import recurrence_note
from oomwatch.notify.notice import IncidentNotice, Notice, notice_to_json
from oomwatch.notify.outbox import FIRST, TOLD, Outbox, dropped, incidents_in, message
from oomwatch.notify.policy import Around, Drop, Hold, Tell, decide
from oomwatch.notify.recurrence import History
from oomwatch.notify.routing import silenced_by
from oomwatch.records import OutboxRow, Silence

_NOT_NEEDED: Final = Drop("not needed any more")
_NEWER: Final = Drop("a newer message took its place")
_NOT_CONFIGURED: Final = Drop("the receiver is not configured any more")
_FIRST_FAILED: Final = Drop("the first message about the incident failed")
_ARRIVED: Final = Drop("it has arrived after all")
QUIET_KINDS: Final = frozenset({"test", "undelivered"})
"""Messages whose failure is told to nobody else."""
_MOST_STEPS: Final = 3
"""Held at night and over in the morning: first it is told, then that it is over."""


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """The new form of a message; with `to_send` it is to be queued.

    `asked`: somebody wants it to be sent now.
    """

    row: OutboxRow
    to_send: bool = False
    asked: bool = False


class Ledger:
    """One thread at a time. `replace` changes a message that waits, unless it was sent already."""

    def __init__(
        self,
        settings: NotifySettings,
        replace: Callable[[str, str, OutboxRow | None], bool],
    ) -> None:
        """`replace` takes the receiver, the id of the message, and its new form or None."""
        self.outbox = Outbox()
        self.history = History(settings)
        self.silences: tuple[Silence, ...] = ()
        self.acknowledged: frozenset[str] = frozenset()
        self._replace = replace
        self._held: dict[tuple[str, str], float | None] = {}
        """Until when something about an incident is held from a receiver."""

    def reconfigure(self, settings: NotifySettings) -> None:
        """Use other limits from now on."""
        self.history.settings = settings

    # ---------------------------------------------------------------- what is held
    def is_told(self, incident_id: str, over_at: float, sinks: Collection[str], now: float) -> bool:
        """Whether nothing is left to be told of an incident that was over at a time.

        `sinks` are the receivers that are told: others may be back in a while, as a configuration
        is put right or deployed in two steps.
        """
        is_held = any(incident == incident_id for incident, _ in self._held)
        pending = {row.state for row in self.outbox.of_incident(incident_id)} & {"held", "waiting"}
        is_late = over_at < now - self.history.settings.give_up_after_seconds
        return not (is_held or pending or (not is_late and self._is_owed(incident_id, sinks)))

    def _is_owed(self, incident_id: str, sinks: Collection[str]) -> bool:
        """Whether a receiver that is not among these was told of it, but not of its end."""
        rows = [row for row in self.outbox.of_incident(incident_id) if row.sink not in sinks]
        begun = {
            row.sink
            for row in rows
            if row.kind in FIRST and (row.state in TOLD or _is_put_aside(row))
        }
        return bool(begun - {row.sink for row in rows if row.kind == "resolved"})

    def due(self, now: float) -> set[str]:
        """Incidents of which something is held whose time has come."""
        return {
            incident
            for (incident, _), until in self._held.items()
            if until is not None and until <= now
        }

    def held_for_others(self) -> set[str]:
        """Incidents whose message waits until others like them are over."""
        return {incident for (incident, _), until in self._held.items() if until is None}

    def wait_seconds(self, now: float) -> float | None:
        """How long until `due` has something; None if nothing waits for a time."""
        moments = [until for until in self._held.values() if until is not None]
        return max(0.0, min(moments) - now) if moments else None

    def back_note(self, incident: IncidentNotice) -> str | None:
        """That an incident is back, for programs that are reminded of it; None if it is not."""
        return recurrence_note(self.history.recurrence(incident), "en")

    # ---------------------------------------------------------------- what is to be told
    def reconcile(self, incident: IncidentNotice, sink: SinkConfig, now: float) -> list[Change]:
        """What follows for one receiver from how an incident stands now."""
        name = sink.name or sink.kind
        around = Around(
            silence=silenced_by(self.silences, incident, now),
            acknowledged=incident.id in self.acknowledged,
            recurrence=self.history.recurrence(incident),
        )
        changes: list[Change] = []
        wanted, reason = None, _NOT_NEEDED
        self._held.pop((incident.id, name), None)
        for _ in range(_MOST_STEPS):
            told = self.outbox.told(incident.id, name)
            decision = decide(incident, told, sink, now, around)
            if isinstance(decision, Tell):
                changes += self._tell(incident, sink, decision, now)
                continue
            if isinstance(decision, Hold):
                self._held[incident.id, name] = decision.until
                held = message(incident, sink, decision, told, now)
                wanted = held.id
                changes += self._hold(held)
            elif isinstance(decision, Drop):
                reason = decision
            break
        for row in self.outbox.of(incident.id, name):
            if row.state == "held" and row.id != wanted:
                changes.append(self._put(dropped(row, reason, now)))
        return changes

    def _tell(
        self, incident: IncidentNotice, sink: SinkConfig, decision: Tell, now: float
    ) -> list[Change]:
        name, changes = sink.name or sink.kind, list[Change]()
        for row in reversed(self.outbox.of(incident.id, name)):
            if row.state != "waiting":
                continue
            if row.kind == "updated" and self._replace(name, row.id, None):
                changes.append(self._put(dropped(row, _NEWER, now)))
            elif row.kind in FIRST and decision.kind == "updated":
                newer = _renewed(row, incident, now)
                if self._replace(name, row.id, newer):
                    return [*changes, self._put(newer)]
        told = self.outbox.told(incident.id, name)
        if decision.kind == "updated" and told.change == change_of(incident):
            return changes  # it is again as it was told before the one that nobody has seen
        row = message(incident, sink, decision, told, now)
        return [*changes, self._put(row, to_send=True)]

    def _hold(self, row: OutboxRow) -> list[Change]:
        known = self.outbox.get(row.id)
        if known is not None and known.state == "held":
            same = ("kind", "due_at", "reason", "change")
            if all(getattr(known, name) == getattr(row, name) for name in same) and (
                _ends(known) == _ends(row)
            ):
                return []
            row = dataclasses.replace(row, created_at=known.created_at)
        return [self._put(row)]

    def _put(self, row: OutboxRow, *, to_send: bool = False) -> Change:
        self.outbox.put(row)
        return Change(row, to_send)

    # ---------------------------------------------------------------- what is not to be told
    def put_aside(self, sinks: Collection[str], now: float) -> list[Change]:
        """What waits for receivers that are not among these waits no more, unless they are back."""
        self._held = {key: until for key, until in self._held.items() if key[1] in sinks}
        pending = [
            row
            for state in ("held", "waiting", "retry")
            for row in self.outbox.in_state(state)
            if row.sink not in sinks
        ]
        return [
            self._put(dataclasses.replace(dropped(row, _NOT_CONFIGURED, now), notice=row.notice))
            for row in pending
        ]

    def take_up(self, sink: str, now: float) -> list[Change]:
        """What waited for a receiver that is back waits again, if that was put aside lately."""
        since = now - self.history.settings.give_up_after_seconds
        return [
            self._put(
                dataclasses.replace(row, state="waiting", reason=None, due_at=now, changed_at=now)
            )
            for row in self.outbox.in_state("dropped", sink)
            if _is_put_aside(row) and row.changed_at >= since
        ]

    def drop_followers(self, first: OutboxRow, now: float) -> list[Change]:
        """What would follow a first message that failed means nothing to its receiver."""
        firsts = self.outbox.firsts_in(first) if first.kind == "grouped" else [first]
        return [
            self._put(dropped(row, _FIRST_FAILED, now))
            for one in firsts
            if one.kind in FIRST and one.incident_id is not None
            for row in self.outbox.of(one.incident_id, one.sink)
            if row.state == "waiting" and self._replace(one.sink, row.id, None)
        ]

    def take_back(
        self,
        arrived: OutboxRow,
        make: Callable[[OutboxRow, str, float], OutboxRow],
        now: float,
    ) -> list[Change]:
        """Who was to be told that a message failed which has arrived is told of another one.

        `make` makes the message about a failed one for a receiver; if none failed, it is let go.
        """
        changes = []
        for told in self.outbox.undelivered(arrived.id):
            lost = [
                row
                for row in self.outbox.in_state("failed", arrived.sink)
                if row.kind not in QUIET_KINDS and row.changed_at >= told.created_at
            ]
            instead = make(lost[0], told.sink, told.created_at) if lost else None
            if self._replace(told.sink, told.id, instead):
                changes.append(self._put(instead or dropped(told, _ARRIVED, now)))
        return changes


def _is_put_aside(row: OutboxRow) -> bool:
    return (
        row.state == "dropped" and row.reason == _NOT_CONFIGURED.reason and row.notice is not None
    )


def _ends(row: OutboxRow) -> list[object]:
    """When the incidents of a message were over: a held one may be all that is known of them."""
    return [each.get("closed_at") for each in incidents_in(row)]


def _renewed(row: OutboxRow, incident: IncidentNotice, now: float) -> OutboxRow:
    """A message that nobody has seen yet, saying what is known now."""
    notice = Notice(
        row.id,
        "escalated" if row.kind == "escalated" else "opened",
        now,
        (incident,),
        row.notice.get("note") if row.notice is not None else None,
    )
    return dataclasses.replace(
        row,
        change=change_of(incident),
        headline=incident.headline,
        notice=notice_to_json(notice),
        changed_at=now,
    )
