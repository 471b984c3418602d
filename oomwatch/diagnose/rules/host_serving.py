"""Host memory that was refused, rather than taken away, while the engine served."""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.rules.findings import KERNEL, NAMED_CHECK, Rule, found
from oomwatch.diagnose.rules.host_evidence import KILLED_FOR_MEMORY
from oomwatch.records import Finding
from oomwatch.units import GIB, MIB, format_bytes

_LAST_WORDS: Final = 8
"""Lines from the end of the log, with what a keeper adds, that are the server's last words."""
_DEFAULT_CAP_MIB: Final = 8192
"""llama.cpp's own --cache-ram."""


def refused_while_serving(facts: Facts) -> Finding | None:
    """An allocation on the host failed with an exception, in a server that was up."""
    hit = facts.failing("torch.cpu_alloc", "host.alloc", "host.bad_alloc")
    if hit is None or not (facts.served or facts.ready):
        return None
    failure, fields = hit
    tried = fields.get("tried")
    return found(
        facts,
        "host_oom_kill",
        0.7,
        "The host refused memory to a process of the server while it served; the GPU is not involved.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={
            "stage": "serving",
            "tried_bytes": int(tried) if isinstance(tried, str) and tried.isdigit() else None,
            "host_total_bytes": facts.series.host_total_bytes,
        },
        unseen=("Which process grew: resident memory of the server's processes over time.",),
    )


def prompt_cache_over_cap(facts: Facts) -> Finding | None:
    """llama.cpp's last words save a prompt's state to host memory: one entry may exceed the cap.

    It allocates the state first and looks at --cache-ram afterwards.
    """
    run = facts.run
    saves = run.all("llama.prompt_cache") if run else []
    if run is None or run.last is None or not saves:
        return None
    last = saves[-1]
    size = last.fields.get("state_bytes") or 0
    killed = facts.said(*KILLED_FOR_MEMORY) or run.find_last("exit.killed", "exit.systemd")
    kernel = next((c for c in reversed(facts.kernel) if c.event.kind == "oom_kill"), None)
    if last.line.number < run.last.number - _LAST_WORDS or size < GIB / 2:
        return None
    cap = facts.number("--cache-ram") or _number(facts.argument("--cache-ram"))
    limit = (cap if cap is not None else _DEFAULT_CAP_MIB) * MIB
    dead = killed is not None or kernel is not None
    if not dead and not 0 <= limit < size:
        return None
    over = f", more than the {format_bytes(limit)} of --cache-ram" if 0 <= limit < size else ""
    evidence = [cite(last.line), *([cite(killed.line)] if killed else [])]
    return found(
        facts,
        "host_cache_growth",
        0.9 if dead else 0.7,
        f"The server ended while it saved a prompt's state of {format_bytes(size)} to host memory{over}.",
        [*evidence, *([kernel.evidence()] if kernel else [])],
        strength=KERNEL if dead else NAMED_CHECK,
        order=last.order,
        values={"grown_bytes": size, "limit_bytes": round(limit), "stage": "serving"},
        unseen=() if dead else ("How the process ended: its exit status, and the kernel's log.",),
    )


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None


RULES: Final[tuple[Rule, ...]] = (refused_while_serving, prompt_cache_over_cap)
