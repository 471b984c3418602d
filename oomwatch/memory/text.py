"""A plan for people: verdict, budget bar, and what each change would do, in 80 columns."""

from __future__ import annotations

import math
import string
import textwrap
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from oomwatch.memory.goals import CHOSEN_FORMATS, Answer
from oomwatch.memory.planner import Plan, PlanInput
from oomwatch.memory.what_if import FormatRow, WhatIf
from oomwatch.units import GIB, KIB, format_bytes, format_count

_PARTS: Final = (  # name, letter where there is no colour, colour
    ("weights", "W", "blue"),
    ("activation", "A", "yellow"),
    ("cuda graphs", "G", "magenta"),
    ("non-torch", "N", "red"),
    ("states", "S", "cyan"),
    ("kv cache", "K", "green"),
    ("left outside", ".", "bright_black"),
)
_TOO_LARGE: Final = ("weights_dont_fit", "profile_activation_peak", "kv_no_blocks")
"""Refusals that no shorter request mends."""


def print_plan(
    console: Console,
    given: PlanInput,
    plan: Plan,
    *,
    name: str,
    where: str,
    formats: Sequence[FormatRow],
    changes: Sequence[WhatIf],
    fewest: Plan | None = None,
    verbose: bool = False,
) -> None:
    """The whole answer, on a console; the table of formats and all changes when `verbose`.

    `fewest` is the plan with the fewest GPUs that starts, where this one does not.
    """
    settings = plan.settings
    version = f" {given.version}" if given.version else ""
    console.print(
        f"[bold]{escape(name)}[/] on {settings.gpus} × {escape(given.device.name)} "
        f"({plan.budget.total_bytes / GIB:.2f} GiB), {settings.engine}{escape(version)}"
        f"{' V0' if settings.v0 else ''}; {escape(where)}"
    )
    console.print(verdict(plan))
    too_large = plan.refusal in _TOO_LARGE
    if too_large:
        _print_fewest(console, given, fewest)
    _print_bar(console, plan)
    if not too_large or verbose:
        _print_cache(console, plan)
    for each in plan.warnings:
        _print_item(console, each, indent="  ! ", style="yellow")
    shown = [each for each in changes if verbose or _is_useful(plan, each)]
    _print_changes(console, plan, shown)
    if verbose:
        _print_formats(console, plan, formats)
    elif len(shown) < len(changes) or formats:
        left = len(changes) - len(shown)
        more = f"{left} more changes and the table" if left else "The table"
        console.print(f"\n[dim]{more} of KV cache formats: plan -v[/]")
    print_assumptions(console, plan)


def print_assumptions(console: Console, plan: Plan) -> None:
    """What the plan takes for granted, as a list."""
    if plan.assumptions:
        console.print("\n[bold]Assumptions[/]")
        for each in plan.assumptions:
            _print_item(console, each, indent="  - ")


def _is_useful(plan: Plan, change: WhatIf) -> bool:
    """Whether a change belongs in the short list: it starts, is allowed, and costs no quality."""
    fmt = change.set.get("--kv-cache-dtype")
    if not change.plan.fits or (not change.validated and plan.fits):
        return False
    if change.plan.warnings and not plan.warnings:
        return False
    return fmt is None or fmt in CHOSEN_FORMATS


def _print_fewest(console: Console, given: PlanInput, fewest: Plan | None) -> None:
    card = escape(given.device.name)
    if fewest is None:
        line = f"  No number of {card} up to 16 starts it with these flags."
    else:
        flag = "--tensor-parallel-size" if fewest.settings.engine == "vllm" else "--tp-size"
        line = (
            f"  The fewest {card} that start it: [bold]{fewest.settings.gpus}[/] "
            f"({flag} {fewest.settings.tensor_parallel}), for {requests(fewest)} at once"
        )
    console.print(line)


def _print_item(console: Console, text: str, *, indent: str, style: str = "") -> None:
    """A paragraph whose further lines stand below its first."""
    hang = " " * len(indent)
    for line in textwrap.wrap(text, console.width, initial_indent=indent, subsequent_indent=hang):
        console.print(Text(line, style=style))


def verdict(plan: Plan) -> str:
    """Whether it starts and what it holds, or why not: one sentence, as markup."""
    if plan.refusal is not None:
        return f"[bold red]does not start[/] ({plan.refusal}): {escape(plan.refusal_text or '')}"
    return (
        f"[bold green]starts[/]: {format_count(plan.tokens)} tokens of KV cache, "
        f"{requests(plan)} at once"
    )


def requests(plan: Plan) -> str:
    """How many requests of full length the pool holds, and how many of them are let run."""
    settings = plan.settings
    length = format_count(settings.max_model_len)
    words = f"{_number(plan.max_concurrency)} requests of {length} tokens"
    if plan.max_concurrency < settings.max_num_seqs + 1:
        return words
    flag = "--max-num-seqs" if settings.engine == "vllm" else "--max-running-requests"
    return f"{words}, of which {flag} lets {format_count(settings.max_num_seqs)} run"


def print_refused_flag(console: Console, reason: str) -> None:
    """That the release refuses a flag, so that what follows holds without it only."""
    console.print(f"[bold red]does not start[/] (bad_arguments): {escape(reason)}")
    console.print("[dim]Without it:[/]")


def shares(plan: Plan) -> tuple[tuple[str, int], ...]:
    """The parts of one GPU, as (name, bytes); they add up to its total where the plan fits."""
    budget = plan.budget
    parts = [
        ("weights", budget.weights.bytes),
        ("activation", budget.activation.bytes),
        ("cuda graphs", budget.graphs.bytes),
        ("non-torch", budget.non_torch.bytes),
        ("states", budget.state_pool_bytes),
        ("kv cache", plan.pool_bytes),
    ]
    used = sum(size for _, size in parts)
    return (*parts, ("left outside", max(0, budget.total_bytes - used)))


