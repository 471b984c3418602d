"""Periodic load lines: requests and KV use at a moment, as engines print them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from oomwatch.diagnose.items import LogEvent
from oomwatch.engines.patterns import LARGEST
from oomwatch.records import LogLine


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """One periodic load line: requests and KV use at that moment."""

    line: LogLine
    running: float | None = None
    waiting: float | None = None
    swapped: float | None = None
    kv_usage_ratio: float | None = None
    cpu_kv_ratio: float | None = None
    generation_rate: float | None = None
    prompt_rate: float | None = None
    preemptions: float | None = None
    pools: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Usage of further pools by name (swa, mamba, full), 0..1."""


def read_load(event: LogEvent) -> Load:
    """The load that a matched line states; what it does not state is None."""
    fields = dict(event.fields)
    if "fields" in fields:
        return _sglang_load(event.line, fields["fields"])
    return Load(
        line=event.line,
        running=fields.get("running_count"),
        waiting=fields.get("waiting_count"),
        swapped=fields.get("swapped_count"),
        kv_usage_ratio=fields.get("kv_ratio"),
        cpu_kv_ratio=fields.get("cpu_kv_ratio"),
        generation_rate=fields.get("generation_rate"),
        prompt_rate=fields.get("prompt_rate"),
        preemptions=fields.get("preemption_count"),
    )


def _sglang_load(line: LogLine, text: str) -> Load:
    values: dict[str, float] = {}
    for part in text[:2000].split(", "):
        name, separator, number = part.partition(": ")
        if separator:
            try:
                value = float(number.strip().rstrip(","))
            except ValueError:
                continue
            if abs(value) < LARGEST:  # neither infinite nor "nan"
                values[name.strip()] = value
    pools = {
        name.removesuffix(" token usage").removesuffix(" usage"): value
        for name, value in values.items()
        if name.endswith(" usage") and name != "token usage"
    }
    usage = values.get("token usage", max(pools.values(), default=None) if pools else None)
    return Load(
        line=line,
        running=values.get("#running-req"),
        waiting=values.get("#queue-req"),
        kv_usage_ratio=usage,
        generation_rate=values.get("gen throughput (token/s)"),
        pools={name: value for name, value in pools.items() if name in ("full", "swa", "mamba")},
    )
