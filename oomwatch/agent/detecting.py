"""The detector's thread: takes messages, does what is due, and loses none over a fault."""

from __future__ import annotations

import collections
import logging
import threading
import time
from typing import Final

from oomwatch.agent.detector import Detector
from oomwatch.agent.messages import READINGS, Discovered, Mailbox, Message

_LOG = logging.getLogger(__name__)

_TICK_SECONDS: Final = 0.1
"""At least between two looks at what is due, however many messages come."""
_AGAIN_SECONDS: Final = (1.0, 10.0)
"""What was missing a moment ago (a descriptor, memory) may be there again."""


class Detecting:
    """Hands messages to a detector. What makes it fail is tried twice more, then let go."""

    def __init__(
        self,
        mailbox: Mailbox,
        detector: Detector,
        stop: threading.Event,
        *,
        again_seconds: tuple[float, ...] = _AGAIN_SECONDS,
    ) -> None:
        """`again_seconds`: pauses before each further try of a message."""
        self._mailbox = mailbox
        self._detector = detector
        self._stop = stop
        self._again_seconds = again_seconds
        self._again: collections.deque[tuple[float, int, Message]] = collections.deque()
        """Due time, tries that failed, and the message; few, since readings are not kept."""
        self.came_round_at = 0.0
        """When the loop last came round, in monotonic time; 0 before the first time."""

    def run(self) -> None:
        """Take messages until it is told to stop."""
        tick_due = 0.0
        while not self._stop.is_set():
            message = self._mailbox.take(self._detector.pause_seconds())
            if message is not None:
                self._handle(message, 0)
            now = time.monotonic()
            for due, failed, earlier in [self._again.popleft() for _ in range(len(self._again))]:
                if due > now:
                    self._again.append((due, failed, earlier))
                else:
                    self._handle(earlier, failed)
            if now >= tick_due:
                tick_due = now + _TICK_SECONDS
                self._detector.tick(now)
            self.came_round_at = now

    def _handle(self, message: Message, failed: int) -> None:
        try:
            self._detector.handle(message)
        except Exception:  # noqa: BLE001 - one fault must not cost what others have seen
            kept = not isinstance(message, READINGS) and failed < len(self._again_seconds)
            then = "tried again" if kept else "let go"
            _LOG.exception("judging %s failed; it is %s", type(message).__name__, then)
            if kept:
                due = time.monotonic() + self._again_seconds[failed]
                self._again.append((due, failed + 1, message))
        finally:
            if isinstance(message, Discovered) and message.done is not None:
                message.done.set()
