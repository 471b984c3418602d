"""A plan for people: budget bar, verdict, tables of formats and changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from oomwatch.memory.goals import Answer
from oomwatch.memory.planner import Plan, PlanInput
from oomwatch.memory.what_if import FormatRow, WhatIf
from oomwatch.units import GIB, KIB, format_bytes, format_count

_NARROW: Final = 110  # cells; below, prices stand under their changes
_PARTS: Final = (
    ("weights", "blue"),
    ("activation", "yellow"),
    ("cuda graphs", "magenta"),
    ("non-torch", "red"),
    ("states", "cyan"),
    ("kv cache", "green"),
    ("left outside", "bright_black"),
)


def print_plan(
    console: Console,
    given: PlanInput,
    plan: Plan,
    *,
    name: str,
    where: str,
    formats: Sequence[FormatRow],
    changes: Sequence[WhatIf],
) -> None:
    """The whole answer, on a console."""
    settings = plan.settings
    version = f" {given.version}" if given.version else ""
    console.print(
        f"[bold]{escape(name)}[/] on {settings.gpus} × {escape(given.device.name)} "
        f"({plan.budget.total_bytes / GIB:.2f} GiB), {settings.engine}{escape(version)}"
        f"{' V0' if settings.v0 else ''}; {escape(where)}"
    )
    console.print(_verdict(plan))
    _print_bar(console, plan)
    _print_cache(console, plan)
    _print_formats(console, plan, formats)
    _print_changes(console, plan, changes)
    if plan.assumptions:
        console.print("\n[bold]Assumptions[/]")
        for each in plan.assumptions:
            console.print(f"  - {escape(each)}")


def _verdict(plan: Plan) -> str:
    if plan.refusal is not None:
        return f"[bold red]does not start[/] ({plan.refusal}): {escape(plan.refusal_text or '')}"
    return (
        f"[bold green]starts[/]: {format_count(plan.tokens)} tokens of KV cache, "
        f"{_number(plan.max_concurrency)} requests of {format_count(plan.settings.max_model_len)} "
        "tokens at once"
    )


def shares(plan: Plan) -> tuple[tuple[str, int], ...]:
    """The parts of one GPU, as (name, bytes); they add up to its total where the plan fits."""
    budget = plan.budget
    graphs = budget.graphs.bytes
    kv = max(0, plan.kv_available_bytes)
    parts = [
        ("weights", budget.weights.bytes),
        ("activation", budget.activation.bytes),
        ("cuda graphs", graphs),
        ("non-torch", budget.non_torch.bytes),
        ("states", budget.state_pool_bytes),
        ("kv cache", kv),
    ]
    used = sum(size for _, size in parts)
    return (*parts, ("left outside", max(0, budget.total_bytes - used)))


def _print_bar(console: Console, plan: Plan) -> None:
    width = min(72, max(30, console.width - 4))
    parts = shares(plan)
    whole = max(1, sum(size for _, size in parts))
    bar = Text("  ")
    for (_, size), (_, style) in zip(parts, _PARTS, strict=True):
        cells = round(width * size / whole)
        bar.append("█" * cells, style=style)
    console.print(bar)
    legend = Text("  ")
    for (name, size), (_, style) in zip(parts, _PARTS, strict=True):
        if size:
            legend.append("■ ", style=style)
            legend.append(f"{name} {size / GIB:.2f}   ")
    legend.append("GiB per GPU")
    console.print(legend)
    low, high = plan.kv_low_bytes / GIB, plan.kv_high_bytes / GIB
    if low != high:
        console.print(f"  KV cache expected between {low:.2f} and {high:.2f} GiB per GPU")


def _print_cache(console: Console, plan: Plan) -> None:
    layout = plan.layout
    per_token = f"{layout.bytes_per_token / KIB:.1f} KiB per token and GPU"
    state = (
        f", {format_bytes(layout.state_bytes)} of state per request" if layout.state_bytes else ""
    )
    console.print(
        f"  {plan.kv_format} cache: {per_token}{state}; blocks of {layout.block_tokens} tokens, "
        f"{format_count(plan.blocks)} of them; one full request takes "
        f"{format_bytes(plan.bytes_per_request)}"
    )
    if plan.line_tokens != plan.tokens:
        console.print(
            f"  The server's own log line will say {format_count(plan.line_tokens)} tokens: with "
            "grouped layers this version prints something else than capacity."
        )
    if plan.max_model_len_that_fits < plan.settings.max_model_len:
        console.print(f"  Longest request that fits: {format_count(plan.max_model_len_that_fits)}")


def _print_formats(console: Console, plan: Plan, rows: Sequence[FormatRow]) -> None:
    if not rows:
        return
    length = format_count(plan.settings.max_model_len)
    table = _table(f"KV formats this version and card can run, at {length} tokens")
    table.add_column("--kv-cache-dtype", no_wrap=True)
    for head in ("GiB/request", "requests", "tokens"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("quality")
    for row in rows:
        shown = f"{row.name} *" if row.in_force else row.name
        table.add_row(
            shown,
            f"{row.bytes_per_request / GIB:.2f}",
            _number(row.max_concurrency),
            format_count(row.tokens),
            row.backend,
            row.quality,
        )
    console.print()
    console.print(table)


def _print_changes(console: Console, plan: Plan, changes: Sequence[WhatIf]) -> None:
    if not changes:
        return
    table = _table("What each change would do")
    narrow = console.width < _NARROW
    table.add_column("change", no_wrap=not narrow)
    for head in ("tokens", "requests", "KV GiB/GPU"):
        table.add_column(head, justify="right", no_wrap=True)
    if not narrow:
        table.add_column("price")
    for each in changes:
        after = each.plan
        flags = " ".join(k if v is True else f"{k} {v}" for k, v in each.set.items())
        removed = " ".join(f"without {k}" for k in each.unset)
        result = _number(after.max_concurrency) if after.fits else "no start"
        price = each.cost if each.validated else f"{each.cost} (not checked: {each.reason})"
        name = escape(f"{flags} {removed}".strip())
        table.add_row(
            f"{name}\n[dim]  {escape(price)}[/]" if narrow else name,
            f"{format_count(after.tokens)} {_change(plan.tokens, after.tokens)}",
            result,
            f"{after.kv_available_bytes / GIB:.2f} {each.freed_bytes / GIB:+.2f}",
            *([] if narrow else [escape(price)]),
        )
    console.print()
    console.print(table)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE, pad_edge=False)


def print_answer(console: Console, answer: Answer, line: str) -> None:
    """The configuration that reaches a goal, as a command to paste."""
    after = answer.plan
    word = "[bold green]reaches the goal[/]" if answer.reached else "[bold yellow]nearest[/]"
    console.print(
        f"\n{word}: {_number(after.max_concurrency)} requests of "
        f"{format_count(after.settings.max_model_len)} tokens on {after.settings.gpus} GPUs"
    )
    console.print(Text(line), soft_wrap=True)


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "any number of"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _change(before: int, after: int) -> str:
    return f"{after / before - 1:+.0%}" if before > 0 and after != before else ""
