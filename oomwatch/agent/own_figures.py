"""What the agent itself takes and how it does, as it is exported."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from oomwatch.agent.messages import Mailbox
from oomwatch.agent.own_usage import OwnUsage, OwnUsageMeter
from oomwatch.errors import OomwatchError
from oomwatch.export.snapshot import AgentFigures, ReceiverFigures
from oomwatch.notify.delivery import SinkStatus
from oomwatch.store.location import file_of, parse_store
from oomwatch.store.writer import StoreWriter

_USAGE_SECONDS: Final = 10.0
_FILES: Final = ("", "-wal", "-shm")


@dataclasses.dataclass(slots=True)
class OwnFigures:
    """`look` reads the host now and then; everything else is in memory."""

    mailbox: Mailbox
    writer: StoreWriter
    address: str
    stuck: Callable[[float], list[str]]
    """Threads that have not come round, at a monotonic time."""
    receivers: Callable[[], tuple[SinkStatus, ...]] = tuple
    started_at: float = dataclasses.field(default_factory=time.time)
    reload_ok: bool = True
    page_seconds: float | None = None
    _meter: OwnUsageMeter = dataclasses.field(default_factory=OwnUsageMeter)
    _usage: OwnUsage | None = None
    _store_bytes: int | None = None
    _due: float = 0.0

    def look(self) -> None:
        """Read memory, threads, open files and the size of the store, if it is time."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + _USAGE_SECONDS
        self._usage = self._meter.read()
        self._store_bytes = _size_of(self.address)

    def figures(self) -> AgentFigures:
        """All of it, from memory."""
        status, usage = self.writer.status, self._usage
        return AgentFigures(
            started_at=self.started_at,
            cpu_seconds=time.process_time(),
            resident_bytes=usage.rss_bytes if usage else None,
            threads=usage.threads if usage else None,
            open_files=usage.descriptors if usage else None,
            store_bytes=self._store_bytes,
            stuck_threads=len(self.stuck(time.monotonic())),
            reload_ok=self.reload_ok,
            page_seconds=self.page_seconds,
            queues={"detector": len(self.mailbox), "store": status.pending},
            dropped={
                "detector": self.mailbox.dropped_total,
                "store_samples": status.dropped_samples_total,
                "store_events": status.dropped_events_total,
            },
            sources={"store": status.mode == "ok"},
            receivers=tuple(map(_receiver, self.receivers())),
        )


def _receiver(status: SinkStatus) -> ReceiverFigures:
    return ReceiverFigures(
        name=status.name,
        due=status.waiting,
        held=status.held,
        delivered_total=status.delivered_total,
        failed_total=status.failed_total,
        attempts_failed_total=status.attempts_failed_total,
        ok=status.disabled is None and status.trouble is None,
    )


def _size_of(address: str) -> int | None:
    """Bytes of an SQLite store with its log; None for a server."""
    try:
        path = file_of(parse_store(address))
    except OomwatchError:
        return None
    if path is None:
        return None
    size = 0
    for suffix in _FILES:
        with contextlib.suppress(OSError):
            size += Path(f"{path}{suffix}").stat().st_size
    return size
