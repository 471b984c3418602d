"""A program that takes what Alertmanager sends to its webhooks, version 4."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from oomwatch.config.sinks import AlertmanagerWebhookConfig
from oomwatch.notify.data import compact
from oomwatch.notify.http import HttpClient, outcome
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.outcome import Outcome
from oomwatch.notify.sinks import alerts
from oomwatch.notify.sinks.base import BaseSink


def make(config: AlertmanagerWebhookConfig, environ: Mapping[str, str]) -> AlertmanagerWebhookSink:
    """Raises `ConfigError` if the address is missing."""
    return AlertmanagerWebhookSink(config, environ)


class AlertmanagerWebhookSink(BaseSink):
    """Alerts in the envelope that Alertmanager puts around them."""

    kind = "alertmanager_webhook"

    def __init__(self, config: AlertmanagerWebhookConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._client = HttpClient(config)
        self._credentials.url()
        self._credentials.headers()

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        url, own = self._credentials.url(), self._credentials.headers()
        body = compact(envelope(notice, self.name))
        answer = self._client.post(url, body, {**own, "Content-Type": "application/json"})
        return outcome(answer, (url, *own.values()))

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """The body."""
        return json.dumps(envelope(notice, self.name), ensure_ascii=False, indent=2)


def envelope(notice: Notice, receiver: str) -> dict[str, Any]:
    """The body: the alerts of a message, and what they have in common."""
    if alerts.is_own(notice):
        told = [_alert(alerts.notice_labels(notice), alerts.notice_annotations(notice), notice.at)]
    else:
        told = [_of_incident(notice, incident) for incident in notice.incidents]
    labels = alerts.common(one["labels"] for one in told)
    group = {name: labels[name] for name in ("alertname", "fingerprint", "host") if name in labels}
    key = ", ".join(f"{name}={json.dumps(value)}" for name, value in group.items())
    firing = any(one["status"] == "firing" for one in told)
    return {
        "version": "4",
        "groupKey": f"{{}}:{{{key}}}",
        "truncatedAlerts": 0,
        "status": "firing" if firing else "resolved",
        "receiver": receiver,
        "groupLabels": group,
        "commonLabels": labels,
        "commonAnnotations": alerts.common(one["annotations"] for one in told),
        "routeLabels": {},
        "externalURL": "",
        "alerts": told,
    }


def _of_incident(notice: Notice, incident: IncidentNotice) -> dict[str, Any]:
    over = notice.kind == "resolved" or incident.closed_at is not None
    return _alert(
        alerts.incident_labels(incident),
        alerts.incident_annotations(incident, notice.note),
        incident.opened_at,
        (incident.closed_at or notice.at) if over else None,
    )


def _alert(
    labels: Mapping[str, str],
    annotations: Mapping[str, str],
    starts_at: float,
    ends_at: float | None = None,
) -> dict[str, Any]:
    return {
        "status": "firing" if ends_at is None else "resolved",
        **alerts.alert(labels, annotations, starts_at, ends_at),
        "fingerprint": alerts.fingerprint(labels),
    }
