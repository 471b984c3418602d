"""Reads the metrics page of one engine for as long as it runs, in a thread of its own.

An engine that is busy answers late, one that hangs not at all: only this thread waits, long, and
how long is a figure like any other. Nothing is raised: what fails is said by `state`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from oomwatch.errors import OomwatchError
from oomwatch.records import EngineSample
from oomwatch.sources.metrics import MAX_PAGE_BYTES, MetricsPage, PageReader, no_figures
from oomwatch.sources.paced import PacedThread
from oomwatch.sources.page_connection import PageConnection

_log = logging.getLogger(__name__)

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 60.0
"""An engine in a long prefill, or that compiles, may take that long and be well."""
MAX_PAUSE_SECONDS: Final = 10.0
"""Between two tries to reach a server that is not there."""

HandOn = Callable[[str, tuple[EngineSample, ...], float, float], None]
"""Engine id, samples, monotonic time of the figures, latency of the whole page in seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScrapeState:
    """How it goes: `failing_since` (UTC) and `reason` are None while pages come."""

    failing_since: float | None = None
    reason: str | None = None
    failures: int = 0
    """In a row."""
    last_at: float | None = None
    """When the last good page came, UTC."""
    latency_seconds: float | None = None
    """Of the last good page, from the request to its last byte."""
    waiting_seconds: float = 0.0
    """How long the request in flight has waited; 0 where there is none."""


class Scraper(PacedThread):
    """One page, read every `interval_seconds` from `start` to `stop`."""

    def __init__(
        self,
        engine_id: str,
        url: str,
        hand_on: HandOn,
        *,
        interval_seconds: float = 1.0,
        connect_seconds: float = CONNECT_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
        max_bytes: int = MAX_PAGE_BYTES,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        """Raises `UsageError` for what is no address."""
        super().__init__(f"scrape {engine_id}", interval_seconds)
        self.engine_id = engine_id
        self._connection = PageConnection(
            url,
            connect_seconds=connect_seconds,
            answer_seconds=answer_seconds,
            max_bytes=max_bytes,
            headers=headers,
            ca_file=ca_file,
        )
        self._reader = PageReader(self._connection.shown)
        self._hand_on = hand_on
        self._state = ScrapeState()
        self._page: MetricsPage | None = None
        self._in_flight_since: float | None = None

    @property
    def state(self) -> ScrapeState:
        """How it goes."""
        since = self._in_flight_since
        waiting = 0.0 if since is None else time.monotonic() - since
        return dataclasses.replace(self._state, waiting_seconds=waiting)

    @property
    def page(self) -> MetricsPage | None:
        """The last page that was read: its configuration, what it lacks, what is new."""
        return self._page

    # ---------------------------------------------------------------- the thread
    def _pause_seconds(self) -> float:
        """The interval, or more where nobody is there to be asked."""
        failures = min(self._state.failures, 10)
        backed_off = min(MAX_PAUSE_SECONDS, self.interval_seconds * 2.0 ** max(0, failures - 1))
        return max(self.interval_seconds, backed_off)

    def _interrupt(self) -> None:
        self._connection.abort()

    def _end(self) -> None:
        self._connection.close()

    def _step(self) -> None:
        started = self._in_flight_since = time.monotonic()
        try:
            fetched = self._connection.fetch()
            ended = time.monotonic()
            self._in_flight_since = None
            samples = self._read(fetched.data, fetched.at)
        except OomwatchError as error:
            self._failed(str(error))
        except Exception as error:  # noqa: BLE001 - a fault of ours must not end the thread
            if not self.stopping:
                _log.exception("reading %s", self._connection.shown)
                self._failed(f"{self._connection.shown}: {type(error).__name__}")
        else:
            self._state = ScrapeState(last_at=fetched.at, latency_seconds=ended - started)
            self._give(samples, fetched.monotonic, ended - started)
        finally:
            self._in_flight_since = None

    def _read(self, data: bytes, at: float) -> tuple[EngineSample, ...]:
        page = self._reader.read(data, at=at)
        if page.engine is None:
            raise no_figures(self._connection.shown)
        self._page = page
        return page.samples

    def _give(self, samples: tuple[EngineSample, ...], at: float, latency_seconds: float) -> None:
        if self.stopping:
            return
        try:
            self._hand_on(self.engine_id, samples, at, latency_seconds)
        except Exception:  # noqa: BLE001 - nor one of whoever takes the figures
            _log.exception("handing on the figures of %s", self._connection.shown)

    def _failed(self, reason: str) -> None:
        if self.stopping:
            return
        before = self._state
        self._state = dataclasses.replace(
            before,
            failing_since=before.failing_since or time.time(),
            reason=reason,
            failures=before.failures + 1,
        )
