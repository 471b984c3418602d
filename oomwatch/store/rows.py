"""Records to the integers of their rows, and back.

Ratios become parts per million, watts milliwatts, degrees whole; what is no number, or does not
fit in 64 bits, is unknown.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
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
Values = tuple[Any, ...]

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
_counts: Final = operator.attrgetter(*ENGINE_COUNTS)
_LINE_FIELDS: Final = tuple(
    field.name for field in dataclasses.fields(LogLine) if field.name not in {"text", "at"}
)


def to_ms(seconds: float) -> int:
    """Milliseconds of epoch seconds.

    Raises:
        ValueError: it is no time that can be stored.

    """
    if not 0 <= seconds < 2**43:  # NaN is neither
        raise ValueError(f"{seconds!r} is not a time")
    return round(seconds * 1000)


def scaled(value: float | None, factor: int = 1) -> int | None:
    """A number times `factor` as an integer; None where it is none or too large."""
    if value is None or type(value) is bool:
        return None
    whole = value * factor
    if isinstance(whole, float):
        if not math.isfinite(whole):
            return None
        whole = round(whole)
    return whole if whole.bit_length() < 64 else None


def _beyond(value: int | None, own: int | None, *, above: bool) -> int | None:
    """A true extreme; left out where it is the sample's own value: most are, NULL takes no room."""
    if value is None or (own is not None and (value <= own if above else value >= own)):
        return None
    return scaled(value)


# ---------------------------------------------------------------- samples to rows
# Each in the order of `samples.COLUMNS`, what the rows are read back by.
def gpu_values(sample: GpuSample) -> Values:
    """Columns of `gpu_sample` beside its key."""
    return (
        scaled(sample.used_bytes),
        scaled(sample.free_bytes),
        scaled(sample.reserved_bytes),
        scaled(sample.utilization_ratio, 1_000_000),
        scaled(sample.temperature_celsius),
        scaled(sample.power_watts, 1000),
        _beyond(sample.used_max_bytes, sample.used_bytes, above=True),
        _beyond(sample.free_min_bytes, sample.free_bytes, above=False),
    )


def gpu_process_values(sample: GpuProcessSample) -> Values:
    """Columns of `gpu_process_sample` beside its key."""
    return (scaled(sample.used_bytes),)


def process_values(sample: ProcessSample) -> Values:
    """Columns of `process_sample` beside its key; the state is the last."""
    return (
        scaled(sample.rss_bytes),
        scaled(sample.shared_bytes),
        scaled(sample.swap_bytes),
        plain(sample.state),
    )


def host_values(sample: HostSample) -> Values:
    """Columns of `host_sample` beside its key."""
    return (
        scaled(sample.mem_total_bytes),
        scaled(sample.mem_available_bytes),
        scaled(sample.swap_used_bytes),
        scaled(sample.cgroup_oom_kills),
    )


def engine_values(sample: EngineSample, extra: str | None) -> Values:
    """Columns of `engine_sample` beside its key; `extra` is the JSON of further numbers."""
    return (scaled(sample.kv_usage_ratio, 1_000_000), extra, *map(scaled, _counts(sample)))


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
    try:
        text = _encode(value)
    except (TypeError, ValueError):  # few need that: going through all values takes its time
        text = _encode(_finite(value))
    return plain(text) or "null"


def _word(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


_encode: Final = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_word
).encode


def _finite(value: object) -> object:
    """NaN and the infinities, which JSON lacks, as null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
