"""What comes back: an incident after another of the same fingerprint and cause.

Such incidents are one episode for as long as the pauses between them are shorter than the pace at
which something counts as flapping (`flap_window` / `flap_count`, or the cooldown if that is
longer). The first of an episode is told like any other; one that is back within the cooldown only
if it stays; the one that makes it flapping at once; and what comes after that only if it stays.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from oomwatch.config.notify import NotifySettings
from oomwatch.notify.notice import IncidentNotice

_MOST: Final = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """One incident as the history keeps it. Times are epoch seconds."""

    key: tuple[str, str | None]
    opened_at: float
    closed_at: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Recurrence:
    """How an incident stands in its episode.

    `count` is how often it was seen in `span_seconds` by now; from `hold_until` on it may be told,
    if it is still open; its end not before `end_hold_until`, and not at all while `comes_back`.
    """

    count: int = 1
    hold_until: float | None = None
    end_hold_until: float | None = None
    comes_back: bool = False
    flapping: bool = False
    span_seconds: float = 0.0
    quiet_seconds: float = 0.0


class History:
    """The incidents of the last hours, for what comes back. One thread at a time."""

    def __init__(self, settings: NotifySettings) -> None:
        self.settings = settings
        self._seen: dict[str, Seen] = {}

    def take(self, incident: IncidentNotice) -> None:
        """Note an incident, or what has changed about it."""
        key = (incident.fingerprint, incident.cause)
        self._seen[incident.id] = Seen(key, incident.opened_at, incident.closed_at)
        if len(self._seen) > _MOST:
            oldest = sorted(self._seen, key=lambda name: self._seen[name].opened_at)
            for name in oldest[: _MOST // 4]:
                del self._seen[name]

    def recurrence(self, incident: IncidentNotice) -> Recurrence:
        """How an incident that was taken stands among those like it."""
        settings, quiet = self.settings, self.quiet_seconds
        key = (incident.fingerprint, incident.cause)
        alike = sorted(
            (seen.opened_at, name, seen) for name, seen in self._seen.items() if seen.key == key
        )
        place = next((n for n, (_, name, _) in enumerate(alike) if name == incident.id), None)
        if place is None:
            return Recurrence()
        episode = [seen for _, _, seen in alike]
        begin = place
        while begin > 0 and _pause(episode[begin - 1], episode[begin]) < quiet:
            begin -= 1
        window_from = incident.opened_at - settings.flap_window_seconds
        lately = [seen for seen in episode[begin : place + 1] if seen.opened_at >= window_from]
        count = len(lately)
        if count == 1 and begin == place:
            return Recurrence()
        hold = None
        if count > settings.flap_count:
            hold = incident.opened_at + quiet
        elif count < settings.flap_count and place > begin:
            before = min(episode[place - 1].closed_at or incident.opened_at, incident.opened_at)
            back_soon = incident.opened_at - before < settings.cooldown_seconds
            hold = before + settings.cooldown_seconds if back_soon else None
        flapping = count >= settings.flap_count
        later = episode[place:]
        last = place
        while last + 1 < len(episode) and _pause(episode[last], episode[last + 1]) < quiet:
            last += 1
        ends = [seen.closed_at for seen in later[: last - place + 1]]
        known = [end for end in ends if end is not None]
        return Recurrence(
            count=count,
            hold_until=hold,
            end_hold_until=max(known) + quiet if flapping and known else None,
            comes_back=flapping and None in ends,
            flapping=flapping,
            span_seconds=incident.opened_at - lately[0].opened_at,
            quiet_seconds=quiet,
        )

    @property
    def quiet_seconds(self) -> float:
        """For so long nothing like it must be seen until an episode is over."""
        settings = self.settings
        return max(settings.cooldown_seconds, settings.flap_window_seconds / settings.flap_count)


def _pause(before: Seen, after: Seen) -> float:
    """Seconds between two incidents; none while the first was open."""
    return after.opened_at - (after.opened_at if before.closed_at is None else before.closed_at)
