"""A thread that does one thing again and again; a fault of it is told and ends nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)


class Repeat:
    """Calls `work` at once and then `interval_seconds` after each end; daemonic."""

    def __init__(self, name: str, interval_seconds: float, work: Callable[[], None]) -> None:
        self._name = name
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
            except Exception:  # noqa: BLE001 - one fault must not end the thread
                _LOG.exception("%s", self._name)
            self._stop.wait(self._interval_seconds)
