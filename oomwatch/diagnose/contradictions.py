"""Where the command that was given and the log that was read are not of the same start.

The log wins: it is what the server itself said. Only numbers and the model are compared; texts have
too many spellings of one meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from oomwatch.engines.commandline import ServerCommand
from oomwatch.engines.flags import as_number


def other_values(typed: Mapping[str, Any], printed: Mapping[str, Any]) -> dict[str, Any]:
    """The printed values of flags to which a command gives another number."""
    return {
        flag: printed[flag]
        for flag, value in typed.items()
        if flag in printed
        and (number := as_number(value)) is not None
        and (said := as_number(printed[flag])) is not None
        and number != said
        and number >= 0  # -1 asks for what fits
    }


def contradictions(
    parsed: ServerCommand, printed: Mapping[str, Any], model: str | None
) -> list[str]:
    """What a command says otherwise than the log that printed these arguments; a clause each."""
    found = []
    if parsed.model and model and _is_another(parsed.model, model):
        found.append(f"it serves {parsed.model}, the log {model}")
    found += [
        f"it has {flag} {parsed.arguments[flag]}, the log {value}"
        for flag, value in other_values(parsed.arguments, printed).items()
    ]
    return found


def _is_another(typed: str, logged: str) -> bool:
    """Whether two names of a model cannot mean one; a path may end in a snapshot's hash."""
    mine, its = (PurePosixPath(name.lower()).name for name in (typed, logged))
    if not mine or not its or any(sign in typed for sign in "$*`"):
        return False
    return mine not in logged.lower() and its not in typed.lower()
