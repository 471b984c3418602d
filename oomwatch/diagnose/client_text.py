"""Lines that a request's path through a server leaves; what a client said in them is no evidence."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.engines.client_text import (
    is_client_text,
    refuses_request,
    without_echo,
    without_repeated,
)

__all__ = [
    "access_status",
    "is_client_text",
    "own_words",
    "refuses_request",
    "without_echo",
    "without_repeated",
]

_AFTER_SPAN: Final = re.compile(r".*\}(?::\w+)*: [\w:]+: (\S+\.rs:\d+: .*)$")
_ACCESS: Final = re.compile(
    r'"(?:GET|POST|PUT|DELETE|HEAD|OPTIONS|PATCH) /\S* HTTP/[\d.]+" (\d{3})'
)


def own_words(text: str) -> str | None:
    """What TGI's router itself says after the spans that hold a request, or None."""
    match = _AFTER_SPAN.search(text)
    return match[1] if match else None


def access_status(text: str) -> int | None:
    """The HTTP status of an access line, or None for any other line."""
    match = _ACCESS.search(text)
    return int(match[1]) if match else None
