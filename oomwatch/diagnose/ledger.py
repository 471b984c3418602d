"""Where the bytes of a GPU are at the moment of the failure; the parts always add up to the total.

Filled from the allocator's own message, from NVML, and from the start-up lines. What no source
explains is shown as unattributed, never hidden; a breakdown that would exceed the whole is dropped.
"""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.rules.placing import gpu_failure
from oomwatch.records import Finding, GpuLedger, GpuSample, MemoryPart

_LOADING: Final = frozenset({"load", "slots", "quantize", "repack", "draft"})
"""Stages in which a start fills the card with weights, or with what stands beside them."""
_OF_WEIGHTS: Final = frozenset({"weights_dont_fit", "quant_load_peak", "quant_repack"})


def build_ledgers(
    facts: Facts, finding: Finding, samples: tuple[GpuSample, ...]
) -> tuple[GpuLedger, ...]:
    """One ledger for each GPU that can be accounted for, the deciding one first."""
    failure = gpu_failure(facts)
    if failure is not None and failure.oom is not None and failure.oom.total_bytes:
        return (_from_message(facts, finding, failure),)
    if samples and facts.series.gpu_totals:
        ledgers = [_from_nvml(facts, gpu, samples) for gpu in sorted(facts.series.gpu_totals)[:16]]
        found = tuple(ledger for ledger in ledgers if ledger is not None)
        if found:
            return found
    ledger = _from_check(facts, finding)
    return (ledger,) if ledger is not None else ()


def _from_message(facts: Facts, finding: Finding, failure: Failure) -> GpuLedger:
    oom = failure.oom
    assert oom is not None and oom.total_bytes is not None  # noqa: S101, PT018 - the caller has looked
    parts: list[MemoryPart] = []
    allocated, reserved, private = oom.allocated_bytes, oom.reserved_bytes, oom.private_bytes
    if allocated is not None:
        parts += _inside(facts, finding, allocated, private)
    if reserved:
        parts.append(MemoryPart("fragmentation", reserved, "log"))
    outside = oom.outside_bytes
    if outside is not None and outside > 0:
        parts.append(MemoryPart("non_torch", outside, "log"))
    elif allocated is None and oom.own_bytes:
        parts.append(MemoryPart("engine", oom.own_bytes, "log"))
    others = sum(size for _, size in oom.others)
    if others:
        parts.append(MemoryPart("other_processes", others, "log"))
    if oom.free_bytes is not None:
        parts.append(MemoryPart("free", oom.free_bytes, "log"))
    return GpuLedger(oom.gpu, oom.total_bytes, _balanced(parts, oom.total_bytes))


def _inside(
    facts: Facts, finding: Finding, allocated: int, private: int | None
) -> list[MemoryPart]:
    """What PyTorch allocated, split by what the start printed."""
    engine = facts.engine
    parts: list[MemoryPart] = []
    rest = allocated
    known = [("weights", engine.weights_bytes), ("cuda_graphs", private)]
    if facts.run is not None and (facts.run.reached("capture") or facts.served):
        known.insert(1, ("kv_cache", engine.kv_bytes))
    for name, size in known:
        if size and 0 < size <= rest:
            parts.append(MemoryPart(name, size, "log"))
            rest -= size
    if rest > 0:
        parts.append(MemoryPart(_rest(facts, finding, parts), rest, "computed"))
    return parts


def _rest(facts: Facts, finding: Finding, parts: list[MemoryPart]) -> str:
    """What the rest of PyTorch's memory is, as far as the start had come.

    While weights are loaded there is neither a KV cache nor a step of work; and where nobody printed
    how large the weights are, they are in the rest.
    """
    named = {part.name for part in parts}
    run, loading = facts.run, finding.values.get("stage") in _LOADING
    before_pool = not (facts.served or (run is not None and run.reached("kv")))
    if "weights" in named:
        if loading and before_pool:
            return "engine_other"
        return "activation" if "kv_cache" in named or before_pool else "kv_and_activation"
    loaded = facts.served or (run is not None and run.reached("loaded"))
    return "weights" if not loaded and (loading or finding.cause in _OF_WEIGHTS) else "engine"


