"""Files that the configuration names: a pipe in their place must hold up nobody."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The first bytes of a file.

    Raises:
        OSError: it cannot be read, or is no regular file.

    """
    # A pipe that nobody writes would hold up whoever opens it, and a terminal become ours.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags)
    try:
        _require(os.fstat(descriptor), path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(most_bytes)
    finally:
        os.close(descriptor)


def require_regular(path: str | Path) -> None:
    """Before a library opens this file by its name.

    Raises:
        OSError: it is not there, or is no regular file.

    """
    _require(os.stat(path), path)  # noqa: PTH116 - of a text too


def _require(status: os.stat_result, path: str | Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
