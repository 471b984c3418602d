"""What the renderers share about ledgers: which GPUs look alike, and the names of parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomwatch.records import GpuLedger
from oomwatch.report.sanitize import clean
from oomwatch.units import format_bytes


def group_ledgers(ledgers: Sequence[GpuLedger]) -> list[tuple[str, GpuLedger]]:
    """A label (``GPU 0``, ``GPU 0-7``) and one ledger for all GPUs that print alike."""
    groups: dict[tuple[object, ...], list[GpuLedger]] = {}
    for ledger in ledgers:
        parts = tuple((part.name, format_bytes(part.bytes)) for part in ledger.parts)
        groups.setdefault((format_bytes(ledger.total_bytes), parts), []).append(ledger)
    return [(_label(group), group[0]) for group in groups.values()]


def part_name(name: str, texts: Mapping[str, str]) -> str:
    """A part's name for people; unknown ones as they are."""
    return texts.get(f"part.{name}") or clean(name, 30)


def _label(group: Sequence[GpuLedger]) -> str:
    """``GPU 0``, ``GPU 0-7``, ``GPU 0,2``, or ``GPU`` where the index is unknown."""
    indexes = sorted({ledger.gpu for ledger in group if ledger.gpu is not None})
    if not indexes:
        return "GPU"
    run = indexes[-1] - indexes[0] == len(indexes) - 1
    if run and len(indexes) > 2:
        return f"GPU {indexes[0]}-{indexes[-1]}"
    return "GPU " + ",".join(map(str, indexes))
