"""The last step of a diagnosis: nothing leaves with a secret of the server's in it.

Rules and facts see lines, commands and arguments as they are; whatever they kept of them goes
through here, so that no report, file or store downstream can hold more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from oomwatch.engines.secrets import hide, hide_words
from oomwatch.records import Diagnosis, EngineFacts


def without_secrets(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with `***` for every secret in its commands, arguments and quotations."""
    return dataclasses.replace(
        diagnosis,
        **{
            field.name: _hidden(getattr(diagnosis, field.name))
            for field in dataclasses.fields(diagnosis)
        },
    )


def _hidden(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_hidden(each) for each in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return hide(value)
    parts = {field.name: _hidden(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, EngineFacts) and value.command is not None:
        parts["command"] = hide_words(value.command, version=value.version)
    return type(value)(**parts)