def _from_nvml(facts: Facts, gpu: int, samples: tuple[GpuSample, ...]) -> GpuLedger | None:
    mine = [s for s in samples if s.gpu == gpu and s.total_bytes and s.used_bytes is not None]
    if not mine:
        return None
    busy = [s for s in mine if s.used_bytes and s.used_bytes > 0.02 * (s.total_bytes or 1)]
    sample = (busy or mine)[-1]
    total = sample.total_bytes or 0
    parts: list[MemoryPart] = []
    own = foreign = 0
    for holder in facts.series.holders:
        if holder.gpu == gpu and abs(holder.last_seen - sample.at) < max(
            600.0, 0.1 * facts.series.seconds
        ):
            if not facts.tree_pids or holder.pid in facts.tree_pids:
                own += round(holder.used.last)
            else:
                foreign += round(holder.used.last)
    if own:
        parts += _own_parts(facts, own)
    if foreign:
        parts.append(MemoryPart("other_processes", foreign, "nvml"))
    if sample.reserved_bytes:
        parts.append(MemoryPart("driver_reserved", sample.reserved_bytes, "nvml"))
    if sample.free_bytes is not None:
        parts.append(MemoryPart("free", sample.free_bytes, "nvml"))
    return GpuLedger(gpu, total, _balanced(parts, total))


def _own_parts(facts: Facts, own: int) -> list[MemoryPart]:
    engine = facts.engine
    parts: list[MemoryPart] = []
    rest = own
    for name, size in (
        ("weights", engine.weights_bytes),
        ("kv_cache", engine.kv_bytes),
        ("cuda_graphs", engine.graph_bytes),
        ("activation", engine.activation_bytes),
        ("non_torch", engine.non_torch_bytes),
    ):
        if size and 0 < size <= rest:
            parts.append(MemoryPart(name, size, "log"))
            rest -= size
    if rest > 0:
        parts.append(
            MemoryPart("engine_other" if parts else "engine", rest, "computed" if parts else "nvml")
        )
    return parts


def _from_check(facts: Facts, finding: Finding) -> GpuLedger | None:
    """From a start-up check: total, free, and what the start had measured."""
    values, engine = finding.values, facts.engine
    total = values.get("total_bytes") or engine.total_bytes
    if not isinstance(total, int) or total <= 0 or finding.cls != "startup":
        return None
    parts: list[MemoryPart] = []
    free = values.get("free_bytes")
    if finding.cause in (
        "gpu_busy_other_process",
        "gpu_busy_margin",
        "unified_memory",
    ) and isinstance(free, int):
        name = "other_processes" if finding.cause == "gpu_busy_other_process" else "unattributed"
        parts = [
            MemoryPart("free", free, "log"),
            MemoryPart(name, max(0, total - free), "computed"),
        ]
        return GpuLedger(None, total, _balanced(parts, total))
    for name, size in (
        ("weights", engine.weights_bytes),
        ("activation", engine.activation_bytes),
        ("non_torch", engine.non_torch_bytes),
        ("kv_cache", engine.kv_bytes),
        ("cuda_graphs", engine.graph_bytes),
    ):
        if size and size > 0:
            parts.append(MemoryPart(name, size, "log"))
    if not parts:
        return None
    return GpuLedger(None, total, _balanced(parts, total))


def _balanced(parts: list[MemoryPart], total: int) -> tuple[MemoryPart, ...]:
    """The parts and the remainder; parts that exceed the whole lose their least sure ones."""
    kept = list(parts)
    while kept and sum(p.bytes for p in kept) > total:
        surplus = sum(p.bytes for p in kept) - total
        computed = next((p for p in kept if p.source == "computed" and p.bytes >= surplus), None)
        chosen = computed or max(kept, key=lambda p: p.bytes)
        kept[kept.index(chosen)] = MemoryPart(
            chosen.name, max(0, chosen.bytes - surplus), chosen.source
        )
    kept = [p for p in kept if p.bytes > 0]
    remainder = total - sum(p.bytes for p in kept)
    if remainder > 0:
        kept.append(MemoryPart("unattributed", remainder, "computed"))
    return tuple(kept)
