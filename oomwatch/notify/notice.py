"""What one message says, before any sink has put it in words of its own.

Every text in it is fit for a person and for the wire: bounded, without control characters, and
without what clients sent, keys or tokens. A sink only has to escape what its own format gives a
meaning to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

NoticeKind = Literal["opened", "updated", "resolved", "escalated", "grouped", "test", "undelivered"]
Severity = Literal["critical", "warning", "info"]


@dataclasses.dataclass(frozen=True, slots=True)
class RemedyNotice:
    """One remedy: what to do, as flags or in words, and what it is predicted to change."""

    title: str
    flags: tuple[str, ...] = ()
    """As they are typed: ``--max-num-seqs 64``; variables as ``NAME=value``."""
    action: str | None = None
    effect: str | None = None
    validated: bool = False
    """Whether the version that runs is known to accept these flags."""


@dataclasses.dataclass(frozen=True, slots=True)
class IncidentNotice:
    """One incident as a message shows it. Times are UTC epoch seconds."""

    id: str
    fingerprint: str
    host: str
    severity: Severity
    headline: str
    opened_at: float
    closed_at: float | None = None
    resolution: str | None = None
    """Of one that is over: what is known of the cure, in a sentence."""
    engine_id: str | None = None
    engine: str | None = None
    version: str | None = None
    model: str | None = None
    gpus: tuple[int, ...] = ()
    incident_class: str | None = None
    cause: str | None = None
    confidence: float | None = None
    why: str | None = None
    remedies: tuple[RemedyNotice, ...] = ()
    flags: tuple[str, ...] = ()
    """What `oomwatch flags` prints: of the remedies, which are alternatives, those set together."""
    memory: str | None = None
    """One line: who holds how much of the GPU that ran out."""
    evidence: tuple[str, ...] = ()
    """What decided first: lines of logs and counters; the first to go where room is short."""
    eta_seconds: float | None = None
    """Of a forecast: when memory will be used up, counted from when it was made."""
    runbook_url: str | None = None
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    restarts: int | None = None
    """How often it was started lately, of an engine that fails each time."""
    note: str | None = None
    """Among several: what a message about this one alone would say of itself, such as that it is
    back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """A message to one sink.

    `id` stays the same over retries, restarts of the agent and a second look at the same change:
    receivers may drop what they have seen. `incidents` are several only where a sink groups them.
    """

    id: str
    kind: NoticeKind
    at: float
    incidents: tuple[IncidentNotice, ...] = ()
    note: str | None = None
    """A sentence about the message itself: how often it came back, what could not be delivered."""
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Of a message that is about no incident, such as a test: those of the configuration."""


def notice_to_json(notice: Notice) -> dict[str, Any]:
    """The form in which a notice waits in the store."""
    return dataclasses.asdict(notice)


def notice_from_json(data: Mapping[str, Any]) -> Notice:
    """The notice again; keys that a later version wrote are left out.

    Raises:
        KeyError, TypeError, ValueError: it is not one.

    """
    return Notice(
        **{
            **_known(Notice, data),
            "incidents": tuple(_incident(item) for item in data.get("incidents", ())),
        }
    )


def _incident(data: Mapping[str, Any]) -> IncidentNotice:
    remedies = tuple(
        RemedyNotice(**{**_known(RemedyNotice, item), "flags": tuple(item.get("flags", ()))})
        for item in data.get("remedies", ())
    )
    known = _known(IncidentNotice, data)
    for name in ("gpus", "evidence", "flags"):
        known[name] = tuple(known.get(name, ()))
    return IncidentNotice(**{**known, "remedies": remedies})


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: value for name, value in data.items() if name in names}
