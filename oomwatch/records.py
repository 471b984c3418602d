"""The plain records that stages hand to each other. No logic, no I/O; units are in the names.

Unknown is None, never 0. Times are UTC epoch seconds. Sizes are bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

Verdict = Literal["oom", "at_risk", "healthy", "not_oom", "unknown"]
CauseClass = Literal["startup", "long_context", "irregular", "not_oom"]
Direction = Literal["more_kv", "less_kv", "less_weights", "less_host", "free_gpu", "other"]
Phase = Literal["starting", "serving", "exited", "unknown"]
EvidenceSource = Literal[
    "log", "kernel", "metrics", "nvml", "process", "arguments", "config", "computed"
]
SourceStatusName = Literal["ok", "warning", "error", "not_available"]
KernelEventKind = Literal[
    "oom_kill",  # the OOM killer chose and killed a process
    "oom_invoked",  # it was called, and no kill is in the log
    "unit_oom_kill",  # systemd says that a process of a unit was killed
    "xid",  # an NVIDIA driver error with a code
    "driver_no_memory",  # an allocation inside the GPU driver failed
    "driver_mismatch",  # user-space and kernel parts of the driver differ
    "hardware_ecc",  # host memory or machine-check error
    "native_crash",  # SIGSEGV, SIGILL, SIGBUS as the kernel logs them
]
TriggerKind = Literal[
    "log_failure",  # an engine's log says that it failed
    "process_exit",  # a process of an engine ended
    "cgroup_oom",  # the kill counter of an engine's cgroup rose
    "kernel_oom",  # the kernel log names a kill
    "kv_saturation",  # the KV pool stays full
    "preemption_storm",  # preemptions come faster than noise
    "never_fits",  # a request waits that no free pool could take
    "zombie_engine",  # the port answers, the engine behind it does not work
    "restart_loop",  # starts follow each other and none gets to serve
    "driver_unresponsive",  # a driver call has not come back
    "gpu_lost",
    "orphan_holder",  # a process holds GPU memory whose engine is gone
    "neighbour_growth",  # another tenant of the GPU grows
    "gpu_headroom",  # little memory is left on a GPU
    "host_headroom",  # little host memory, or of a cgroup's limit, is left
    "forecast_kv",  # the KV pool will be full soon
    "forecast_gpu",  # the GPU's headroom will be used up soon
    "forecast_host",  # the host's or cgroup's memory will be used up soon
]
IncidentState = Literal["open", "closed"]
OutboxState = Literal[
    "held",  # to be told later, or not at all: quiet hours, a silence, a cooldown
    "waiting",  # to be sent, now or after a pause
    "retry",  # a person asked for another attempt; the agent makes it waiting
    "delivered",
    "grouped",  # told by a message about several incidents, which `reason` names
    "failed",  # refused, or given up
    "dropped",  # became needless before it was sent
]


# ---------------------------------------------------------------- samples (sources produce them)
@dataclasses.dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU or MIG instance; NVML v2: total = reserved + used + free."""

    at: float
    gpu: int
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    utilization_ratio: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    used_max_bytes: int | None = None
    """Highest `used_bytes` since the sample kept before this one; None: this sample's own."""
    free_min_bytes: int | None = None
    """Lowest `free_bytes` since the sample kept before this one; None: this sample's own."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuProcessSample:
    """GPU memory that one process holds on one GPU; used_bytes None where the driver hides it."""

    at: float
    gpu: int
    pid: int
    name: str | None = None
    used_bytes: int | None = None
    kind: str | None = None  # compute, graphics, mps
    mig: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ProcessSample:
    """One reading of one process."""

    at: float
    pid: int
    ppid: int | None = None
    name: str | None = None
    cmdline: tuple[str, ...] | None = None
    rss_bytes: int | None = None
    shared_bytes: int | None = None
    swap_bytes: int | None = None
    cgroup: str | None = None
    unit: str | None = None
    container: str | None = None
    state: str | None = None
    """As in ``/proc/PID/stat``: R, S, D (in the kernel), T (stopped), …"""


@dataclasses.dataclass(frozen=True, slots=True)
class HostSample:
    """Host memory, and the kernel's count of OOM kills in the watched cgroup."""

    at: float
    mem_total_bytes: int | None = None
    mem_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    cgroup_oom_kills: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSample:
    """What an engine's own counters say at one moment; counters keep their `_total`."""

    at: float
    engine: str
    running: float | None = None
    waiting: float | None = None
    swapped: float | None = None
    kv_usage_ratio: float | None = None
    preemptions_total: float | None = None
    prompt_tokens_total: float | None = None
    generation_tokens_total: float | None = None
    prefix_cache_queries_total: float | None = None
    prefix_cache_hits_total: float | None = None
    request_success_total: float | None = None
    kv_blocks_total: float | None = None
    block_size_tokens: float | None = None
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further counters and gauges by their own name, without the engine's prefix."""


