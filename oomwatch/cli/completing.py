"""What may stand after an option, for the shells' completion."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click
    from click.shell_completion import CompletionItem


def files(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Files and folders, which the shell itself lists."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def causes(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Ids of causes."""
    from oomwatch.causes import CAUSES

    known = [cause for group in CAUSES.values() for cause in group]
    return [cause for cause in known if cause.startswith(incomplete.replace("-", "_"))]


def cards(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Short names of cards."""
    from oomwatch.memory.devices import known_names

    return [name for name in known_names() if name.startswith(incomplete.lower())]
