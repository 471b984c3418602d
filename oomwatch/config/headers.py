"""HTTP headers as a kind of value: any of them may hold a secret."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Final

from oomwatch.config.values import HIDDEN

_SECRET: Final = re.compile(r"auth|key|token|secret|cookie|passw", re.IGNORECASE)
_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110


@dataclasses.dataclass(frozen=True, slots=True)
class Headers:
    """HTTP headers: a table, or as text one ``Name: value`` a line."""

    suffix: str = ""

    def read(self, value: object, *, text: bool) -> Mapping[str, str]:
        """Names and values."""
        if text and isinstance(value, str):
            return parse_headers(value)
        if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
            raise ValueError('must be a table of texts, such as { "X-Tenant" = "a" }')
        return dict(
            _header(f"{name}:{one}", number) for number, (name, one) in enumerate(value.items(), 1)
        )

    def show(self, value: Mapping[str, str]) -> str:
        """A table with the names only: any value may be a secret."""
        inside = ", ".join(f'{json.dumps(name)} = "{HIDDEN}"' for name in value)
        return f"{{ {inside} }}"


def parse_headers(text: str) -> dict[str, str]:
    """Headers of ``Name: value`` lines; empty lines and those that begin with # are left out.

    Raises:
        ValueError: a line is no header; the message does not repeat it, it may be a secret.

    """
    headers = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, value = _header(line, number)
        headers[name] = value
    return headers


def _header(line: str, number: int) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    value = value.strip(" \t")
    if not colon or not _NAME.fullmatch(name) or not value.isprintable() or not value:
        raise ValueError(f'has a header (number {number}) that is not "Name: value"')
    try:
        value.encode("latin-1")
    except UnicodeEncodeError:
        raise ValueError(
            f"has a header (number {number}) with letters that none can hold: write it in ASCII"
        ) from None
    return name, value


def looks_secret(headers: Mapping[str, str]) -> bool:
    """Whether one of the headers is there to prove who asks."""
    return any(_SECRET.search(name) for name in headers)
