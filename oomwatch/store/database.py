"""Opens a store: one connection that writes, or any number that only read.

SQLite: write-ahead log, `synchronous=NORMAL` (a power cut may cost the last second, never the
file), small caches, free pages given back in steps and never by a blocking VACUUM. Readers open
read-only, beside the agent or on a copied file.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, OperationalError
from sqlalchemy.pool import NullPool

from oomwatch.errors import NoInputError
from oomwatch.store.access import forbidden
from oomwatch.store.location import StoreError, file_of, network_filesystem
from oomwatch.store.migrations import migrate, require_known, version_of
from oomwatch.store.schema import APPLICATION_ID

FILE_MODE: Final = 0o640
BUSY_TIMEOUT_MS: Final = 5000
WAL_BYTES: Final = 4 * 1024**2  # the log is cut back to this after a checkpoint
MIN_CAP_BYTES: Final = 16 * 1024**2
_CACHE_KIB: Final = 512
_LEAST_BYTES: Final = 256 * 1024  # with less room left a file cannot be opened to write
_CORRUPT: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_PASSING: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_SERVER: Final = {
    "connect_timeout": 5,
    "tcp_user_timeout": 20_000,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 2,
}
"""A server that is cut off is given up before the agent is taken for stuck."""
KEPT_BROKEN: Final = 3  # a file that was put aside, with its log and shared memory
SIDECARS: Final = ("", "-wal", "-shm")


class BrokenStoreError(StoreError):
    """The file is damaged."""


class AwayStoreError(StoreError):
    """The disk is full, another program has locked it, or its server is away: that may pass."""


def error_code(error: BaseException) -> int | None:
    """SQLite's primary result code of an error; None for other errors."""
    origin = error.orig if isinstance(error, DBAPIError) else error
    code = getattr(origin, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def is_corrupt(error: BaseException) -> bool:
    """Whether SQLite says that the file is damaged."""
    return isinstance(error, BrokenStoreError) or error_code(error) in _CORRUPT


def data_limit(max_bytes: int) -> int:
    """Bytes of the file itself where file and write-ahead log together may have `max_bytes`."""
    return max(max_bytes, MIN_CAP_BYTES) - 2 * WAL_BYTES


# ---------------------------------------------------------------- writing
def open_writer(url: URL, *, max_bytes: int | None = None) -> Connection:
    """Open a store to write, created and brought to the current schema if need be.

    `max_bytes` bounds the file with its log; SQLite then reports a full disk rather than grow.

    Raises:
        BrokenStoreError: the file is damaged.
        StoreError: it cannot be used for another reason.

    """
    path = file_of(url)
    if path is not None:
        _require_right(path, write=True)
        _prepare(path)
    engine = _engine(url, read_only=False)
    try:
        connection = engine.connect()
        try:
            if path is not None:
                _check_file(connection, path)
                if max_bytes is not None:
                    _cap(connection, max_bytes)
            migrate(connection, path=path)
            if path is None:
                _bound_waits(connection)
        except BaseException:
            connection.close()
            raise
    except DBAPIError as error:
        raise explain(error, url) from None
    return connection


def _require_right(path: Path, *, write: bool) -> None:
    said = forbidden(path, write=write)
    if said is not None:
        raise StoreError(said)


def _prepare(path: Path) -> None:
    kind = network_filesystem(path.parent)
    if kind is not None:
        raise StoreError(
            f"{path} is on a network filesystem ({kind}), where SQLite loses data: name a file on "
            "a local disk, or a postgresql:// URL"
        )
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        # The log and the shared memory beside it take over the mode of the file.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, FILE_MODE))
        _require_file(path)
    except OSError as error:
        kind_of_error = AwayStoreError if error.errno == errno.ENOSPC else StoreError
        raise kind_of_error(f"{path} cannot be created: {error.strerror or error}") from None


def _require_file(path: Path) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        raise StoreError(f"{path} is not a regular file: name another file for the store")


def _check_file(connection: Connection, path: Path) -> None:
    """Refuse a later schema; find damage before anything is written."""
    with connection.begin():
        require_known(version_of(connection))
        verdict = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar_one()
    if verdict != "ok":
        raise BrokenStoreError(f"{path} is damaged: {' '.join(str(verdict).split())[:200]}")


def _bound_waits(connection: Connection) -> None:
    """Wait for locks of others on a server no longer than on a file."""
    with connection.begin():
        connection.exec_driver_sql(f"SET lock_timeout = {BUSY_TIMEOUT_MS}")


def _cap(connection: Connection, max_bytes: int) -> None:
    pages = data_limit(max_bytes) // _pragma(connection, "page_size")
    _pragma(connection, f"max_page_count = {pages}")


def _pragma(connection: Connection, text: str) -> int:
    """Run a PRAGMA outside of a transaction."""
    value = raw_connection(connection).execute(f"PRAGMA {text}").fetchall()
    return int(value[0][0]) if value and value[0][0] is not None else 0


def raw_connection(connection: Connection) -> sqlite3.Connection:
    """The sqlite3 connection below, for PRAGMAs and the backup call."""
    return cast("sqlite3.Connection", connection.connection.dbapi_connection)


def quarantine(path: Path) -> Path:
    """Put a damaged file aside, with its log, and return its new name.

    Of those that were put aside before only the newest stays: a failing disk must not fill itself.

    Raises:
        StoreError: it cannot be renamed.

    """
    for older in sorted(path.parent.glob(f"{path.name}.broken-*"))[:-KEPT_BROKEN]:
        with contextlib.suppress(OSError):
            older.unlink()
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    aside = path.with_name(f"{path.name}.broken-{stamp}")
    number = 1
    while aside.exists():
        aside = path.with_name(f"{path.name}.broken-{stamp}-{number}")
        number += 1
    try:
        for suffix in SIDECARS:
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").replace(f"{aside}{suffix}")
    except OSError as error:
        raise StoreError(f"{path} is damaged and cannot be put aside: {error.strerror}") from None
    return aside


def rescue(connection: Connection, path: Path) -> Path | None:
    """Save the rows of a file that was deleted while it was open; None if that is not possible.

    The copy lies beside, for the caller to rename once the connection is closed: closing removes
    the log of that name.
    """
    target = path.with_name(f"{path.name}.rescued")
    try:
        target.unlink(missing_ok=True)
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
        with contextlib.closing(sqlite3.connect(target)) as copy:
            raw_connection(connection).backup(copy)
    except (OSError, sqlite3.Error):
        with contextlib.suppress(OSError):
            target.unlink(missing_ok=True)
        return None
    return target


# ---------------------------------------------------------------- reading
@contextlib.contextmanager
def open_reader(url: URL) -> Iterator[Connection]:
    """A connection that cannot write, in one read transaction: all queries see one moment.

    Keep it short: the agent's log cannot be cut back while it is open.

    Raises:
        NoInputError: there is no such file.
        BrokenStoreError: the file is damaged.
        StoreError: this user may not read it, or it cannot be read for another reason.

    """
    path = file_of(url)
    if path is not None:
        _require_right(path, write=False)
    if path is not None and not os.path.exists(path):  # noqa: PTH110 - False where it may not look
        raise NoInputError(f"{path}: no store there; start `oomwatch agent`, or give --store")
    if path is not None:
        _require_file(path)
    try:
        with _connect_reader(url) as connection, connection.begin():
            version = version_of(connection)
            require_known(version)
            if not version:
                raise StoreError(f"{path or 'the database'} holds no oomwatch store yet")
            yield connection
    except DBAPIError as error:
        raise explain(error, url) from None


def _connect_reader(url: URL) -> Connection:
    engine = _engine(url, read_only=True)
    try:
        return engine.connect()
    except OperationalError:
        path = file_of(url)
        if path is None:
            raise
        # A file in a folder that may not be written, with no agent beside it: without a log
        # nobody is writing, and the shared memory of the log can be done without.
        if os.path.exists(f"{path}-wal"):  # noqa: PTH110 - False where it may not look
            raise StoreError(
                f"{path} cannot be opened with its log in a folder that this user may not write: "
                f"run it with sudo, or copy it with {path.name}-wal elsewhere"
            ) from None
        return _engine(url, read_only=True, immutable=True).connect()


def read_quick_check(connection: Connection) -> list[str]:
    """What is wrong with the file, ten findings at most; empty if nothing is."""
    if connection.dialect.name != "sqlite":
        return []
    rows = connection.exec_driver_sql("PRAGMA quick_check(10)").scalars().all()
    return [str(row) for row in rows if row != "ok"]


# ---------------------------------------------------------------- engines
def _engine(url: URL, *, read_only: bool, immutable: bool = False) -> Engine:
    path = file_of(url)
    if path is None:
        return _postgres(url, read_only=read_only)
    mode = "ro" if read_only else "rw"
    target = f"{path.as_uri()}?mode={mode}" + ("&immutable=1" if immutable else "")

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            target,
            uri=True,
            timeout=BUSY_TIMEOUT_MS / 1000,
            isolation_level=None,  # transactions are begun below
            check_same_thread=False,  # opened by one thread, owned by the writer's afterwards
        )
        connection.text_factory = _text
        try:
            _require_ours(connection, path)
            _set_up(connection, read_only=read_only)
        except BaseException:
            connection.close()
            raise
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