@dataclasses.dataclass(frozen=True, slots=True)
class LogLine:
    """One physical line of a log, or one carriage-return part of it, without its wrappers.

    `text` has no container, journal, timestamp, level, process or rank prefix and no colours or
    control characters. `number` counts line feeds of the decompressed file, from 1.
    """

    source: str
    number: int
    text: str
    at: float | None = None
    level: str | None = None
    process: str | None = None
    pid: int | None = None
    rank: str | None = None
    origin: str | None = None
    """The engine's source file and line, as printed: ``core.py:515``."""
    stream: str | None = None
    container: str | None = None
    """The service, pod or container that a compose or kubectl prefix names."""
    prefixed: bool = False
    """Whether the line carried an engine prefix; lines of a traceback often do not."""


@dataclasses.dataclass(frozen=True, slots=True)
class KernelEvent:
    """One thing the kernel or the GPU driver said: a kill, an Xid, a driver allocation that failed.

    `fields` carries what the kind has, by these names: pid, comm (15 characters at most),
    total_vm_bytes, anon_rss_bytes, file_rss_bytes, shmem_rss_bytes, oom_score_adj, constraint,
    scope (``host``, ``cgroup``, ``cpuset``, ``memory_policy``), oom_memcg, task_memcg, invoked_by,
    group (path), usage_bytes, limit_bytes, tasks (pid, comm, rss_bytes; largest first), unit,
    container, pod_uid; xid, pci (``0000:3b:00``), uuid, name, detail, gpu_instance,
    compute_instance, xid_kind, xid_meaning, caused_by_xid; module, offset, client_version,
    kernel_version, corrected.
    """

    kind: KernelEventKind
    text: str
    number: int = 0
    """Line of the file, counted in line feeds from 1; 0 for live reading."""
    at: float | None = None
    monotonic_seconds: float | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class SourceStatus:
    """How reading one source went; becomes an entry of `sources` in the report."""

    name: str
    status: SourceStatusName
    detail: str | None = None


MODEL_SIZES: Final = "model sizes"
"""Name of the source that says where a model's sizes behind the predicted effects are from."""


