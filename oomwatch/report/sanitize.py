"""The one door for text that came from logs, command lines, processes and metrics.

Such text may hold terminal escapes, bidirectional overrides, zero-width characters, halves of
surrogate pairs, or a hundred megabytes on one line. What leaves here is one printable line.
Square brackets stay: no renderer of this package parses rich markup (``[rank0]:`` is data).
"""

from __future__ import annotations

import re
from typing import Final

ELLIPSIS: Final = "…"

# CSI, OSC and other string sequences (also as C1 bytes), then two-character escapes.
_ESCAPE: Final = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]{0,4096}(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]"
)
_BLANKS: Final = re.compile(r" {3,}")


def clean(text: object, limit: int | None = None) -> str:
    """One printable line of `text`, cut to `limit` characters with an ellipsis.

    Escapes, control, format (bidirectional, zero-width) and unassigned characters go; line breaks
    and tabs become a space; lone surrogates become U+FFFD.
    """
    line = text if isinstance(text, str) else str(text)
    if limit is not None:
        line = line[: 4 * limit + 4096]  # what the escapes leave of it is cut below
    if not line.isprintable():
        line = "".join(map(_printable, _ESCAPE.sub("", line)))
    line = _BLANKS.sub("  ", line).strip()
    if limit is not None and len(line) > limit:
        return line[: max(limit - 1, 0)].rstrip() + ELLIPSIS
    return line


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    if char.isspace():
        return " "
    return "\ufffd" if "\ud800" <= char <= "\udfff" else ""
