"""Which incidents a receiver is told of, what is silenced, and until when quiet hours last."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable, Mapping
from typing import Final

from oomwatch.config.notify import SEVERITIES, SinkConfig
from oomwatch.notify.notice import IncidentNotice
from oomwatch.records import Silence

_RANK: Final = {severity: rank for rank, severity in enumerate(SEVERITIES)}
_MINUTE: Final = 60


def is_meant(sink: SinkConfig, incident: IncidentNotice) -> bool:
    """Whether all filters of a receiver let an incident through.

    What is not known matches no filter: an incident without a diagnosis has no class.
    """
    return (
        _RANK[incident.severity] <= _RANK[sink.min_severity]
        and (not sink.classes or incident.incident_class in sink.classes)
        and (not sink.causes or incident.cause in sink.causes)
        and (not sink.engines or _fits_any(sink.engines, incident.engine_id))
        and (not sink.hosts or _fits_any(sink.hosts, incident.host))
        and _has_labels(sink.labels, incident.labels)
    )


def silenced_by(
    silences: Iterable[Silence], incident: IncidentNotice, now: float
) -> Silence | None:
    """The silence that holds an incident longest; None if none does.

    All have begun: one that seems to begin later is from before the clock was set back.
    """
    holding = [
        silence for silence in silences if now < silence.ends_at and _is_silenced(silence, incident)
    ]
    return max(holding, key=lambda silence: silence.ends_at, default=None)


def _is_silenced(silence: Silence, incident: IncidentNotice) -> bool:
    wanted = (
        (silence.engine, incident.engine_id),
        (silence.host, incident.host),
        (silence.incident_class, incident.incident_class),
        (silence.cause, incident.cause),
    )
    return all(
        pattern is None or _fits_any((pattern,), value) for pattern, value in wanted
    ) and _has_labels(silence.labels, incident.labels)


def quiet_until(span: str | None, now: float) -> float | None:
    """When the quiet hours end that hold at `now`, in epoch seconds; None if none do.

    `span` is ``22:00-07:00`` of the host's clock; its days may have 23 or 25 hours.
    """
    if span is None:
        return None
    begin, end = (_minutes(part) for part in span.split("-"))
    clock = time.localtime(now)
    minute = clock.tm_hour * _MINUTE + clock.tm_min
    if begin <= end:
        holds, is_tomorrow = begin <= minute < end, False
    else:
        holds, is_tomorrow = minute >= begin or minute < end, minute >= begin
    if not holds:
        return None
    return _moment((clock.tm_year, clock.tm_mon, clock.tm_mday + is_tomorrow), end)


def _moment(date: tuple[int, int, int], minute: int) -> float:
    """When the host's clock shows a minute of a day; the second time where it does so twice."""
    hour, rest = divmod(minute, _MINUTE)
    known = [time.mktime((*date, hour, rest, 0, 0, 0, is_summer)) for is_summer in (0, 1)]
    shown = [at for at in known if time.localtime(at)[3:5] == (hour, rest)]
    return max(shown or known)


def _minutes(text: str) -> int:
    hours, _, minutes = text.partition(":")
    return int(hours) * _MINUTE + int(minutes)


def _fits_any(patterns: Iterable[str], value: str | None) -> bool:
    return value is not None and any(fnmatch.fnmatchcase(value, pattern) for pattern in patterns)


def _has_labels(wanted: Iterable[str], labels: Mapping[str, str]) -> bool:
    for each in wanted:
        name, _, pattern = each.partition("=")
        if not _fits_any((pattern,), labels.get(name)):
            return False
    return True