# ---------------------------------------------------------------- what a recording or host yields
@dataclasses.dataclass(frozen=True, slots=True)
class RecordedEngine:
    """An engine as the manifest of a recording, or discovery, describes it."""

    id: str
    engine: str | None = None
    version: str | None = None
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pids: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    log: str | None = None
    metrics_url: str | None = None
    started_at: float | None = None
    ended: bool = False
    """Whether its server is known to be gone."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineExit:
    """How an engine ended, as its keeper (a container runtime, systemd) says.

    `exit_code` is the status as a shell tells it, 128 + the signal if one ended it.
    """

    engine: str
    """Id of the engine, as in `RecordedEngine`."""
    where: str
    """Who says so: ``container vllm``, ``unit vllm.service``."""
    at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    oom_killed: bool | None = None
    """Whether the kernel's OOM killer ended something in its memory cgroup."""
    restarts: int | None = None
    detail: str | None = None
    """The keeper's own words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """All samples that were read, each tuple in order of time."""

    gpus: tuple[GpuSample, ...] = ()
    gpu_processes: tuple[GpuProcessSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    hosts: tuple[HostSample, ...] = ()
    engines: tuple[EngineSample, ...] = ()


# ---------------------------------------------------------------- diagnosis
@dataclasses.dataclass(frozen=True, slots=True)
class Evidence:
    """One claim that can be looked up: where it stands, and what stands there."""

    source: EvidenceSource
    where: str
    at: float | None = None
    text: str | None = None
    value: float | int | str | bool | None = None
    unit: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """One start of one engine: who it is, how it was started, what it said about its memory.

    `arguments` are the flags that were given, by their canonical long name (``--max-model-len``),
    with the values as typed. `in_force` holds the values in force by the same names, as numbers
    where they are numbers: given flags, values the log prints, then the version's defaults.
    """

    id: str
    engine: str | None = None  # vllm, sglang, tgi, lmdeploy, llama.cpp, pytorch, ...
    fork: str | None = None  # "vllm-ascend" and the like; flags are then not validated
    version: str | None = None
    version_since: str | None = None  # where no line names the version: the oldest it can be
    version_until: str | None = None  # and the newest
    model: str | None = None
    command: tuple[str, ...] | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_force: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pids: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()
    phase: Phase = "unknown"
    generation: str | None = None  # vLLM: "V0" or "V1"
    kv_tokens: int | None = None
    kv_blocks: int | None = None
    block_size_tokens: int | None = None
    max_model_len: int | None = None
    max_concurrency: float | None = None
    total_bytes: int | None = None  # CUDA's total of the deciding GPU
    free_at_start_bytes: int | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    graph_bytes: int | None = None
    available_gpu_bytes: int | None = None  # SGLang's available_gpu_mem at ready
    model_config: Mapping[str, Any] | None = None
    gpu_name: str | None = None  # as NVML names the card
    load: EngineSample | None = None  # of a running engine: its counters, just read
    started_at: float | None = None  # of its first line, or of its first process
    arguments_seen: bool = True
    """Whether its arguments were printed or given; if not, a default in `in_force` is a guess."""
    accepted: frozenset[str] = frozenset()
    """Flags that the server itself printed as its own: it took them, whatever the tables say."""
    values_seen: frozenset[str] = frozenset()
    """Flags whose value in force was itself printed, given or measured."""


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """A second explanation, and why it ranks lower."""

    cls: CauseClass
    cause: str
    confidence: float
    why_less_likely: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPart:
    """One part of a GPU's ledger."""

    name: str
    bytes: int
    source: str  # log, nvml, computed


