"""A message that one receiver did not take, told to the others: nobody loses an incident."""

from __future__ import annotations

from typing import Final

from oomwatch.notify.notes import undelivered_note
from oomwatch.notify.notice import Notice, notice_from_json, notice_to_json
from oomwatch.notify.policy import message_id
from oomwatch.records import OutboxRow
from oomwatch.report.locale import Language

_HOUR: Final = 3600


def undelivered_message(row: OutboxRow, sink: str, now: float, lang: Language = "en") -> OutboxRow:
    """What `sink` is told of a failed message of another; in one hour all have the same id."""
    identity = message_id("undelivered", row.sink, sink, int(now // _HOUR))
    try:
        incidents = notice_from_json(row.notice or {}).incidents
    except (KeyError, TypeError, ValueError):
        incidents = ()
    note = undelivered_note(row.sink, row.reason, lang)
    return OutboxRow(
        id=identity,
        sink=sink,
        kind="undelivered",
        state="waiting",
        created_at=now,
        changed_at=now,
        headline=f"not delivered to {row.sink}: {row.headline}",
        notice=notice_to_json(Notice(identity, "undelivered", now, incidents, note)),
        due_at=now,
    )
