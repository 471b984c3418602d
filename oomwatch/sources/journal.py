"""Reads a systemd unit's log from the journal, through `journalctl -o export`.

By default the last start only: systemd gives every start of a unit an invocation id, which the
records of its processes carry as ``_SYSTEMD_INVOCATION_ID`` and systemd's own about them (a kill,
the exit status) as ``INVOCATION_ID``.
"""

from __future__ import annotations

import datetime
import json
import re
import time
from typing import Final

from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
    UsageError,
)
from oomwatch.sources.kernel import probe_journal
from oomwatch.sources.logfile import OpenedLog
from oomwatch.sources.logformat_child import Failed, ask_child, read_child
from oomwatch.sources.logformat_time import Clock

_UNIT: Final = re.compile(r"[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,250}")
_SUFFIXES: Final = (".service", ".scope", ".slice", ".socket", ".target", ".timer", ".mount")
_STARTING: Final = "7d4958e842da4a758f6c1cdc7b36dcc5"
"""MESSAGE_ID of systemd's "Starting …", from sd-messages.h."""
_INVOCATION: Final = re.compile(r"[0-9a-f]{32}")


def read_unit(
    unit: str,
    *,
    since: float | None = None,
    until: float | None = None,
    starts: int = 1,
    directory: str | None = None,
    zone: datetime.tzinfo | None = None,
    full: bool = False,
) -> OpenedLog:
    """The log of a unit's last `starts` starts; with `since` or `until` (epoch) of that time.

    `directory` holds journal files to read instead of this host's.

    Raises UsageError for what is no unit's name, SourceUnavailable without journalctl or a journal,
    PermissionDeniedError where the journal may not be read, NoDataError where the unit has logged
    nothing or does not exist.
    """
    if not _UNIT.fullmatch(unit):
        raise UsageError(f"{unit[:100]!a} is no name of a unit: give it as systemctl shows it")
    name = unit if unit.endswith(_SUFFIXES) else unit + ".service"
    journalctl = ["journalctl", "--no-pager", *([f"--directory={directory}"] if directory else [])]
    window = [f"--since=@{since:.3f}"] if since is not None else []
    window += [f"--until=@{until:.3f}"] if until is not None else []
    notes: list[str] = []
    try:
        invocations = [] if window else _find_invocations(journalctl, name, starts)
        if invocations:
            fields = [f"{field}={value}" for value in invocations for field in _FIELDS]
            matches = " + ".join(fields).split(" ")
            notes.append(f"the last start of {name}" if starts == 1 else f"starts of {name}")
        else:
            matches = [f"--unit={name}"]
        command = [*journalctl, "--output=export", *window, *matches]
        lines = read_child(command, name, Clock(zone, time.time()), full=full)
    except Failed as error:
        raise _explain(str(error), name) from None
    except SourceUnavailable:
        raise SourceUnavailable(
            f"unit {name}: journalctl is not on this host; give its log as a file with --log"
        ) from None
    if lines is None:
        if directory is None:
            _say_where_no_journal_is(name)
        raise NoDataError(
            f"unit {name}: nothing in the journal; `systemctl status {name}` says whether there is "
            "such a unit and where it logs"
        )
    return OpenedLog(name, lines, "the journal", zone="UTC", notes=tuple(notes))


def _say_where_no_journal_is(name: str) -> None:
    """Without any journal no unit has one, whatever its name is."""
    try:
        probe_journal()
    except PermissionDeniedError as error:
        raise PermissionDeniedError(f"unit {name}: {error}") from None
    except SourceError as error:
        raise SourceUnavailable(
            f"unit {name}: {error}; give its log as a file with --log"
        ) from None


_FIELDS: Final = ("_SYSTEMD_INVOCATION_ID", "INVOCATION_ID")


def _find_invocations(journalctl: list[str], name: str, count: int) -> list[str]:
    """Ids of the last starts, newest first; empty where the journal does not know them."""
    newest = [f"--unit={name}", "--reverse", "--lines=1"]
    started = [f"MESSAGE_ID={_STARTING}", f"UNIT={name}", "--reverse", f"--lines={count}"]
    found: list[str] = []
    for matches in (started, newest):
        if len(found) < count:
            text = ask_child([*journalctl, "--output=json", *matches])
            found += [i for i in _invocations(text) if i not in found]
    return found[:count]


def _invocations(text: str) -> list[str]:
    ids: list[str] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # "-- No entries --"
            continue
        values = [row.get(field) for field in _FIELDS] if isinstance(row, dict) else []
        ids += [v for v in values if isinstance(v, str) and _INVOCATION.fullmatch(v)][:1]
    return ids


def _explain(said: str, name: str) -> SourceError:
    lower = said.lower()
    if "permission" in lower or "not seeing messages from other users" in lower:
        return PermissionDeniedError(
            f"unit {name}: the journal may not be read; join the group systemd-journal, or use sudo"
        )
    if "no journal files" in lower:
        return SourceUnavailable(
            f"unit {name}: no journal files on this host; give its log as a file with --log"
        )
    return SourceUnavailable(f"unit {name}: journalctl says: {said}")
