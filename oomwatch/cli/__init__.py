"""The command line: a group whose commands are modules of this package, imported on use.

A command NAME is the click object `command` in ``oomwatch/cli/NAME.py``; one line here adds it.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

from oomwatch import __version__

COMMANDS: Final = {
    "diagnose": "One-shot report: what ran out, why, and which flags fix it.",
    "check": "What can be seen from here, and how to see more.",
    "explain": "What a cause is, how it looks, what to do; offline.",
    "plan": "Does it fit, how many tokens, what would each flag change.",
    "run": "Start a server, pass its output through, diagnose it when it fails.",
    "agent": "The daemon: watch this host, record it, see failures coming.",
    "incidents": "What the agent has seen.",
    "flags": "Only the flags that fix the last incident, for scripts.",
    "notify": "Try the receivers of alerts; see what was told and what failed.",
    "silence": "Tell the receivers nothing of some incidents for a while.",
    "config": "Show, check or print the configuration.",
    "service": "Run the agent under systemd: install, remove, look at it.",
    "db": "Look into the agent's store: stats, check, prune, export.",
    "record": "Record this host, for a time or until an incident.",
    "replay": "A recording as the agent would have seen it, or any command on it.",
    "demo": "The main job on an embedded recording, then on this host.",
    "completion": "Print the completion script of a shell.",
}
"""Name and one line of help; the help is here so that `oomwatch --help` imports no command."""


class LazyGroup(click.Group):
    """Imports a command's module when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names, in the order a newcomer needs them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load a command's module."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"oomwatch.cli.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)  # noqa: S101 - each module defines one
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Say which command was probably meant."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            ctx.fail(f"No such command '{name[:60]}'.{hint}")
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="""\b
Examples:
  oomwatch diagnose --log server.log     the log of a server that failed
  oomwatch diagnose                      what runs on this host
  oomwatch run -- vllm serve MODEL       start a server; it is diagnosed if it fails
  oomwatch check                         what can be seen from here
""",
)
@click.version_option(__version__, "--version", message="oomwatch %(version)s")
def cli() -> None:
    """Say what ran out of memory on an LLM server, why, and which flags fix it."""


def describe_error(error: Exception) -> str:
    """What an error says, without the passwords of addresses that it quotes."""
    from oomwatch.engines.secrets import hide_text

    return hide_text(str(error))


def print_error(message: str) -> None:
    """One line for the user on stderr, without the control characters of what was typed or read."""
    from oomwatch.report.sanitize import clean

    click.echo(f"oomwatch: {clean(message, 1000)}", err=True)
