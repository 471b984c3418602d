"""The whole [notify] section: when something is told, and the receivers of each kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from oomwatch.config.fields import Problem, sections
from oomwatch.config.notify import NotifySettings, SinkConfig
from oomwatch.config.sinks import (
    SINKS,
    AlertmanagerConfig,
    AlertmanagerWebhookConfig,
    AppriseConfig,
    EmailConfig,
    PagerDutyConfig,
    SlackConfig,
    WebhookConfig,
)

_OTHER_PLACE: Final = re.compile(r"\{(?!cause\})[^{}]*\}")


@dataclasses.dataclass(frozen=True, slots=True)
class NotifyConfig(NotifySettings):
    """When something is told, and when not again. Receivers are tables such as [[notify.slack]]."""

    slack: tuple[SlackConfig, ...] = sections(SlackConfig, "slack")
    webhook: tuple[WebhookConfig, ...] = sections(WebhookConfig, "webhook")
    alertmanager: tuple[AlertmanagerConfig, ...] = sections(AlertmanagerConfig, "alertmanager")
    alertmanager_webhook: tuple[AlertmanagerWebhookConfig, ...] = sections(
        AlertmanagerWebhookConfig, "alertmanager_webhook"
    )
    pagerduty: tuple[PagerDutyConfig, ...] = sections(PagerDutyConfig, "pagerduty")
    email: tuple[EmailConfig, ...] = sections(EmailConfig, "email")
    apprise: tuple[AppriseConfig, ...] = sections(AppriseConfig, "apprise")

    @property
    def sinks(self) -> tuple[SinkConfig, ...]:
        """All receivers, also those that are switched off."""
        return tuple(sink for kind in SINKS for sink in getattr(self, kind))

    def problems(self) -> Iterator[Problem]:
        """Receivers are told apart by name; the place of a runbook is that of its cause."""
        if self.runbook_url is not None:
            for other in _OTHER_PLACE.findall(self.runbook_url):
                yield "runbook_url", f"has {other} in it: only {{cause}} is filled in"
        taken: set[str] = set()
        for kind in SINKS:
            for index, sink in enumerate(getattr(self, kind)):
                if sink.name in taken:
                    yield f"{kind}.{index}.name", f"{sink.name} is taken by an earlier receiver"
                taken.add(sink.name)
