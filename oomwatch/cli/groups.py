"""Groups of commands that say which of theirs was probably meant."""

from __future__ import annotations

import re
from typing import ClassVar, Final

import click

_ID: Final = re.compile(r"(?:inc-)?[0-9a-f]{3,12}")


class NamedGroup(click.Group):
    """As `oomwatch` itself does of its commands."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Say which command was probably meant, and which there are."""
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.commands:
            import difflib

            near = difflib.get_close_matches(name, self.commands, n=1)
            hint = f"Did you mean '{near[0]}'?" if near else f"There are {self._names()}."
            ctx.fail(f"No such command '{name[:60]}'. {hint}")
        return super().resolve_command(ctx, args)

    def _names(self) -> str:
        *first, last = self.commands
        return f"{', '.join(first)} and {last}"


class GroupOfIncidents(NamedGroup):
    """A group in which the id of an incident alone shows it."""

    shown_by: ClassVar[str] = "show"

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Take what looks like an id for `show ID`."""
        if args and args[0] not in self.commands and _ID.fullmatch(args[0]):
            args = [self.shown_by, *args]
        return super().resolve_command(ctx, args)
