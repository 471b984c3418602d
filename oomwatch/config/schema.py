"""Every key of the configuration: its kind, its default, and the sentence that documents it.

The example file, the reference in the documentation and ``oomwatch config`` are made from these
definitions, so they cannot disagree.
"""

# ruff: noqa: RUF009 - the functions of `fields` return dataclass fields

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from oomwatch.config.detection import DetectConfig
from oomwatch.config.export import ExportConfig
from oomwatch.config.fields import (
    Problem,
    count,
    duration,
    key,
    section,
    sections,
    share,
    size,
    switch,
)
from oomwatch.config.headers import Headers
from oomwatch.config.labels import Labels
from oomwatch.config.receivers import NotifyConfig
from oomwatch.config.values import Choice, FilePath, Names, Number, Text, Url
from oomwatch.units import KIB, MIB

SCHEMA_VERSION: Final = 1

BurstCondition = Literal["start", "kv_usage", "headroom", "preemptions", "incident"]


@dataclasses.dataclass(frozen=True, slots=True)
class AgentConfig:
    """How often the agent looks, and when it looks more often."""

    sampling_interval_seconds: float = duration(
        "1s", "How often GPUs, processes and host memory are read.", "100ms", "1min"
    )
    burst_interval_seconds: float = duration(
        "100ms", "The same while one of `burst_on` holds.", "50ms", "1min"
    )
    burst_on: tuple[BurstCondition, ...] = key(
        Names(("start", "kv_usage", "headroom", "preemptions", "incident")),
        ("start", "kv_usage", "headroom", "preemptions", "incident"),
        "What starts a burst: an engine that starts, a KV cache fuller than `burst_kv_usage`, "
        "headroom that ends within `burst_headroom`, preemptions, an open incident.",
    )
    burst_kv_usage_ratio: float = share(0.9, "See `burst_on`.")
    burst_headroom_seconds: float = duration(
        "2min", "See `burst_on`: at the present rate of growth, free memory lasts this long."
    )
    burst_hold_seconds: float = duration(
        "30s", "A burst goes on for this long after its condition has ended.", "1s", "1h"
    )
    scrape_interval_seconds: float = duration(
        "1s", "How often the metrics page of each engine is read.", "100ms", "10min"
    )
    scrape_timeout_seconds: float = duration(
        "30s",
        "How long an engine may take to answer. A slow answer is a measurement, not a failure.",
        "100ms",
        "10min",
    )
    housekeeping_interval_seconds: float = duration(
        "5min", "How often samples are rolled up and old ones removed.", "10s", "1d"
    )
    queue_size: int = count(
        30_000,
        "Records that may wait for the database, and log lines for detection; what does not fit "
        "is counted and reported.",
        100,
        1_000_000,
    )
    log_level: Literal["debug", "info", "warning", "error"] = key(
        Choice(("debug", "info", "warning", "error")),
        "info",
        "What the agent writes about itself to its log.",
    )

    def problems(self) -> Iterator[Problem]:
        """A burst must not be slower than the normal rate."""
        if self.burst_interval_seconds > self.sampling_interval_seconds:
            yield "burst_interval", "must not be longer than agent.sampling_interval"


