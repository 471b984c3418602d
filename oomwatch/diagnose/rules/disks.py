"""What a file system refused: it is full, over a quota, read-only, or another user's."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.events import Failure

_QUOTED: Final = re.compile(r"['\"](/[^'\"\n]{1,200})['\"]")
_SAYS: Final = {
    "disk.full": ("full", "The disk{place} is full: no space is left for what the server writes"),
    "disk.quota": ("quota", "The disk quota{quota} is used up"),
    "disk.read_only": ("read_only", "The file system{place} is read-only"),
    "disk.denied": ("denied", "The server's user has no permission for {path}"),
}
"""By pattern: the value `disk` of a finding, and what is said."""


def refused_by_disk(failure: Failure) -> tuple[str, dict[str, str]] | None:
    """A sentence, and what the remedies want to know; None where no file system refused."""
    for name, (kind, sentence) in _SAYS.items():
        if failure.match(name) is not None:
            quoted = _QUOTED.search(failure.message)
            path = quoted[1] if quoted else ""
            said = sentence.format(
                place=f" that holds {path}" if path else "",
                quota=f" for {path}" if path else "",
                path=path or "its files",
            )
            return f"{said}; memory did not run out.", {"disk": kind, "path": path}
    return None
