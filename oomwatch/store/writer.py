"""The thread that owns the only write connection of a store.

Records are handed over at any time, from any thread, and never wait; once a second they are
written in one transaction. While the store cannot be written (disk full, read-only, locked, server
away) records wait in memory, bounded and counted, and are written when it can be again. A damaged
file is put aside and a new one begun; a file that was deleted is written anew from the open one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import Connection
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, SQLAlchemyError

from oomwatch.records import IncidentExcerpt, OutboxRow, StoredIncident
from oomwatch.store.batch import Recorder
from oomwatch.store.chores import chores, make_room
from oomwatch.store.clock import ClockWatch, wall_ms
from oomwatch.store.database import AwayStoreError, error_code, is_corrupt
from oomwatch.store.dictionary import read_last_clock
from oomwatch.store.lanes import CAPACITY, Batch, Lanes, PendingEvent, Position
from oomwatch.store.location import StoreError, parse_store
from oomwatch.store.retention import Retention
from oomwatch.store.rows import Event, Sample
from oomwatch.store.session import WriteSession
from oomwatch.store.watching import Guarded, Watcher

_LOG = logging.getLogger(__name__)

BATCH_LIMIT: Final = 2000  # records of a kind in one transaction; readers see it in between
EARLY: Final = 4000  # records that wait are written before their time
CHORE_SLICE_SECONDS: Final = 0.1  # of housekeeping between two writes
_RETRY_SECONDS: Final = (1.0, 2.0, 5.0, 10.0, 30.0)
_UNFIT: Final = (
    *(DataError, IntegrityError, ValueError, OverflowError),
    *(TypeError, AttributeError, LookupError),
)
"""What comes of a record that cannot be stored."""
_OF_THE_STORE: Final = (SQLAlchemyError, sqlite3.Error, StoreError, OSError)


_Result = TypeVar("_Result")
Mode = Literal["ok", "memory_only", "stopped"]


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStatus:
    """How writing goes. `notice` is one line about what changed last."""

    mode: Mode
    notice: str | None = None
    pending: int = 0
    written_total: int = 0
    dropped_samples_total: int = 0
    dropped_events_total: int = 0
    rejected_total: int = 0
    commits_total: int = 0
    last_commit_monotonic: float | None = None
    last_tick_monotonic: float | None = None


class StoreWriter:
    """Writes one host's records to a store from a thread of its own.

    `on_status` is called in that thread with every change of mode and every notice; it must be
    quick and must not raise. `clock` and `wall` (milliseconds) are for replays, and for tests that
    set the clock.
    """

    def __init__(
        self,
        store: str,
        host: str,
        *,
        retention: Retention | None = None,
        on_status: Callable[[StoreStatus], None] = lambda _status: None,
        interval_seconds: float = 1.0,
        capacity: int = CAPACITY,
        clock: ClockWatch | None = None,
        wall: Callable[[], int] = wall_ms,
    ) -> None:
        self._retention = retention or Retention()
        self._session = WriteSession(parse_store(store), self._retention.max_bytes)
        self._on_status = on_status
        self._interval = interval_seconds
        self._lanes = Lanes(capacity)
        self._recorder = Recorder(host)
        self._clock = clock
        self._wall_ms = wall
        self._watcher: Watcher | None = None
        self._chores: Iterator[object] | None = None
        self._calls: list[tuple[Callable[[Connection], Any], concurrent.futures.Future[Any]]] = []
        self._calls_lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._failures = 0
        self._retry_at = 0.0
        self._status = StoreStatus("ok")
        self._ticked_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)

    # ------------------------------------------------------------ any thread
    def start(self) -> None:
        """Open the store and start the thread.

        Raises:
            StoreError: it cannot be used; what may pass (a full disk, a lock, a server that is
                away) and a damaged file are no reason.

        """
        notice = last = None
        try:
            notice = self._session.open()
            connection = self._session.connection
            with connection.begin():
                last = read_last_clock(connection, self._recorder.names.host)
        except (AwayStoreError, DBAPIError) as error:  # a host is watched all the same
            self._fail(error)
        self._clock = self._clock or ClockWatch(last)
        if notice is not None and self._status.mode == "ok":
            self._say("ok", notice)
        self._thread.start()

    def put(self, samples: Iterable[Sample]) -> None:
        """Hand samples over, in order of time."""
        assert self._clock is not None, "start() comes first"  # noqa: S101 - wrong use
        self._lanes.add_samples(samples, self._clock.now())
        if len(self._lanes) > EARLY and self._status.mode == "ok":
            self._wake.set()

    def put_events(self, events: Iterable[Event], engine_id: str | None = None) -> None:
        """Hand over log lines and kernel events of one engine, in the order they were read."""
        assert self._clock is not None, "start() comes first"  # noqa: S101 - wrong use
        clock, now = self._clock.now(), self._wall_ms()
        self._lanes.add_events(PendingEvent(event, engine_id, clock, now) for event in events)

    def save_incident(self, incident: StoredIncident, outbox: Iterable[OutboxRow] = ()) -> None:
        """Store an incident, or what changed about it, at once, with the messages about it."""
        self._lanes.add_incident(incident, outbox)
        self._wake.set()

    def save_outbox(self, rows: Iterable[OutboxRow]) -> None:
        """Store messages, or what became of them, at once and in one transaction."""
        self._lanes.add_outbox(rows)
        self._wake.set()

    def save_excerpt(self, excerpt: IncidentExcerpt) -> None:
        """Store what an incident can be judged again by, in place of an earlier excerpt."""
        self._lanes.add_excerpt(excerpt)
        self._wake.set()

    def save_position(self, source: str, position: Mapping[str, Any]) -> None:
        """Store where a follower is, not before the lines that were handed over before."""
        self._lanes.add_position(Position(source, position, self._wall_ms()))

    def call(self, work: Callable[[Connection], _Result]) -> concurrent.futures.Future[_Result]:
        """Run `work` in the thread, after what is waiting was written, outside a transaction.

        The future fails with StoreError while the store cannot be written.
        """
        future: concurrent.futures.Future[_Result] = concurrent.futures.Future()
        with self._calls_lock:
            if self._stopping:
                future.set_exception(StoreError("the store is closed"))
                return future
            self._calls.append((work, future))
        self._wake.set()
        return future

    def watch(self, watcher: Watcher) -> None:
        """Tell this one from now on what was written."""
        self._watcher = Guarded(watcher)

    def keep_house(self) -> None:
        """Have tiers counted and old rows pruned, in small steps between writes."""
        self.call(self._begin_chores)

    def flush(self, timeout_seconds: float = 5.0) -> bool:
        """Wait until everything handed over is on disk; False if it is not by then."""
        try:
            self.call(lambda _connection: None).result(timeout_seconds)
        except (StoreError, concurrent.futures.TimeoutError):
            return False
        return True

    def stop(self, timeout_seconds: float = 2.0) -> bool:
        """Write what waits, close the store, end the thread; False if something was left."""
        with self._calls_lock:
            self._stopping = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive() and not len(self._lanes)

    @property
    def status(self) -> StoreStatus:
        """How writing goes now."""
        return dataclasses.replace(
            self._status,
            last_tick_monotonic=self._ticked_at,
            pending=len(self._lanes),
            dropped_samples_total=self._lanes.dropped_samples_total,
            dropped_events_total=self._lanes.dropped_events_total,
        )

    # ------------------------------------------------------------ the thread
    def _run(self) -> None:
        due = time.monotonic()
        while not self._stopping:
            due = max(due + self._interval, time.monotonic())
            self._wake.wait(timeout=max(0.0, due - time.monotonic()))
            self._wake.clear()
            self._tick()
        self._tick(last=True)
        self._session.close()
        self._say("stopped", None)

    def _tick(self, *, last: bool = False) -> None:
        try:
            if self._is_ready(now=last):
                asked = len(self._calls)  # what a later one waits for may not be written yet
                self._drain()
                self._failures = 0
                self._look()
                self._run_calls(asked)
                self._run_chores()
        except Exception as error:  # noqa: BLE001 - without this thread nothing is written
            if not isinstance(error, _OF_THE_STORE):
                _LOG.exception("writing the store failed")
            self._fail(error)
        if self._status.mode != "ok" or last:
            self._refuse_calls()
        self._ticked_at = time.monotonic()

    def _is_ready(self, *, now: bool) -> bool:
        """Whether there is a connection to a file that is still there; opens one if it is time."""
        if self._status.mode != "ok" and not now and time.monotonic() < self._retry_at:
            return False
        if self._session.is_moved():
            self._reset()
            self._say(self._status.mode, self._session.restore())
        elif self._session.is_damaged():
            self._reset()
            self._say(self._status.mode, self._session.begin_anew())
        elif not self._session.is_open():
            self._reset()
            notice = self._session.open()
            if notice is not None:
                self._say(self._status.mode, notice)
        return True

    def _drain(self) -> None:
        """Write all that waits, a transaction for each batch."""
        while batch := self._lanes.take(BATCH_LIMIT):
            try:
                self._write(batch)
            except BaseException:
                self._recorder.forget()
                self._lanes.put_back(batch)
                raise
        if self._status.mode != "ok":
            lost = self._lanes.dropped_samples_total + self._lanes.dropped_events_total
            meanwhile = f"{lost} records were dropped" if lost else "nothing was lost meanwhile"
            self._say("ok", f"the store is written again; {meanwhile}")

    def _write(self, batch: Batch) -> None:
        try:
            self._commit(batch)
        except _UNFIT:
            # One record cannot be stored: the others must not wait for it for ever.
            self._recorder.forget()
            for single in batch.singles():
                try:
                    self._commit(single)
                except _UNFIT:
                    self._recorder.forget()
                    rejected = self._status.rejected_total + 1
                    self._status = dataclasses.replace(self._status, rejected_total=rejected)
        except DBAPIError as error:
            if error_code(error) != sqlite3.SQLITE_FULL or not self._make_room():
                raise
            self._recorder.forget()
            self._commit(batch)

    def _commit(self, batch: Batch) -> None:
        connection = self._session.connection
        with connection.begin():
            self._recorder.write(connection, batch)
        self._status = dataclasses.replace(
            self._status,
            written_total=self._status.written_total + len(batch),
            commits_total=self._status.commits_total + 1,
            last_commit_monotonic=time.monotonic(),
        )
        if batch.outbox and self._watcher is not None:
            self._watcher.stored([row.id for row in batch.outbox])

    def _make_room(self) -> bool:
        """Whether the file was at its own limit, and is below it now."""
        limit = self._retention.max_bytes
        return limit is not None and make_room(self._session.connection, limit, self._wall_ms())

    def _look(self) -> None:
        if self._watcher is not None:
            connection = self._session.connection
            with connection.begin():
                self._watcher.look(connection)

    def _run_calls(self, count: int) -> None:
        connection = self._session.connection
        for _ in range(count):
            with self._calls_lock:
                work, future = self._calls.pop(0)
            try:
                future.set_result(work(connection))
            except SQLAlchemyError as error:
                future.set_exception(StoreError(_line(error)))
                if is_corrupt(error):  # any other trouble of the store shows at the next write
                    raise
            except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                future.set_exception(error)
            finally:
                if connection.in_transaction():
                    connection.rollback()

    def _refuse_calls(self) -> None:
        with self._calls_lock:
            calls, self._calls = self._calls, []
        for _work, future in calls:
            future.set_exception(StoreError(f"the store is {self._status.mode}"))

    def _begin_chores(self, connection: Connection) -> None:
        if self._chores is None:
            with connection.begin():
                host_id = self._recorder.names.host_id(connection)
            self._chores = chores(connection, host_id, self._retention, self._wall_ms())

    def _run_chores(self) -> None:
        if self._chores is None:
            return
        until = time.monotonic() + CHORE_SLICE_SECONDS
        try:
            for _step in self._chores:
                if time.monotonic() > until:
                    self._wake.set()  # go on after the next batch
                    return
        except BaseException:
            self._chores = None
            raise
        self._chores = None

    # ------------------------------------------------------------ trouble
    def _fail(self, error: Exception) -> None:
        """Go on in memory, and say so; or begin anew where the file is damaged."""
        self._reset()
        if is_corrupt(error):
            try:
                notice = self._session.begin_anew()
            except (StoreError, SQLAlchemyError, sqlite3.Error, OSError) as again:
                error = again
            else:
                self._say(self._status.mode, notice)
                self._wake.set()
                return
        if error_code(error) not in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY}:
            self._session.close()  # it may not see that what it was refused is allowed again
        pause = _RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS) - 1)]
        self._failures += 1
        self._retry_at = time.monotonic() + pause
        self._say(
            "memory_only",
            f"the store cannot be written, samples are kept in memory only: {_line(error)}",
        )

    def _reset(self) -> None:
        """Trust nothing that was learned from the connection."""
        self._recorder.forget()
        self._chores = None

    def _say(self, mode: Mode, notice: str | None) -> None:
        if mode == self._status.mode and notice in {None, self._status.notice}:
            return
        self._status = dataclasses.replace(self._status, mode=mode, notice=notice)
        self._on_status(self.status)


def _line(error: BaseException) -> str:
    origin = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(origin).split())[:300]
