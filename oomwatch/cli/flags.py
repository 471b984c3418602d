"""`oomwatch flags`: only the flags that an incident's first remedies set, for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from oomwatch.cli.stored import find_incident, opened, store_option
from oomwatch.errors import NoInputError

if TYPE_CHECKING:
    from oomwatch.records import Incident, Risk

EXAMPLES = """\b
Examples:
  oomwatch flags                         of the last incident
  oomwatch flags 3fa9 --format env
  vllm serve MODEL $(oomwatch flags)
"""


@click.command("flags", epilog=EXAMPLES)
@click.argument("incident", required=False, metavar="[ID]")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(["args", "env", "compose", "k8s", "python"]),
    default="args",
    show_default=True,
    help="How to print them.",
)
@store_option
def command(incident: str | None, fmt: str, store: str | None) -> None:
    """Print the flags that fix the last incident, or that one."""
    from oomwatch.records import EngineFacts
    from oomwatch.remedies.render import render
    from oomwatch.report.json_read import from_json

    with opened(store) as connection:
        stored = find_incident(connection, incident)
    if stored.diagnosis is None:
        raise NoInputError(f"{stored.id} has no diagnosis yet")
    diagnosis = from_json(stored.diagnosis)
    found: list[Incident | Risk] = [*diagnosis.incidents, *diagnosis.risks]
    top = found[0] if found else None
    if top is None:
        raise NoInputError(f"{stored.id} has no cause, so there are no flags for it")
    engines = [e for e in diagnosis.engines if e.id == top.finding.engine_id]
    text = render(top.remedies, engines[0] if engines else EngineFacts(id="engine-0"), fmt)
    if not text:
        raise NoInputError(
            f"no flag helps against {top.finding.cause}; see `oomwatch incidents show {stored.id}`"
        )
    click.echo(text.rstrip("\n"))
