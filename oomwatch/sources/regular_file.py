"""Files that other programs write, whatever lies in their place and whenever they were written."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO, Final

LAST_MOMENT: Final = 2**37
"""In the year 6325: before it, a time is one to calendars and databases."""


def open_regular(path: str | Path) -> BinaryIO:
    """The file without a buffer. A named pipe in its place would wait for a writer for ever.

    Raises:
        OSError: it may not be read, or is no regular file.

    """
    stream: BinaryIO = open(  # noqa: SIM115 - the caller's
        path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)
    )
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    return stream


def changed_at(status: os.stat_result) -> float:
    """When a file was last written; now where no calendar has what its filesystem says."""
    return status.st_mtime if 0 <= status.st_mtime < LAST_MOMENT else time.time()


def hole_bytes(descriptor: int) -> int:
    """Bytes at the beginning of a file that nobody wrote; to be read they are zeros.

    A log that is cut begins with them if its writer does not append: it goes on where it was,
    gigabytes behind the new end.
    """
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:  # no data yet, no file, or a filesystem that does not know
        return 0