@dataclasses.dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where samples and incidents are kept, and for how long."""

    path: str | None = key(
        FilePath(),
        None,
        "The SQLite database. Not set: `oomwatch.db` in the service's state directory "
        "(/var/lib/oomwatch), or in $XDG_STATE_HOME/oomwatch for a person.",
        '"/var/lib/oomwatch/oomwatch.db"',
    )
    url: str | None = key(
        Url(
            ("postgresql", "postgres", "postgresql+psycopg", "sqlite"),
            "postgresql://oomwatch@db.example/oomwatch",
        ),
        None,
        "A PostgreSQL database instead, which a whole fleet may share. With a password "
        "in it, use `url_file`.",
        '"postgresql://oomwatch@db.example/oomwatch"',
        secret=True,  # it may hold a password
    )
    url_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file that holds that URL, or the name of a systemd credential.",
        '"store-url"',
    )
    max_size_bytes: int = size(
        "1GiB",
        "The database stays below this: the oldest samples go first, incidents last.",
        16 * MIB,
    )
    commit_interval_seconds: float = duration(
        "1s", "How often samples are written; incidents are written at once.", "100ms", "1min"
    )
    raw_retention_seconds: float = duration("24h", "How long every sample is kept.", "10min")
    ten_second_retention_seconds: float = duration(
        "3d", "How long minimum, mean, maximum and last of each 10 s are kept.", "10min"
    )
    minute_retention_seconds: float = duration("30d", "The same of each minute.", "1h")
    hour_retention_seconds: float = duration("400d", "The same of each hour.", "1d", "3660d")
    log_retention_seconds: float = duration(
        "7d", "How long the lines of logs that may tell something are kept.", "10min"
    )
    incident_retention_seconds: float = duration(
        "400d", "How long incidents and the samples around them are kept.", "1d", "3660d"
    )

    def problems(self) -> Iterator[Problem]:
        """One database, and coarser samples for longer."""
        given = [name for name in ("path", "url", "url_file") if getattr(self, name) is not None]
        if len(given) > 1:
            yield given[1], f"cannot be given together with store.{given[0]}"
        tiers = (
            ("ten_second_retention", self.raw_retention_seconds, self.ten_second_retention_seconds),
            ("minute_retention", self.ten_second_retention_seconds, self.minute_retention_seconds),
            ("hour_retention", self.minute_retention_seconds, self.hour_retention_seconds),
        )
        for name, finer, coarser in tiers:
            if coarser < finer:
                yield name, "must not be shorter than that of the finer samples"


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKinds:
    """Which kinds of engines are looked for."""

    vllm: bool = switch(True, "vLLM.")
    sglang: bool = switch(True, "SGLang.")
    tgi: bool = switch(True, "Text Generation Inference.")
    lmdeploy: bool = switch(True, "LMDeploy.")
    llama_cpp: bool = switch(True, "llama.cpp's server.")
    ollama: bool = switch(True, "Ollama.")
    other: bool = switch(True, "Other programs that are known to serve models.")


@dataclasses.dataclass(frozen=True, slots=True)
class DiscoveryConfig:
    """How engines are found."""

    enabled: bool = switch(True, "Whether engines are looked for; if not, [[engine]] names them.")
    interval_seconds: float = duration(
        "10s",
        "How often the host is searched while an engine starts; else every sixth time. What comes "
        "or ends is seen within a second.",
        "1s",
        "1h",
    )
    engines: EngineKinds = section(EngineKinds)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine that discovery cannot find alone, or of which more is to be said.

    All of `unit`, `container`, `pod`, `pid` and `port` that are given must match.
    """

    name: str | None = key(
        Text(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", "chat-70b"),
        None,
        "What reports and alerts call it. Must be given, once each.",
        '"chat-70b"',
    )
    kind: Literal["auto", "vllm", "sglang", "tgi", "lmdeploy", "llama.cpp", "ollama"] = key(
        Choice(("auto", "vllm", "sglang", "tgi", "lmdeploy", "llama.cpp", "ollama")),
        "auto",
        "What it is; auto tells by its command, log and metrics.",
    )
    unit: str | None = key(
        Text(r"[A-Za-z0-9:_.\\@-]{1,250}", "vllm-chat.service"),
        None,
        "The systemd unit that runs it.",
        '"vllm-chat.service"',
    )
    container: str | None = key(
        Text(r"[0-9a-f]{12,64}", "4f3c2a1b9d8e"),
        None,
        "The id of its container, or the first twelve or more characters of it. An id changes with "
        "every start; `port` does not.",
        '"4f3c2a1b9d8e"',
    )
    pod: str | None = key(
        Text(r"[a-z0-9.-]{1,63}/[a-z0-9.*-]{1,253}", "inference/chat-0"),
        None,
        "Its pod, as NAMESPACE/NAME; a * stands for any text in the name.",
        '"inference/chat-0"',
    )
    pid: int | None = key(
        Number(1, 2**22, whole=True),
        None,
        "Its process. Changes with every start, so rather for a trial.",
        "4242",
    )
    port: int | None = key(
        Number(1, 65535, whole=True), None, "The port that its API listens on.", "8000"
    )
    metrics_url: str | None = key(
        Url(("http", "https"), "http://127.0.0.1:8000/metrics"),
        None,
        "Its metrics page. Not set: found by its port.",
        '"http://127.0.0.1:8000/metrics"',
        secret=True,  # a proxy's address may hold a password
    )
    headers: Mapping[str, str] = key(
        Headers(),
        {},
        "Headers to send for it. Those that prove who asks belong in `headers_file`.",
        '{ "X-Tenant" = "a" }',
        secret=True,
    )
    headers_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `Name: value` lines, or the name of a systemd credential.",
        '"chat-headers"',
    )
    ca_file: str | None = key(
        FilePath(),
        None,
        "Certificates to trust for an https page, beside those of the system.",
        '"/etc/ssl/certs/internal-ca.pem"',
    )
    log: str | None = key(
        FilePath(),
        None,
        "Its log file. Not set: found where the process writes.",
        '"/var/log/vllm/chat.log"',
    )
    labels: Mapping[str, str] = key(
        Labels(),
        {},
        "Labels of its incidents, for filters, silences and receivers; they win over those of "
        "[notify].",
        '{ team = "chat" }',
    )

    def problems(self) -> Iterator[Problem]:
        """A name, and something to find it by."""
        if self.name is None:
            yield "name", 'is missing: give the engine a name, such as name = "chat-70b"'
        marks = (self.unit, self.container, self.pod, self.pid, self.port)
        if all(mark is None for mark in (*marks, self.metrics_url, self.log)):
            yield (
                "name",
                "has nothing to find the engine by: give unit, container, pod, pid, port, "
                "metrics_url or log",
            )


