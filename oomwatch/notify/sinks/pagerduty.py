"""A service of PagerDuty, through its Events API v2.

An incident of ours is an alert of PagerDuty's: host and fingerprint name it, so that one that comes
back while it is still open there joins it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomwatch.config.sinks import PagerDutyConfig
from oomwatch.notify import text
from oomwatch.notify.data import compact, notice_data
from oomwatch.notify.http import Answer, HttpClient, outcome
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.outcome import Delivered, Later, Outcome
from oomwatch.notify.sinks.base import BaseSink
from oomwatch.report.sanitize import clean
from oomwatch.units import format_rfc3339

_SUMMARY: Final = 1024
_KEY: Final = 255
_TAKEN: Final = 202
_DETAILS_BYTES: Final = 200_000
"""Of the 512,000 that an event may have."""


def make(config: PagerDutyConfig, environ: Mapping[str, str]) -> PagerDutySink:
    """Raises `ConfigError` if there is no integration key."""
    return PagerDutySink(config, environ)


class PagerDutySink(BaseSink):
    """Triggers and resolves."""

    kind = "pagerduty"
    per_second = 2.0

    def __init__(self, config: PagerDutyConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._url = config.url
        self._client = HttpClient(config)
        self._credentials.get("routing_key")

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        key = self._credentials.get("routing_key").strip()
        said: Outcome = Delivered()
        for event in events(notice):
            body = compact({"routing_key": key, **event})
            answer = self._client.post(self._url, body, {"Content-Type": "application/json"})
            said = _outcome(answer, key)
            if not isinstance(said, Delivered):
                break
        return said

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """The events, without the integration key."""
        return json.dumps(list(events(notice)), ensure_ascii=False, indent=2)


def events(notice: Notice) -> Iterator[dict[str, Any]]:
    """What is posted for a message; a test is resolved at once."""
    if notice.kind in {"test", "undelivered"}:
        key = f"oomwatch/{platform.node()}/{notice.kind}"
        yield _trigger(notice, None, key, text.note(notice, "en"))
        if notice.kind == "test":
            yield {"event_action": "resolve", "dedup_key": key}
        return
    for incident in notice.incidents:
        key = dedup_key(incident)
        if notice.kind == "resolved":
            yield {"event_action": "resolve", "dedup_key": key}
        else:
            yield _trigger(notice, incident, key, incident.why)


def dedup_key(incident: IncidentNotice) -> str:
    """At most 255 characters, the same for all that is said of an incident."""
    key = f"{incident.host}/{incident.fingerprint}"
    return key if len(key) <= _KEY else hashlib.sha256(key.encode()).hexdigest()


def _trigger(
    notice: Notice, incident: IncidentNotice | None, key: str, why: str | None
) -> dict[str, Any]:
    about = (incident,) if incident else notice.incidents
    one = dataclasses.replace(notice, incidents=about)
    host = incident.host if incident else platform.node() or "oomwatch"
    back = notice.note if incident else None
    more = " ".join(filter(None, (back, why)))
    said = ": ".join(filter(None, (text.subject(one, "en"), more)))
    event: dict[str, Any] = {
        "event_action": "trigger",
        "dedup_key": key,
        "client": "oomwatch",
        "payload": {
            "summary": clean(said, _SUMMARY),
            "source": host,
            "severity": incident.severity if incident else _severity(notice),
            "timestamp": format_rfc3339(incident.opened_at if incident else notice.at),
            "component": incident.engine_id if incident else None,
            "group": incident.incident_class if incident else None,
            "class": incident.cause if incident else None,
            "custom_details": notice_data(one, _DETAILS_BYTES),
        },
    }
    if incident and incident.runbook_url:
        event["links"] = [{"href": incident.runbook_url, "text": "Runbook"}]
    return event


def _outcome(answer: Answer | Later, key: str) -> Outcome:
    """Of what is no answer of PagerDuty's, nobody knows whom it woke; a repeated event is one."""
    said = outcome(answer, (key,))
    if isinstance(answer, Later) or not isinstance(said, Delivered) or answer.status == _TAKEN:
        return said
    try:
        told = json.loads(answer.body)
    except ValueError:
        told = None
    if isinstance(told, dict) and told.get("status") == "success":
        return said
    return Later(f"{answer.place} does not answer like PagerDuty; is a log-in in between?")


def _severity(notice: Notice) -> str:
    return "info" if notice.kind == "test" else "warning"
