"""Readings of a running engine's counters, some seconds apart, so that counters become rates.

Each engine has a thread: a busy server answers late, a hung one not at all, and neither may hold
up the others. Where work is running and no token came out, a third reading tells a pause from a
standstill.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Final

from oomwatch.errors import OomwatchError

if TYPE_CHECKING:
    from oomwatch.sources.metrics import MetricsPage

WINDOW_SECONDS: Final = 2.0
"""From one answer to the next question."""
STANDSTILL_SECONDS: Final = 6.0
TIMEOUT_SECONDS: Final = 15.0
"""A page took up to 11 s to come from a real vLLM 0.32 whose API process was short of CPU."""


class Readings(threading.Thread):
    """Two or three pages of one address, or the reason why there are none."""

    def __init__(self, url: str) -> None:
        """Begin to read at once."""
        super().__init__(name=f"metrics of {url}", daemon=True)
        self.url = url
        self.pages: list[MetricsPage] = []
        self.slowest_seconds = 0.0
        self.error: OomwatchError | None = None
        self.start()

    def run(self) -> None:
        """Read; a failure ends it, as a server that does not answer once will not soon."""
        try:
            self._read()
            time.sleep(WINDOW_SECONDS)
            self._read()
            if stands_still(self.pages):
                time.sleep(max(0.0, STANDSTILL_SECONDS - WINDOW_SECONDS))
                self._read()
        except OomwatchError as error:
            self.error = error

    def _read(self) -> None:
        from oomwatch.sources.metrics import read_metrics

        begun = time.monotonic()
        page = read_metrics(self.url, timeout_seconds=TIMEOUT_SECONDS)
        self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - begun)
        self.pages.append(page)


def stands_still(pages: list[MetricsPage]) -> bool:
    """Whether requests run and no token was read or written from the first page to the last."""
    if len(pages) < 2:
        return False
    first, last = (_totals(page) for page in (pages[0], pages[-1]))
    running, tokens = last
    return bool(running) and tokens is not None and tokens == first[1]


def _totals(page: MetricsPage) -> tuple[float, float | None]:
    """Running requests, and tokens read and written so far (None where the page lacks them)."""
    running = sum(sample.running or 0 for sample in page.samples)
    written = [s.generation_tokens_total for s in page.samples]
    if not written or None in written:
        return running, None
    read = sum(s.prompt_tokens_total or 0 for s in page.samples)
    return running, read + sum(tokens or 0 for tokens in written)
