"""NCCL's failures at start: no GPU memory, no shared memory, or no word of why.

Python says only "unhandled cuda error" or "unhandled system error"; NCCL's own line, which needs
NCCL_DEBUG or a WARN, tells a full card from an operation that the cards do not support.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.frames import find_stage
from oomwatch.diagnose.rules.findings import NAMED_CHECK, NOTHING, STAGE, Rule, found
from oomwatch.diagnose.rules.placing import is_placed_by_lines, shows_serving
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, format_bytes

_FULL: Final = 1 * GIB
"""Communicators need some hundreds of MiB a card."""
_SEGMENT: Final = re.compile(r"[A-Za-z0-9]{6}")
"""What mkstemp puts after ``nccl-``."""


def full_card(facts: Facts) -> Finding | None:
    """NCCL could not get GPU memory for its communicators, by its own line or by what NVML saw."""
    if shows_serving(facts):
        return None
    hit = facts.failing("nccl.oom")
    bare = facts.failing("nccl.cuda_error")
    evidence: list[Evidence] = []
    if hit is not None:
        failure, _ = hit
        why = "(CUDA failure 2)"
        confidence = 0.9 if _is_at_start(facts, failure) else 0.65
    elif bare is not None and facts.failing("nccl.unsupported") is None:
        failure, _ = bare
        free = min((trend.low for trend in facts.series.gpu_free.values()), default=None)
        if free is None or free > _FULL:
            return _unexplained(facts, failure)
        why, confidence = f"({format_bytes(free)} of a card were free)", 0.72
        evidence = [
            Evidence(
                "nvml", "free_bytes", text="free memory at the lowest", value=free, unit="bytes"
            )
        ]
    else:
        return None
    return found(
        facts,
        "nccl_init",
        confidence,
        f"NCCL could not get GPU memory for its communicators {why}: the cards are nearly full before the model loads.",
        [*cite_failure(failure), *evidence],
        strength=NAMED_CHECK,
        order=failure.order,
        values={"stage": "nccl"},
        unseen=()
        if facts.series.holders
        else ("Which process holds the cards: NVML's process list.",),
    )


def _is_at_start(facts: Facts, failure: Failure) -> bool:
    """Whether a frame or the lines before place it where the ranks connect, and not behind the load."""
    if find_stage(failure.frames, failure.paths) == "nccl":
        return True
    run = facts.run
    return is_placed_by_lines(facts, failure) and run is not None and not run.reached("loaded")


def _unexplained(facts: Facts, failure: Failure) -> Finding:
    return found(
        facts,
        "startup_unknown",
        0.35,
        "NCCL failed with a CUDA error while the ranks connected; its own line, which tells a full card from an operation"
        " that is not supported, is not in this input.",
        cite_failure(failure),
        strength=NOTHING,
        order=failure.order,
        values={"stage": "nccl"},
        unseen=("NCCL's own reason: start once with NCCL_DEBUG=INFO.",),
    )


def shared_memory(facts: Facts) -> Finding | None:
    """The ranks could not get shared memory: NCCL's segment, or a bus error while several ranks start."""
    shm = facts.failing("nccl.shm") or facts.failing("nccl.system_error")
    said = facts.said("nccl.shm")
    bus = facts.said("crash.bus_error")
    if said is None and facts.failing("nccl.shm") is None and _attached(facts) is not None:
        return None
    if shm is None and said is None and not (bus and has_ranks(facts) and not facts.served):
        return None
    if facts.served and said is None:
        return None
    named = said is not None or facts.failing("nccl.shm") is not None
    raised: Failure | None = shm[0] if shm else None
    line = said.line if said else raised.line if raised is not None else bus.line if bus else None
    if line is None:
        return None
    what = "NCCL failed with a system error" if raised is not None else "A process got a bus error"
    return found(
        facts,
        "shm_too_small",
        0.92 if named else 0.6,
        "The ranks could not get shared memory (/dev/shm) for NCCL: the container's share is too small."
        if named
        else f"{what} while the ranks connected; in a container this is nearly always a /dev/shm that is too small.",
        [
            cite(line),
            *(cite_failure(raised) if raised is not None and raised.line is not line else ()),
        ],
        strength=NAMED_CHECK if named else STAGE,
        order=min((x.order for x in (raised, said, bus) if x is not None), default=None),
        values={"stage": "nccl"},
        unseen=() if named else ("NCCL's own reason: start once with NCCL_DEBUG=INFO.",),
    )


def missing_segment(facts: Facts) -> Finding | None:
    """A rank does not find the segment that another one made: it is not full, it is not there.

    NCCL takes a handle of the CUDA driver for a name where the two ranks allocate differently, as
    on boards with NUMA nodes without memory; the name is then empty or garbled, or the size 0.
    """
    hit = _attached(facts)
    if hit is None or facts.served or facts.said("nccl.shm") or facts.failing("nccl.shm"):
        return None
    evidence, order, size, name = hit
    mistaken = not size or _SEGMENT.fullmatch(name) is None
    return found(
        facts,
        "nccl_unsupported",
        0.75 if mistaken else 0.6,
        "A rank could not open another rank's shared memory: NCCL took a handle of the CUDA driver for a file in /dev/shm,"
        " as it does on some boards; /dev/shm is not full."
        if mistaken
        else "A rank did not find another rank's segment in /dev/shm: the ranks do not share one (containers without a common"
        " IPC namespace), or the rank that made it ended first; /dev/shm is not full.",
        evidence,
        strength=NAMED_CHECK,
        order=order,
        values={"stage": "nccl", "segment_bytes": size, "shared": not mistaken},
        unseen=("What the other ranks printed: one of them may have failed before.",)
        if not mistaken
        else (),
    )


def _attached(facts: Facts) -> tuple[list[Evidence], int, int, str] | None:
    """Lines, place, size and name of the segment that a rank could not open."""
    said = facts.said("nccl.shm_attach")
    raised = facts.failing("nccl.shm_attach")
    if said is not None:
        lines, order, fields = [cite(said.line)], said.order, said.fields
    elif raised is not None:
        lines, order, fields = [*cite_failure(raised[0])], raised[0].order, raised[1]
    else:
        return None
    return lines, order, int(fields.get("segment_bytes") or 0), str(fields.get("segment") or "")


def has_ranks(facts: Facts) -> bool:
    """Whether several ranks start on this host, by the command or by who measured the start."""
    if (facts.number("--tensor-parallel-size", "--tp-size") or 1) > 1:
        return True
    return facts.run is not None and any(len(who) > 1 for who in facts.run.by_rank.values())


RULES: Final[tuple[Rule, ...]] = (full_card, shared_memory, missing_segment)