_text = functools.partial(str, encoding="utf-8", errors="replace")
"""One text that a failing disk has damaged must not keep all others from being read."""


def _require_ours(connection: sqlite3.Connection, path: Path) -> None:
    """Leave somebody else's database as it is."""
    (owner,) = connection.execute("PRAGMA application_id").fetchone()
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
    if tables and owner != APPLICATION_ID:
        raise StoreError(f"{path} is a database of another program: name another file")


def _set_up(connection: sqlite3.Connection, *, read_only: bool) -> None:
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    connection.execute("PRAGMA foreign_keys = ON")
    if read_only:
        connection.execute("PRAGMA query_only = ON")
        return
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table, or never
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")


def _postgres(url: URL, *, read_only: bool, name: str = "oomwatch") -> Engine:
    options: dict[str, Any] = {**_SERVER, "application_name": name}
    if read_only:
        options["options"] = "-c default_transaction_read_only=on"
    try:
        return create_engine(url, poolclass=NullPool, connect_args=options)
    except (ImportError, NoSuchModuleError):
        raise StoreError(
            "PostgreSQL needs the package psycopg: pip install 'oomwatch[postgres]'"
        ) from None


def connect_server(url: URL, *, name: str) -> Connection:
    """A connection to PostgreSQL that is in no transaction; its server shows it under `name`."""
    return (
        _postgres(url, read_only=False, name=name)
        .connect()
        .execution_options(isolation_level="AUTOCOMMIT")
    )


def explain(error: DBAPIError, url: URL) -> StoreError:
    """One line for a database error; URLs are printed without their password."""
    place = file_of(url) or url.render_as_string(hide_password=True)
    reason = " ".join(str(error.orig).split())[:200]
    if is_corrupt(error):
        return BrokenStoreError(f"{place} is damaged or not a database: {reason}")
    kind = AwayStoreError if _may_pass(error, file_of(url)) else StoreError
    return kind(f"the store {place} cannot be used: {reason}")


def _may_pass(error: DBAPIError, path: Path | None) -> bool:
    """Whether trying again may help, with nothing changed about the configuration.

    Where there is no room for the shared memory of its log, SQLite says "I/O error".
    """
    if path is None:
        return isinstance(error, OperationalError)
    code = error_code(error)
    if code in _PASSING:
        return True
    if code not in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN}:
        return False
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_BYTES