def _print_bar(console: Console, plan: Plan) -> None:
    width = min(72, max(30, console.width - 4))
    parts = shares(plan)
    colored = console.color_system is not None and not console.no_color
    cells = _cells([size for _, size in parts], width)
    bar = Text("  ")
    for count, (_, letter, style) in zip(cells, _PARTS, strict=True):
        bar.append(("█" if colored else letter) * count, style=style)
    console.print(bar)
    line = Text("  ")
    for (name, size), (_, letter, style) in zip(parts, _PARTS, strict=True):
        if size:
            words = f" {name} {size / GIB:.2f}"
            if line.cell_len + len(words) + 1 > console.width:
                console.print(line)
                line = Text("  ")
            line.append("■" if colored else letter, style=style)
            line.append(f"{words}   ")
    unit = "GiB per GPU"
    beyond = sum(size for _, size in parts) - plan.budget.total_bytes
    if beyond > 0:
        unit += f", {beyond / GIB:.2f} more than the card has"
    if line.cell_len + len(unit) > console.width:
        console.print(line)
        line = Text("  ")
    line.append(unit)
    console.print(line)
    low, high = max(0, plan.kv_low_bytes) / GIB, plan.kv_high_bytes / GIB
    if low < high and plan.pool_bytes == plan.kv_available_bytes:
        console.print(f"  KV cache expected between {low:.2f} and {high:.2f} GiB per GPU")


def _cells(sizes: Sequence[int], width: int) -> list[int]:
    """`width` cells shared out in proportion to sizes; what rounding leaves goes by its end."""
    whole = max(1, sum(sizes))
    ends = [round(width * sum(sizes[: place + 1]) / whole) for place in range(len(sizes))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _print_cache(console: Console, plan: Plan) -> None:
    layout = plan.layout
    per_token = f"{layout.bytes_per_token / KIB:.1f} KiB per token and GPU"
    state = (
        f", {format_bytes(layout.state_bytes)} of state per request" if layout.state_bytes else ""
    )
    console.print(
        f"  {plan.kv_format} cache: {per_token}{state}; blocks of {_tokens(layout.block_tokens)}, "
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
    console.print(f"\n[bold]KV formats this version and card can run, at {length} tokens[/]")
    codes = dict(
        zip(dict.fromkeys(row.quality for row in rows), string.ascii_lowercase, strict=False)
    )
    cells = [
        (
            f"{row.name} *" if row.in_force else row.name,
            f"{row.bytes_per_request / GIB:.2f}",
            _number(row.max_concurrency),
            format_count(row.tokens),
            row.backend,
            codes[row.quality],
        )
        for row in rows
    ]
    heads = ("--kv-cache-dtype", "GiB/request", "requests", "tokens", "backend", "note")
    for line in _aligned((heads, *cells), left=(0, 4, 5)):
        console.print(Text(f"  {line}"))
    for quality, code in codes.items():
        _print_item(console, quality, indent=f"  {code}  ", style="dim")
    if any(row.in_force for row in rows):
        console.print(Text("  *  in force", style="dim"))


def _print_changes(console: Console, plan: Plan, changes: Sequence[WhatIf]) -> None:
    if not changes:
        return
    console.print("\n[bold]What each change would do[/]")
    cells, prices = [], []
    for each in changes:
        after = each.plan
        flags = " ".join(k if v is True else f"{k} {v}" for k, v in each.set.items())
        removed = " ".join(f"without {k}" for k in each.unset)
        cells.append(
            (
                f"{flags} {removed}".strip(),
                format_count(after.tokens) if after.fits else "-",
                _change(plan.tokens, after.tokens) if after.fits else "",
                _number(after.max_concurrency) if after.fits else "no start",
                f"{each.freed_bytes / GIB:+.2f}",
            )
        )
        prices.append(each.cost if each.validated else f"{each.cost} (not checked: {each.reason})")
    heads = ("change", "tokens", "", "requests", "GiB/GPU")
    title, *lines = _aligned((heads, *cells), left=(0,))
    beside = all(
        len(line) + len(price) + 4 <= console.width
        for line, price in zip(lines, prices, strict=True)
    )
    console.print(Text(f"  {title}", style="dim"))
    for line, price in zip(lines, prices, strict=True):
        if beside:
            console.print(Text.assemble(f"  {line}  ", (price, "dim")))
        else:
            console.print(Text(f"  {line}"))
            _print_item(console, price, indent="      ", style="dim")


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Rows of cells as lines; columns in `left` are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def print_answer(console: Console, answer: Answer, line: str) -> None:
    """The configuration that reaches a goal, as a command to paste."""
    after = answer.plan
    word = "[bold green]reaches the goal[/]" if answer.reached else "[bold yellow]out of reach[/]"
    gpus = after.settings.gpus
    console.print(
        f"{word}{'' if answer.reached else '; the nearest'}: {requests(after)} on {gpus} "
        f"GPU{'s' if gpus > 1 else ''}"
    )
    console.print(Text(line), soft_wrap=True)
    for each in (*answer.caveats, *after.warnings):
        _print_item(console, each, indent="  ! ", style="yellow")


def _tokens(count: int) -> str:
    return f"{format_count(count)} token{'' if count == 1 else 's'}"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "any number of"
    return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"


def _change(before: int, after: int) -> str:
    return f"{after / before - 1:+.0%}" if before > 0 and after != before else ""
