"""What waits to be written, bounded. Overflow is counted: oldest samples first, then log lines.

Incidents, messages about them, excerpts and positions are never dropped; of each only the newest
form waits.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

from oomwatch.records import IncidentExcerpt, OutboxRow, StoredIncident
from oomwatch.store.clock import Clock
from oomwatch.store.rows import Event, Sample

CAPACITY: Final = 30_000
"""Records that wait at most: about five minutes of eight GPUs with four processes each, 10 MB."""


_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True, slots=True)
class PendingEvent:
    """A log line or kernel event, the engine it is of, and when it was handed over."""

    event: Event
    engine_id: str | None
    clock: Clock
    ts_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """Where a follower is in its source: a JSON object that only the follower understands."""

    source: str
    position: Mapping[str, Any]
    ts_ms: int


@dataclasses.dataclass(slots=True)
class Batch:
    """What one transaction writes."""

    samples: list[tuple[Sample, Clock]] = dataclasses.field(default_factory=list)
    events: list[PendingEvent] = dataclasses.field(default_factory=list)
    incidents: list[StoredIncident] = dataclasses.field(default_factory=list)
    positions: list[Position] = dataclasses.field(default_factory=list)
    excerpts: list[IncidentExcerpt] = dataclasses.field(default_factory=list)
    outbox: list[OutboxRow] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        alone = len(self.positions) + len(self.excerpts) + len(self.outbox)
        return len(self.samples) + len(self.events) + len(self.incidents) + alone

    def singles(self) -> Iterator[Batch]:
        """Each record in a batch of its own, to find the one that cannot be written."""
        yield from (Batch(samples=[sample]) for sample in self.samples)
        yield from (Batch(events=[event]) for event in self.events)
        yield from (Batch(incidents=[incident]) for incident in self.incidents)
        yield from (Batch(outbox=[row]) for row in self.outbox)
        yield from (Batch(excerpts=[excerpt]) for excerpt in self.excerpts)
        yield from (Batch(positions=[position]) for position in self.positions)


class Lanes:
    """The queue before the writer, safe to use from any thread."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._samples: collections.deque[tuple[Sample, Clock]] = collections.deque()
        self._events: collections.deque[PendingEvent] = collections.deque()
        self._incidents: dict[str, StoredIncident] = {}
        self._outbox: dict[str, OutboxRow] = {}
        self._excerpts: dict[str, IncidentExcerpt] = {}
        self._positions: dict[str, Position] = {}
        self.dropped_samples_total = 0
        self.dropped_events_total = 0

    def __len__(self) -> int:
        alone = len(self._positions) + len(self._excerpts) + len(self._outbox)
        return len(self._samples) + len(self._events) + len(self._incidents) + alone

    def add_samples(self, samples: Iterable[Sample], clock: Clock) -> None:
        """Queue samples in order of time."""
        with self._lock:
            self._samples.extend(zip(samples, itertools.repeat(clock), strict=False))
            self._shed()

    def add_events(self, events: Iterable[PendingEvent]) -> None:
        """Queue log lines and kernel events in the order they were read."""
        with self._lock:
            self._events.extend(events)
            self._shed()

    def add_incident(self, incident: StoredIncident, outbox: Iterable[OutboxRow] = ()) -> None:
        """Queue an incident in place of an older form of it, and what is to be told with it."""
        with self._lock:
            self._incidents[incident.id] = incident
            self._outbox.update((row.id, row) for row in outbox)

    def add_outbox(self, rows: Iterable[OutboxRow]) -> None:
        """Queue messages in place of older forms of them, all for one transaction."""
        with self._lock:
            self._outbox.update((row.id, row) for row in rows)

    def add_excerpt(self, excerpt: IncidentExcerpt) -> None:
        """Queue an excerpt in place of an older one of its incident."""
        with self._lock:
            self._excerpts[excerpt.incident_id] = excerpt

    def add_position(self, position: Position) -> None:
        """Queue a position in place of an older one; it is written with the lines before it."""
        with self._lock:
            self._positions[position.source] = position

    def take(self, limit: int) -> Batch:
        """The oldest records, at most `limit` samples and as many events."""
        with self._lock:
            batch = Batch(incidents=list(self._incidents.values()))
            self._incidents.clear()
            batch.outbox.extend(self._outbox.values())
            self._outbox.clear()
            batch.excerpts.extend(self._excerpts.values())
            self._excerpts.clear()
            batch.samples.extend(_pop(self._samples, limit))
            batch.events.extend(_pop(self._events, limit))
            if not self._events:  # a position must not overtake its lines
                batch.positions.extend(self._positions.values())
                self._positions.clear()
            return batch

    def put_back(self, batch: Batch) -> None:
        """Queue again what could not be written, before all that came since."""
        with self._lock:
            self._samples.extendleft(reversed(batch.samples))
            self._events.extendleft(reversed(batch.events))
            for incident in batch.incidents:
                self._incidents.setdefault(incident.id, incident)
            for row in batch.outbox:
                self._outbox.setdefault(row.id, row)
            for excerpt in batch.excerpts:
                self._excerpts.setdefault(excerpt.incident_id, excerpt)
            for position in batch.positions:
                self._positions.setdefault(position.source, position)
            self._shed()

    def _shed(self) -> None:
        surplus = len(self._samples) + len(self._events) - self._capacity
        while surplus > 0 and self._samples:
            self._samples.popleft()
            self.dropped_samples_total += 1
            surplus -= 1
        while surplus > 0:
            self._events.popleft()
            self.dropped_events_total += 1
            surplus -= 1


def _pop(lane: collections.deque[_Item], limit: int) -> list[_Item]:
    return [lane.popleft() for _ in range(min(limit, len(lane)))]
