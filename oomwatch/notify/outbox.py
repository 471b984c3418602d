"""What each receiver was told: the messages of the store, as far as they still matter, in memory.

It answers what was told of an incident, and turns a decision of the policy into messages.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

from oomwatch.config.notify import SinkConfig
from oomwatch.notify.changes import change_note, change_of
from oomwatch.notify.notes import escalated_note, recurrence_note
from oomwatch.notify.notice import IncidentNotice, Notice, notice_to_json
from oomwatch.notify.policy import Drop, Hold, HoldReason, Tell, Told, message_id
from oomwatch.records import OutboxRow
from oomwatch.report.locale import Language

FIRST: Final = frozenset({"opened", "escalated"})
TOLD: Final = frozenset({"waiting", "retry", "delivered", "grouped"})
_SETTLED: Final = frozenset({"delivered", "grouped", "failed", "dropped"})
_MOST_INCIDENTS: Final = 1024
_MOST_ALONE: Final = 256


class Outbox:
    """Safe to use from any thread."""

    def __init__(self, rows: Iterable[OutboxRow] = ()) -> None:
        """`rows` are those of the store."""
        self._lock = threading.Lock()
        self._rows: dict[str, OutboxRow] = {}
        self._of: dict[str, list[str]] = {}
        """Ids of messages by incident, in order."""
        self._alone: list[str] = []
        """Those of no incident, and of several."""
        for row in in_order(rows):
            self.put(row)

    def put(self, row: OutboxRow) -> None:
        """Take a message, or its new form; what has arrived need not be kept whole."""
        if row.state in {"delivered", "grouped"}:
            row = dataclasses.replace(row, notice=None)
        with self._lock:
            is_new = row.id not in self._rows
            self._rows[row.id] = row
            if not is_new:
                return
            if row.incident_id is None:
                self._alone.append(row.id)
            else:
                self._of.setdefault(row.incident_id, []).append(row.id)

    def get(self, identity: str) -> OutboxRow | None:
        """A message by its id; None if it is not known."""
        with self._lock:
            return self._rows.get(identity)

    def of(self, incident_id: str, sink: str) -> list[OutboxRow]:
        """What a receiver was, is or may be told of an incident, in order."""
        return [row for row in self.of_incident(incident_id) if row.sink == sink]

    def of_incident(self, incident_id: str) -> list[OutboxRow]:
        """The same for all receivers."""
        with self._lock:
            return [self._rows[identity] for identity in self._of.get(incident_id, ())]

    def in_state(self, state: str, sink: str | None = None) -> list[OutboxRow]:
        """All messages in a state, of one receiver or of all."""
        with self._lock:
            rows = list(self._rows.values())
        return [row for row in rows if row.state == state and sink in {None, row.sink}]

    def told(self, incident_id: str, sink: str) -> Told:
        """What a receiver was told of an incident, or is about to be."""
        opened = resolved = failed = False
        change, updates = None, 0
        held: HoldReason | None = None
        for row in self.of(incident_id, sink):
            if row.state == "grouped" and self._is_lost(row):
                row = dataclasses.replace(row, state="failed")  # noqa: PLW2901 - as good as that
            if row.kind in FIRST:
                opened = opened or row.state in TOLD
                failed = row.state == "failed"
                held = cast("HoldReason | None", row.reason) if row.state == "held" else None
            elif row.kind == "updated":
                updates += row.state in _SETTLED | TOLD
            elif row.kind == "resolved":
                resolved = row.state in TOLD | {"failed"}
            if row.state in TOLD and row.change is not None:
                change = row.change
        return Told(opened, resolved, failed, change, updates, held)

    def _is_lost(self, member: OutboxRow) -> bool:
        """Whether the message failed that stands for this one and others."""
        group = self.get(member.reason or "")
        return group is not None and group.state == "failed"

    def firsts_in(self, group: OutboxRow) -> list[OutboxRow]:
        """The first messages about incidents that were told as one."""
        rows = self.in_state("grouped", group.sink)
        return [row for row in rows if row.reason == group.id and row.kind in FIRST]

    def undelivered(self, failed_id: str) -> list[OutboxRow]:
        """What waits to be told of a message that failed."""
        with self._lock:
            rows = [self._rows[identity] for identity in self._alone]
        return [
            row
            for row in rows
            if (row.kind, row.state, row.change) == ("undelivered", "waiting", failed_id)
        ]

    def first(self, incident_id: str, sink: str) -> OutboxRow | None:
        """The message that told a receiver of an incident, if it was sent."""
        rows = self.of(incident_id, sink)
        return next((r for r in rows if r.kind in FIRST and r.state == "delivered"), None)

    def forget(self, keep: Iterable[str]) -> None:
        """Let the oldest go that are settled, but not of incidents to keep."""
        kept = set(keep)
        with self._lock:
            surplus = len(self._of) - _MOST_INCIDENTS
            for incident_id in list(self._of) if surplus > 0 else ():
                rows = [self._rows[identity] for identity in self._of[incident_id]]
                if incident_id not in kept and all(row.state in _SETTLED for row in rows):
                    for identity in self._of.pop(incident_id):
                        del self._rows[identity]
            if len(self._alone) > _MOST_ALONE:
                oldest = self._alone[: len(self._alone) - _MOST_ALONE]
                for identity in oldest:
                    if self._rows[identity].state in _SETTLED:
                        del self._rows[identity]
                        self._alone.remove(identity)


def message(
    incident: IncidentNotice, sink: SinkConfig, decision: Tell | Hold, told: Told, now: float
) -> OutboxRow:
    """The message that a decision asks for; the same decision makes the same id."""
    name = sink.name or sink.kind
    change = change_of(incident)
    what: tuple[object, ...] = (incident.id, name, "opened")
    if decision.kind == "resolved":
        what = (incident.id, name, "resolved")
    elif decision.kind not in FIRST:
        what = (incident.id, name, decision.kind, told.updates + 1, change)
    identity = message_id(*what)
    row = OutboxRow(
        id=identity,
        sink=name,
        kind=decision.kind,
        state="waiting",
        created_at=now,
        changed_at=now,
        incident_id=incident.id,
        change=None if decision.kind == "resolved" else change,
        headline=incident.headline,
        due_at=now,
    )
    note = None
    if isinstance(decision, Hold):
        row = dataclasses.replace(row, state="held", due_at=decision.until, reason=decision.reason)
    else:
        note = _note(incident, decision, told, now, lang_of(sink))
    notice = Notice(identity, decision.kind, now, (incident,), note)
    return dataclasses.replace(row, notice=notice_to_json(notice))


def _note(
    incident: IncidentNotice, decision: Tell, told: Told, now: float, lang: Language
) -> str | None:
    """What a message says of itself: that it is back, what is asked of people, what changed."""
    notes = [recurrence_note(decision.again, lang)]
    if decision.kind == "escalated":
        notes.append(escalated_note(incident.id, now - incident.opened_at, lang))
    elif decision.kind == "updated":
        notes.append(change_note(told.change, incident, lang))
    return " ".join(filter(None, notes)) or None


def in_order(rows: Iterable[OutboxRow]) -> list[OutboxRow]:
    """As they were made; what was made at one moment as it is to be told."""
    return sorted(rows, key=lambda row: (row.created_at, row.kind == "resolved"))


def incidents_in(row: OutboxRow) -> list[Mapping[str, Any]]:
    """The incidents of a message as they wait in the store; what is no incident is left out."""
    listed = (row.notice or {}).get("incidents")
    if not isinstance(listed, list | tuple):
        return []
    return [each for each in listed if isinstance(each, Mapping)]


def subjects_of(row: OutboxRow) -> set[str]:
    """All incidents that a message is about, and what names them to those who keep alerts.

    An end that comes late must not end the alert of the next incident like it.
    """
    subjects = set()
    for each in incidents_in(row):
        subjects.add(str(each.get("id")))
        subjects.add(f"{each.get('host')}/{each.get('fingerprint')}")
    return subjects


def lang_of(sink: SinkConfig) -> Language:
    """The language of a receiver's messages: programs get English, people what they chose."""
    lang: Language = getattr(sink, "lang", "en")
    return lang


def dropped(row: OutboxRow, decision: Drop, now: float) -> OutboxRow:
    """A message that is not needed any more."""
    return dataclasses.replace(
        row, state="dropped", reason=decision.reason, changed_at=now, due_at=None, notice=None
    )
