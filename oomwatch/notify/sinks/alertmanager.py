"""Prometheus' Alertmanager, told directly by ``POST /api/v2/alerts``.

It takes an alert for over at its ``endsAt``. So open ones are sent again every minute with an end
four minutes away: if the agent dies, they end by themselves.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from oomwatch.config.sinks import AlertmanagerConfig
from oomwatch.notify.data import compact
from oomwatch.notify.http import Answer, HttpClient, outcome
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused
from oomwatch.notify.sinks import alerts
from oomwatch.notify.sinks.base import BaseSink

_NOT_THERE: Final = 404
_REFRESH_SECONDS: Final = 60.0
_OWN_LASTS_SECONDS: Final[Mapping[str, float]] = {"test": 300.0, "undelivered": 3600.0}


def make(config: AlertmanagerConfig, environ: Mapping[str, str]) -> AlertmanagerSink:
    """Raises `ConfigError` if a file that it needs cannot be read."""
    return AlertmanagerSink(config, environ)


class AlertmanagerSink(BaseSink):
    """All Alertmanagers of a cluster; a message has arrived when one of them has taken it."""

    kind = "alertmanager"
    refresh_seconds = _REFRESH_SECONDS
    lasts_seconds: float = 4 * _REFRESH_SECONDS
    """How long an alert lasts that is not sent again."""

    def __init__(self, config: AlertmanagerConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._urls = [f"{url.rstrip('/')}/api/v2/alerts" for url in config.urls]
        self._client = HttpClient(config)
        self._credentials.headers()
        self._told: dict[str, dict[str, str]] = {}
        """By incident that is open there: the labels it was told with."""

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        said = self._post(list(self._alerts(notice)))
        if isinstance(said, Delivered) and not alerts.is_own(notice):
            self._remember([notice])
        return said

    def _refresh(self, notices: Sequence[Notice]) -> Outcome:
        """Renew the end of all that is open."""
        said = self._post([alert for notice in notices for alert in self._alerts(notice)])
        if isinstance(said, Delivered):
            self._told.clear()
            self._remember(notices)
        return said

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """The alerts, as they are posted."""
        return json.dumps(list(self._alerts(notice)), ensure_ascii=False, indent=2)

    def _remember(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            for incident in notice.incidents:
                if _is_over(notice, incident):
                    self._told.pop(incident.id, None)
                else:
                    self._told[incident.id] = alerts.incident_labels(incident)

    def _alerts(self, notice: Notice) -> Iterator[dict[str, Any]]:
        now = time.time()
        if alerts.is_own(notice):
            ends_at = now + _OWN_LASTS_SECONDS[notice.kind]
            labels, said = alerts.notice_labels(notice), alerts.notice_annotations(notice)
            yield alerts.alert(labels, said, min(notice.at, now), ends_at)
            return
        for incident in notice.incidents:
            labels = alerts.incident_labels(incident)
            said = alerts.incident_annotations(incident, notice.note)
            starts_at = min(incident.opened_at, now)  # the clock may have been set back since
            before = self._told.get(incident.id)
            if before is not None and before != labels:
                yield alerts.alert(before, said, starts_at, now)
            over = _is_over(notice, incident)
            ends_at = min(incident.closed_at or now, now) if over else now + self.lasts_seconds
            yield alerts.alert(labels, said, starts_at, ends_at)

    def _post(self, told: list[dict[str, Any]]) -> Outcome:
        """The best that one of them says: they tell each other what they have told."""
        if not told:
            return Delivered()
        body, own = compact(told), self._credentials.headers()
        headers = {**own, "Content-Type": "application/json"}
        said = [
            _outcome(self._client.post(url, body, headers), (url, *own.values()))
            for url in self._urls
        ]
        for kind in (Delivered, Later):
            for one in said:
                if isinstance(one, kind):
                    return one
        return said[0]


def _outcome(answer: Answer | Later, secrets: Iterable[str]) -> Outcome:
    said = outcome(answer, secrets)
    if isinstance(answer, Answer) and answer.status == _NOT_THERE and isinstance(said, Refused):
        return Refused(
            f"{said.reason}; give only the base address in urls, such as "
            "http://alertmanager.internal:9093: oomwatch adds /api/v2/alerts"
        )
    return said


def _is_over(notice: Notice, incident: IncidentNotice) -> bool:
    return notice.kind == "resolved" or incident.closed_at is not None
