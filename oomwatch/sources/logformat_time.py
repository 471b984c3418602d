"""Times of log lines, as UTC epoch seconds.

Three forms: with a date (``2025-03-12T06:09:16.123Z``, ``2025-03-12 06:09:16``), vLLM's without a
year (``11-29 12:00:00``), and glog's (``1129 12:00:00.5``, also syslog's month names).
Times without an offset are local to the host that wrote them: the zone is a setting, by default
this machine's. A missing year is that of the last dated line nearby, else the latest that does not
lie after the file's last change.
"""

from __future__ import annotations

import datetime
import re

DAY_SECONDS = 86_400
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_DATED = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T -](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?\d* ?(Z|UTC|[+-]\d\d:?\d\d)?"
)
_YEARLESS = re.compile(r"(\d\d?)-?(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_SYSLOG = re.compile(r"([A-Za-z]{3}) {1,2}(\d{1,2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")


class Clock:
    """Reads times; remembers the last dated one to complete those without a year."""

    def __init__(
        self, zone: datetime.tzinfo | None = None, written_at: float | None = None
    ) -> None:
        """`zone` for times without an offset; `written_at`: when the log was last written."""
        self.zone = zone
        self._written_at = written_at
        self._last_dated: float | None = None
        self._cache: dict[str, float | None] = {}

    def read_dated(self, text: str) -> float | None:
        """Seconds of a text with a full date; a missing offset means the local zone."""
        match = _DATED.match(text)
        if match is None:
            return None
        year, month, day, hour, minute, second, fraction, offset = match.groups()
        zone = self.zone if offset is None else _offset_zone(offset)
        key = text[:19] + (offset or "")
        if key not in self._cache:
            self._remember(
                key, _to_epoch(int(year), int(month), int(day), (hour, minute, second), zone)
            )
        base = self._cache[key]
        if base is None:
            return None
        self._last_dated = base
        return base + _fraction(fraction)

    def read_yearless(self, text: str) -> float | None:
        """Seconds of ``MM-DD HH:MM:SS`` or glog's ``MMDD HH:MM:SS.ffffff``."""
        match = _YEARLESS.match(text)
        if match is None:
            return None
        month, day, *clock, fraction = match.groups()
        return self._complete(match.group(0), int(month), int(day), clock, fraction)

    def read_syslog(self, text: str) -> float | None:
        """Seconds of syslog's ``Mar 12 06:09:16``."""
        match = _SYSLOG.match(text)
        month = None if match is None else _MONTHS.get(match.group(1).capitalize())
        if match is None or month is None:
            return None
        _, day, *clock, fraction = match.groups()
        return self._complete(match.group(0), month, int(day), clock, fraction)

    def note(self, at: float) -> None:
        """Take a time known from elsewhere (a journal's, a container runtime's) as dated."""
        self._last_dated = at

    def _complete(
        self, text: str, month: int, day: int, clock: list[str], fraction: str | None
    ) -> float | None:
        key = text.partition(".")[0]
        if key not in self._cache:
            self._remember(key, self._guess_year(month, day, clock))
        base = self._cache[key]
        return None if base is None else base + _fraction(fraction)

    def _guess_year(self, month: int, day: int, clock: list[str]) -> float | None:
        near = self._last_dated
        anchor = near if near is not None else self._written_at
        if anchor is None:
            return None
        year = datetime.datetime.fromtimestamp(anchor, datetime.UTC).year
        moments = [
            moment
            for candidate in (year - 1, year, year + 1)
            if (moment := _to_epoch(candidate, month, day, clock, self.zone)) is not None
        ]
        if near is not None:
            return min(moments, key=lambda moment: abs(moment - near), default=None)
        # A day of tolerance: the file's time and the log's zone may differ by up to 14 hours.
        return max((m for m in moments if m <= anchor + DAY_SECONDS), default=None)

    def _remember(self, key: str, value: float | None) -> None:
        if len(self._cache) > 4096:
            self._cache.clear()
        self._cache[key] = value


def _fraction(digits: str | None) -> float:
    return float("0." + digits) if digits else 0.0


def _offset_zone(offset: str) -> datetime.tzinfo | None:
    if offset in {"Z", "UTC"}:
        return datetime.UTC
    minutes = int(offset[1:3]) * 60 + int(offset[-2:])
    if minutes >= 24 * 60:
        return datetime.UTC
    delta = datetime.timedelta(minutes=minutes if offset[0] == "+" else -minutes)
    return datetime.timezone(delta)


def _to_epoch(
    year: int,
    month: int,
    day: int,
    clock: tuple[str, str, str] | list[str],
    zone: datetime.tzinfo | None,
) -> float | None:
    """Epoch seconds, or None where no such moment exists (month 13, 29 February)."""
    hour, minute, second = (int(part) for part in clock)
    try:
        # A leap second, 23:59:60, is the second after.
        moment = datetime.datetime(year, month, day, hour, minute, min(second, 59), tzinfo=zone)
        return moment.timestamp() + (second == 60)
    except (ValueError, OverflowError, OSError):
        return None
