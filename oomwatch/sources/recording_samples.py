"""The sample files of a recording: one JSON object a line, read in constant memory.

``gpu.jsonl``, ``gpu_process.jsonl``, ``process.jsonl``, ``host.jsonl`` and ``engine.jsonl``, e.g.
``{"t": 1760000000.5, "gpu": 0, "used_bytes": 73014444032, "free_bytes": 11811160064}``

A line that cannot be read is counted and skipped. A file with more samples than `MAX_SAMPLES` is
thinned while it is read: of every run of neighbouring samples of one thing (a GPU, a process, an
engine) those stay that hold the smallest and the largest value of each watched field, so no peak,
no trough and no last value is lost.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from oomwatch.records import EngineSample, GpuProcessSample, GpuSample, HostSample, ProcessSample
from oomwatch.sources.regular_file import LAST_MOMENT

MAX_SAMPLES: Final = 50_000
MAX_LINE_BYTES: Final = 1024 * 1024

Sample = TypeVar("Sample", GpuSample, GpuProcessSample, ProcessSample, HostSample, EngineSample)

_ENGINE_FIELDS: Final = frozenset(
    field.name for field in dataclasses.fields(EngineSample) if field.name not in {"at", "extra"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class SampleKind(Generic[Sample]):
    """How one file becomes samples, and what must survive when there are too many of them."""

    file_name: str
    read: Callable[[Mapping[str, Any]], Sample | None]
    key: Callable[[Sample], Hashable]
    watched: tuple[str, ...]  # the first after `at` ranks things when there are too many of them


class Thinner(Generic[Sample]):
    """Keeps at most `limit` samples, with the extremes of every watched field of every thing."""

    def __init__(self, kind: SampleKind[Sample], limit: int = MAX_SAMPLES) -> None:
        self._kind: SampleKind[Sample] = kind
        self._limit = limit
        self._samples: list[Sample] = []
        self.thinned = False
        self.dropped_things = 0

    def add(self, sample: Sample) -> None:
        """Take one more sample; now and then all of them are thinned."""
        self._samples.append(sample)
        if len(self._samples) > self._limit:
            self._thin()

    def samples(self) -> tuple[Sample, ...]:
        """What was kept, in order of time."""
        return tuple(sorted(self._samples, key=lambda sample: sample.at))

    def _thin(self) -> None:
        self.thinned = True
        things: dict[Hashable, list[Sample]] = {}
        for sample in self._samples:
            things.setdefault(self._kind.key(sample), []).append(sample)
        # Each run keeps two samples a field at most: a quarter of it.
        run_length = 8 * len(self._kind.watched)
        kept = {
            key: [
                sample
                for start in range(0, len(samples), run_length)
                for sample in self._extremes(samples[start : start + run_length])
            ]
            for key, samples in things.items()
        }
        if sum(map(len, kept.values())) > self._limit * 3 // 4:
            kept = self._largest(kept)
        self._samples = [sample for samples in kept.values() for sample in samples]

    def _extremes(self, run: list[Sample]) -> list[Sample]:
        places: set[int] = set()
        for field in self._kind.watched:
            known = [
                (value, place)
                for place, sample in enumerate(run)
                if (value := getattr(sample, field)) is not None
            ]
            if known:
                places.add(min(known)[1])
                places.add(max(known)[1])
        return [run[place] for place in sorted(places)]

    def _largest(self, kept: dict[Hashable, list[Sample]]) -> dict[Hashable, list[Sample]]:
        """The things with the largest peaks: a recording of many short-lived processes."""
        rank_by = self._kind.watched[1]

        def peak(key: Hashable) -> float:
            return max((getattr(sample, rank_by) or 0 for sample in kept[key]), default=0)

        room, chosen = self._limit // 2, dict[Hashable, list[Sample]]()
        for key in sorted(kept, key=peak, reverse=True):
            if len(kept[key]) <= room:
                room -= len(kept[key])
                chosen[key] = kept[key]
            else:
                self.dropped_things += 1
        return chosen


def read_samples(
    directory: Path, kind: SampleKind[Sample], problems: list[str], *, limit: int = MAX_SAMPLES
) -> tuple[Sample, ...]:
    """All samples of one file in order of time; what went wrong is added to `problems`."""
    path = directory / kind.file_name
    if not path.is_file():
        return ()
    thinner = Thinner(kind, limit)
    bad = 0
    try:
        for line in _lines(path):
            sample = None if line is None else _sample_of(line, kind)
            if sample is None:
                bad += 1
            else:
                thinner.add(sample)
    except OSError as error:
        problems.append(f"{kind.file_name}: {error.strerror or 'cannot be read'}")
    if bad:
        problems.append(f"{kind.file_name}: {bad} unreadable lines were skipped")
    if thinner.dropped_things:
        problems.append(
            f"{kind.file_name}: {thinner.dropped_things} of the smallest things were left out, "
            "there were too many"
        )
    elif thinner.thinned:
        problems.append(f"{kind.file_name}: thinned, peaks and last values are kept")
    return thinner.samples()


def iterate_samples(directory: Path, kind: SampleKind[Sample]) -> Iterator[Sample]:
    """All samples of one file as they stand there, one at a time; unreadable lines are left out."""
    path = directory / kind.file_name
    if path.is_file():
        for line in _lines(path):
            sample = None if line is None else _sample_of(line, kind)
            if sample is not None:
                yield sample


def _lines(path: Path) -> Iterator[bytes | None]:
    """Lines that are not blank; None for one that is too long to be a sample."""
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield None
            elif line.strip():
                yield line


def _sample_of(line: bytes, kind: SampleKind[Sample]) -> Sample | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(row, dict) or moment(row.get("t")) is None:
        return None
    return kind.read(row)


# ---------------------------------------------------------------- values
def number(value: object) -> float | None:
    """A finite number of 64 bits; None for anything else, booleans included."""
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int and -(2**63) < value < 2**63:
        return value
    return None


def moment(value: object) -> float | None:
    """A time that calendars and databases have; None for anything else."""
    found = number(value)
    return found if found is not None and 0 <= found < LAST_MOMENT else None


def count(value: object) -> int | None:
    """A number that can be a size in bytes or an id: not negative, below 2^63."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**63 else None


