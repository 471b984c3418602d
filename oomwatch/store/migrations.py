"""Numbered steps from one schema to the next: forward only, each in a transaction with its record.

SQLite keeps the number in ``user_version``, PostgreSQL in the table `migration`; both keep the
record. A file is copied with SQLite's backup call before its first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, func, insert, inspect, select
from sqlalchemy.exc import DBAPIError

from oomwatch.store import schema
from oomwatch.store.location import StoreError

_LOCK: Final = 0x6F6F6D77  # of PostgreSQL: agents of a fleet start at once, one of them migrates


@dataclasses.dataclass(frozen=True, slots=True)
class Migration:
    """One step. `apply` changes tables and rows through the connection it is given."""

    number: int
    name: str
    apply: Callable[[Connection], None]


def _create_tables(connection: Connection) -> None:
    schema.metadata.create_all(connection)


def _add_excerpts(connection: Connection) -> None:
    schema.incident_excerpt.create(connection, checkfirst=True)  # a new store has it from step 1


def _add_outbox(connection: Connection) -> None:
    for table in (schema.outbox, schema.silence, schema.acknowledgement):
        table.create(connection, checkfirst=True)


MIGRATIONS: Final = (
    Migration(1, "initial tables", _create_tables),
    Migration(2, "excerpts of incidents", _add_excerpts),
    Migration(3, "messages to receivers, silences", _add_outbox),
)


def version_of(connection: Connection) -> int:
    """Number of the last step that was applied; 0 for an empty database."""
    if connection.dialect.name == "sqlite":
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())
    if not inspect(connection).has_table(schema.migration.name):
        return 0
    return int(connection.scalar(select(func.max(schema.migration.c.number))) or 0)


def require_known(version: int, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Refuse a store of a later oomwatch.

    Raises:
        StoreError: its schema is newer than this program knows.

    """
    known = migrations[-1].number
    if version > known:
        raise StoreError(
            f"the store has schema {version}, this oomwatch knows {known}: use the newer oomwatch "
            "that wrote it, or name another file"
        )


def migrate(
    connection: Connection, migrations: Sequence[Migration] = MIGRATIONS, path: Path | None = None
) -> list[int]:
    """Apply what is missing and return its numbers; `path` is the file to copy before.

    The connection must be outside of a transaction.

    Raises:
        StoreError: the schema is newer than known, or there is no room for the copy.

    """
    with connection.begin():
        before = version_of(connection)
    require_known(before, migrations)
    missing = [step for step in migrations if step.number > before]
    if missing and before and path is not None:
        back_up(path, path.with_name(f"{path.name}.schema{before}"))
    return [step.number for step in missing if _apply(connection, step)]


def _apply(connection: Connection, step: Migration) -> bool:
    """One step with its record; False if another process was faster."""
    sqlite = connection.dialect.name == "sqlite"
    with connection.begin():
        if not sqlite:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
        if version_of(connection) >= step.number:
            return False
        step.apply(connection)
        connection.execute(
            insert(schema.migration).values(
                number=step.number, name=step.name, applied_ms=time.time_ns() // 1_000_000
            )
        )
        if sqlite:
            connection.exec_driver_sql(f"PRAGMA user_version = {step.number:d}")
            connection.exec_driver_sql(f"PRAGMA application_id = {schema.APPLICATION_ID:d}")
    return True


def back_up(source: Path, target: Path) -> None:
    """Copy an SQLite file while it may be in use; the copy is whole or absent.

    Raises:
        StoreError: it cannot be read, or the copy cannot be written.

    """
    partial = target.with_name(target.name + ".partial")
    try:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640))
        with (
            contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as old,
            contextlib.closing(sqlite3.connect(partial)) as new,
        ):
            old.backup(new, pages=1000)
            new.execute("PRAGMA journal_mode = DELETE")  # one file, readable on its own
        partial.replace(target)
    except (OSError, sqlite3.Error, DBAPIError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise StoreError(f"{source} could not be copied to {target}: {error}") from None
