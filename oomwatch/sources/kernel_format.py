"""The wrappers that kernel messages come in, taken off: dmesg, kmsg, syslog, journal.

dmesg         ``[ 3928.274063] text``, ``[ 3928.274063][ T4242] text``, ``<3>[ 3928.27] text``,
              ``kern  :err   : [ 3928.27] text`` (-x)
dmesg -T      ``[Fri Sep  4 13:46:52 2026] text``
dmesg iso     ``2026-09-04T13:46:52,123456+00:00 text``
kmsg          ``3,1234,3928274063,-;text`` (priority, sequence, microseconds since boot, flags)
journal       ``Sep 04 13:46:52 host kernel: text`` and the -iso, -precise, -full, -unix, -monotonic
              forms; ``-o json`` and ``-o export``
syslog        ``Sep  4 13:46:52 host kernel: [ 3928.274063] text``

A message of a program is not the kernel's word, whatever it quotes: lines with a tag other than the
kernel's or systemd's yield None.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Mapping
from typing import Any, Final

# journald takes the word before a colon off an injected line, so "NVRM" and "EDAC" may be tags.
_TAGS: Final = frozenset({"kernel", "systemd", "systemd-oomd", "NVRM", "EDAC", "mce"})
_TAGS_IN_TEXT: Final = frozenset({"NVRM", "EDAC", "mce"})

_KMSG: Final = re.compile(r"(\d{1,6}),(\d+),(\d+),[^;]{0,64};(.*)", re.DOTALL)
_DMESG: Final = re.compile(
    r"(?:<\d{1,3}>|[a-z]{2,8}\s*:[a-z]{2,6}\s*: )?"
    r"\[\s*(\d{1,12}\.\d{3,9})\](?:\[\s*[TC]\d+\])?\s?(.*)",
    re.DOTALL,
)
_HUMAN: Final = re.compile(
    r"(?:<\d{1,3}>|[a-z]{2,8}\s*:[a-z]{2,6}\s*: )?"
    r"\[\S{1,6} ([A-Z][a-z]{2}|\d{1,2}月)\s+(\d{1,2}) (\d\d):(\d\d):(\d\d) (\d{4})\]\s?(.*)",
    re.DOTALL,
)
"""`dmesg -T` names day and month in the language of the shell."""
_ISO: Final = re.compile(
    r"(?:[A-Z][a-z]{2} )?(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:([.,])(\d{1,9}))?"
    r"(?:\s?(Z|UTC|[+-]\d\d:?\d\d))?\s(.*)",
    re.DOTALL,
)
_SYSLOG: Final = re.compile(
    r"(?:<\d{1,3}>)?([A-Z][a-z]{2})\s+(\d{1,2}) (\d\d):(\d\d):(\d\d)(\.\d{1,9})?\s(.*)", re.DOTALL
)
_UNIX: Final = re.compile(r"(\d{9,11}\.\d{1,9})\s(.*)", re.DOTALL)
_TAGGED: Final = re.compile(
    r"(?:([\w.:-]{1,255}) )?([A-Za-z][\w./@-]{0,63})(?:\[\d+\])?: (.*)", re.DOTALL
)
_MONTHS: Final = {
    name: index
    for index, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
} | {f"{month}月": month for month in range(1, 13)}
_CONTROLS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|[\x00-\x08\x0a-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True, slots=True)
class KernelLine:
    """One message without its wrapper."""

    text: str
    at: float | None = None
    monotonic_seconds: float | None = None


class Unwrapper:
    """Takes the wrappers off line by line; state is only needed by the journal's export form.

    `zone` is assumed for times without one, `now` (epoch seconds) dates times without a year:
    such a time is the latest one that is not more than a day after `now`.
    """

    def __init__(self, *, zone: datetime.tzinfo = datetime.UTC, now: float | None = None) -> None:
        self._zone = zone
        self._now = (
            datetime.datetime.now(zone)
            if now is None
            else datetime.datetime.fromtimestamp(now, zone)
        )
        self._record: dict[str, str] = {}
        self._binary_field: str | None = None
        self._before: KernelLine | None = None

    def line(self, raw: str) -> KernelLine | None:
        """The message of one line, or None if it is none, or not of the kernel's or systemd's."""
        raw = raw.rstrip("\r\n")
        if self._record or raw.startswith("__CURSOR="):
            return self._export(raw)
        unwrapped = self._unwrap(raw)
        if unwrapped is None:
            return None
        if raw[:1].isspace() and unwrapped.text == raw and self._before is not None:
            # dmesg indents what goes on: the time is that of the line before.
            unwrapped = dataclasses.replace(self._before, text=raw.lstrip())
        self._before = unwrapped
        return dataclasses.replace(unwrapped, text=_CONTROLS.sub("", unwrapped.text).rstrip())

    def finish(self) -> KernelLine | None:
        """The last export record, if the file does not end with a blank line."""
        return self._export("") if self._record else None

    def _unwrap(self, raw: str) -> KernelLine | None:
        first = raw[:1]
        if first == "{":
            return _from_json(raw)
        if first.isdigit():
            if match := _KMSG.fullmatch(raw):
                return KernelLine(_unescape(match[4]), monotonic_seconds=int(match[3]) / 1e6)
            if match := _UNIX.fullmatch(raw):
                return _tagged(match[2], float(match[1]))
        if match := _DMESG.fullmatch(raw):
            return _after_monotonic(match[2], float(match[1]))
        if match := _HUMAN.fullmatch(raw):
            at = self._moment(
                int(match[6]), match[1], [int(part) for part in match.group(2, 3, 4, 5)]
            )
            return KernelLine(match[7], at)
        if match := _ISO.fullmatch(raw):
            at = self._iso(match)
            # util-linux prints a comma before the fraction, everybody else a full stop.
            return KernelLine(match[6], at) if match[3] == "," else _tagged(match[6], at)
        if match := _SYSLOG.fullmatch(raw):
            return _tagged(match[7], self._without_year(match))
        return KernelLine(raw.removeprefix("kernel: "))  # copied without its time

    def _export(self, raw: str) -> KernelLine | None:
        if self._binary_field is not None:
            # A value that is not plain text: eight bytes of length come before it.
            self._record[self._binary_field], self._binary_field = raw[8:], None
            return None
        if raw:
            name, equals, value = raw.partition("=")
            if equals:
                self._record[name] = value
            elif name.isupper():
                self._binary_field = name
            return None
        record, self._record = self._record, {}
        return _from_journal(record)

    def _iso(self, match: re.Match[str]) -> float | None:
        offset = match[5]
        text = f"{match[1]}T{match[2]}.{(match[4] or '0')[:6]:0<6}"
        if offset:
            text += "+00:00" if offset in ("Z", "UTC") else offset
        try:
            moment = datetime.datetime.fromisoformat(text)
            return (moment if offset else moment.replace(tzinfo=self._zone)).timestamp()
        except (ValueError, OverflowError):
            return None

    def _without_year(self, match: re.Match[str]) -> float | None:
        fraction = float(match[6] or 0)
        for year in (self._now.year + 1, self._now.year, self._now.year - 1):
            at = self._moment(year, match[1], [int(part) for part in match.group(2, 3, 4, 5)])
            if at is not None and at <= self._now.timestamp() + 86400:
                return at + fraction
        return None

    def _moment(self, year: int, month: str, rest: list[int]) -> float | None:
        """`rest` is day, hour, minute, second."""
        try:
            day, hour, minute, second = rest
            moment = datetime.datetime(
                year, _MONTHS[month], day, hour, minute, second, tzinfo=self._zone
            )
            return moment.timestamp()
        except (KeyError, ValueError, OverflowError):
            return None


def _after_monotonic(text: str, monotonic: float) -> KernelLine:
    """``journalctl -o short-monotonic`` puts host and tag behind the bracket, dmesg nothing."""
    match = _TAGGED.fullmatch(text)
    if match and match[1] and match[2] in _TAGS:
        return KernelLine(_with_tag(match[2], match[3]), monotonic_seconds=monotonic)
    return KernelLine(text, monotonic_seconds=monotonic)


def _tagged(text: str, at: float | None) -> KernelLine | None:
    match = _TAGGED.fullmatch(text)
    if match is None or match[2] not in _TAGS:
        return None
    message = _with_tag(match[2], match[3])
    if inner := _DMESG.fullmatch(message):
        return KernelLine(inner[2], at, float(inner[1]))
    return KernelLine(message, at)


def _with_tag(tag: str, text: str) -> str:
    return f"{tag}: {text}" if tag in _TAGS_IN_TEXT else text


def _from_json(raw: str) -> KernelLine | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return _from_journal(record) if isinstance(record, dict) else None


def _from_journal(record: Mapping[str, Any]) -> KernelLine | None:
    tag = record.get("SYSLOG_IDENTIFIER") or record.get("_COMM") or "kernel"
    message = record.get("MESSAGE")
    if isinstance(message, list):  # not UTF-8: journalctl gives the bytes as numbers
        message = bytes(part for part in message if isinstance(part, int) and 0 <= part < 256)
        message = message.decode("utf-8", "replace")
    if not isinstance(message, str) or tag not in _TAGS or not _trusted(record, tag):
        return None
    wall = _microseconds(record, "_SOURCE_REALTIME_TIMESTAMP", "__REALTIME_TIMESTAMP")
    monotonic = _microseconds(record, "_SOURCE_MONOTONIC_TIMESTAMP", "__MONOTONIC_TIMESTAMP")
    text = _CONTROLS.sub("", _with_tag(tag, message)).rstrip()
    return KernelLine(text, wall, monotonic)


def _trusted(record: Mapping[str, Any], tag: object) -> bool:
    """Whether the sender is the kernel or systemd; programs choose their own tag."""
    transport = record.get("_TRANSPORT")
    if transport in (None, "kernel"):
        return True
    comm = record.get("_COMM")
    return transport == "journal" and tag == comm and comm in ("systemd", "systemd-oomd")


def _microseconds(record: Mapping[str, Any], *names: str) -> float | None:
    for name in names:
        value = record.get(name)
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
            return int(value) / 1e6
    return None


def _unescape(text: str) -> str:
    r"""/dev/kmsg writes bytes that are not printable as ``\x1b``."""
    return re.sub(r"\\x([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), text)
