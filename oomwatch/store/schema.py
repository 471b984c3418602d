"""The tables of a store, one definition for SQLite and PostgreSQL.

Times are UTC epoch milliseconds of the wall clock (`ts_ms`), sizes bytes, ratios parts per
million, all integers. A sample's key begins with its time, so that new rows go to the end of the
tree: a fifth of the writes of (gpu, ts). Names are spelt once, in the dictionaries; a dictionary
row belongs to a host, so one database can hold a fleet.

`clock_id` names a stretch of time in which wall and monotonic clock went together. After the wall
clock was set back, new rows fall among older ones; the clock tells them apart, and
``ts_ms - clock.offset_ms`` is the monotonic time since the boot.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    UniqueConstraint,
)

APPLICATION_ID: Final = 0x6F6F6D77  # "oomw", in the header of an SQLite file

# STRICT tables of SQLite know INTEGER, which is 64 bits there and 32 in PostgreSQL.
_Int64: Final = BigInteger().with_variant(Integer(), "sqlite")
_STRICT: Final[dict[str, Any]] = {"sqlite_strict": True}
_NARROW: Final[dict[str, Any]] = {"sqlite_strict": True, "sqlite_with_rowid": False}

metadata = MetaData()


def _int(name: str, *, null: bool = True) -> Column[int]:
    return Column(name, _Int64, nullable=null)


def _text(name: str, *, null: bool = True) -> Column[str]:
    return Column(name, Text, nullable=null)


# ---------------------------------------------------------------- about the store
meta = Table("meta", metadata, Column("key", Text, primary_key=True), _text("value"), **_NARROW)

migration = Table(
    "migration",
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    _text("name", null=False),
    _int("applied_ms", null=False),
    **_STRICT,
)

# ---------------------------------------------------------------- dictionaries
host = Table(
    "host",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    **_STRICT,
)

clock = Table(
    "clock",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _text("boot_id", null=False),
    _int("offset_ms", null=False),  # wall clock minus the clock that counts from boot
    _int("from_ms", null=False),
    UniqueConstraint("host_id", "boot_id", "offset_ms", "from_ms"),
    **_STRICT,
)

# '' is an unknown UUID: NULLs are never equal, and this one is part of the key.
gpu = Table(
    "gpu",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    Column("gpu", Integer, nullable=False),
    _text("uuid", null=False),
    _text("name"),
    _int("total_bytes"),
    UniqueConstraint("host_id", "gpu", "uuid"),
    **_STRICT,
)

engine = Table(
    "engine",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _text("name", null=False),
    _int("seen_ms", null=False),
    UniqueConstraint("host_id", "name"),
    Index("engine_seen", "seen_ms"),
    **_STRICT,
)

# A process whose name, parent or cgroup changes gets a new row; `digest` is over all of them.
process = Table(
    "process",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _int("digest", null=False),
    _int("pid", null=False),
    _int("ppid"),
    _text("name"),
    _text("cmdline"),  # a JSON list
    _text("cgroup"),
    _text("unit"),
    _text("container"),
    _int("seen_ms", null=False),
    UniqueConstraint("host_id", "digest"),
    Index("process_seen", "seen_ms"),
    **_STRICT,
)

# A process as the holder of memory of one GPU: what the driver says of it.
holder = Table(
    "holder",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _int("digest", null=False),
    Column("gpu", Integer, nullable=False),
    _int("pid", null=False),
    _text("name"),
    _text("kind"),
    _text("mig"),
    _int("seen_ms", null=False),
    UniqueConstraint("host_id", "digest"),
    Index("holder_seen", "seen_ms"),
    **_STRICT,
)


# ---------------------------------------------------------------- samples and their tiers
@dataclasses.dataclass(frozen=True, slots=True)
class Metric:
    """A column of a sample table, and what the tiers keep of it.

    A gauge keeps min, mean, max and last; a counter its last value. `low` and `high` are columns
    that hold the true extremes since the sample before.
    """

    column: str
    gauge: bool = True
    low: str | None = None
    high: str | None = None

    @property
    def tier_columns(self) -> tuple[str, ...]:
        """Names of its columns in a tier."""
        kinds = ("min", "mean", "max", "last") if self.gauge else ("last",)
        return tuple(f"{self.column}_{kind}" for kind in kinds)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """A table of samples with its tiers. `key` is the dictionary column after the time."""

    name: str
    key: str
    dictionary: Table
    metrics: tuple[Metric, ...]
    raw: Table
    tier: Table
    tier_steps: tuple[int, ...]  # seconds


TIER_STEPS: Final = (10, 60, 3600)


def _samples(
    name: str,
    dictionary: Table,
    metrics: tuple[Metric, ...],
    *,
    extra: tuple[Column[str], ...] = (),
    steps: tuple[int, ...] = TIER_STEPS,
) -> SampleTable:
    key = f"{dictionary.name}_id"
    columns = [
        column
        for metric in metrics
        for column in (metric.column, metric.low, metric.high)
        if column is not None
    ]
    raw = Table(
        f"{name}_sample",
        metadata,
        _int("ts_ms", null=False),
        Column(key, Integer, nullable=False),
        Column("clock_id", Integer, nullable=False),
        *map(_int, columns),
        *extra,
        PrimaryKeyConstraint("ts_ms", key, "clock_id"),
        **_NARROW,
    )
    tier = Table(
        f"{name}_tier",
        metadata,
        Column("step", Integer, nullable=False),
        _int("ts_ms", null=False),
        Column(key, Integer, nullable=False),
        *(_int(column) for metric in metrics for column in metric.tier_columns),
        PrimaryKeyConstraint("step", "ts_ms", key),
        **_NARROW,
    )
    return SampleTable(name, key, dictionary, metrics, raw, tier, steps)


def _gauges(*columns: str) -> tuple[Metric, ...]:
    return tuple(Metric(column) for column in columns)


def _counters(*columns: str) -> tuple[Metric, ...]:
    return tuple(Metric(column, gauge=False) for column in columns)


GPU: Final = _samples(
    "gpu",
    gpu,
    (
        Metric("used_bytes", high="used_max_bytes"),
        Metric("free_bytes", low="free_min_bytes"),
        *_counters("reserved_bytes"),
        *_gauges("utilization_ppm", "temperature_celsius", "power_milliwatts"),
    ),
)
# Processes have no 10 s tier: with four on each GPU it would be half of the whole store.
GPU_PROCESS: Final = _samples("gpu_process", holder, _gauges("used_bytes"), steps=(60, 3600))
PROCESS: Final = _samples(
    "process",
    process,
    (*_gauges("rss_bytes"), *_counters("shared_bytes", "swap_bytes")),
    extra=(_text("state"),),
    steps=(60, 3600),
)
HOST: Final = _samples(
    "host",
    host,
    (
        *_gauges("mem_available_bytes", "swap_used_bytes"),
        *_counters("mem_total_bytes", "cgroup_oom_kills"),
    ),
)
# `extra` is a JSON object of further numbers: those that changed since the engine's row before,
# and once a minute all of them, marked by the key "".
ENGINE: Final = _samples(
    "engine",
    engine,
    (
        *_gauges("running", "waiting", "swapped", "kv_usage_ppm"),
        *_counters(
            "preemptions_total",
            "prompt_tokens_total",
            "generation_tokens_total",
            "prefix_cache_queries_total",
            "prefix_cache_hits_total",
            "request_success_total",
            "kv_blocks_total",
            "block_size_tokens",
        ),
    ),
    extra=(_text("extra"),),
)
SAMPLES: Final = (GPU, GPU_PROCESS, PROCESS, HOST, ENGINE)

# Up to where each tier is complete, per host. Rows that come late, and rows written after the
# clock was set back, pull it back.
rollup_mark = Table(
    "rollup_mark",
    metadata,
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    Column("step", Integer, nullable=False),
    _int("until_ms", null=False),
    PrimaryKeyConstraint("host_id", "step"),
    **_NARROW,
)

# From when on each step is complete: what is older was pruned. Step 0 is raw samples.
retention_mark = Table(
    "retention_mark",
    metadata,
    Column("step", Integer, primary_key=True, autoincrement=False),
    _int("from_ms", null=False),
    **_STRICT,
)

# ---------------------------------------------------------------- events
# `digest` is over source, number and text, so that a line written twice is one row.
log_event = Table(
    "log_event",
    metadata,
    _int("ts_ms", null=False),
    _int("digest", null=False),
    Column("clock_id", Integer, nullable=False),
    Column("host_id", Integer, nullable=False),
    Column("engine_id", Integer),
    _text("kind", null=False),  # "log", or the kind of a kernel event
    _text("text", null=False),
    _text("fields", null=False),  # a JSON object: the record's further fields
    PrimaryKeyConstraint("ts_ms", "digest", "clock_id"),
    **_NARROW,
)

# With a rowid: rows hold a whole diagnosis, and trees of wide rows are slow without one.
incident = Table(
    "incident",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _text("fingerprint", null=False),
    _text("state", null=False),
    _int("opened_ms", null=False),
    _int("closed_ms"),
    _text("engine"),
    _int("window_from_ms"),
    _int("window_to_ms"),
    _text("diagnosis"),  # JSON, oomwatch.diagnosis/1
    Index("incident_opened", "opened_ms", "id"),
    Index("incident_state", "state", "opened_ms", "id"),
    Index("incident_engine", "engine", "opened_ms", "id"),
    **_STRICT,
)

incident_trigger = Table(
    "incident_trigger",
    metadata,
    Column("incident_id", Text, ForeignKey("incident.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    _text("kind", null=False),
    _int("at_ms", null=False),
    _text("engine"),
    Column("gpu", Integer),
    _int("pid"),
    _text("text"),
    _text("values", null=False),  # a JSON object
    _text("evidence", null=False),  # a JSON list
    PrimaryKeyConstraint("incident_id", "number"),
    **_NARROW,
)

# What an incident can be judged again by when its logs are gone: `store.excerpts`.
incident_excerpt = Table(
    "incident_excerpt",
    metadata,
    Column("incident_id", Text, ForeignKey("incident.id", ondelete="CASCADE"), primary_key=True),
    _text("excerpt", null=False),  # a JSON object
    **_STRICT,
)

# Raw samples and log lines in these windows outlive pruning by age.
pinned_window = Table(
    "pinned_window",
    metadata,
    Column("incident_id", Text, ForeignKey("incident.id", ondelete="CASCADE"), nullable=False),
    _int("from_ms", null=False),
    _int("to_ms", null=False),
    PrimaryKeyConstraint("incident_id"),
    Index("pinned_window_from", "from_ms", "to_ms"),
    **_NARROW,
)

follower_position = Table(
    "follower_position",
    metadata,
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _text("source", null=False),
    _text("position", null=False),  # a JSON object, the follower's own
    _int("updated_ms", null=False),
    PrimaryKeyConstraint("host_id", "source"),
    **_NARROW,
)

# ---------------------------------------------------------------- what receivers are told
# No reference to `incident`: what must be told outlives it.
outbox = Table(
    "outbox",
    metadata,
    Column("id", Text, primary_key=True),
    Column("host_id", Integer, ForeignKey("host.id"), nullable=False),
    _text("sink", null=False),
    _text("kind", null=False),
    _text("state", null=False),
    _int("created_ms", null=False),
    _int("changed_ms", null=False),
    _text("incident_id"),
    _text("change"),
    _text("headline", null=False),
    _text("notice"),  # a JSON object
    _int("attempts", null=False),
    _int("due_ms"),
    _text("reason"),
    _text("reference"),
    Index("outbox_state", "host_id", "state", "changed_ms"),
    Index("outbox_changed", "changed_ms"),
    Index("outbox_incident", "incident_id"),
    **_STRICT,
)

silence = Table(
    "silence",
    metadata,
    Column("id", Text, primary_key=True),
    _int("starts_ms", null=False),
    _int("ends_ms", null=False),
    _text("reason", null=False),
    _text("author"),
    _text("matchers", null=False),  # a JSON object
    Index("silence_ends", "ends_ms"),
    **_STRICT,
)

acknowledgement = Table(
    "acknowledgement",
    metadata,
    Column("incident_id", Text, ForeignKey("incident.id", ondelete="CASCADE"), primary_key=True),
    _int("at_ms", null=False),
    _text("author"),
    **_STRICT,
)
