"""The GPU's own faults, as the driver logs them: Xids, lost cards, ECC errors, a wrong driver.

Codes that name the board, its memory or its links are hardware. Codes 13, 31 and 43 follow faults of
a program, 45 is the clean-up after any end, and 63, 92 and 154 are notes that a healthy card may
bear for weeks: they explain a failure, they are none.
"""

from __future__ import annotations

from typing import Final

from oomwatch.diagnose.facts import Facts, KernelCitation, cite_failure
from oomwatch.diagnose.rules.findings import ARITHMETIC, KERNEL, Rule, found
from oomwatch.records import Evidence, Finding

_HARDWARE: Final = frozenset(
    {46, 48, 61, 62, 64, 74, 79, 94, 95, 110, 119, 120, 136, 140, 143, 149, 155, 156, 158, 171, 172}
)
_NOTES: Final = frozenset({63, 92, 154})
_PROGRAM: Final = frozenset({13, 31, 43, 69, 137})
_BEFORE_SECONDS: Final = 3_600.0
_AFTER_SECONDS: Final = 21_600.0


def hardware(facts: Facts) -> Finding | None:
    """The GPU or its link failed."""
    chosen = _xids(facts, _HARDWARE)
    if not chosen and _unexplained(facts):
        chosen = _xids(facts, _NOTES) + [
            c
            for c in facts.kernel
            if c.event.kind == "hardware_ecc"
            and not c.event.fields.get("corrected")
            and _at_that_time(facts, c)
        ]
    if not chosen:
        return None
    code, pci = _code(chosen[0]), chosen[0].event.fields.get("pci")
    return found(
        facts,
        "gpu_hw_fault",
        0.93,
        f"The {f'GPU {pci}' if pci else 'GPU' if code else 'hardware'} reported a fault"
        + (f" (Xid {code})" if code else "")
        + "; time-outs and errors of the engine follow from it.",
        [c.evidence() for c in chosen[:3]],
        strength=KERNEL,
        values={"xid": code, "pci": pci},
        at=chosen[0].event.at,
    )


def program_fault(facts: Facts) -> Finding | None:
    """The driver stopped a kernel that used a wrong address; the log calls it a launch failure."""
    xids = _xids(facts, _PROGRAM)
    if not xids or _xids(facts, _HARDWARE):
        return None
    launch = facts.failing("cuda.hw")
    if launch is None and not _silent(facts):
        return None
    code = _code(xids[0])
    evidence: list[Evidence] = [xids[0].evidence()]
    if launch is not None:
        evidence += cite_failure(launch[0])
    return found(
        facts,
        "illegal_memory_access",
        0.8,
        f"The driver stopped a kernel of the engine for an invalid access (Xid {code}): a bug in a kernel, not a lack of memory.",
        evidence,
        strength=ARITHMETIC if launch is not None else KERNEL,
        order=launch[0].order if launch is not None else None,
        values={"xid": code},
    )


def wrong_driver(facts: Facts) -> Finding | None:
    """The driver's parts in the kernel and in user space differ, and the start failed."""
    events = [c for c in facts.kernel if c.event.kind == "driver_mismatch"]
    if not events or facts.served or any(f.oom is not None for f in facts.failures):
        return None
    return found(
        facts,
        "driver_mismatch",
        0.85,
        "The NVIDIA driver in the kernel and its libraries are of different versions.",
        [events[0].evidence()],
        strength=KERNEL,
    )


def _xids(facts: Facts, codes: frozenset[int]) -> list[KernelCitation]:
    return [
        c
        for c in facts.kernel
        if c.event.kind == "xid" and _code(c) in codes and _at_that_time(facts, c)
    ]


def _code(citation: KernelCitation) -> int | None:
    """The code of the fault itself: a clean-up may name the one it follows."""
    fields = citation.event.fields
    code = fields.get("caused_by_xid", fields.get("xid"))
    return code if isinstance(code, int) else None


def _at_that_time(facts: Facts, citation: KernelCitation) -> bool:
    """Whether the event is of the time the log covers, as far as times are known."""
    run, at = facts.run, citation.event.at
    if run is None or at is None:
        return True
    first = run.first.at if run.first is not None else None
    last = run.last.at if run.last is not None else None
    if first is not None and at < first - _BEFORE_SECONDS:
        return False
    return last is None or at <= last + _AFTER_SECONDS


def _silent(facts: Facts) -> bool:
    """Whether the engine is gone and says no reason."""
    if facts.failures:
        return False
    return bool(facts.messengers) or (facts.run is not None and facts.run.ended is not None)


def _unexplained(facts: Facts) -> bool:
    """Whether the failure is of a kind that bad hardware causes, or has no cause in the log."""
    if not facts.has_log:
        return True
    named = ("cuda.hw", "nccl.watchdog", "vllm.rpc_timeout", "cuda.illegal_access")
    return _silent(facts) or (bool(facts.failures) and facts.failing(*named) is not None)


RULES: Final[tuple[Rule, ...]] = (hardware, program_fault, wrong_driver)
"""Every rule of this file."""
