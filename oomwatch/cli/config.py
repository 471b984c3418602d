"""`oomwatch config`: the configuration in force, whether it is right, and all of its keys."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch import __version__
from oomwatch.cli.groups import NamedGroup

if TYPE_CHECKING:
    from oomwatch.config import Loaded

EXAMPLES: Final = """\b
Examples:
  oomwatch config show                      what is in force, and where each value is from
  oomwatch config check --strict            before a reload
  oomwatch config default > config.toml     every key with its default
"""

_file = click.option(
    "--config",
    "path",
    metavar="PATH",
    help="The file; by default $OOMWATCH_CONFIG, /etc/oomwatch/config.toml, or "
    "$XDG_CONFIG_HOME/oomwatch/config.toml.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON (oomwatch.config/1).")


@click.group("config", cls=NamedGroup, epilog=EXAMPLES)
def command() -> None:
    """Show, check or print the configuration."""


@command.command(epilog="\b\nExamples:\n  oomwatch config show\n  oomwatch config show --json")
@_file
@_json
def show(path: str | None, as_json: bool) -> None:
    """Print what is in force, with the origin of each value.

    Secrets are hidden.
    """
    from oomwatch.cli import print_error
    from oomwatch.config import load_config
    from oomwatch.config.texts import merged_json, merged_toml
    from oomwatch.report.sanitize import clean

    loaded = load_config(path)
    if as_json:
        settings = merged_json(loaded.config, loaded.origins)
        _print_json({**_head(loaded), "settings": settings})
        return
    for warning in loaded.warnings:
        print_error(f"warning: {warning}")
    lines = merged_toml(loaded.config, loaded.origins).splitlines()
    click.echo("\n".join(map(clean, lines)))


@command.command(
    epilog="\b\nExamples:\n  oomwatch config check\n  oomwatch config check --config new.toml"
)
@_file
@click.option(
    "--strict",
    is_flag=True,
    help="A key or cause that is not known, and what a receiver or an engine lacks, is a mistake.",
)
@_json
@click.pass_context
def check(ctx: click.Context, path: str | None, strict: bool, as_json: bool) -> None:
    """Say whether the configuration is right: status 0, or 2 and every mistake.

    What it names is looked at too: secrets, certificates, folders. The service may have other
    rights than you; that it cannot read something is a warning.
    """
    from oomwatch.cli import print_error
    from oomwatch.config import ConfigError, load_config

    loaded: Loaded | None = None
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    try:
        loaded = load_config(path, strict=strict)
    except ConfigError as error:
        problems = error.problems
    else:
        from oomwatch.cli.config_findings import findings

        found = findings(loaded.config)
        problems = tuple(one.text for one in found if strict and one.is_mistake)
        odd = (one.text for one in found if not (strict and one.is_mistake))
        warnings = (*loaded.warnings, *odd)
    if as_json:
        head = {**_head(loaded), "warnings": warnings}
        _print_json({**head, "valid": not problems, "errors": problems})
    else:
        for problem in problems:
            print_error(problem)
        for warning in warnings:
            print_error(f"warning: {warning}")
        if loaded and not problems:
            count = len(warnings)
            but = f", with {count} warning{'s' * (count > 1)}" if count else ""
            click.echo(f"{loaded.path or 'no file, all defaults'}: right{but}")
    if problems:
        ctx.exit(2)


@command.command(epilog="\b\nExamples:\n  oomwatch config default > config.toml")
@_json
def default(as_json: bool) -> None:
    """Print the example file: every key with its default, commented."""
    from oomwatch.config import Config
    from oomwatch.config.layers import Origin, dotted
    from oomwatch.config.texts import example_toml, in_force, merged_json

    if not as_json:
        click.echo(example_toml(), nl=False)
        return
    config = Config()
    origins = {dotted(path): Origin("default") for path, _, _ in in_force(config)}
    _print_json({**_head(None), "settings": merged_json(config, origins)})


def _head(loaded: Loaded | None) -> dict[str, Any]:
    return {
        "schema": "oomwatch.config/1",
        "oomwatch_version": __version__,
        "file": str(loaded.path) if loaded and loaded.path else None,
        "warnings": [*loaded.warnings] if loaded else [],
    }


def _print_json(document: dict[str, Any]) -> None:
    click.echo(json.dumps(document, indent=2, ensure_ascii=False))
