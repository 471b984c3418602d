"""One transaction of new records. All of it can be written twice: the second time changes nothing.

Readings of a process that say the same as the one before are kept once in ten seconds: a value
holds until the next one.
"""

from __future__ import annotations

import collections
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
from oomwatch.store.dictionary import Dictionary, plain
from oomwatch.store.excerpts import save_excerpt
from oomwatch.store.incidents import save_incident
from oomwatch.store.inserts import insert_new, upsert
from oomwatch.store.lanes import Batch, PendingEvent, Position
from oomwatch.store.outbox import save_outbox
from oomwatch.store.rows import (
    Sample,
    engine_values,
    event_values,
    gpu_values,
    host_values,
    process_values,
    scaled,
    to_json,
    to_ms,
)

SAME_EVERY_MS: Final = 10_000
EXTRA_EVERY_MS: Final = 60_000
_REMEMBERED: Final = 8192
_USUAL_STATES: Final = {"R", "S", "I"}  # running, sleeping, idle: they change all the time

_MARK: Final = schema.rollup_mark
_FIRST: Final = bindparam("first", type_=BigInteger)
# Built once: it is run with every batch, and building it takes longer than running it.
_PULL_BACK: Final = (
    update(_MARK)
    .where(_MARK.c.host_id == bindparam("host"), _MARK.c.until_ms > _FIRST)
    .values(until_ms=_FIRST - _FIRST % (_MARK.c.step * 1000))
)

Rows = dict[schema.SampleTable, list[dict[str, Any]]]


class Recorder:
    """Writes batches of one host; remembers ids and last values from one batch to the next."""

    def __init__(self, host: str) -> None:
        self.names = Dictionary(host)
        self._last: dict[tuple[str, int, int], tuple[int, Any]] = {}
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
            connection.execute(insert_new(connection, table.raw), values)
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
        for sample, clock in samples:
            ts = to_ms(sample.at)
            table, key, values = self._values(connection, sample, ts)
            place = {
                "ts_ms": ts,
                table.key: key,
                "clock_id": self.names.clock_id(connection, clock),
            }
            if table is schema.ENGINE:
                assert isinstance(sample, EngineSample)  # noqa: S101 - by its table
                values["extra"] = self._changed_extra(key, place["clock_id"], ts, sample.extra)
            elif table in {schema.GPU_PROCESS, schema.PROCESS} and self._is_repeat(
                table, place, values
            ):
                continue
            rows[table].append({**place, **values})
        return rows

    def _values(
        self, connection: Connection, sample: Sample, ts: int
    ) -> tuple[schema.SampleTable, int, dict[str, Any]]:
        match sample:
            case GpuSample():
                return schema.GPU, self.names.gpu_id(connection, sample), gpu_values(sample)
            case GpuProcessSample():
                holder = self.names.holder_id(connection, sample, ts)
                return schema.GPU_PROCESS, holder, {"used_bytes": scaled(sample.used_bytes)}
            case ProcessSample():
                process = self.names.process_id(connection, sample, ts)
                return schema.PROCESS, process, process_values(sample)
            case HostSample():
                return schema.HOST, self.names.host_id(connection), host_values(sample)
            case EngineSample():
                engine = self.names.engine_id(connection, sample.engine, ts)
                return schema.ENGINE, engine, engine_values(sample)

    def _is_repeat(
        self, table: schema.SampleTable, place: Mapping[str, int], values: Mapping[str, Any]
    ) -> bool:
        key = (table.name, place[table.key], place["clock_id"])
        told = {**values, "state": None} if values.get("state") in _USUAL_STATES else values
        last = self._last.get(key)
        if last is not None and last[1] == told and 0 <= place["ts_ms"] - last[0] < SAME_EVERY_MS:
            return True
        if len(self._last) >= _REMEMBERED:
            self._last.clear()
        self._last[key] = (place["ts_ms"], told)
        return False

    def _changed_extra(
        self, engine: int, clock: int, ts: int, extra: Mapping[str, float]
    ) -> str | None:
        """The numbers that changed since this engine's last row; once a minute all of them."""
        numbers = {str(name): value for name, value in extra.items()}
        whole_at, before = self._extra.get((engine, clock), (None, {}))
        whole = whole_at is None or not 0 <= ts - whole_at < EXTRA_EVERY_MS
        if not whole and before.keys() - numbers.keys():
            whole = True  # one is gone: only a whole row can say so
        self._extra[engine, clock] = (ts if whole or whole_at is None else whole_at, numbers)
        if whole:
            return to_json({"": 1, **numbers}) if numbers or before else None
        changed = {name: value for name, value in numbers.items() if before.get(name) != value}
        return to_json(changed) if changed else None

    def _pull_back(self, connection: Connection, rows: Rows) -> None:
        """Have the tiers count rows again that came late."""
        times = [row["ts_ms"] for values in rows.values() for row in values]
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
