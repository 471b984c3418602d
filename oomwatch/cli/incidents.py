"""`oomwatch incidents`: what the agent has stored."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.cli.groups import GroupOfIncidents
from oomwatch.cli.stored import find_incident, opened, store_option

if TYPE_CHECKING:
    from oomwatch.records import StoredIncident
    from oomwatch.store.silences import Acknowledgement

_LIST: Final = "oomwatch.incidents/1"
_ONE: Final = "oomwatch.incident/1"
EXAMPLES = """\b
Examples:
  oomwatch incidents                     the last ones
  oomwatch incidents list --open --json
  oomwatch incidents show 3fa9           the whole report of one; `incidents 3fa9` does the same
  oomwatch incidents export 3fa9         as a recording, to hand on
"""


_COLUMNS: Final = ("ID", "OPENED", "STATE", "SEVERITY", "ENGINE", "CAUSE", "WHAT")
_NARROWEST: Final = 40


@click.group("incidents", cls=GroupOfIncidents, invoke_without_command=True, epilog=EXAMPLES)
@store_option
@click.pass_context
def command(ctx: click.Context, store: str | None) -> None:  # noqa: ARG001 - `opened` looks it up
    """List and show what the agent has stored."""
    if ctx.invoked_subcommand is None:
        ctx.invoke(list_)


@command.command("list", epilog="\b\nExamples:\n  oomwatch incidents list --since 2d")
@click.option("--open", "only_open", is_flag=True, help="Only those that are not over.")
@click.option("--engine", metavar="ID", help="Only those of this engine.")
@click.option("--since", metavar="TIME", help="Only from then on: 2h, 3d, or 2026-11-29 03:00.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many."
)
@click.option("--json", "as_json", is_flag=True, help=f"Print JSON ({_LIST}).")
@store_option
def list_(  # noqa: PLR0917 - as many as there are options
    only_open: bool = False,
    engine: str | None = None,
    since: str | None = None,
    limit: int = 50,
    as_json: bool = False,
    store: str | None = None,
) -> None:
    """Print one line for each incident, the newest first."""
    from oomwatch.cli.window import parse_time
    from oomwatch.store.incidents import list_incidents
    from oomwatch.store.silences import read_acknowledgements

    begin = parse_time(since, time.time())
    with opened(store) as connection:
        found = list_incidents(
            connection,
            state="open" if only_open else None,
            engine_id=engine,
            since=begin,
            limit=limit,
        )
        known = read_acknowledgements(connection, [incident.id for incident in found])
    if as_json:
        rows = [_summary(incident, known.get(incident.id)) for incident in found]
        click.echo(json.dumps({"schema": _LIST, "incidents": rows}, ensure_ascii=False, indent=2))
        return
    if not found:
        click.echo("no incidents")
        return
    told = sys.stdout.isatty() or "COLUMNS" in os.environ
    width = max(_NARROWEST, shutil.get_terminal_size().columns) if told else None
    for line in aligned([_COLUMNS, *(_row(one, known.get(one.id)) for one in found)], width):
        click.echo(line)


@command.command("show", epilog="\b\nExamples:\n  oomwatch incidents show 3fa9 --format markdown")
@click.argument("incident", required=False, metavar="[ID]")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["text", "json", "markdown", "html"]),
    default="text",
    show_default=True,
    help="How to print it.",
)
@click.option("--lang", type=click.Choice(["en", "zh", "auto"]), default="auto", show_default=True)
@store_option
def show(incident: str | None, fmt: str, lang: str, store: str | None) -> None:
    """Print the report of an incident, by default of the last one."""
    from oomwatch.cli.rendering import render
    from oomwatch.report.json_read import from_json
    from oomwatch.report.sanitize import clean
    from oomwatch.store.silences import read_acknowledgements

    with opened(store) as connection:
        stored = find_incident(connection, incident)
        known = read_acknowledgements(connection, [stored.id]).get(stored.id)
    if fmt == "json":
        whole = {"schema": _ONE, **_summary(stored, known), "diagnosis": stored.diagnosis}
        click.echo(json.dumps(whole, ensure_ascii=False, indent=2))
        return
    if fmt == "text":
        facts = (*_row(stored, None)[:-1], "" if stored.diagnosis else _sentence(stored))
        click.echo(clean("  ".join(filter(None, facts)), 400))
        for line in _story(stored, known):
            click.echo(f"  {clean(line, 400)}")
        click.echo("")
    if stored.diagnosis is None:
        over = stored.state == "closed"
        click.echo("it was over before more was known" if over else "not diagnosed yet")
        return
    options: dict[str, Any] = {"lang": lang, "color": "auto" if sys.stdout.isatty() else "never"}
    options["printer"] = f"`oomwatch flags {stored.id}`"
    click.echo(render(from_json(stored.diagnosis), fmt, options), color=True)


@command.command(
    "export",
    epilog="\b\nExamples:\n  oomwatch incidents export 3fa9\n"
    "  oomwatch incidents export 3fa9 -o incident.tar.zst\n"
    "  oomwatch diagnose --recording incident.tar.zst",
)
@click.argument("incident", required=False, metavar="[ID]")
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="A directory, or a .tar, .tar.gz or .tar.zst; by default ID.tar.gz.",
)
@click.option(
    "--redact/--no-redact",
    default=None,
    help="Take out prompts, users and home paths; by default as incidents.redact says. Keys and "
    "tokens are taken out always.",
)
@store_option
def export(
    incident: str | None, output: str | None, redact: bool | None, store: str | None
) -> None:
    """Write an incident as a recording, by default the last one."""
    from oomwatch.cli.incident_recording import write_incident
    from oomwatch.cli.privacy import make_redactor
    from oomwatch.sources.recording_write import RecordingWriter

    if redact is None:
        from oomwatch.config import load_config

        redact = load_config().config.incidents.redact
    with opened(store) as connection:
        stored = find_incident(connection, incident)
        redactor = make_redactor(redact=redact, hosts=[stored.host] if stored.host else ())
        writer = RecordingWriter(output or f"{stored.id}.tar.gz", redactor)
        try:
            path = write_incident(connection, stored, writer)
        finally:
            writer.abandon()  # nothing, once it is finished
    click.echo(f"{path}: read it with `oomwatch diagnose --recording {path}`")


def cause_of(incident: StoredIncident) -> str:
    """What its diagnosis says first; ``unknown`` before there is one."""
    diagnosis = incident.diagnosis or {}
    for kind in ("incidents", "risks"):
        for row in diagnosis.get(kind) or ():
            return str(row.get("cause", "unknown"))
    return "unknown"


def _sentence(incident: StoredIncident) -> str:
    """What its diagnosis says of the cause; before there is one, what set it off."""
    diagnosis = incident.diagnosis or {}
    for kind in ("incidents", "risks"):
        for row in diagnosis.get(kind) or ():
            if summary := row.get("summary"):
                return str(summary)
            break
    return next((trigger.text for trigger in incident.triggers if trigger.text), "")


def _row(incident: StoredIncident, known: Acknowledgement | None) -> tuple[str, ...]:
    """What stands below `_COLUMNS`."""
    looked_after = "" if known is None else f"[{_looked_after(known)}]  "
    return (
        incident.id,
        _local(incident.opened_at),
        incident.state,
        _severity(incident),
        incident.engine_id or "-",
        cause_of(incident),
        looked_after + _sentence(incident),
    )


def aligned(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Rows as lines of at most `width` cells, whose columns begin at the same place."""
    from rich.cells import cell_len, set_cell_size

    from oomwatch.report.sanitize import clean

    shown = [[clean(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*shown, strict=True)]
    for *cells, last in shown:
        filled = (
            cell + " " * (width - cell_len(cell))
            for cell, width in zip(cells, widths, strict=False)
        )
        line = "  ".join((*filled, last)).rstrip()
        cut = width is not None and cell_len(line) > width
        yield set_cell_size(line, width - 1).rstrip() + "…" if cut and width else line


def _story(incident: StoredIncident, known: Acknowledgement | None) -> Iterator[str]:
    """What happened, a line each in order of time; what the report below says is not repeated."""
    for at, text in sorted(_events(incident, known), key=lambda event: event[0]):
        yield f"{_local(at)}  {text}"


def _events(incident: StoredIncident, known: Acknowledgement | None) -> Iterator[tuple[float, str]]:
    from oomwatch.notify.message import resolution_of

    said = _sentence(incident) if incident.diagnosis else None
    for trigger in incident.triggers[:20]:
        text = "" if trigger.text in (said, None) else f": {trigger.text}"
        yield trigger.at, f"{trigger.kind}{text}"
    if known is not None:
        yield known.at, _looked_after(known)
    over = resolution_of(incident)
    if over is not None:
        yield incident.closed_at or 0, over


def _looked_after(known: Acknowledgement) -> str:
    return f"acknowledged by {known.author}" if known.author else "acknowledged"


def _summary(incident: StoredIncident, known: Acknowledgement | None) -> dict[str, Any]:
    from oomwatch.notify.message import incident_notice
    from oomwatch.report.sanitize import clean

    def shown(text: str | None) -> str | None:
        return None if text is None else clean(text)

    told = incident_notice(incident, labels={}, runbook_base="")
    return {
        "id": incident.id,
        "state": incident.state,
        "severity": told.severity,
        "headline": told.headline,
        "opened_at": incident.opened_at,
        "opened_at_iso": _iso(incident.opened_at),
        "closed_at": incident.closed_at,
        "closed_at_iso": _iso(incident.closed_at),
        "acknowledged": None
        if known is None
        else {"at": known.at, "at_iso": _iso(known.at), "by": shown(known.author)},
        "engine": shown(incident.engine_id),
        "host": shown(incident.host),
        "cause": clean(cause_of(incident)),
        "triggers": [
            {
                "kind": trigger.kind,
                "at": trigger.at,
                "gpu": trigger.gpu,
                "pid": trigger.pid,
                "text": shown(trigger.text),
            }
            for trigger in incident.triggers
        ],
    }


def _severity(incident: StoredIncident) -> str:
    from oomwatch.notify.message import severity_of

    return severity_of(incident, cause_of(incident))


def _iso(at: float | None) -> str | None:
    from oomwatch.units import format_rfc3339

    return None if at is None else format_rfc3339(at)


def _local(at: float) -> str:
    from oomwatch.report.phrases import local_time

    return local_time(at)
