"""Threads that do one thing again and again; a fault ends nothing, and is not told all the time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_LOG = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 1.0
_SAME_SECONDS: Final = 600.0
"""For so long a fault that comes again is not told again: descriptors may be short for hours."""


class Faults:
    """Tells what goes wrong in one thread."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._told: dict[str, float] = {}

    def tell(self, error: Exception) -> None:
        """Log it, unless it was told lately."""
        now, text = time.monotonic(), f"{type(error).__name__}: {error}"
        self._told = {key: at for key, at in self._told.items() if now - at < _SAME_SECONDS}
        if text not in self._told:
            self._told[text] = now
            _LOG.error("%s", self._what, exc_info=error)


def keep_running(name: str, work: Callable[[], None], stop: threading.Event) -> None:
    """Do a work that ends when it is told to, and begin it anew when it fails."""
    faults = Faults(f"the thread {name} failed; it starts again")
    while not stop.is_set():
        try:
            work()
        except Exception as error:  # noqa: BLE001 - one fault must not end the agent
            faults.tell(error)
            stop.wait(_AGAIN_SECONDS)
        else:
            return


class Repeat:
    """Calls `work` at once and then `interval_seconds` after each end; daemonic."""

    def __init__(self, name: str, interval_seconds: float, work: Callable[[], None]) -> None:
        self._faults = Faults(name)
        self._interval_seconds = interval_seconds
        self._work = work
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self) -> None:
        """End; work that is under way is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._work()
            except Exception as error:  # noqa: BLE001 - one fault must not end the thread
                self._faults.tell(error)
            self._stop.wait(self._interval_seconds)
