"""`oomwatch agent`: the daemon, in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

EXAMPLES = """\b
Examples:
  oomwatch agent                                  watch this host until Ctrl-C
  oomwatch agent --store ./oomwatch.db            keep what is seen in this file
  sudo oomwatch service install                   run it under systemd

\b
SIGHUP reads the configuration anew, SIGTERM and Ctrl-C end with everything written.
"""


@click.command("agent", epilog=EXAMPLES)
@click.option(
    "--config",
    "path",
    metavar="PATH",
    help="The file; by default $OOMWATCH_CONFIG, /etc/oomwatch/config.toml, or "
    "$XDG_CONFIG_HOME/oomwatch/config.toml.",
)
@click.option("--store", metavar="PATH|URL", help="A SQLite file or postgresql:// URL instead.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A key of the configuration, such as agent.sampling_interval=500ms. Repeatable.",
)
@click.pass_context
def command(
    ctx: click.Context, path: str | None, store: str | None, settings: tuple[str, ...]
) -> None:
    """Watch GPUs, engines, logs and the kernel; record what happens; see it coming."""
    from oomwatch.agent.allocator import give_memory_back

    give_memory_back()  # before the first thread is there
    from oomwatch.agent.service import main_agent

    overrides: dict[str, Any] = {}
    for setting in settings:
        key, found, value = setting.partition("=")
        if not found:
            raise click.UsageError(f"--set {setting}: write KEY=VALUE")
        overrides[key.strip()] = value
    if store is not None and "://" in store:
        overrides["store.url"] = store
    elif store is not None:  # a shell's words are relative to where they are typed, a file's never
        overrides["store.path"] = str(Path(store).expanduser().absolute())
    ctx.exit(main_agent(path, overrides))
