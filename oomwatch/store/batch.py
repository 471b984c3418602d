"""One transaction of new records. All of it can be written twice: the second time changes nothing.

Readings of a process that say the same as the one before are kept once in ten seconds: a value
holds until the next one.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import BigInteger, Connection, bindparam, update

from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    ProcessSample,
)
from oomwatch.store import schema
from oomwatch.store.clock import Clock
from oomwatch.store.dictionary import Dictionary, of_holder, of_process, plain
from oomwatch.store.excerpts import save_excerpt
from oomwatch.store.incidents import save_incident
from oomwatch.store.inserts import insert_new, insert_new_rows, upsert
from oomwatch.store.lanes import Batch, PendingEvent, Position
from oomwatch.store.outbox import save_outbox
from oomwatch.store.rows import (
    Sample,
    Values,
    engine_values,
    event_values,
    gpu_process_values,
    gpu_values,
    host_values,
    process_values,
    to_json,
    to_ms,
)
from oomwatch.store.samples import COLUMNS

SAME_EVERY_MS: Final = 10_000
EXTRA_EVERY_MS: Final = 60_000
_REMEMBERED: Final = 8192
_HELD: Final = (GpuProcessSample, ProcessSample)
"""What a process holds mostly stays what it is."""
_USUAL_STATES: Final = {"R", "S", "I"}  # running, sleeping, idle: they change all the time

_MARK: Final = schema.rollup_mark
_FIRST: Final = bindparam("first", type_=BigInteger)
# Built once: it is run with every batch, and building it takes longer than running it.
_PULL_BACK: Final = (
    update(_MARK)
    .where(_MARK.c.host_id == bindparam("host"), _MARK.c.until_ms > _FIRST)
    .values(until_ms=_FIRST - _FIRST % (_MARK.c.step * 1000))
)

Rows = dict[schema.SampleTable, list[Values]]
"""Each ``(ts_ms, clock_id, key, *COLUMNS[table.name])``."""


class Recorder:
    """Writes batches of one host; remembers ids and last values from one batch to the next."""

    def __init__(self, host: str) -> None:
        self.names = Dictionary(host)
        self._last: dict[tuple[int, object], tuple[int, object]] = {}
        self._extra: dict[tuple[int, int], tuple[int, dict[str, float]]] = {}

    def forget(self) -> None:
        """After a transaction failed: what it wrote is not there."""
        self.names.forget()
        self._last.clear()
        self._extra.clear()

    def write(self, connection: Connection, batch: Batch) -> None:
        """Write a batch within the caller's transaction; call `forget` if that fails.

        Raises:
            ValueError: a record cannot be stored.

        """
        rows = self._sample_rows(connection, batch.samples)
        for table, values in rows.items():
            columns = ("ts_ms", "clock_id", table.key, *COLUMNS[table.name])
            connection.exec_driver_sql(insert_new_rows(connection, table.raw, columns), values)
        self._pull_back(connection, rows)
        if batch.events:
            events = [self._event_row(connection, pending) for pending in batch.events]
            connection.execute(insert_new(connection, schema.log_event), events)
        for incident in batch.incidents:
            save_incident(connection, self.names.host_id(connection), incident)
        if batch.outbox:
            save_outbox(connection, self.names.host_id(connection), batch.outbox)
        for excerpt in batch.excerpts:
            save_excerpt(connection, excerpt)
        for position in batch.positions:
            self._save_position(connection, position)

    def _sample_rows(self, connection: Connection, samples: Iterable[tuple[Sample, Clock]]) -> Rows:
        rows: Rows = collections.defaultdict(list)
        for clock, timed in itertools.groupby(samples, operator.itemgetter(1)):
            clock_id = self.names.clock_id(connection, clock)
            for sample, _ in timed:
                ts = to_ms(sample.at)
                if isinstance(sample, _HELD) and self._is_repeat(sample, ts, clock_id):
                    continue
                table, key, values = self._values(connection, sample, ts, clock_id)
                rows[table].append((ts, clock_id, key, *values))
        return rows

    def _values(
        self, connection: Connection, sample: Sample, ts: int, clock_id: int
    ) -> tuple[schema.SampleTable, int, Values]:
        match sample:
            case GpuSample():
                return schema.GPU, self.names.gpu_id(connection, sample), gpu_values(sample)
            case GpuProcessSample():
                holder = self.names.holder_id(connection, sample, ts)
                return schema.GPU_PROCESS, holder, gpu_process_values(sample)
            case ProcessSample():
                process = self.names.process_id(connection, sample, ts)
                return schema.PROCESS, process, process_values(sample)
            case HostSample():
                return schema.HOST, self.names.host_id(connection), host_values(sample)
            case EngineSample():
                engine = self.names.engine_id(connection, sample.engine, ts)
                extra = self._changed_extra(engine, clock_id, ts, sample.extra)
                return schema.ENGINE, engine, engine_values(sample, extra)

    def _is_repeat(self, sample: GpuProcessSample | ProcessSample, ts: int, clock_id: int) -> bool:
        told: object
        if isinstance(sample, GpuProcessSample):
            key, told = (clock_id, of_holder(sample)), sample.used_bytes
        else:
            state = None if sample.state in _USUAL_STATES else sample.state
            told = (sample.rss_bytes, sample.shared_bytes, sample.swap_bytes, state)
            key = (clock_id, of_process(sample))
        last = self._last.get(key)
        if last is not None and last[1] == told and 0 <= ts - last[0] < SAME_EVERY_MS:
            return True
        if len(self._last) >= _REMEMBERED:
            self._last.clear()
        self._last[key] = (ts, told)
        return False

    def _changed_extra(
        self, engine: int, clock: int, ts: int, extra: Mapping[str, float]
    ) -> str | None:
        """The numbers that changed since this engine's last row; once a minute all of them."""
        numbers = dict(extra)
        whole_at, before = self._extra.get((engine, clock), (None, {}))
        whole = whole_at is None or not 0 <= ts - whole_at < EXTRA_EVERY_MS
        if not whole and before.keys() - numbers.keys():
            whole = True  # one is gone: only a whole row can say so
        self._extra[engine, clock] = (ts if whole or whole_at is None else whole_at, numbers)
        if whole:
            return to_json({"": 1, **numbers}) if numbers or before else None
        changed = dict(sorted(numbers.items() - before.items()))
        return to_json(changed) if changed else None

    def _pull_back(self, connection: Connection, rows: Rows) -> None:
        """Have the tiers count rows again that came late."""
        times = [row[0] for values in rows.values() for row in values]
        if not times:
            return
        host = self.names.host_id(connection)
        connection.execute(_PULL_BACK, {"host": host, "first": min(times)})

    def _event_row(self, connection: Connection, pending: PendingEvent) -> dict[str, Any]:
        at = pending.event.at
        ts = pending.ts_ms if at is None else to_ms(at)
        engine = pending.engine_id
        return {
            "ts_ms": ts,
            "clock_id": self.names.clock_id(connection, pending.clock),
            "host_id": self.names.host_id(connection),
            "engine_id": None if engine is None else self.names.engine_id(connection, engine, ts),
            **event_values(pending.event),
        }

    def _save_position(self, connection: Connection, position: Position) -> None:
        connection.execute(
            upsert(connection, schema.follower_position),
            {
                "host_id": self.names.host_id(connection),
                "source": plain(position.source),
                "position": to_json(position.position),
                "updated_ms": position.ts_ms,
            },
        )