def text(value: object) -> str | None:
    """A string; None for anything else, and for an empty one."""
    return value if isinstance(value, str) and value else None


# ---------------------------------------------------------------- the five files
def gpu_kind(totals: Mapping[int, int | None], only_gpu: int | None) -> SampleKind[GpuSample]:
    """`totals` are the manifest's, by index; boards that share the host's memory have none."""

    def read(row: Mapping[str, Any]) -> GpuSample | None:
        gpu = only_gpu if row.get("gpu") is None else count(row["gpu"])
        if gpu is None:
            return None
        used, free = count(row.get("used_bytes")), count(row.get("free_bytes"))
        reserved = count(row.get("reserved_bytes"))
        total = totals.get(gpu)
        if total is None and used is not None and free is not None and reserved is not None:
            total = used + free + reserved  # NVML v2
        return GpuSample(
            at=row["t"],
            gpu=gpu,
            uuid=text(row.get("uuid")),
            name=text(row.get("name")),
            total_bytes=total,
            used_bytes=used,
            free_bytes=free,
            reserved_bytes=reserved,
            utilization_ratio=number(row.get("utilization_ratio")),
            temperature_celsius=number(row.get("temperature_celsius")),
            power_watts=number(row.get("power_watts")),
            used_max_bytes=count(row.get("used_max_bytes")),
            free_min_bytes=count(row.get("free_min_bytes")),
        )

    watched = ("at", "used_bytes", "free_bytes")
    return SampleKind("gpu.jsonl", read, lambda sample: sample.gpu, watched)


def gpu_process_kind(only_gpu: int | None) -> SampleKind[GpuProcessSample]:
    """Who holds how much of which GPU."""

    def read(row: Mapping[str, Any]) -> GpuProcessSample | None:
        gpu = only_gpu if row.get("gpu") is None else count(row["gpu"])
        pid = count(row.get("pid"))
        if gpu is None or pid is None:
            return None
        return GpuProcessSample(
            at=row["t"],
            gpu=gpu,
            pid=pid,
            name=text(row.get("name")),
            used_bytes=count(row.get("used_bytes")),
            kind=text(row.get("kind")),
            mig=text(row.get("mig")),
        )

    watched = ("at", "used_bytes")
    return SampleKind("gpu_process.jsonl", read, lambda sample: (sample.gpu, sample.pid), watched)


def process_kind() -> SampleKind[ProcessSample]:
    """Processes; their command line stands on their first line only, as a rule."""

    def read(row: Mapping[str, Any]) -> ProcessSample | None:
        pid = count(row.get("pid"))
        if pid is None:
            return None
        cmdline = row.get("cmdline")
        return ProcessSample(
            at=row["t"],
            pid=pid,
            ppid=count(row.get("ppid")),
            name=text(row.get("name")),
            cmdline=tuple(map(str, cmdline)) if isinstance(cmdline, list) else None,
            rss_bytes=count(row.get("rss_bytes")),
            shared_bytes=count(row.get("shared_bytes")),
            swap_bytes=count(row.get("swap_bytes")),
            cgroup=text(row.get("cgroup")),
            unit=text(row.get("unit")),
            container=text(row.get("container")),
            state=text(row.get("state")),
        )

    watched = ("at", "rss_bytes", "swap_bytes")
    return SampleKind("process.jsonl", read, lambda sample: sample.pid, watched)


def host_kind() -> SampleKind[HostSample]:
    """Memory of the host."""

    def read(row: Mapping[str, Any]) -> HostSample:
        return HostSample(
            at=row["t"],
            mem_total_bytes=count(row.get("mem_total_bytes")),
            mem_available_bytes=count(row.get("mem_available_bytes")),
            swap_used_bytes=count(row.get("swap_used_bytes")),
            cgroup_oom_kills=count(row.get("cgroup_oom_kills")),
        )

    watched = ("at", "mem_available_bytes", "swap_used_bytes", "cgroup_oom_kills")
    return SampleKind("host.jsonl", read, lambda _sample: None, watched)


def engine_kind(only_engine: str | None) -> SampleKind[EngineSample]:
    """An engine's own counters; numbers without a field of their own go to `extra`."""

    def read(row: Mapping[str, Any]) -> EngineSample | None:
        engine = only_engine if row.get("engine") is None else text(row["engine"])
        if engine is None:
            return None
        values = {
            name: value
            for name, raw in row.items()
            if name not in {"t", "engine"} and (value := number(raw)) is not None
        }
        known = {name: value for name, value in values.items() if name in _ENGINE_FIELDS}
        extra = {name: value for name, value in values.items() if name not in _ENGINE_FIELDS}
        return EngineSample(at=row["t"], engine=engine, extra=extra, **known)

    watched = ("at", "kv_usage_ratio", "running", "waiting", "preemptions_total")
    return SampleKind("engine.jsonl", read, lambda sample: sample.engine, watched)
