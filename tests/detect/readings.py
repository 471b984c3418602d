"""Readings for tests, a second apart."""

from __future__ import annotations

import dataclasses

from oomwatch.records import EngineSample, GpuProcessSample, GpuSample, HostSample

GIB = 1024**3
NOW = 1_764_400_000.0


def page(second: float, **figures) -> EngineSample:
    """What a busy engine's page says; its counters move with the time."""
    moving = {"running": 8.0, "waiting": 0.0, "kv_usage_ratio": 0.5, "preemptions_total": 0.0}
    tokens = {"generation_tokens_total": 100.0 * second, "prompt_tokens_total": 10.0 * second}
    return EngineSample(at=NOW + second, engine="vllm-8000", **{**moving, **tokens, **figures})


def still(second: float, **figures) -> EngineSample:
    """What the page of an engine says in which nothing moves."""
    return dataclasses.replace(page(0, **figures), at=NOW + second)


def gpu(second: float, free_bytes: float, index: int = 0, total_bytes: int = 80 * GIB) -> GpuSample:
    free = round(free_bytes)
    return GpuSample(
        NOW + second,
        index,
        total_bytes=total_bytes,
        free_bytes=free,
        used_bytes=total_bytes - free,
    )


def holder(second: float, pid: int, used_bytes: float | None, index: int = 0) -> GpuProcessSample:
    used = None if used_bytes is None else round(used_bytes)
    return GpuProcessSample(NOW + second, index, pid, name=f"prog-{pid}", used_bytes=used)


def host(second: float, available_bytes: float, total_bytes: int = 100 * GIB) -> HostSample:
    return HostSample(NOW + second, total_bytes, round(available_bytes))
