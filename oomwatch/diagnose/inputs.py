"""What `diagnose` is given: everything that was read, by kind, before anything is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from oomwatch.records import (
    EngineExit,
    EngineSample,
    Gpu,
    KernelEvent,
    LogLine,
    RecordedEngine,
    Series,
    SourceStatus,
    Trigger,
)


@dataclasses.dataclass(frozen=True, slots=True)
class LogInput:
    """One log, and the engine it belongs to where that is known."""

    name: str
    lines: Iterable[LogLine]
    engine_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PageInput:
    """One metrics page: figures per engine label, and what its constants say."""

    source: str
    engine: str | None
    samples: tuple[EngineSample, ...]
    model_name: str | None = None
    kv_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    engine_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class KernelInput:
    """The events of one kernel log."""

    name: str
    events: tuple[KernelEvent, ...]
    live: bool = False
    """Whether it is the running kernel's own: what it does not say did not happen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Orphan:
    """A process of an engine whose server is gone; it still holds memory."""

    pid: int
    name: str
    gpu: int | None
    held_bytes: int | None
    on_gpu: bool
    engine_id: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """All inputs of one diagnosis."""

    generated_at: float
    host: str | None = None
    logs: tuple[LogInput, ...] = ()
    pages: tuple[PageInput, ...] = ()
    kernel: tuple[KernelInput, ...] = ()
    series: Series = dataclasses.field(default_factory=Series)
    engines: tuple[RecordedEngine, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    command: str | None = None
    model_config: Mapping[str, Any] | None = None
    engine: str | None = None
    version: str | None = None
    sources: tuple[SourceStatus, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    exits: tuple[EngineExit, ...] = ()
    """How engines that are gone ended, by their id."""
    noticed: tuple[Trigger, ...] = ()
    """What the agent has noticed; of it what no other input shows as well is judged."""
    live: bool = False
    """Whether the engines were found running, rather than read from files."""
