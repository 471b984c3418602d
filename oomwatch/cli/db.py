"""`oomwatch db`: how large the store is, what is in it, whether it is sound; prune, export."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.cli.groups import NamedGroup
from oomwatch.errors import UsageError

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.engine import URL

    from oomwatch.store.retention import Retention

EXAMPLES: Final = """\b
Examples:
  oomwatch db stats
  oomwatch db check --store /backup/oomwatch.db
  oomwatch db prune --raw 6h --dry-run
  oomwatch db export --since 2h > samples.jsonl
  oomwatch db export --kind gpu --format csv --since 1d --step 60
  oomwatch db export --format sqlite -o copy.db      a sound copy while the agent runs
"""
_KINDS: Final = (
    "gpu",
    "gpu_process",
    "process",
    "host",
    "engine",
    "event",
    "incident",
    "message",
    "silence",
)

_store = click.option(
    "--store",
    metavar="URL",
    help="A file, or postgresql://HOST/NAME; by default the one that the agent writes.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON (oomwatch.db/1).")


@click.group("db", cls=NamedGroup, epilog=EXAMPLES)
def command() -> None:
    """Look into the store of the agent, prune it, export it."""


def find_store(given: str | None, config: str | None = None) -> URL:
    """The store that was named, or the one that the configuration names, `config` or the usual.

    A person without a store of their own looks into the service's.
    """
    from oomwatch.store.location import file_of, parse_store

    if given is not None:
        return parse_store(given)
    from oomwatch.config import load_config
    from oomwatch.config.paths import SYSTEM_STORE
    from oomwatch.config.secrets import store_address

    settings = load_config(config).config
    url = parse_store(store_address(settings))
    path = file_of(url)
    unnamed = settings.store.path is None and settings.store.url is None
    if unnamed and path is not None and not path.exists() and SYSTEM_STORE.parent.is_dir():
        return parse_store(str(SYSTEM_STORE))
    return url


# ---------------------------------------------------------------- stats
@command.command(epilog="\b\nExamples:\n  oomwatch db stats\n  oomwatch db stats --json")
@_store
@_json
def stats(store: str | None, as_json: bool) -> None:
    """Say how large the store is and how far it reaches back.

    Counting rows reads the whole file.
    """
    from oomwatch.store.database import open_reader

    url = find_store(store)
    with open_reader(url) as connection:
        found = _stats(connection, url)
    if as_json:
        _print_json(found)
    else:
        click.echo(_stats_text(found), nl=False)


def _stats(connection: Connection, url: URL) -> dict[str, Any]:
    from oomwatch.store.location import file_of
    from oomwatch.store.migrations import version_of
    from oomwatch.store.queries import list_incidents, read_engines, read_stats
    from oomwatch.store.retention import size_of
    from oomwatch.units import format_rfc3339

    path, size = file_of(url), size_of(connection)
    log = None if path is None else Path(f"{path}-wal")
    return {
        "store": _place(url),
        "schema_version": version_of(connection),
        "file_bytes": None if size is None else size[0],
        "data_bytes": None if size is None else size[1],
        "log_bytes": None if log is None else (log.stat().st_size if log.exists() else 0),
        "tables": [
            {
                "name": table.table,
                "rows": table.rows,
                "first_at": None if table.first_at is None else format_rfc3339(table.first_at),
                "last_at": None if table.last_at is None else format_rfc3339(table.last_at),
            }
            for table in read_stats(connection)
        ],
        "engines": [
            {"host": seen.host, "engine": seen.engine, "seen_at": format_rfc3339(seen.seen_at)}
            for seen in read_engines(connection)
        ],
        "open_incidents": [
            incident.id for incident in list_incidents(connection, state="open", limit=1000)
        ],
    }


def _stats_text(found: dict[str, Any]) -> str:
    from oomwatch.report.sanitize import clean
    from oomwatch.units import format_bytes, format_count

    size = ""
    if found["file_bytes"] is not None:
        free = found["file_bytes"] - found["data_bytes"]
        size = (
            f", {format_bytes(found['file_bytes'])} ({format_bytes(free)} of it free), "
            f"log {format_bytes(found['log_bytes'])}"
        )
    lines = [f"{clean(found['store'])}: schema {found['schema_version']}{size}"]
    for table in found["tables"]:
        if table["rows"]:
            span = f"  {table['first_at']} to {table['last_at']}" if table["first_at"] else ""
            lines.append(f"  {table['name']:<20}{format_count(table['rows']):>14}{span}")
    lines += [
        f"  engine {clean(seen['engine'])} on {clean(seen['host'])}, last seen {seen['seen_at']}"
        for seen in found["engines"]
    ]
    if found["open_incidents"]:
        lines.append(f"  open incidents: {clean(', '.join(found['open_incidents']))}")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------- check
@command.command(epilog="\b\nExamples:\n  oomwatch db check\n  oomwatch db check --store copy.db")
@_store
@_json
@click.pass_context
def check(ctx: click.Context, store: str | None, as_json: bool) -> None:
    """Say whether the file is sound; exit status 1 if it is not."""
    from oomwatch.store.database import BrokenStoreError, open_reader, read_quick_check

    url = find_store(store)
    try:
        with open_reader(url) as connection:
            problems = read_quick_check(connection)
    except BrokenStoreError as error:
        problems = [str(error)]
    if as_json:
        _print_json({"store": _place(url), "sound": not problems, "problems": problems})
    else:
        from oomwatch.report.sanitize import clean

        for problem in problems:
            click.echo(clean(problem))
        click.echo(f"{clean(_place(url))}: {'DAMAGED' if problems else 'sound'}")
    if problems:
        ctx.exit(1)


# ---------------------------------------------------------------- prune
@command.command(
    epilog="\b\nExamples:\n  oomwatch db prune\n  oomwatch db prune --raw 6h --max-size 200MiB"
)
@_store
@_json
@click.option("--raw", metavar="TIME", help="Keep every sample for that long, such as 6h.")
@click.option("--logs", metavar="TIME", help="Keep log lines for that long.")
@click.option("--incidents", metavar="TIME", help="Keep closed incidents for that long.")
@click.option("--max-size", metavar="SIZE", help="Make the data fit, such as 200MiB.")
@click.option("--dry-run", is_flag=True, help="Say what is too old, and delete nothing.")
def prune(store: str | None, as_json: bool, dry_run: bool, **limits: str | None) -> None:
    """Delete what is older than the limits and give the space back.

    What is not given is as configured. The windows of incidents stay. The agent does the same by
    itself; it may be running.
    """
    from oomwatch.store.chores import chores
    from oomwatch.store.database import open_reader, open_writer
    from oomwatch.store.retention import count_too_old, size_of

    url, retention, now_ms = find_store(store), _retention(limits), time.time_ns() // 1_000_000
    with open_reader(url) as connection:  # a store that is not there is not made
        before = size_of(connection)
        counted = count_too_old(connection, retention, now_ms) if dry_run else 0
    after = before
    if not dry_run:
        writer = open_writer(url)
        try:
            counted = sum(chores(writer, None, retention, now_ms))
            after = size_of(writer)
        finally:
            writer.close()
    found = {
        "store": _place(url),
        "dry_run": dry_run,
        "rows": counted,
        "file_bytes_before": None if before is None else before[0],
        "file_bytes_after": None if after is None else after[0],
    }
    if as_json:
        _print_json(found)
        return
    from oomwatch.report.sanitize import clean
    from oomwatch.units import format_bytes, format_count

    what = "rows are too old" if dry_run else "rows deleted"
    size = ""
    if before is not None and after is not None and not dry_run:
        size = f"; {format_bytes(before[0])} before, {format_bytes(after[0])} after"
    click.echo(f"{clean(_place(url))}: {format_count(counted)} {what}{size}")


def _retention(limits: dict[str, str | None]) -> Retention:
    """The configured limits, with those that were given in their place."""
    import dataclasses

    from oomwatch.agent.retention import retention_of
    from oomwatch.config import load_config
    from oomwatch.config.quantities import parse_duration
    from oomwatch.units import parse_size

    settings = load_config().config.store
    retention = retention_of(settings)
    given: dict[str, Any] = {}
    fields = {"raw": "raw_seconds", "logs": "log_seconds", "incidents": "incident_seconds"}
    for option, field in fields.items():
        text = limits[option]
        if text is None:
            continue
        seconds = parse_duration(text)
        if seconds is None:
            raise UsageError(f"--{option} {text[:40]!r} is no time: write 30min, 6h or 7d")
        given[field] = int(seconds)
    text = limits["max_size"]
    if text is not None:
        size = parse_size(text)
        if size is None or size <= 0 or text.strip().isdigit():
            raise UsageError(f"--max-size {text[:40]!r} is no size: write 200MiB or 1GiB")
        given["max_bytes"] = size
    return dataclasses.replace(retention, **given)


# ---------------------------------------------------------------- export
@command.command(
    epilog="\b\nExamples:\n  oomwatch db export --since 2h > samples.jsonl\n"
    "  oomwatch db export --kind gpu --format csv --since 1d --step 60 -o gpu.csv\n"
    "  oomwatch db export --format sqlite -o copy.db"
)
@_store
@click.option(
    "--format",
    "form",
    type=click.Choice(["jsonl", "csv", "sqlite"]),
    default="jsonl",
    show_default=True,
    help="jsonl: an object a line, its keys those of a recording; sqlite: a sound copy of it all.",
)
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(_KINDS), help="Only these; csv takes one."
)
@click.option("--since", metavar="TIME", help="Only from then on: 2h, 30min, or 2026-11-29 03:00.")
@click.option("--until", metavar="TIME", help="Only up to then.")
@click.option(
    "--step",
    type=click.Choice(["0", "10", "60", "3600"]),
    default="0",
    show_default=True,
    help="Every sample, or the last of each so many seconds.",
)
@click.option("--host", metavar="NAME", help="Only this host, in the store of a fleet.")
@click.option("-o", "--output", metavar="PATH", help="Write there instead of to standard output.")
def export(store: str | None, form: str, output: str | None, **given: Any) -> None:
    """Write samples, events and incidents as JSON lines or CSV, or copy the whole store.

    Command lines and log lines are written as they were seen, secrets included.
    """
    url = find_store(store)
    if form == "sqlite":
        _copy(url, output)
        return
    kinds = given["kinds"] or _KINDS
    if form == "csv" and len(kinds) != 1:
        raise UsageError("a CSV table is of one kind: add --kind gpu, or another")
    from oomwatch.store.database import open_reader

    with open_reader(url) as connection:
        rows = _rows(connection, kinds, given)
        if output is None:
            _write(sys.stdout, rows, form, kinds[0])
            return
        try:
            with Path(output).open("w", encoding="utf-8", newline="") as file:
                _write(file, rows, form, kinds[0])
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror or error}") from None


def _rows(
    connection: Connection, kinds: tuple[str, ...], given: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    from oomwatch.cli.window import parse_time
    from oomwatch.store.export import export_rows

    now = time.time()
    since, until = parse_time(given["since"], now), parse_time(given["until"], now)
    for kind in kinds:
        found = export_rows(
            connection,
            kind,
            0.0 if since is None else since,
            now + 366 * 86400 if until is None else until,  # a clock may have been ahead
            host=given["host"],
            step=int(given["step"]),
        )
        yield from ((kind, row) for row in found)


def _write(file: Any, rows: Iterator[tuple[str, dict[str, Any]]], form: str, kind: str) -> None:
    if form == "jsonl":
        for name, row in rows:
            file.write(json.dumps({"record": name, **row}) + "\n")
        return
    import csv

    from oomwatch.store.export import columns

    table = csv.DictWriter(file, columns(kind), extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for _name, row in rows:
        table.writerow({key: _cell(value) for key, value in row.items()})


def _cell(value: object) -> object:
    """A value of a CSV table; lists and objects as JSON."""
    from oomwatch.report.sanitize import clean

    if isinstance(value, str):
        return clean(value)
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value


def _copy(url: URL, output: str | None) -> None:
    from oomwatch.store.database import open_reader
    from oomwatch.store.location import file_of
    from oomwatch.store.migrations import back_up

    path = file_of(url)
    if path is None:
        raise UsageError("a PostgreSQL store is copied with pg_dump")
    if output is None:
        raise UsageError("a copy of the file needs a name: add -o copy.db")
    with open_reader(url):
        back_up(path, Path(output).absolute())


# ---------------------------------------------------------------- shared
def _place(url: URL) -> str:
    """The path of a file; the URL of a server without its password."""
    from oomwatch.store.location import file_of

    path = file_of(url)
    return url.render_as_string(hide_password=True) if path is None else str(path)


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": "oomwatch.db/1", **value}, indent=2, ensure_ascii=False))
