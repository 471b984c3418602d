"""A small store for tests, and the time they all happen at."""

from __future__ import annotations

import contextlib

from sqlalchemy import func, select

from oomwatch.store.batch import Recorder
from oomwatch.store.clock import Clock
from oomwatch.store.database import open_reader, open_writer
from oomwatch.store.lanes import Batch
from oomwatch.store.location import parse_store
from oomwatch.store.schema import metadata

CLOCK = Clock("boot-a", 1_000_000, 0)
NOW = 1_764_400_000.0  # a whole ten seconds; samples of tests lie around it


class Store:
    """A store with one open writer, for tests that need no thread."""

    def __init__(self, text: str, max_bytes: int | None = None) -> None:
        self.text, self.url = text, parse_store(text)
        self.writer = open_writer(self.url, max_bytes=max_bytes)
        self.recorder = Recorder("host-a")

    def write(self, *samples, clock=CLOCK, events=(), incidents=(), recorder=None):
        batch = Batch([(sample, clock) for sample in samples], list(events), list(incidents))
        with self.writer.begin():
            (recorder or self.recorder).write(self.writer, batch)

    @contextlib.contextmanager
    def read(self):
        with open_reader(self.url) as connection:
            yield connection

    def host_id(self) -> int:
        with self.writer.begin():
            return self.recorder.names.host_id(self.writer)

    def count(self, table: str) -> int:
        with self.read() as connection:
            query = select(func.count()).select_from(metadata.tables[table])
            return connection.scalar(query)
