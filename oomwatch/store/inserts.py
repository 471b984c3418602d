"""INSERTs that may meet a row of the same key, in the words of either database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Insert, Select, Table, func
from sqlalchemy.dialects import sqlite


def insert_new(connection: Connection, table: Table) -> Insert:
    """An INSERT that leaves rows alone whose key is there: writing twice is writing once."""
    insert: Insert = _insert(connection, table).on_conflict_do_nothing()
    return insert


def upsert(connection: Connection, table: Table, *, keeping: tuple[str, ...] = ()) -> Insert:
    """An INSERT that takes the place of a row with the same primary key.

    Of the columns in `keeping` the stored value stays where the new row has none.
    """
    return _replacing(_insert(connection, table), table, keeping)


def upsert_rows(connection: Connection, table: Table, rows: Select[Any]) -> Insert:
    """The same with the rows of a query, whose columns are those of the table in their order."""
    names = [column.name for column in table.columns]
    return _replacing(_insert(connection, table).from_select(names, rows), table)


def _insert(connection: Connection, table: Table) -> Any:
    if connection.dialect.name == "postgresql":
        # 2 MB of memory that an agent with a file does not need.
        from sqlalchemy.dialects import postgresql  # noqa: PLC0415

        return postgresql.insert(table)
    return sqlite.insert(table)


def _replacing(insert: Any, table: Table, keeping: tuple[str, ...] = ()) -> Insert:
    keys = [column.name for column in table.primary_key]
    others = {
        column.name: func.coalesce(insert.excluded[column.name], column)
        if column.name in keeping
        else insert.excluded[column.name]
        for column in table.columns
        if not column.primary_key
    }
    replacing: Insert = insert.on_conflict_do_update(index_elements=keys, set_=others)
    return replacing
