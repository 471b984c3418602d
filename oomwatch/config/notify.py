"""Who is told what: the part of a receiver's section that all kinds share, and what they obey."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import ClassVar, Final, Literal

from oomwatch.config.fields import Problem, count, duration, key, switch
from oomwatch.config.labels import Labels
from oomwatch.config.values import Choice, FilePath, Names, Text, Texts, Url

SEVERITIES: Final = ("critical", "warning", "info")
CLASSES: Final = ("startup", "long_context", "irregular", "not_oom")

IncidentClass = Literal["startup", "long_context", "irregular", "not_oom"]


@dataclasses.dataclass(frozen=True, slots=True)
class SinkConfig:
    """What every receiver of messages can be told. Filters that are given must all match."""

    kind: ClassVar[str] = ""

    name: str | None = key(
        Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "oncall"),
        None,
        "What `oomwatch notify` calls it. Must be given, once each.",
        '"oncall"',
    )
    enabled: bool = switch(True, "Whether anything is sent to it.")
    min_severity: Literal["critical", "warning", "info"] = key(
        Choice(SEVERITIES), "warning", "The least that is told: info, warning or critical."
    )
    classes: tuple[IncidentClass, ...] = key(
        Names(CLASSES),
        (),
        "Only incidents of these classes: startup, long_context, irregular, not_oom.",
        '["startup", "long_context"]',
    )
    causes: tuple[str, ...] = key(
        Texts(r"[a-z][a-z0-9_]{1,60}", "kv_saturation"),
        (),
        "Only incidents of these causes, as `oomwatch explain` lists them.",
        '["kv_saturation", "host_oom_kill"]',
    )
    engines: tuple[str, ...] = key(
        Texts(r"[^\s]{1,200}", "chat-*"),
        (),
        "Only these engines; a * stands for any text.",
        '["chat-*"]',
    )
    hosts: tuple[str, ...] = key(
        Texts(r"[^\s]{1,253}", "gpu-*"),
        (),
        "Only these hosts; a * stands for any text.",
        '["gpu-*"]',
    )
    labels: tuple[str, ...] = key(
        Texts(r"[A-Za-z_][A-Za-z0-9_]*=.{1,200}", "team=chat"),
        (),
        "Only incidents that carry these labels, as NAME=VALUE; a * stands for any text.",
        '["team=chat"]',
    )
    quiet_hours: str | None = key(
        Text(r"([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d", "22:00-07:00"),
        None,
        "Between these times of the host's clock only critical messages are sent; the others wait "
        "until its end.",
        '"22:00-07:00"',
    )
    escalate_after_seconds: float = duration(
        "0s",
        "Tell it only what nobody has acknowledged, and is still open, after this time; 0s tells "
        "it at once.",
        "0s",
        "7d",
    )
    send_resolved: bool = switch(True, "Whether the end of an incident is told too.")
    timeout_seconds: float = duration("20s", "How long one attempt may take.", "1s", "2min")
    proxy: str | None = key(
        Url(("http", "https"), "http://proxy.internal:3128"),
        None,
        "A proxy to send through. Not set: as $https_proxy and $no_proxy say.",
        '"http://proxy.internal:3128"',
        secret=True,  # its address may hold a password
    )
    ca_file: str | None = key(
        FilePath(),
        None,
        "Certificates to trust, beside those of the system.",
        '"/etc/ssl/certs/internal-ca.pem"',
    )

    def problems(self) -> Iterator[Problem]:
        """A name to call it by, and quiet hours that begin and end."""
        if self.name is None:
            yield "name", 'is missing: give the receiver a name, such as name = "oncall"'
        begin, _, end = (self.quiet_hours or "").partition("-")
        if begin and begin == end:
            yield "quiet_hours", f"begin and end at {begin}: write two times, or leave it out"


def variable_part(name: str) -> str:
    """How a receiver's name stands in the variables that hold its secrets: ON_CALL for on-call."""
    return re.sub(r"[^A-Za-z0-9]", "_", name).upper()


@dataclasses.dataclass(frozen=True, slots=True)
class NotifySettings:
    """When something is told, and when not again. Receivers are tables such as [[notify.slack]]."""

    labels: Mapping[str, str] = key(
        Labels(),
        {},
        "Labels of all incidents of this host, for filters, silences and receivers.",
        '{ site = "fra1" }',
    )
    runbook_url: str | None = key(
        Url(("http", "https", "file"), "https://runbooks.internal/oomwatch/{cause}"),
        None,
        "Where the pages of the causes are; {cause} stands for the cause's id. Not set: messages "
        "say `oomwatch explain CAUSE`, which needs no network.",
        '"https://runbooks.internal/oomwatch/{cause}"',
    )
    cooldown_seconds: float = duration(
        "5min",
        "An incident that comes back so soon after its end is told only if it stays.",
        "0s",
        "1d",
    )
    flap_count: int = count(
        4,
        "What comes back so often within `flap_window` is told once, and then when it ends.",
        2,
        100,
    )
    flap_window_seconds: float = duration("1h", "See `flap_count`.", "1min", "1d")
    retry_interval_seconds: float = duration(
        "5s",
        "The pause after a failed attempt; after more of them it grows, up to 180 times that.",
        "100ms",
        "10min",
    )
    group_limit: int = count(
        3,
        "After so many messages of one host within `group_window` people get the rest as one "
        "message.",
        1,
        100,
    )
    group_window_seconds: float = duration("30s", "See `group_limit`.", "1s", "1h")
    give_up_after_seconds: float = duration(
        "1d",
        "A message that could not be delivered for so long is given up, and that is told.",
        "1min",
        "7d",
    )
