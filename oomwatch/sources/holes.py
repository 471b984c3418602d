"""The hole that a log begins with once it was cut, where its writer does not append."""

from __future__ import annotations

import os


def hole_bytes(descriptor: int) -> int:
    """Bytes at the beginning of a file that nobody wrote; to be read they are zeros.

    Such a writer goes on where it was: gigabytes behind the new end.
    """
    try:
        return os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError:  # no data yet, no file, or a filesystem that does not know
        return 0
