"""A recording in order of time, read as it goes: a day of eight GPUs is not held in memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

from oomwatch.records import KernelEvent, ProcessSample
from oomwatch.sources.follow import READ_BYTES, Chunk
from oomwatch.sources.kernel import read_kernel_log
from oomwatch.sources.logfile import read_pieces
from oomwatch.sources.logformat_lines import Piece
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.recording import Recording
from oomwatch.sources.recording_rows import AnySample
from oomwatch.sources.recording_samples import (
    SampleKind,
    engine_kind,
    gpu_kind,
    gpu_process_kind,
    host_kind,
    iterate_samples,
    process_kind,
)

_BLOCK_BYTES: Final = 8 << 10


def stream_samples(recording: Recording) -> Iterator[AnySample | KernelEvent]:
    """All samples and kernel events of a recording; each file is in order of time already."""
    gpus, engines = recording.gpus, recording.engines
    totals = {gpu.index: gpu.total_bytes for gpu in gpus if gpu.index is not None}
    only_gpu = gpus[0].index if len(gpus) == 1 else None
    only_engine = engines[0].id if len(engines) == 1 else None
    kinds: tuple[SampleKind[Any], ...] = (
        gpu_process_kind(only_gpu),
        gpu_kind(totals, only_gpu),
        process_kind(),
        host_kind(),
        engine_kind(only_engine),
    )
    root = Path(recording.root)
    streams: list[Iterator[AnySample | KernelEvent]] = [
        _of_processes(iterate_samples(root, kind))
        if kind.file_name == "process.jsonl"
        else iterate_samples(root, kind)
        for kind in kinds
    ]
    if recording.kernel_log is not None:
        streams.append(read_kernel_log(recording.kernel_log))
    begin = recording.started_at or 0.0
    yield from heapq.merge(*streams, key=lambda item: item.at if item.at is not None else begin)


def _of_processes(samples: Iterator[AnySample]) -> Iterator[AnySample]:
    """Samples of processes, each with what stands on the first line of its process only."""
    known: dict[int, ProcessSample] = {}
    for sample in samples:
        if not isinstance(sample, ProcessSample):
            continue
        first = known.get(sample.pid)
        if sample.cmdline is not None or first is None:
            known[sample.pid] = sample
            yield sample
            continue
        yield dataclasses.replace(
            sample,
            ppid=first.ppid,
            name=first.name,
            cmdline=first.cmdline,
            cgroup=first.cgroup,
            unit=first.unit,
            container=first.container,
        )


class ReplayFollower:
    """Follows a recorded log as it grew: gives the lines that are due by the replay's clock."""

    def __init__(self, path: str, recording: Recording, wall: Callable[[], float]) -> None:
        self.missed: str | None = None
        self._wall = wall
        self._lines = _timed_lines(Path(path), recording)
        self._next = next(self._lines, None)

    @property
    def position(self) -> None:
        """Nowhere to go on from."""

    @property
    def due_at(self) -> float | None:
        """The time of the next line; None at the end."""
        return None if self._next is None else self._next[0]

    def read(self, *, limit: int = READ_BYTES, now: float | None = None) -> Iterator[Chunk]:
        """The lines that are due; `now` is that of the clock that was given."""
        due = self._wall() if now is None else now
        lines: list[bytes] = []
        number, fresh, size = 0, False, 0
        while self._next is not None and self._next[0] <= due and size < limit:
            at_number, raw = self._next[1], self._next[2]
            if not lines:
                number, fresh = at_number, at_number == 1
            lines.append(raw)
            size += len(raw)
            self._next = next(self._lines, None)
        if lines:
            yield Chunk(b"".join(lines), number, fresh)

    def close(self) -> None:
        """Let go of the file."""
        self._next = None
        self._lines.close()


def _timed_lines(
    path: Path, recording: Recording
) -> Generator[tuple[float, int, bytes], None, None]:
    """Time, number and bytes of each line; one without a time has that of the line before it."""
    clock = Clock(None, recording.ended_at)
    last, number = recording.started_at or 0.0, 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            block += file.readline()
            if not block.endswith(b"\n"):
                block += b"\n"
            times = {
                line.number: line.at
                for line in read_pieces([Piece(number, block, joined=False)], str(path), clock)
                if line.at is not None
            }
            for raw in block.split(b"\n")[:-1]:
                last = max(last, times.get(number, last))
                yield last, number, raw + b"\n"
                number += 1
