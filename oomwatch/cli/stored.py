"""What commands share that read the agent's store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from oomwatch.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

    from oomwatch.records import StoredIncident

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST_LOOKED_AT: Final = 1000
_LEAST_OF_ID: Final = 4

_CONFIG: Final = "oomwatch.cli.stored.config"

store_alone = click.option(
    "--store",
    metavar="PATH|URL",
    help="The agent's store; by default that of the configuration.",
)


def remember_config(ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    """Note, as a callback of `--config`, which file names the store."""
    if value is not None:
        ctx.meta[_CONFIG] = value
    return value


def store_option(command: _Command) -> _Command:
    """Add `--store`, and the `--config` that may name it instead."""
    config = click.option(
        "--config",
        metavar="PATH",
        expose_value=False,
        callback=remember_config,
        help="The configuration of the agent; by default the one that the agent finds.",
    )
    return store_alone(config(command))


@contextlib.contextmanager
def opened(store: str | None) -> Iterator[Connection]:
    """The store, to read.

    Raises:
        NoInputError: there is none.
        StoreError: it cannot be read.

    """
    from oomwatch.store.database import open_reader

    if store is None:  # `oomwatch incidents --store PATH list`
        ctx = click.get_current_context(silent=True)
        group = None if ctx is None else ctx.parent
        store = None if group is None else group.params.get("store")
    with open_reader(_address(store)) as connection:
        yield connection


def _address(store: str | None) -> URL:
    from oomwatch.cli.db import find_store

    ctx = click.get_current_context(silent=True)
    return find_store(store, None if ctx is None else ctx.meta.get(_CONFIG))


@contextlib.contextmanager
def writing(store: str | None) -> Iterator[Connection]:
    """One transaction in a store that is there; the agent may be running.

    Raises:
        NoInputError: there is none.
        StoreError: it cannot be written.

    """
    from sqlalchemy.exc import DBAPIError

    from oomwatch.store.database import open_reader, open_writer
    from oomwatch.store.location import StoreError

    url = _address(store)
    with open_reader(url):  # a store that is not there is not made
        pass
    connection = open_writer(url)
    try:
        with connection.begin():
            yield connection
    except DBAPIError as error:
        reason = " ".join(str(error.orig).split())[:200]
        raise StoreError(f"the store cannot be written: {reason}") from None
    finally:
        connection.close()


def begin_of_id(identity: str, kind: str) -> str:
    """``inc-3fa9`` for ``3fa9`` and the kind ``inc``: how the id begins of what is to be changed.

    Raises:
        UsageError: too little of it to be meant for sure, even where there is only one.

    """
    rest = identity.removeprefix(f"{kind}-")
    if len(rest) < _LEAST_OF_ID:
        raise UsageError(f"{identity[:60]!r}: write at least {_LEAST_OF_ID} characters of the id")
    return f"{kind}-{rest}"


def find_incident(connection: Connection, identity: str | None) -> StoredIncident:
    """The incident of an id or of the beginning of one; without, the last that was diagnosed.

    Raises:
        NoInputError: there is none, or several begin like that.

    """
    from oomwatch.store.incidents import get_incident, list_incidents

    exact = None if identity is None else get_incident(connection, identity)
    if exact is not None:
        return exact
    incidents = list_incidents(connection, limit=_MOST_LOOKED_AT)
    if identity is None:
        for incident in incidents:
            if incident.diagnosis and incident.diagnosis.get("incidents"):
                return incident
        if incidents:
            return incidents[0]
        raise NoInputError("the store holds no incident")
    begin = f"inc-{identity.removeprefix('inc-')}"
    found = [incident for incident in incidents if incident.id.startswith(begin)]
    if not found:
        raise NoInputError(f"no incident {identity}; see `oomwatch incidents`")
    if len(found) > 1:
        raise NoInputError(f"{identity} fits {len(found)} incidents; write more of it")
    return found[0]
