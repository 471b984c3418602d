"""Small numbers for the names in samples: looked up once, remembered, inserted when new."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Table, select, update

from oomwatch.engines.secrets import hide_words
from oomwatch.records import GpuProcessSample, GpuSample, ProcessSample
from oomwatch.store import schema
from oomwatch.store.clock import Clock
from oomwatch.store.inserts import insert_new

SEEN_EVERY_MS: Final = 15 * 60_000
"""How far `seen_ms` of a dictionary row may lag behind its last sample."""

# What the names in samples are; each is a tuple.
of_process: Final = operator.attrgetter(
    "pid", "ppid", "name", "cmdline", "cgroup", "unit", "container"
)
of_holder: Final = operator.attrgetter("gpu", "pid", "name", "kind", "mig")

_REMEMBERED: Final = 8192  # names; a host where thousands of processes come and go forgets some


def digest_of(*parts: object) -> int:
    """A signed 64-bit number that stands for these values."""
    text = json.dumps(parts, default=str, ensure_ascii=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True)


def plain(text: str | None) -> str | None:
    """A text that both databases take: no NUL, no half of a surrogate pair."""
    if text is None:
        return None
    return text.replace("\0", "").encode("utf-8", "replace").decode()


class Dictionary:
    """Ids of one host's names. After a transaction failed, `forget` what it may have inserted."""

    def __init__(self, host: str) -> None:
        self.host = plain(host) or "unknown"
        self._ids: dict[tuple[str, Any], tuple[int, Any]] = {}

    def forget(self) -> None:
        """Look everything up again."""
        self._ids.clear()

    def host_id(self, connection: Connection) -> int:
        """Of the host itself."""
        known = self._ids.get(("host", None))
        if known is None:
            number = _find_or_insert(connection, schema.host, {"name": self.host}, {})
            known = self._remember(("host", None), number, None)
        return known[0]

    def clock_id(self, connection: Connection, clock: Clock) -> int:
        """Of a stretch of time between two settings of the clock."""
        known = self._ids.get(("clock", clock))
        if known is None:
            key = {
                "host_id": self.host_id(connection),
                "boot_id": clock.boot_id,
                "offset_ms": clock.offset_ms,
                "from_ms": clock.from_ms,
            }
            number = _find_or_insert(connection, schema.clock, key, {})
            known = self._remember(("clock", clock), number, None)
            # Set back to before what was pruned: from here on the store is complete again.
            mark = schema.retention_mark
            connection.execute(
                update(mark).where(mark.c.from_ms > clock.from_ms).values(from_ms=clock.from_ms)
            )
        return known[0]

    def gpu_id(self, connection: Connection, sample: GpuSample) -> int:
        """Of a GPU or MIG instance; its name and total are kept up to date."""
        name, told = ("gpu", (sample.gpu, sample.uuid)), (sample.name, sample.total_bytes)
        known = self._ids.get(name)
        if known is not None and known[1] == told:
            return known[0]
        uuid = plain(sample.uuid) or ""
        key = {"host_id": self.host_id(connection), "gpu": sample.gpu, "uuid": uuid}
        facts = {"name": plain(sample.name), "total_bytes": sample.total_bytes}
        number = _find_or_insert(connection, schema.gpu, key, facts)
        given = {column: value for column, value in facts.items() if value is not None}
        if given:
            connection.execute(update(schema.gpu).where(schema.gpu.c.id == number).values(**given))
        return self._remember(name, number, told)[0]

    def engine_id(self, connection: Connection, engine: str, ts_ms: int) -> int:
        """Of an engine, by the id that discovery gave it."""
        name = ("engine", engine)
        number = self._seen(connection, schema.engine, name, ts_ms)
        if number is None:
            key = {"host_id": self.host_id(connection), "name": plain(engine) or "unknown"}
            number = _find_or_insert(connection, schema.engine, key, {"seen_ms": ts_ms})
            self._remember(name, number, None)
            self._seen(connection, schema.engine, name, ts_ms)
        return number

    def process_id(self, connection: Connection, sample: ProcessSample, ts_ms: int) -> int:
        """Of a process under its present name, parent and cgroup."""
        name = ("process", of_process(sample))
        number = self._seen(connection, schema.process, name, ts_ms)
        if number is not None:
            return number
        words = sample.cmdline
        facts = {
            "pid": sample.pid,
            "ppid": sample.ppid,
            "name": plain(sample.name),
            "cmdline": plain(json.dumps(hide_words(words))) if words is not None else None,
            "cgroup": plain(sample.cgroup),
            "unit": plain(sample.unit),
            "container": plain(sample.container),
        }
        return self._describe(connection, schema.process, name, facts, ts_ms=ts_ms)

    def holder_id(self, connection: Connection, sample: GpuProcessSample, ts_ms: int) -> int:
        """Of a process as the holder of memory of one GPU."""
        name = ("holder", of_holder(sample))
        number = self._seen(connection, schema.holder, name, ts_ms)
        if number is not None:
            return number
        facts = {
            "gpu": sample.gpu,
            "pid": sample.pid,
            "name": plain(sample.name),
            "kind": plain(sample.kind),
            "mig": plain(sample.mig),
        }
        return self._describe(connection, schema.holder, name, facts, ts_ms=ts_ms)

    def _describe(
        self,
        connection: Connection,
        table: Table,
        name: tuple[str, Any],
        facts: Mapping[str, Any],
        *,
        ts_ms: int,
    ) -> int:
        """Insert what has no row yet, and remember it by `name`."""
        key = {"host_id": self.host_id(connection), "digest": digest_of(*facts.values())}
        number = _find_or_insert(connection, table, key, {**facts, "seen_ms": ts_ms})
        self._remember(name, number, None)
        self._seen(connection, table, name, ts_ms)
        return number

    def _seen(
        self, connection: Connection, table: Table, name: tuple[str, Any], ts_ms: int
    ) -> int | None:
        """The id of a name, if it is remembered; notes now and then that it is still seen."""
        known = self._ids.get(name)
        if known is None:
            return None
        number, noted_ms = known
        if noted_ms is None or abs(ts_ms - noted_ms) >= SEEN_EVERY_MS:
            newer = (table.c.id == number) & (table.c.seen_ms < ts_ms)
            connection.execute(update(table).where(newer).values(seen_ms=ts_ms))
            self._remember(name, number, ts_ms)
        return number

    def _remember(self, name: tuple[str, Any], number: int, facts: object) -> tuple[int, Any]:
        if len(self._ids) >= _REMEMBERED:
            self._ids.clear()
        self._ids[name] = (number, facts)
        return self._ids[name]


def _find_or_insert(
    connection: Connection, table: Table, key: Mapping[str, Any], facts: Mapping[str, Any]
) -> int:
    found = select(table.c.id).where(*(table.c[name] == value for name, value in key.items()))
    number = connection.scalar(found)
    if number is None:
        connection.execute(insert_new(connection, table).values(**key, **facts))
        number = connection.scalar(found)
    return int(number or 0)


def read_last_clock(connection: Connection, host: str) -> Clock | None:
    """The clock that a host's rows were last written under."""
    row = connection.execute(
        select(schema.clock.c.boot_id, schema.clock.c.offset_ms, schema.clock.c.from_ms)
        .join(schema.host, schema.host.c.id == schema.clock.c.host_id)
        .where(schema.host.c.name == (plain(host) or "unknown"))
        .order_by(schema.clock.c.id.desc())
        .limit(1)
    ).first()
    return None if row is None else Clock(row.boot_id, row.offset_ms, row.from_ms)
