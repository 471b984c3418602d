"""The page as a file for node_exporter's textfile collector; put in place whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Final

_MODE: Final = 0o644  # node_exporter runs as another user


def write_textfile(path: str, page: bytes) -> None:
    """Put the page in place of what is there.

    Raises:
        OSError: it cannot be written; what was there stays.

    """
    target = Path(path)
    # node_exporter reads whatever ends in .prom: a page that is being written does not.
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".new", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(page)
            os.fchmod(file.fileno(), _MODE)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def remove_textfile(path: str) -> None:
    """Take the page away: figures of an agent that has ended are not those of now."""
    with contextlib.suppress(OSError):
        Path(path).unlink()
