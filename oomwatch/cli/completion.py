"""`oomwatch completion SHELL`: print the completion script, for the user to install."""

from __future__ import annotations

import click


@click.command(
    "completion",
    epilog="""\b
Examples:
  oomwatch completion bash > /etc/bash_completion.d/oomwatch
  oomwatch completion zsh  > "${fpath[1]}/_oomwatch"
  oomwatch completion fish > ~/.config/fish/completions/oomwatch.fish
""",
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script of a shell; nothing is installed."""
    from click.shell_completion import get_completion_class

    from oomwatch.cli import cli

    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(completion(cli, {}, "oomwatch", "_OOMWATCH_COMPLETE").source())
