"""The whole [notify] section: when something is told, and the receivers of each kind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Final

from oomwatch.config.fields import Problem, sections
from oomwatch.config.notify import NotifySettings, SinkConfig, variable_part
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
        """Receivers and their secrets are told apart by name; a runbook has the cause's."""
        if self.runbook_url is not None:
            for other in _OTHER_PLACE.findall(self.runbook_url):
                yield "runbook_url", f"has {other} in it: only {{cause}} is filled in"
        taken: dict[str, str] = {}
        for kind in SINKS:
            for index, sink in enumerate(getattr(self, kind)):
                part = variable_part(sink.name)
                if sink.name in taken.values():
                    yield f"{kind}.{index}.name", f"{sink.name} is taken by an earlier receiver"
                elif part in taken:
                    yield (
                        f"{kind}.{index}.name",
                        f"{sink.name} is too like the earlier receiver {taken[part]}: "
                        f"OOMWATCH_NOTIFY_{part}_... would hold the secrets of both",
                    )
                taken.setdefault(part, sink.name)
