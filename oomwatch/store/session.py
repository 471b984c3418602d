"""The write connection over its life: opened, found damaged, deleted under us, opened again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path
from typing import Final

from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from oomwatch.store.database import BrokenStoreError, open_writer, quarantine, rescue
from oomwatch.store.location import StoreError, file_of

_MAGIC: Final = b"SQLite format 3\0"


class WriteSession:
    """One write connection at a time to one store. Its methods return a notice for people."""

    def __init__(self, url: URL, max_bytes: int | None) -> None:
        self._url, self._max_bytes = url, max_bytes
        self._path = file_of(url)
        self._ids: tuple[tuple[int, int], ...] = ()
        self._connection: Connection | None = None
        self._head: int | None = None
        """A descriptor of the open file. To close any takes SQLite's locks on the file away, of the
        whole process: another one would then believe that nobody else has it open."""

    @property
    def connection(self) -> Connection:
        """The open connection.

        Raises:
            StoreError: there is none now.

        """
        if self._connection is None:
            raise StoreError("the store is not open")
        return self._connection

    def is_open(self) -> bool:
        """Whether there is a connection."""
        return self._connection is not None

    def open(self) -> str | None:
        """Open the store; a damaged file is put aside and a new one begun.

        Raises:
            StoreError: it cannot be used.

        """
        try:
            self._connection = open_writer(self._url, max_bytes=self._max_bytes)
        except BrokenStoreError:
            return self.begin_anew()
        self._opened()
        return None

    def begin_anew(self) -> str:
        """Put the damaged file aside and begin a new one.

        Raises:
            StoreError: that is not possible either.

        """
        self.close()
        if self._path is None:
            raise StoreError("the database of the server is damaged: its log says more")
        aside = quarantine(self._path)
        self._connection = open_writer(self._url, max_bytes=self._max_bytes)
        self._opened()
        return f"{self._path} is damaged: it was put aside as {aside.name} and a new one begun"

    def _opened(self) -> None:
        self._ids = self._identify()
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._head = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(SQLAlchemyError, sqlite3.Error):
                connection.close()
        head, self._head = self._head, None
        if head is not None:
            os.close(head)

    def is_moved(self) -> bool:
        """Whether the file of that name, or its log, is no longer the one that is open."""
        return self.is_open() and self._identify() != self._ids

    def is_damaged(self) -> bool:
        """Whether the open file no longer begins as SQLite's do.

        The connection itself would go on for long: what it reads again and again is cached.
        """
        if self._head is None:
            return False
        try:
            return os.pread(self._head, len(_MAGIC), 0) not in {_MAGIC, b""}
        except OSError:
            return False  # a disk that cannot be read is another trouble

    def restore(self) -> str:
        """Put the rows of a deleted file, which is still open here, into a new one of its name.

        Raises:
            StoreError: no file of that name can be used.

        """
        assert self._path is not None  # noqa: S101 - only files are moved
        replaced = self._path.exists() and self._identify()[0] != self._ids[0]
        saved: Path | None = None if replaced else rescue(self.connection, self._path)
        self.close()
        if saved is not None:
            with contextlib.suppress(OSError):
                saved.replace(self._path)
        notice = self.open()
        if notice is not None:
            return notice
        if replaced:
            return f"{self._path} was replaced by another file: that one is used from here on"
        saving = "a new one was begun" if saved is None else "its rows were saved to a new file"
        return f"{self._path} was deleted: {saving}"

    def _identify(self) -> tuple[tuple[int, int], ...]:
        """Device and number of the file and of its log; zeros for what is not there."""
        if self._path is None:
            return ()
        found = []
        for name in (self._path, f"{self._path}-wal"):
            try:
                status = os.stat(name)  # noqa: PTH116 - a name with a suffix
            except OSError:
                found.append((0, 0))
            else:
                found.append((status.st_dev, status.st_ino))
        return tuple(found)
