"""A thread that does one thing again and again, in step with the monotonic clock."""

from __future__ import annotations

import threading
import time

_STOP_SECONDS = 0.15


class PacedThread:
    """Calls `_step` every `interval_seconds`; a late step is not caught up with.

    The interval may be set at any time. `stop` returns at once, whatever a step waits for: the
    thread is daemonic, and `stopping` tells a step that comes back late that nobody wants it.
    """

    def __init__(self, name: str, interval_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self.stopping = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Do it now, and then on."""
        self._thread.start()

    def stop(self) -> None:
        """Do it no more."""
        self.stopping = True
        self._wake.set()
        self._interrupt()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    @property
    def interval_seconds(self) -> float:
        """Seconds between the beginnings of two steps; may be set at any time."""
        return self._interval_seconds

    @interval_seconds.setter
    def interval_seconds(self, seconds: float) -> None:
        if seconds != self._interval_seconds:
            self._interval_seconds = seconds
            self._wake.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self.stopping:
            self._step()
            now = time.monotonic()
            while (due := last + self._pause_seconds()) > now and not self.stopping:
                self._wake.wait(due - now)
                self._wake.clear()
                now = time.monotonic()
            last = max(due, now - self._pause_seconds())
        self._end()

    def _step(self) -> None:
        """The one thing; must not raise."""
        raise NotImplementedError

    def _pause_seconds(self) -> float:
        """The interval, or more where there is nobody to be asked."""
        return self._interval_seconds

    def _interrupt(self) -> None:
        """Cut short what a step waits for; called by the thread that stops it."""

    def _end(self) -> None:
        """Let go of what the thread holds; called by itself, last."""
