"""`oomwatch flags`: only what an incident's best remedy changes, for scripts."""

from __future__ import annotations

import sys

import click

from oomwatch.cli.stored import find_incident, opened, store_option
from oomwatch.errors import NoInputError

EXAMPLES = """\b
Examples:
  oomwatch flags                         of the last incident
  oomwatch flags 3fa9 --format env
  vllm serve MODEL $(oomwatch flags)     the flags after your own: the last one counts

\b
What is printed is set together: of the numbered steps of the report the first that is
predicted to be enough alone; where none is known to be, the first with up to two that
combine with it. On a terminal stderr says which. args prints the changed flags only;
compose, k8s and python print the setting they belong to.
Exit status: 0 printed, 3 there is no flag or variable to print.
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
    from oomwatch.cli.rendering import engine_hit, to_act_on
    from oomwatch.remedies.render import absence, flags_alone, render
    from oomwatch.report.json_read import from_json

    with opened(store) as connection:
        stored = find_incident(connection, incident)
    if stored.diagnosis is None:
        raise NoInputError(f"{stored.id} has no diagnosis yet")
    diagnosis = from_json(stored.diagnosis)
    top = to_act_on(diagnosis)
    if top is None:
        raise NoInputError(f"{stored.id} has no cause, so there are no flags for it")
    if fmt == "args":
        text = flags_alone(top.remedies)
    else:
        text = render(top.remedies, engine_hit(diagnosis, top), fmt)
    if not text:
        raise NoInputError(
            f"no flag helps against {top.finding.cause}: {absence(top.remedies, fmt)}; "
            f"see `oomwatch incidents show {stored.id}`"
        )
    click.echo(text.rstrip("\n"))
    if sys.stdout.isatty():
        from oomwatch.report.locale import catalogue
        from oomwatch.report.phrases import printed_steps

        shown = f"oomwatch incidents show {stored.id}"
        click.echo(f"{shown}: {printed_steps(top.remedies, 'this', catalogue('en'))}", err=True)
