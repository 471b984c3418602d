"""Samples as the rows of a recording, see `recording_samples` for the way back."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from oomwatch.records import EngineSample, GpuProcessSample, GpuSample, HostSample, ProcessSample

AnySample = GpuSample | GpuProcessSample | ProcessSample | HostSample | EngineSample

KIND_OF: Final[dict[type, str]] = {
    GpuSample: "gpu",
    GpuProcessSample: "gpu_process",
    ProcessSample: "process",
    HostSample: "host",
    EngineSample: "engine",
}
_OF_MANIFEST: Final = frozenset({"uuid", "total_bytes"})
"""What never changes of a GPU stands in the manifest once."""


def row_of(sample: AnySample) -> dict[str, Any]:
    """The keys of a sample that are known, its time as ``t``."""
    row: dict[str, Any] = {"t": sample.at}
    of_gpu = isinstance(sample, GpuSample)
    for field in dataclasses.fields(sample):
        value = getattr(sample, field.name)
        if value is None or field.name in {"at", "extra"}:
            continue
        if of_gpu and (field.name in _OF_MANIFEST or field.name == "name"):
            continue
        row[field.name] = list(value) if isinstance(value, tuple) else value
    if isinstance(sample, EngineSample):
        row.update(sample.extra)
    return row
