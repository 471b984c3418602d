"""What the agent knows at one moment, as plain records: all that is exported comes from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from oomwatch.records import EngineSample, GpuSample

EngineState = Literal["starting", "serving", "unresponsive", "broken", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFigures:
    """One GPU, or one MIG instance of it. A GPU that is not `ok` has no figures worth showing."""

    sample: GpuSample
    ok: bool = True
    mig: str = ""
    """UUID of the instance; empty for a whole GPU."""
    pci: str | None = None
    unattributed_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class HolderFigures:
    """Memory that one holder, of one process or more, has on one GPU or MIG instance."""

    gpu: int
    uuid: str | None
    used_bytes: int
    mig: str = ""
    engine_id: str | None = None
    role: str = "other"
    process: str | None = None
    unit: str | None = None
    container: str | None = None
    namespace: str | None = None
    pod: str | None = None
    pid: int | None = None
    """Only where every process is a holder of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class PoolFigures:
    """One pool of an engine: a data-parallel rank."""

    label: str
    """What the engine itself calls it: "0", "1"."""
    sample: EngineSample
    preemptions_per_minute: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFigures:
    """One engine that runs, or has just ended."""

    id: str
    state: EngineState
    kind: str | None = None
    version: str | None = None
    model: str | None = None
    unit: str | None = None
    container: str | None = None
    namespace: str | None = None
    pod: str | None = None
    started_at: float | None = None
    scraped: bool | None = None
    """Whether its page was read lately; None where it has none."""
    answer_seconds: float | None = None
    pools: tuple[PoolFigures, ...] = ()
    components: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Bytes on one of its GPUs, by what they are for."""

    def with_pools(self, pools: tuple[PoolFigures, ...]) -> EngineFigures:
        """The same engine with these of its pools."""
        return self if len(pools) == len(self.pools) else dataclasses.replace(self, pools=pools)


@dataclasses.dataclass(frozen=True, slots=True)
class ForecastFigures:
    """In which time a resource will be used up."""

    resource: str
    """gpu, kv or host."""
    eta_seconds: float
    engine_id: str | None = None
    gpu: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class IncidentFigures:
    """An incident that is open."""

    id: str
    kind: str
    severity: str
    opened_at: float
    cls: str | None = None
    cause: str | None = None
    engine_id: str | None = None
    summary: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ReceiverFigures:
    """How one receiver of messages does."""

    name: str
    due: int
    """Messages that could be sent now, or are to be tried again."""
    held: int
    """Messages that are not to be sent before their time comes."""
    delivered_total: int
    failed_total: int
    """Messages that were refused or given up."""
    attempts_failed_total: int
    ok: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class AgentFigures:
    """What the agent itself takes, and how it does."""

    started_at: float
    cpu_seconds: float
    resident_bytes: int | None = None
    threads: int | None = None
    open_files: int | None = None
    store_bytes: int | None = None
    stuck_threads: int = 0
    reload_ok: bool = True
    page_seconds: float | None = None
    queues: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sources: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    receivers: tuple[ReceiverFigures, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class PeakFigures:
    """Maxima since somebody has asked before: the only figures that differ by who asks."""

    used_bytes: Mapping[tuple[int, str], float] = dataclasses.field(default_factory=dict)
    """By index of a GPU and UUID of its MIG instance, or an empty text."""
    late_seconds: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """All of it; `at` is UTC epoch seconds."""

    at: float
    host: str
    version: str
    agent: AgentFigures
    driver_version: str | None = None
    driver_silent_seconds: float | None = None
    gpus: tuple[GpuFigures, ...] = ()
    gpus_expected: int = 0
    holders: tuple[HolderFigures, ...] = ()
    engines: tuple[EngineFigures, ...] = ()
    host_total_bytes: int | None = None
    host_available_bytes: int | None = None
    host_swap_bytes: int | None = None
    forecasts: tuple[ForecastFigures, ...] = ()
    incidents: tuple[IncidentFigures, ...] = ()
    incidents_total: Mapping[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    """By class and cause."""
    last_incidents: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    titles: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What the causes of these incidents are called, by id."""
    triggers_total: Mapping[str, int] = dataclasses.field(default_factory=dict)