@dataclasses.dataclass(frozen=True, slots=True)
class GpuLedger:
    """Where the bytes of one GPU are; the parts add up to the total."""

    gpu: int | None
    total_bytes: int | None
    parts: tuple[MemoryPart, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What a rule concluded.

    `values` carries the numbers that remedies need, by documented names (docs/design.md).
    """

    cls: CauseClass
    cause: str
    confidence: float
    summary: str
    evidence: tuple[Evidence, ...] = ()
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unseen: tuple[str, ...] = ()
    engine_id: str | None = None
    at: float | None = None
    risk: bool = False
    """Growing or saturated while the engine still serves: a risk rather than an incident."""
    strength: int = 0
    """Kind of evidence, see `diagnose.rules.findings`; the stronger kind wins."""
    order: int | None = None
    """Place of the deciding line in the input; among failures of a log the earliest decides."""


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """What a remedy is predicted to change; None where it cannot be said."""

    kv_tokens_before: int | None = None
    kv_tokens_after: int | None = None
    freed_bytes: int | None = None
    max_concurrency_before: float | None = None
    max_concurrency_after: float | None = None
    kv_tokens_after_low: int | None = None
    """With `kv_tokens_after_high`: where the prediction expects `kv_tokens_after`."""
    kv_tokens_after_high: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Remedy:
    """One way out: flags to set or remove, variables to export, or an action for a person."""

    id: str
    title: str
    direction: Direction
    why: str
    cost: str
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    action: str | None = None
    effect: Effect | None = None
    valid_for: str | None = None
    validated: bool = False
    enough: bool | None = None
    """Whether this step alone is predicted to cure, where that is arithmetic."""


@dataclasses.dataclass(frozen=True, slots=True)
class Incident:
    """One event, with its explanation and its remedies."""

    id: str
    finding: Finding
    alternatives: tuple[Alternative, ...] = ()
    memory: tuple[GpuLedger, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    count: int = 1  # times the same event repeated (restart loops)


@dataclasses.dataclass(frozen=True, slots=True)
class Risk:
    """Something that will become an incident."""

    finding: Finding
    gpu: int | None = None
    eta_seconds: float | None = None
    remedies: tuple[Remedy, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the report lists it."""

    index: int | None
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """The whole answer of one `diagnose`."""

    verdict: Verdict
    generated_at: float
    host: str | None = None
    engines: tuple[EngineFacts, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    incidents: tuple[Incident, ...] = ()
    risks: tuple[Risk, ...] = ()
    sources: tuple[SourceStatus, ...] = ()
    advice: tuple[str, ...] = ()  # flags of the user's own that are known to be wrong


# ---------------------------------------------------------------- what the agent sees and stores
@dataclasses.dataclass(frozen=True, slots=True)
class Trigger:
    """Something a detector saw that may open an incident."""

    kind: TriggerKind
    at: float
    engine_id: str | None = None
    gpu: int | None = None
    pid: int | None = None
    text: str | None = None
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evidence: tuple[Evidence, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class StoredIncident:
    """One event as the store keeps it; samples from `window_from` to `window_to` outlive pruning.

    `diagnosis` is the JSON form of a Diagnosis (``oomwatch.diagnosis/1``); None before the first.
    """

    id: str
    fingerprint: str
    state: IncidentState
    opened_at: float
    closed_at: float | None = None
    engine_id: str | None = None
    host: str | None = None
    diagnosis: Mapping[str, Any] | None = None
    triggers: tuple[Trigger, ...] = ()
    window_from: float | None = None
    window_to: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class IncidentExcerpt:
    """What an incident's engines were and what they said: enough to judge it again.

    `lines` are by engine: the beginning of its log and what told, without what clients sent.
    """

    incident_id: str
    engines: tuple[RecordedEngine, ...] = ()
    exits: tuple[EngineExit, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    lines: Mapping[str, tuple[LogLine, ...]] = dataclasses.field(default_factory=dict)


# ---------------------------------------------------------------- what receivers are told
@dataclasses.dataclass(frozen=True, slots=True)
class OutboxRow:
    """One message to one receiver, as the store keeps it until some days after it was settled.

    `id` follows from the incident, the receiver and what changed, so that a second look at the
    same change after a restart makes the same row.
    """

    id: str
    sink: str
    kind: str
    state: OutboxState
    created_at: float
    changed_at: float
    incident_id: str | None = None
    change: str | None = None
    """Digest of what was told, by which a later change is known."""
    headline: str = ""
    notice: Mapping[str, Any] | None = None
    """The message itself (`oomwatch.notify.notice`), while it may still have to be sent."""
    attempts: int = 0
    due_at: float | None = None
    reason: str | None = None
    """Why it is held, was not taken, or was let be."""
    reference: str | None = None
    """The receiver's own name for it."""
    host: str | None = None
    """Set where it was read from a store."""


@dataclasses.dataclass(frozen=True, slots=True)
class Silence:
    """A time in which receivers are told nothing of some incidents.

    All that is given must match; a * stands for any text. `labels` are NAME=VALUE.
    """

    id: str
    starts_at: float
    ends_at: float
    reason: str
    author: str | None = None
    engine: str | None = None
    host: str | None = None
    incident_class: str | None = None
    cause: str | None = None
    labels: tuple[str, ...] = ()
