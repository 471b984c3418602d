"""A message that one receiver did not take, told to the others: nobody loses an incident."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from oomwatch.notify.notes import undelivered_note
from oomwatch.notify.notice import IncidentNotice, Notice, notice_from_json, notice_to_json
from oomwatch.notify.policy import message_id
from oomwatch.records import OutboxRow
from oomwatch.report.locale import Language

_HOUR: Final = 3600


def undelivered_message(
    row: OutboxRow,
    sink: str,
    now: float,
    lang: Language = "en",
    *,
    views: Mapping[str, IncidentNotice] = MappingProxyType({}),
    labels: Mapping[str, str] = MappingProxyType({}),
) -> OutboxRow:
    """What `sink` is told of a failed message of another; in one hour all have the same id.

    `views` are incidents, by id, as this receiver reads them; others are told as they were written.
    `labels` are those of the configuration.
    """
    identity = message_id("undelivered", row.sink, sink, int(now // _HOUR))
    try:
        told = notice_from_json(row.notice or {}).incidents
        incidents = tuple(views.get(one.id, one) for one in told)
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
        change=row.id,
        headline=f"{row.incident_id or row.kind} not delivered to {row.sink}: {row.headline}",
        notice=notice_to_json(Notice(identity, "undelivered", now, incidents, note, dict(labels))),
        due_at=now,
    )
