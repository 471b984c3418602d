"""Several messages told as one, to people: what happens to a host at once is one event to them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oomwatch.config.notify import SEVERITIES
from oomwatch.notify.notes import grouped_note
from oomwatch.notify.notice import IncidentNotice, Notice, notice_from_json, notice_to_json
from oomwatch.notify.policy import message_id
from oomwatch.records import OutboxRow
from oomwatch.report.locale import Language


def grouped_message(rows: Sequence[OutboxRow], now: float, lang: Language) -> OutboxRow:
    """One message about all incidents of these, each as the last of them tells it.

    Its id follows from theirs.
    """
    incidents: dict[str, IncidentNotice] = {}
    for row in rows:
        told = notice_from_json(row.notice or {})
        for incident in told.incidents:
            before = incidents.pop(incident.id, incident)  # the place of the latest
            note = told.note or before.note
            incidents[incident.id] = dataclasses.replace(incident, note=note)
    identity = message_id("grouped", rows[0].sink, *(row.id for row in rows))
    over = sum(incident.closed_at is not None for incident in incidents.values())
    note = grouped_note(len(incidents), over, lang)
    notice = Notice(identity, "grouped", now, tuple(sorted(incidents.values(), key=_rank)), note)
    return OutboxRow(
        id=identity,
        sink=rows[0].sink,
        kind="grouped",
        state="waiting",
        created_at=min(row.created_at for row in rows),
        changed_at=now,
        headline=note,
        notice=notice_to_json(notice),
        due_at=now,
    )


def _rank(incident: IncidentNotice) -> tuple[bool, int]:
    """What is down stands first, what is over last."""
    return incident.closed_at is not None, SEVERITIES.index(incident.severity)
