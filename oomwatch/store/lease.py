"""One agent at a time writes a host's records to a store.

Two would tell each incident twice and number the same engine anew. What is taken here dies with
the process, however that ends: nothing is left to clear by hand. SQLite: `flock` on a file of its
own beside the store, because to close any descriptor of the store itself would take SQLite's locks
away. PostgreSQL: an advisory lock of the host, held by a connection of its own.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from sqlalchemy import Connection, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from oomwatch.store.database import FILE_MODE, AwayStoreError, connect_server, explain
from oomwatch.store.location import StoreError, file_of
from oomwatch.store.schema import APPLICATION_ID

_Held = TypeVar("_Held")
_PID: Final = re.compile(r"pid (\d+)")
_GONE_SECONDS: Final = 60.0
"""A server drops the lock of a host that lost its power once its keepalives are not answered."""
_AGAIN_SECONDS: Final = 2.0
_KEEPALIVE: Final = (
    "SET tcp_keepalives_idle = 15; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3"
)
_TAKE: Final = text("SELECT pg_try_advisory_lock(:kind, hashtext(:host))")
_HOLDER: Final = text("""
    SELECT activity.application_name FROM pg_locks AS lock
    JOIN pg_database AS base ON base.oid = lock.database AND base.datname = current_database()
    JOIN pg_stat_activity AS activity ON activity.pid = lock.pid
    WHERE lock.locktype = 'advisory' AND lock.granted AND lock.classid::bigint = :kind
      AND lock.objid::bigint = (hashtext(:host)::bigint & 4294967295)
""")


class StoreInUseError(StoreError):
    """Another agent writes this host's records to the store."""


class Lease:
    """The lease that an agent has from `take` to `close`."""

    def __init__(self, url: URL, host: str) -> None:
        self._url, self._host = url, host
        self._held = contextlib.ExitStack()

    def take(self) -> bool:
        """Take it; False where the server is away: a host is watched all the same.

        Raises:
            StoreInUseError: another agent has it.
            StoreError: there is no such store.

        """
        try:
            self._held = take_lease(self._url, self._host)
        except AwayStoreError:
            return False
        return True

    def take_later(self, stop: threading.Event) -> None:
        """Try again until the server is there; errors as of `take`."""
        while not stop.wait(_AGAIN_SECONDS) and not self.take():
            pass

    def close(self) -> None:
        """Give it back."""
        self._held.close()


def take_lease(url: URL, host: str) -> contextlib.ExitStack:
    """Become the one agent of a host that writes to a store; until what is returned is closed.

    Raises:
        StoreInUseError: another one is.
        StoreError: the server cannot be asked.

    """
    path = file_of(url)
    return _take_server(url, host) if path is None else _take_file(path)


# ---------------------------------------------------------------- a file
def _take_file(path: Path) -> contextlib.ExitStack:
    # One file for all names of the store; a link of this name would lock something else.
    place = f"{os.path.realpath(path)}.lock"
    flags = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        Path(place).parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        lock = os.open(place, os.O_RDWR | flags, FILE_MODE)
    except OSError:
        # A folder that is full or may not be written: what that means for the store, the store
        # says itself, and a full disk is no reason to leave a host unwatched.
        return contextlib.ExitStack()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 64, 0).decode("ascii", "replace")
        os.close(lock)
        if error.errno == errno.EWOULDBLOCK:
            raise _in_use(str(path), _pid_in(holder)) from None
        return contextlib.ExitStack()  # a filesystem without locks; the store judges those
    with contextlib.suppress(OSError):  # no room: it is only for the message
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"pid {os.getpid()}\n".encode(), 0)
    return _until_closed(os.close, lock)


# ---------------------------------------------------------------- a server
def _take_server(url: URL, host: str) -> contextlib.ExitStack:
    try:
        connection = connect_server(url, name=f"oomwatch agent, pid {os.getpid()}")
        lease = _until_closed(_close, connection)
        try:
            connection.exec_driver_sql(_KEEPALIVE)
            _await_lock(connection, host, f"{url.render_as_string(hide_password=True)} for {host}")
        except BaseException:
            lease.close()
            raise
    except DBAPIError as error:
        raise explain(error, url) from None
    return lease


def _await_lock(connection: Connection, host: str, place: str) -> None:
    """Take the lock; wait for it only while the process that has it is no longer there."""
    names = {"kind": APPLICATION_ID, "host": host}
    deadline = time.monotonic() + _GONE_SECONDS
    while not connection.scalar(_TAKE, names):
        pid = _pid_in(str(connection.scalar(_HOLDER, names)))
        if (pid is not None and _is_alive(pid)) or time.monotonic() > deadline:
            raise _in_use(place, pid)
        time.sleep(1.0)


def _close(connection: Connection) -> None:
    with contextlib.suppress(DBAPIError):  # the server may have gone before
        connection.close()


# ---------------------------------------------------------------- both
def _until_closed(release: Callable[[_Held], None], held: _Held) -> contextlib.ExitStack:
    lease = contextlib.ExitStack()
    lease.callback(release, held)
    return lease


def _pid_in(said: str) -> int | None:
    found = _PID.search(said)
    return None if found is None else int(found[1])


def _is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")  # noqa: PTH110 - False where it may not look


def _in_use(place: str, pid: int | None) -> StoreInUseError:
    who = "another agent" if pid is None else f"another agent (pid {pid})"
    return StoreInUseError(
        f"{who} uses this store: {place}; end that one first, or give --store another one"
    )
