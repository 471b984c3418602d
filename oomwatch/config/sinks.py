"""The receivers of messages: for each kind the keys of a ``[[notify.KIND]]`` table.

A new kind is a class here, a line in `SINKS` and one in ``config/receivers.py``, and a module of
its name in ``notify/sinks``.
Secrets are never written in the configuration: a key ``*_file`` names a file or a systemd
credential, and without it the variable ``OOMWATCH_NOTIFY_<NAME>_<KEY>`` holds the secret.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from oomwatch.config.fields import Problem, key
from oomwatch.config.headers import Headers
from oomwatch.config.notify import SinkConfig
from oomwatch.config.values import Choice, FilePath, Number, Text, Texts, Url

_ADDRESS: Final = r"[^\s@<>,;:\"]+@[^\s@<>,;:\"]+"


@dataclasses.dataclass(frozen=True, slots=True)
class PeopleSinkConfig(SinkConfig):
    """A receiver that people read."""

    lang: Literal["en", "zh"] = key(
        Choice(("en", "zh")),
        "en",
        "The language of titles and fixed words; flags and log lines stay as they are.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class SlackConfig(PeopleSinkConfig):
    """A channel in Slack: an incoming webhook, or a bot that threads and updates its messages."""

    kind: ClassVar[str] = "slack"
    url_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds the URL of an incoming webhook, or the name of a systemd credential.",
        '"slack-url"',
    )
    token_file: str | None = key(
        FilePath(secret=True),
        None,
        "Instead: a file that holds a bot's token (xoxb-…; scope chat:write). With it an incident "
        "is one thread, and its first message is kept up to date.",
        '"slack-token"',
    )
    channel: str | None = key(
        Text(r"[#@]?[^\s#@]{1,80}", "C0123456789"),
        None,
        "The channel that the bot writes to: its id, or #name where the bot may write everywhere.",
        '"C0123456789"',
    )
    api_url: str = key(
        Url(("http", "https"), "https://slack.com/api"),
        "https://slack.com/api",
        "Slack's API for bots; https://slack-gov.com/api for GovSlack.",
    )

    def problems(self) -> Iterator[Problem]:
        """A webhook or a bot, not both."""
        yield from SinkConfig.problems(self)
        if self.url_file is not None and self.token_file is not None:
            yield "token_file", "cannot be given together with url_file"
        if self.token_file is not None and self.channel is None:
            yield "channel", "is missing: a bot must know where to write"
        if self.url_file is not None and self.channel is not None:
            yield "channel", "cannot be given with url_file: a webhook has its channel"


@dataclasses.dataclass(frozen=True, slots=True)
class WebhookConfig(SinkConfig):
    """A program of your own: signed JSON as Standard Webhooks describes it."""

    kind: ClassVar[str] = "webhook"
    url: str | None = key(
        Url(("http", "https"), "https://hooks.internal/oomwatch"),
        None,
        "Where to POST to. With a password or token in it, use `url_file`.",
        '"https://hooks.internal/oomwatch"',
        secret=True,  # it may hold a token
    )
    url_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds that URL, or the name of a systemd credential.",
        '"webhook-url"',
    )
    secret_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds the secret to sign with: `whsec_` and 24 to 64 bytes in base64. While "
        "it is being changed two lines: messages then carry both signatures.",
        '"webhook-secret"',
    )
    headers: Mapping[str, str] = key(
        Headers(),
        {},
        "Headers to send along. Those that prove who asks belong in `headers_file`.",
        '{ "X-Team" = "inference" }',
        secret=True,
    )
    headers_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `Name: value` lines, or the name of a systemd credential.",
        '"webhook-headers"',
    )

    def problems(self) -> Iterator[Problem]:
        """One address."""
        yield from SinkConfig.problems(self)
        yield from _one_address(self.url, self.url_file)


@dataclasses.dataclass(frozen=True, slots=True)
class AlertmanagerConfig(SinkConfig):
    """Prometheus' Alertmanager, told directly: alerts are renewed while they last, and resolved."""

    kind: ClassVar[str] = "alertmanager"
    urls: tuple[str, ...] = key(
        Texts(r"https?://[^\s,]+", "http://alertmanager.internal:9093"),
        (),
        "The Alertmanagers; all of a cluster, for each of them is told.",
        '["http://alertmanager.internal:9093"]',
    )
    headers_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `Name: value` lines to send along, such as Authorization, or the name of a "
        "systemd credential.",
        '"alertmanager-headers"',
    )

    def problems(self) -> Iterator[Problem]:
        """Somebody to tell."""
        yield from SinkConfig.problems(self)
        if not self.urls:
            yield "urls", 'is missing: write urls = ["http://alertmanager.internal:9093"]'
        if any("@" in url or "?" in url for url in self.urls):
            yield (
                "urls",
                "must not hold a password or a query: put an Authorization line in headers_file",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class AlertmanagerWebhookConfig(SinkConfig):
    """A program that takes what Alertmanager sends to its webhooks (version 4)."""

    kind: ClassVar[str] = "alertmanager_webhook"
    url: str | None = key(
        Url(("http", "https"), "https://alerts.internal/webhook"),
        None,
        "Where to POST to. With a password or token in it, use `url_file`.",
        '"https://alerts.internal/webhook"',
        secret=True,  # it may hold a token
    )
    url_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds that URL, or the name of a systemd credential.",
        '"alerts-url"',
    )
    headers_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `Name: value` lines to send along, such as Authorization, or the name of a "
        "systemd credential.",
        '"alerts-headers"',
    )

    def problems(self) -> Iterator[Problem]:
        """One address."""
        yield from SinkConfig.problems(self)
        yield from _one_address(self.url, self.url_file)


