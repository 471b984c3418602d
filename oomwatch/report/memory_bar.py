"""The ledger of a GPU as one bar: coloured blocks, or letters where there is no colour.

GPU 0  [WWWWWWWWWWWWWWWWWWWWWWWWKKKKKKKKKKKKKKAA........]  79.2 GiB
       W weights 38.1 GiB   K KV cache 22.0 GiB   A activation peak 3.0 GiB   . free 16.1 GiB
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from rich.cells import cell_len

from oomwatch.records import GpuLedger, MemoryPart
from oomwatch.report.layout import Sheet
from oomwatch.report.ledgers import group_ledgers, part_name
from oomwatch.units import format_bytes

# Letter and colour of each part; other names get the first free capital and no colour.
_LOOKS: Final[dict[str, tuple[str, str]]] = {
    "weights": ("W", "blue"),
    "kv_cache": ("K", "green"),
    "kv_and_activation": ("K", "green"),
    "engine": ("E", "blue"),
    "engine_other": ("X", "magenta"),
    "activation": ("A", "magenta"),
    "cuda_graphs": ("G", "cyan"),
    "non_torch": ("N", "yellow"),
    "fragmentation": ("F", "bright_yellow"),
    "other_processes": ("O", "red"),
    "driver_reserved": ("D", "bright_black"),
    "unattributed": ("U", "white"),
    "free": (".", "dim"),
}
_BAR_CELLS: Final = 60  # wider bars are not easier to read
_GAP: Final = "   "


class Look(NamedTuple):
    """How a part is drawn: a letter without colours, else blocks in a colour."""

    letter: str
    style: str
    block: str
    mark: str


def draw_memory(sheet: Sheet, ledgers: Sequence[GpuLedger], texts: Mapping[str, str]) -> None:
    """One bar per distinct ledger; ranks that look alike share one.

    One or two bars have a legend with sizes each; more have one legend of names for all.
    """
    groups = group_ledgers(ledgers)
    firsts = [ledger for _, ledger in groups]
    column = max((cell_len(name) for name, _ in groups), default=0) + 2
    looks = _looks([part for ledger in firsts for part in ledger.parts])
    detailed = len(firsts) <= 2
    for name, ledger in groups:
        _bar(sheet, name, ledger, column=column, looks=looks, texts=texts)
        if detailed:
            sizes = [(part.name, format_bytes(part.bytes)) for part in _shown(ledger)]
            _legend(sheet, sizes, 2 + column, looks, texts)
    if not detailed:
        seen = dict.fromkeys(part.name for ledger in firsts for part in _shown(ledger))
        _legend(sheet, [(name, "") for name in seen], 2 + column, looks, texts)


def _shown(ledger: GpuLedger) -> list[MemoryPart]:
    return [part for part in ledger.parts if part.bytes > 0]


def _bar(
    sheet: Sheet,
    name: str,
    ledger: GpuLedger,
    *,
    column: int,
    looks: Mapping[str, Look],
    texts: Mapping[str, str],
) -> None:
    known = ledger.total_bytes is not None
    total = format_bytes(ledger.total_bytes) if known else texts["no_total"]
    parts = _shown(ledger)
    if not parts:
        sheet.row(name, total, ("bold", ""), indent=2, column=column)
        return
    cells = max(min(_BAR_CELLS, sheet.width - 2 - column - cell_len(total) - 4), len(parts))
    bar = [
        (
            (looks[part.name].block if sheet.color else looks[part.name].letter) * size,
            looks[part.name].style,
        )
        for part, size in zip(parts, share_cells([p.bytes for p in parts], cells), strict=True)
    ]
    edges = ("", "") if sheet.color else ("[", "]")
    sheet.spans(
        ("  ", ""), (name, "bold"), (" " * (column - cell_len(name)), ""),
        (edges[0], ""), *bar, (edges[1] + "  ", ""), (total, ""),
    )  # fmt: skip


def _legend(
    sheet: Sheet,
    items: Sequence[tuple[str, str]],
    indent: int,
    looks: Mapping[str, Look],
    texts: Mapping[str, str],
) -> None:
    """Marks, names and sizes in aligned columns, as many as the width allows."""
    labels = [part_name(name, texts) for name, _ in items]
    widest = max(map(cell_len, labels), default=0)
    numbers = max((len(size) for _, size in items), default=0)
    cell = 2 + widest + (1 + numbers if numbers else 0)
    columns = max((sheet.width - indent + len(_GAP)) // (cell + len(_GAP)), 1)
    for start in range(0, len(items), columns):
        line: list[tuple[str, str]] = [(" " * indent, "")]
        chunk = list(zip(items, labels, strict=True))[start : start + columns]
        for place, ((name, size), label) in enumerate(chunk):
            look = looks[name]
            text = f" {label}{' ' * (widest - cell_len(label))}"
            if size:
                text += f" {size:>{numbers}}"
            gap = _GAP if place < len(chunk) - 1 else ""
            line += [(look.mark if sheet.color else look.letter, look.style), (text + gap, "")]
        sheet.spans(*line)


def share_cells(sizes: Sequence[int], cells: int) -> list[int]:
    """`cells` shared out in proportion, at least one each while there are enough.

    The largest sizes give up the cells that rounding and the smallest sizes need.
    """
    total = sum(sizes)
    shares = [max(1, round(size * cells / total)) for size in sizes]
    while sum(shares) > cells and max(shares) > 1:
        shares[shares.index(max(shares))] -= 1
    if sum(shares) < cells:
        shares[sizes.index(max(sizes))] += cells - sum(shares)
    return shares


def _looks(parts: Sequence[MemoryPart]) -> dict[str, Look]:
    """The look of each part's name; no two names share a letter."""
    names = dict.fromkeys(part.name for part in parts)
    spare = iter("XYZBCEHIJLMPQRSTV" + "?" * len(names))
    looks = {}
    for name in names:
        letter, style = _LOOKS[name] if name in _LOOKS else (next(spare), "bright_black")
        shade = ("░", "░") if name == "free" else ("█", "■")
        looks[name] = Look(letter, style, *shade)
    return looks
