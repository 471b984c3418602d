"""Who looks on while the store is written, and what keeps their faults from the writer."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from typing import Protocol

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

_LOG = logging.getLogger(__name__)


class Watcher(Protocol):
    """Who wants to know what was written, and what other programs have written. Must be quick."""

    def stored(self, outbox_ids: Sequence[str]) -> None:
        """These messages are on disk."""

    def look(self, connection: Connection) -> None:
        """Read, in a transaction of the writer's thread; called after each round of writing."""


class Guarded:
    """A watcher whose faults are logged and go no further; those of the store do."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._said = ""

    def stored(self, outbox_ids: Sequence[str]) -> None:
        """These messages are on disk."""
        try:
            self._watcher.stored(outbox_ids)
        except Exception as error:  # noqa: BLE001 - what is written is written
            self._say(error)

    def look(self, connection: Connection) -> None:
        """Read, in a transaction of the writer's thread.

        Raises:
            SQLAlchemyError, sqlite3.Error: the store cannot be read.

        """
        try:
            self._watcher.look(connection)
        except (SQLAlchemyError, sqlite3.Error):
            raise
        except Exception as error:  # noqa: BLE001 - no row of the store may end its writer
            self._say(error)

    def _say(self, error: Exception) -> None:
        """Once for each fault: it may come back every second."""
        said = repr(error)
        if said != self._said:
            _LOG.error("what others wrote into the store is not understood", exc_info=error)
        self._said = said