@dataclasses.dataclass(frozen=True, slots=True)
class PagerDutyConfig(SinkConfig):
    """A service of PagerDuty, through its Events API v2."""

    kind: ClassVar[str] = "pagerduty"
    routing_key_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds the integration key of the service, or the name of a systemd "
        "credential.",
        '"pagerduty-key"',
    )
    url: str = key(
        Url(("http", "https"), "https://events.pagerduty.com/v2/enqueue"),
        "https://events.pagerduty.com/v2/enqueue",
        "The address of the API; in the EU that is https://events.eu.pagerduty.com/v2/enqueue.",
    )


@dataclasses.dataclass(frozen=True, slots=True)
class EmailConfig(PeopleSinkConfig):
    """E-mail; the messages of one incident are one thread."""

    kind: ClassVar[str] = "email"
    server: str | None = key(
        Text(r"[A-Za-z0-9.:-]{1,253}", "smtp.internal"),
        None,
        "The host that takes mail.",
        '"smtp.internal"',
    )
    port: int | None = key(
        Number(1, 65535, whole=True),
        None,
        "Its port. Not set: 587 with starttls, 465 with tls, 25 with none.",
        "587",
    )
    security: Literal["starttls", "tls", "none"] = key(
        Choice(("starttls", "tls", "none")),
        "starttls",
        "How the connection is protected: starttls, tls (from its first byte) or none.",
    )
    user: str | None = key(
        Text(r"[^\s]{1,200}", "oomwatch@example.com"),
        None,
        "Whom to log in as. Not set: no log-in.",
        '"oomwatch@example.com"',
    )
    password_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds the password, or the name of a systemd credential.",
        '"smtp-password"',
    )
    sender: str | None = key(
        Text(_ADDRESS, "oomwatch@example.com"),
        None,
        "Who the mail is from.",
        '"oomwatch@example.com"',
    )
    recipients: tuple[str, ...] = key(
        Texts(_ADDRESS, "oncall@example.com"),
        (),
        "Who gets it.",
        '["oncall@example.com"]',
    )

    def problems(self) -> Iterator[Problem]:
        """From whom, to whom, through whom; no password in the clear."""
        yield from SinkConfig.problems(self)
        if self.server is None:
            yield "server", 'is missing: write server = "smtp.internal"'
        if self.sender is None:
            yield "sender", 'is missing: write sender = "oomwatch@example.com"'
        if not self.recipients:
            yield "recipients", 'is missing: write recipients = ["oncall@example.com"]'
        if self.proxy is not None:
            yield "proxy", "does not carry e-mail"
        if self.user is not None and self.security == "none":
            yield (
                "user",
                'needs security = "starttls" or "tls": a password is not sent in the clear',
            )


@dataclasses.dataclass(frozen=True, slots=True)
class AppriseConfig(PeopleSinkConfig):
    """What Apprise knows: DingTalk, Feishu, Lark, WeCom, Teams, Telegram, ntfy and many more."""

    kind: ClassVar[str] = "apprise"
    urls_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of Apprise URLs, one a line, or the name of a systemd credential.",
        '"apprise-urls"',
    )


def _one_address(url: str | None, url_file: str | None) -> Iterator[Problem]:
    if url is not None and url_file is not None:
        yield "url_file", "cannot be given together with url"


SINKS: Final[Mapping[str, type[SinkConfig]]] = {
    kind.kind: kind
    for kind in (
        SlackConfig,
        WebhookConfig,
        AlertmanagerConfig,
        AlertmanagerWebhookConfig,
        PagerDutyConfig,
        EmailConfig,
        AppriseConfig,
    )
}
