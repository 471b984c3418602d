"""How commands reach a running agent: it looks at one value that they change."""

from __future__ import annotations

import time
from typing import Final

from sqlalchemy import Connection, select

from oomwatch.store import schema
from oomwatch.store.inserts import upsert

_KEY: Final = "notify_changed"


def changed(connection: Connection) -> None:
    """Have the agents look again, within the transaction that changes something."""
    now = str(time.time_ns())
    connection.execute(upsert(connection, schema.meta).values(key=_KEY, value=now))


def last_change(connection: Connection) -> str | None:
    """A value that is another one after each `changed`."""
    return connection.scalar(select(schema.meta.c.value).where(schema.meta.c.key == _KEY))
