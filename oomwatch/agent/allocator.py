"""How memory that was let go of comes back, in a process of many threads that runs for weeks."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from typing import Final

# glibc, malloc/malloc.h; other C libraries have no mallopt, or one that takes and ignores them.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_M_ARENA_MAX: Final = -8
_BYTES: Final = 128 * 1024
"""glibc's own thresholds, which it otherwise raises to the largest block that was ever freed."""


def give_memory_back() -> None:
    """Have freed memory go back to the kernel; to be called before threads are started.

    Each thread would keep a heap of its own, and the largest page or diagnosis that was ever held
    would stay resident: 3 MiB of the agent's after a few incidents.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in (
            (_M_ARENA_MAX, 1),
            (_M_TRIM_THRESHOLD, _BYTES),
            (_M_MMAP_THRESHOLD, _BYTES),
        ):
            mallopt(parameter, value)


def spare_the_collector() -> None:
    """Have the collector of cycles pass over what is there now: modules, and what they define.

    A collection stops all threads; this makes it a matter of milliseconds.
    """
    gc.collect()
    gc.freeze()
