"""Tell systemd that the service is ready, what it does, and that it is alive: sd_notify(3).

One datagram of ``NAME=value`` lines to the socket that $NOTIFY_SOCKET names; a name that begins
with @ is in the abstract namespace. Nothing here raises and nothing waits for long: without
systemd, or with a dead socket, the service goes on, and the caller is told that nobody listened.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from typing import Final

_TIMEOUT_SECONDS: Final = 1.0  # systemd's queue is full only while systemd itself stands still
_LONGEST_STATUS: Final = 512
_VARIABLES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_own: dict[str, str] = {}
"""What `keep_to_ourselves` took out of the environment."""


def keep_to_ourselves() -> None:
    """Take systemd's variables out of the environment: what we start shall not speak for us.

    `journalctl --follow` says READY=1 to whatever socket it finds there.
    """
    for name in _VARIABLES:
        value = os.environ.pop(name, None)
        if value is not None:
            _own[name] = value


def notify(*assignments: str, environ: Mapping[str, str] | None = None) -> bool:
    """Send assignments such as ``READY=1`` in one datagram; whether they were taken."""
    address = _variables(environ).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")) or len(address) < 2:
        return False
    if address.startswith("@"):
        address = f"\0{address[1:]}"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(_TIMEOUT_SECONDS)
            sender.sendto("\n".join(assignments).encode(), address)
    except (OSError, ValueError):  # ValueError: an address that is no path
        return False
    return True


def ready(status: str = "", *, environ: Mapping[str, str] | None = None) -> bool:
    """The start, or the reload, is complete."""
    return notify("READY=1", *_status(status), environ=environ)


def status(text: str, *, environ: Mapping[str, str] | None = None) -> bool:
    """One line for ``systemctl status``."""
    return notify(*(_status(text) or ["STATUS="]), environ=environ)


def reloading(*, environ: Mapping[str, str] | None = None) -> bool:
    """The configuration is being read anew; `ready` ends it."""
    now = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    return notify("RELOADING=1", f"MONOTONIC_USEC={now}", environ=environ)


def stopping(text: str = "", *, environ: Mapping[str, str] | None = None) -> bool:
    """The service is about to end."""
    return notify("STOPPING=1", *_status(text), environ=environ)


def watchdog(*, environ: Mapping[str, str] | None = None) -> bool:
    """The service is alive; to be sent every `watchdog_interval` seconds."""
    return notify("WATCHDOG=1", environ=environ)


def watchdog_interval(environ: Mapping[str, str] | None = None) -> float | None:
    """Seconds between two signs of life: half of what systemd waits for one.

    None if systemd waits for none, or for those of another process.
    """
    variables = _variables(environ)
    deadline, pid = variables.get("WATCHDOG_USEC", ""), variables.get("WATCHDOG_PID", "")
    if not re.fullmatch(r"[0-9]{1,18}", deadline) or int(deadline) == 0:
        return None
    if pid and pid != str(os.getpid()):
        return None
    return int(deadline) / 2_000_000


def _variables(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return {**os.environ, **_own} if environ is None else environ


def _status(text: str) -> list[str]:
    """The assignment of a status; a line break in it would be another assignment."""
    line = "".join(char if char.isprintable() else " " for char in text)[:_LONGEST_STATUS].strip()
    return [f"STATUS={line}"] if line else []
