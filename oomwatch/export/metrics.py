"""Every metric: its name, its labels, its unit and what it means. The documentation is made of it.

Names follow Prometheus: base units, counters end in ``_total``, facts in ``_info``. `unit` and
`otlp` are for OpenTelemetry: its own name where its conventions have one, else the same words with
full stops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

MetricKind = Literal["gauge", "counter", "info"]

GPU: Final = ("gpu", "uuid", "mig")
HOLDER: Final = (
    *GPU,
    "engine_id",
    "role",
    "process",
    "unit",
    "container_name",
    "k8s_namespace",
    "k8s_pod",
    "pid",
)
ENGINE: Final = ("engine_id", "model_name")
POOL: Final = (*ENGINE, "engine")


@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """One metric; a label that is empty is left out."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    group: str
    unit: str = ""
    """As UCUM writes it: ``By``, ``s``, ``1`` for a share, ``{request}``."""
    otlp: str | None = None
    """The name of OpenTelemetry's conventions, if they have one."""


def _gauges(
    group: str, labels: tuple[str, ...], rows: Mapping[str, tuple[str, str]]
) -> list[Metric]:
    return [Metric(name, "gauge", labels, text, group, unit) for name, (unit, text) in rows.items()]


_TABLE: Final[tuple[Metric, ...]] = (
    # ------------------------------------------------------------ GPUs
    Metric(
        "oomwatch_gpu_info",
        "info",
        (
            *GPU,
            "gpu_name",
            "UUID",
            "pci_bus_id",
            "driver_version",
            "modelName",
            "device",
        ),
        "A GPU, with the labels that dcgm-exporter gives it: join its series by UUID. modelName "
        "and device only with export.dcgm_labels.",
        "GPUs",
    ),
    Metric(
        "oomwatch_gpu_memory_total_bytes",
        "gauge",
        GPU,
        "Memory of the GPU or MIG instance: reserved + used + free.",
        "GPUs",
        "By",
        "hw.gpu.memory.limit",
    ),
    Metric(
        "oomwatch_gpu_memory_used_bytes",
        "gauge",
        GPU,
        "Memory that processes and the driver's contexts use, without what the driver reserves.",
        "GPUs",
        "By",
        "hw.gpu.memory.usage",
    ),
    *_gauges(
        "GPUs",
        GPU,
        {
            "oomwatch_gpu_memory_free_bytes": ("By", "Memory that is free."),
            "oomwatch_gpu_memory_reserved_bytes": (
                "By",
                "Memory that the driver keeps for itself.",
            ),
            "oomwatch_gpu_memory_used_max_bytes": (
                "By",
                "Highest use, sweeps of a burst included, since whoever asks has asked before; "
                "for 5 minutes at most.",
            ),
            "oomwatch_gpu_memory_unattributed_bytes": (
                "By",
                "Memory in use that no process on the GPU accounts for: what the processes hold "
                "is taken from what is used. Absent where the driver hides a process's share.",
            ),
        },
    ),
    Metric(
        "oomwatch_gpu_utilization_ratio",
        "gauge",
        GPU,
        "Share of time in which a kernel ran.",
        "GPUs",
        "1",
        "hw.gpu.utilization",
    ),
    Metric(
        "oomwatch_gpu_success",
        "gauge",
        GPU,
        "1 if the driver answers for the GPU; else 0, and the GPU has no other series.",
        "GPUs",
    ),
    *_gauges(
        "GPUs",
        (),
        {
            "oomwatch_gpus_present": ("{gpu}", "GPUs that the driver answers for."),
            "oomwatch_gpus_expected": (
                "{gpu}",
                "The most GPUs that the driver has listed since the agent was started.",
            ),
            "oomwatch_driver_silent_seconds": (
                "s",
                "How long the call of the driver that is in flight has not come back; absent where "
                "there is no driver.",
            ),
        },
    ),
    Metric(
        "oomwatch_gpu_holder_memory_bytes",
        "gauge",
        HOLDER,
        "Memory of the GPU by who holds it: role is that of an engine's process, or other. pid "
        "only with export.process_ids.",
        "GPUs",
        "By",
    ),
    # ------------------------------------------------------------ engines
    Metric(
        "oomwatch_engine_info",
        "info",
        (
            *ENGINE,
            "kind",
            "version",
            "unit",
            "container_name",
            "k8s_namespace",
            "k8s_pod",
        ),
        "An engine that runs: what it is and where. Join the others by engine_id.",
        "Engines",
    ),
    Metric(
        "oomwatch_engine_state",
        "gauge",
        ("engine_id", "state"),
        "1 for the state that the engine is in, 0 for the others: starting, serving, unresponsive "
        "(its page was read, and was not for 15 s), broken (a process that it needs is gone), "
        "unknown.",
        "Engines",
    ),
    *_gauges(
        "Engines",
        ("engine_id",),
        {
            "oomwatch_scrape_success": (
                "",
                "1 if the engine's metrics page was read within the last 15 s; if not, there are "
                "no series of its figures.",
            ),
            "oomwatch_scrape_duration_seconds": ("s", "How long its page took to arrive."),
            "oomwatch_engine_start_timestamp_seconds": ("s", "When it was started."),
        },
    ),
    *_gauges(
        "Engines",
        POOL,
        {
            "oomwatch_kv_usage_ratio": ("1", "Share of the KV cache in use."),
            "oomwatch_kv_block_size_tokens": ("{token}", "Tokens in a block of the KV cache."),
            "oomwatch_requests_running": ("{request}", "Requests that run."),
            "oomwatch_requests_waiting": ("{request}", "Requests that wait."),
            "oomwatch_preemptions_per_minute": (
                "{preemption}/min",
                "Preemptions (SGLang: retractions) in the last minute.",
            ),
        },
    ),
    Metric(
        "oomwatch_kv_blocks",
        "gauge",
        (*POOL, "state"),
        "Blocks of the KV cache, used and free; vLLM has one more, which no request gets.",
        "Engines",
        "{block}",
    ),
    Metric(
        "oomwatch_preemptions_total",
        "counter",
        POOL,
        "Preemptions (SGLang: retractions) since the engine was started.",
        "Engines",
    ),
    Metric(
        "oomwatch_engine_memory_bytes",
        "gauge",
        ("engine_id", "component"),
        "What one GPU of the engine holds, as its start said: weights, kv, activation, cudagraph, "
        "other.",
        "Engines",
        "By",
    ),
    # ------------------------------------------------------------ host, forecasts, incidents
    *_gauges(
        "Host",
        (),
        {
            "oomwatch_host_memory_total_bytes": ("By", "Memory of the host."),
            "oomwatch_host_memory_available_bytes": (
                "By",
                "Memory that can be had without swapping.",
            ),
            "oomwatch_host_swap_used_bytes": ("By", "Swap in use."),
        },
    ),
    Metric(
        "oomwatch_forecast_exhaustion_seconds",
        "gauge",
        ("resource", "engine_id", "gpu"),
        "In which time gpu, kv or host memory is used up if it goes on growing; absent while it "
        "does not grow, or while that cannot be said.",
        "Forecasts",
        "s",
    ),
    Metric(
        "oomwatch_incident_open",
        "gauge",
        ("incident_id", "class", "cause", "severity", "kind", "engine_id"),
        "1 for each incident that is open; kind is its family: failure, kv_pressure, ....",
        "Incidents",
    ),
    Metric(
        "oomwatch_incidents_total",
        "counter",
        ("class", "cause"),
        "Incidents since the agent was started, each counted once, by the cause that was found "
        "within its first seconds.",
        "Incidents",
    ),
    Metric(
        "oomwatch_incident_last_timestamp_seconds",
        "gauge",
        ("class", "cause"),
        "When an incident of this cause was last opened, as far as the agent remembers.",
        "Incidents",
        "s",
    ),
    Metric(
        "oomwatch_cause_info",
        "info",
        ("cause", "title"),
        "What a cause is called, for those of open incidents and of those remembered. Join by "
        "cause.",
        "Incidents",
    ),
    Metric(
        "oomwatch_triggers_total",
        "counter",
        ("kind",),
        "Conditions that were seen, also those that are observed only.",
        "Incidents",
    ),
    # ------------------------------------------------------------ messages
    Metric(
        "oomwatch_receiver_success",
        "gauge",
        ("receiver",),
        "1 if the receiver of messages takes them; 0 after it has failed or was switched off.",
        "Messages",
    ),
    Metric(
        "oomwatch_receiver_messages_waiting",
        "gauge",
        ("receiver", "state"),
        "Messages that are not delivered yet: due, or held until their time comes (quiet hours, a "
        "silence, a cooldown, an escalation).",
        "Messages",
        "{message}",
    ),
    Metric(
        "oomwatch_receiver_messages_total",
        "counter",
        ("receiver", "outcome"),
        "Messages since the agent was started: delivered, or failed for good (refused, given up).",
        "Messages",
    ),
    Metric(
        "oomwatch_receiver_attempts_failed_total",
        "counter",
        ("receiver",),
        "Attempts that failed, those that were refused included; most were made again.",
        "Messages",
    ),
    # ------------------------------------------------------------ the agent itself
    Metric("oomwatch_build_info", "info", ("version",), "The agent's version.", "The agent"),
    Metric(
        "oomwatch_source_success",
        "gauge",
        ("source",),
        "1 if the source could be read lately: nvml (all GPUs; 0 too where there is no driver or "
        "no GPU, until sources.nvml is off), host, store.",
        "The agent",
    ),
    Metric(
        "oomwatch_self_cpu_seconds_total",
        "counter",
        (),
        "Processor time that the agent has taken.",
        "The agent",
        "s",
    ),
    *_gauges(
        "The agent",
        (),
        {
            "oomwatch_config_reload_success": (
                "",
                "1 if the configuration in force is the one in the file; 0 if that one is wrong.",
            ),
            "oomwatch_self_start_timestamp_seconds": ("s", "When the agent was started."),
            "oomwatch_self_resident_bytes": ("By", "Resident memory of the agent."),
            "oomwatch_self_threads": ("{thread}", "Its threads."),
            "oomwatch_self_open_files": ("{file}", "Its open files."),
            "oomwatch_self_stuck_threads": (
                "{thread}",
                "Threads that have not come round for 30 s.",
            ),
            "oomwatch_self_sample_late_max_seconds": (
                "s",
                "How much the latest sweep of the GPUs came late, since whoever asks has asked "
                "before; for 5 minutes at most.",
            ),
            "oomwatch_self_store_bytes": ("By", "Size of the store on disk, its log included."),
            "oomwatch_self_page_duration_seconds": (
                "s",
                "How long the page before this one took to make.",
            ),
            "oomwatch_self_series_left_out": (
                "{series}",
                "Subjects over the limits of a page: 128 engines, 512 pools, 256 holders, 64 open "
                "incidents.",
            ),
        },
    ),
    Metric(
        "oomwatch_self_queue_depth",
        "gauge",
        ("queue",),
        "Records that wait for the detector and for the store.",
        "The agent",
        "{record}",
    ),
    Metric(
        "oomwatch_self_dropped_total",
        "counter",
        ("queue",),
        "Records that found a queue full, by where they were for.",
        "The agent",
        "{record}",
    ),
)

METRICS: Final[Mapping[str, Metric]] = {metric.name: metric for metric in _TABLE}