@dataclasses.dataclass(frozen=True, slots=True)
class SourcesConfig:
    """What is read. A source that is off is reported as such, never as empty."""

    nvml: bool = switch(True, "GPU memory and its processes, from the NVIDIA driver.")
    procfs: bool = switch(True, "Processes and host memory, from /proc.")
    cgroup: bool = switch(True, "Memory limits and OOM kills of control groups.")
    kernel: bool = switch(True, "OOM kills and GPU errors (Xid) in the kernel log.")
    journal: bool = switch(True, "Logs of systemd units.")
    logs: bool = switch(True, "Log files of engines.")
    metrics: bool = switch(True, "Metrics pages of engines.")
    containers: bool = switch(True, "Logs of Docker, Podman and containerd.")
    pods: bool = switch(True, "Logs that the kubelet keeps on this node.")


@dataclasses.dataclass(frozen=True, slots=True)
class ForecastConfig:
    """How far ahead the trend of memory is followed."""

    interval_seconds: float = duration("15s", "How often a forecast is made.", "1s", "1h")
    window_seconds: float = duration("10min", "The samples that a trend is taken from.", "1min")
    warm_up_seconds: float = duration(
        "10min", "Growth this soon after an engine's start is not called a leak.", "0s", "1d"
    )
    kv_horizon_seconds: float = duration(
        "10min", "Warn if the KV cache will be full within this time.", "10s", "1d"
    )
    gpu_horizon_seconds: float = duration(
        "30min", "Warn if a GPU's memory will be used up within this time.", "10s", "7d"
    )
    host_horizon_seconds: float = duration(
        "1h", "Warn if host memory or a limit will be used up within this time.", "10s", "7d"
    )
    confidence_ratio: float = share(
        0.9, "How sure a forecast must be; wider bands warn less often."
    )


@dataclasses.dataclass(frozen=True, slots=True)
class IncidentsConfig:
    """What is kept of an incident."""

    window_before_seconds: float = duration(
        "10min", "Samples before it that are kept at full rate.", "0s", "1d"
    )
    window_after_seconds: float = duration(
        "2min", "Samples after it that are kept at full rate.", "0s", "1d"
    )
    log_excerpt_bytes: int = size(
        "256KiB", "How much of the engine's log is kept around it.", 0, 64 * MIB
    )
    close_after_seconds: float = duration(
        "30s", "It is closed when the engine was healthy for this long.", "0s", "1d"
    )
    redact: bool = switch(True, "Exports are redacted, as [privacy] says.")

    def problems(self) -> Iterator[Problem]:
        """An excerpt is none or worth reading."""
        if 0 < self.log_excerpt_bytes < KIB:
            yield "log_excerpt", 'must be "0B" for none, or at least "1KiB"'


@dataclasses.dataclass(frozen=True, slots=True)
class PrivacyConfig:
    """What is taken out of recordings and exports. Keys and tokens always are."""

    redact_prompts: bool = switch(True, "Text of requests and answers.")
    redact_user_names: bool = switch(True, "Names of users.")
    redact_home_paths: bool = switch(True, "Paths below home directories.")
    redact_host_names: bool = switch(False, "The names of this and other hosts.")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """The whole configuration."""

    agent: AgentConfig = section(AgentConfig)
    store: StoreConfig = section(StoreConfig)
    discovery: DiscoveryConfig = section(DiscoveryConfig)
    engines: tuple[EngineConfig, ...] = sections(EngineConfig, "engine")
    sources: SourcesConfig = section(SourcesConfig)
    detect: DetectConfig = section(DetectConfig)
    forecast: ForecastConfig = section(ForecastConfig)
    incidents: IncidentsConfig = section(IncidentsConfig)
    notify: NotifyConfig = section(NotifyConfig)
    export: ExportConfig = section(ExportConfig)
    privacy: PrivacyConfig = section(PrivacyConfig)

    def problems(self) -> Iterator[Problem]:
        """Engines are told apart by name; forecasts and incidents need the samples they look at."""
        names = [engine.name for engine in self.engines]
        for index, name in enumerate(names):
            if name is not None and name in names[:index]:
                yield f"engine.{index}.name", f"{name} is taken by an earlier [[engine]]"
        if self.incidents.window_before_seconds > self.store.raw_retention_seconds:
            yield "incidents.window_before", "must not be longer than store.raw_retention"
        if self.forecast.window_seconds > self.store.raw_retention_seconds:
            yield "forecast.window", "must not be longer than store.raw_retention"
