"""Records to the integers of their rows, and back.

Ratios become parts per million, watts milliwatts, degrees whole; what is no number, or does not
fit in 64 bits, is unknown.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Final, cast

from oomwatch.engines.secrets import hide_text
from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    KernelEventKind,
    LogLine,
    ProcessSample,
)
from oomwatch.store.dictionary import digest_of, plain

Sample = GpuSample | GpuProcessSample | ProcessSample | HostSample | EngineSample
Event = LogLine | KernelEvent

ENGINE_COUNTS: Final = (
    "running",
    "waiting",
    "swapped",
    "preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "kv_blocks_total",
    "block_size_tokens",
)
_LINE_FIELDS: Final = tuple(
    field.name for field in dataclasses.fields(LogLine) if field.name not in {"text", "at"}
)


def to_ms(seconds: float) -> int:
    """Milliseconds of epoch seconds.

    Raises:
        ValueError: it is no time that can be stored.

    """
    if not math.isfinite(seconds) or not 0 <= seconds < 2**43:
        raise ValueError(f"{seconds!r} is not a time")
    return round(seconds * 1000)


def scaled(value: float | None, factor: int = 1) -> int | None:
    """A number times `factor` as an integer; None where it is none or too large."""
    if value is None or isinstance(value, bool) or not math.isfinite(value):
        return None
    whole = value * factor if isinstance(value, int) else round(value * factor)
    return whole if -(2**63) < whole < 2**63 else None


def _beyond(value: int | None, own: int | None, *, above: bool) -> int | None:
    """A true extreme; left out where it is the sample's own value: most are, NULL takes no room."""
    if value is None or (own is not None and (value <= own if above else value >= own)):
        return None
    return scaled(value)


# ---------------------------------------------------------------- samples to rows
def gpu_values(sample: GpuSample) -> dict[str, Any]:
    """Columns of `gpu_sample` beside its key."""
    return {
        "used_bytes": scaled(sample.used_bytes),
        "used_max_bytes": _beyond(sample.used_max_bytes, sample.used_bytes, above=True),
        "free_bytes": scaled(sample.free_bytes),
        "free_min_bytes": _beyond(sample.free_min_bytes, sample.free_bytes, above=False),
        "reserved_bytes": scaled(sample.reserved_bytes),
        "utilization_ppm": scaled(sample.utilization_ratio, 1_000_000),
        "temperature_celsius": scaled(sample.temperature_celsius),
        "power_milliwatts": scaled(sample.power_watts, 1000),
    }


def process_values(sample: ProcessSample) -> dict[str, Any]:
    """Columns of `process_sample` beside its key."""
    return {
        "rss_bytes": scaled(sample.rss_bytes),
        "shared_bytes": scaled(sample.shared_bytes),
        "swap_bytes": scaled(sample.swap_bytes),
        "state": plain(sample.state),
    }


def host_values(sample: HostSample) -> dict[str, Any]:
    """Columns of `host_sample` beside its key."""
    return {
        "mem_available_bytes": scaled(sample.mem_available_bytes),
        "swap_used_bytes": scaled(sample.swap_used_bytes),
        "mem_total_bytes": scaled(sample.mem_total_bytes),
        "cgroup_oom_kills": scaled(sample.cgroup_oom_kills),
    }


def engine_values(sample: EngineSample) -> dict[str, Any]:
    """Columns of `engine_sample` beside its key and `extra`."""
    values = {name: scaled(getattr(sample, name)) for name in ENGINE_COUNTS}
    values["kv_usage_ppm"] = scaled(sample.kv_usage_ratio, 1_000_000)
    return values


# ---------------------------------------------------------------- events to rows and back
def event_values(event: Event) -> dict[str, Any]:
    """Columns of `log_event` beside its time, clock, host and engine."""
    fields: dict[str, Any]
    if isinstance(event, LogLine):
        kind, digest = "log", digest_of("log", event.source, event.number, event.text)
        fields = {name: getattr(event, name) for name in _LINE_FIELDS}
    else:
        kind = event.kind
        digest = digest_of(event.kind, event.monotonic_seconds, event.number, event.text)
        fields = {
            "number": event.number,
            "monotonic_seconds": event.monotonic_seconds,
            "fields": dict(event.fields),
        }
    kept = {name: value for name, value in fields.items() if value not in (None, False, {})}
    return {
        "kind": kind,
        "digest": digest,
        "text": plain(hide_text(event.text)),
        "fields": to_json(kept),
    }


def event_of(ts_ms: int, kind: str, text: str, fields: str) -> Event:
    """The record of a row. A line that bore no time has the time at which it was read."""
    values: dict[str, Any] = json.loads(fields)
    if kind == "log":
        known = {name: values[name] for name in _LINE_FIELDS if name in values}
        return LogLine(**{"source": "?", "number": 0, **known}, text=text, at=ts_ms / 1000)
    return KernelEvent(
        kind=cast("KernelEventKind", kind),
        text=text,
        at=ts_ms / 1000,
        number=values.get("number", 0),
        monotonic_seconds=values.get("monotonic_seconds"),
        fields=values.get("fields", {}),
    )


def to_json(value: object) -> str:
    """Compact JSON of plain values; what JSON has no word for becomes text or null."""
    return (
        plain(json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"), default=str))
        or "null"
    )


def _finite(value: object) -> object:
    """NaN and the infinities, which JSON lacks, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
