"""INSERTs that may meet a row of the same key, in the words of either database."""

from __future__ import annotations

import functools
from typing import Any, Final

from sqlalchemy import Connection, Insert, Select, Table, TableClause, func
from sqlalchemy import column as column_of
from sqlalchemy import table as table_of
from sqlalchemy.dialects import registry, sqlite

# Of each database the driver, and what it calls parameters that go by their position.
_BY_POSITION: Final = {
    "sqlite": ("sqlite.pysqlite", "qmark"),
    "postgresql": ("postgresql.psycopg", "format"),
}


def insert_new(connection: Connection, table: Table) -> Insert:
    """An INSERT that leaves rows alone whose key is there: writing twice is writing once."""
    return _new(connection.dialect.name, table)


def insert_new_rows(connection: Connection, table: Table, columns: tuple[str, ...]) -> str:
    """The text of `insert_new` for `exec_driver_sql`, with rows as tuples of these columns.

    Rows of samples come by the dozen each second: this way no parameter of them is handled one by
    one before the driver does.
    """
    return _new_rows(connection.dialect.name, table, columns)


def upsert(connection: Connection, table: Table, *, keeping: tuple[str, ...] = ()) -> Insert:
    """An INSERT that takes the place of a row with the same primary key.

    Of the columns in `keeping` the stored value stays where the new row has none.
    """
    return _upsert(connection.dialect.name, table, keeping)


def upsert_rows(connection: Connection, table: Table, rows: Select[Any]) -> Insert:
    """The same with the rows of a query, whose columns are those of the table in their order."""
    names = [column.name for column in table.columns]
    insert = _insert(connection.dialect.name, table)
    return _replacing(insert.from_select(names, rows), table)


# A batch a second is written with the same few statements; building one takes longer than running.
@functools.cache
def _new(dialect: str, table: Table) -> Insert:
    insert: Insert = _insert(dialect, table).on_conflict_do_nothing()
    return insert


@functools.cache
def _new_rows(dialect: str, table: Table, columns: tuple[str, ...]) -> str:
    driver, style = _BY_POSITION[dialect]
    positional = registry.load(driver)(paramstyle=style)
    ordered = table_of(table.name, *(column_of(name, table.c[name].type) for name in columns))
    return str(_insert(dialect, ordered).on_conflict_do_nothing().compile(dialect=positional))


@functools.cache
def _upsert(dialect: str, table: Table, keeping: tuple[str, ...]) -> Insert:
    return _replacing(_insert(dialect, table), table, keeping)


def _insert(dialect: str, table: TableClause) -> Any:
    if dialect == "postgresql":
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
