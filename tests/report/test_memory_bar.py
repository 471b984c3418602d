from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from oomwatch.records import GpuLedger, MemoryPart
from oomwatch.report.layout import Sheet
from oomwatch.report.ledgers import group_ledgers
from oomwatch.report.locale import catalogue
from oomwatch.report.memory_bar import draw_memory, share_cells
from oomwatch.units import GIB


def ledger(gpu: int | None, total: int | None, **parts: int) -> GpuLedger:
    return GpuLedger(gpu, total, tuple(MemoryPart(n, b, "log") for n, b in parts.items()))


def draw(*ledgers: GpuLedger, color: bool = False, width: int = 80) -> str:
    sheet = Sheet(width, color=color)
    draw_memory(sheet, ledgers, catalogue("en"))
    return sheet.render()


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=12), st.integers(12, 60))
@settings(max_examples=200)
def test_cells_add_up_and_every_part_shows(sizes: list[int], cells: int) -> None:
    shares = share_cells(sizes, cells)
    assert sum(shares) == cells
    assert min(shares) >= 1


def test_cells_follow_the_sizes() -> None:
    assert share_cells([60, 30, 10], 10) == [6, 3, 1]
    assert share_cells([10**12, 1], 10) == [9, 1]


def test_a_bar_of_letters_has_the_shares_of_the_parts() -> None:
    text = draw(ledger(0, 100 * GIB, weights=60 * GIB, kv_cache=30 * GIB, free=10 * GIB), width=100)
    bar = text[text.index("[") + 1 : text.index("]")]
    assert len(bar) == 60
    assert (bar.count("W"), bar.count("K"), bar.count(".")) == (36, 18, 6)
    assert "W weights  60.0 GiB" in text
    assert text.splitlines()[0].endswith("100 GiB")


def test_a_bar_of_blocks_has_one_colour_a_part() -> None:
    text = draw(ledger(0, 90 * GIB, weights=60 * GIB, kv_cache=30 * GIB), color=True, width=100)
    assert "\x1b[34m" + "█" * 40 + "\x1b[0m" + "\x1b[32m" + "█" * 20 in text


def test_unknown_parts_get_letters_of_their_own() -> None:
    text = draw(ledger(0, 3 * GIB, lora=GIB, host_mapped=GIB, weights=GIB))
    bar = text[text.index("[") + 1 : text.index("]")]
    assert len(set(bar)) == 3
    assert "lora" in text
    assert "host_mapped" in text


def test_ranks_that_look_alike_share_a_bar() -> None:
    same = [ledger(n, GIB, weights=GIB) for n in range(8)]
    assert [label for label, _ in group_ledgers(same)] == ["GPU 0-7"]
    assert [label for label, _ in group_ledgers([same[0], same[2]])] == ["GPU 0,2"]
    assert [label for label, _ in group_ledgers([ledger(None, GIB)])] == ["GPU"]
    assert draw(*same).count("[") == 1


def test_many_different_cards_share_one_legend() -> None:
    text = draw(*(ledger(n, GIB, weights=GIB - n * 10**8, free=n * 10**8 + 1) for n in range(4)))
    assert text.count("[") == 4
    assert text.count("weights") == 1


def test_an_empty_ledger_is_no_fault() -> None:
    assert draw(ledger(0, None)) == "  GPU 0  total unknown\n"
    assert draw(ledger(0, GIB, weights=0)) == "  GPU 0  1.0 GiB\n"
    assert draw() == ""


def test_narrow_terminals_keep_the_bar_on_a_line() -> None:
    text = draw(ledger(0, 80 * GIB, weights=60 * GIB, kv_cache=20 * GIB), width=40)
    assert all(cell_len(line) <= 40 for line in text.splitlines())
