"""Flags as a person would type them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from oomwatch.report.json_report import flag_value
from oomwatch.report.sanitize import clean


def typed_flags(flags: Mapping[str, Any]) -> list[str]:
    """``["--max-num-seqs 64", "--enforce-eager"]``, values quoted for a shell."""
    return [_typed(clean(flag), flag_value(value)) for flag, value in flags.items()]


def typed_env(env: Mapping[str, str]) -> list[str]:
    """``["NAME=value"]``, values quoted for a shell."""
    return [f"{clean(name)}={shlex.quote(clean(value))}" for name, value in env.items()]


def _typed(flag: str, value: str | bool) -> str:
    if value is True or value == "":
        return flag
    return f"{flag} {'false' if value is False else shlex.quote(value)}"
