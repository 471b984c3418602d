"""Host memory that ran out while an engine started, told by the start's own words.

No kernel line is needed: Ray's monitor, the build of a kernel, the allocator of the host and the
paravirtual driver of Windows each say it in their way.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.facts import Facts, cite_failure
from oomwatch.diagnose.rules.findings import ARITHMETIC, KERNEL, NAMED_CHECK, Rule, found
from oomwatch.records import Finding

_COMPILER_KILLED: Final = re.compile(
    r"(?m)^Killed$|Killed signal terminated program|internal compiler error: Killed|(?:cicc|nvcc|cc1plus|ptxas|c\+\+).{0,80}(?:out of memory|died due to signal 9|signal 9)|virtual memory exhausted|cannot allocate memory",
    re.IGNORECASE,
)
"""What make, ninja, nvcc and gcc print when the kernel killed a compiler or memory was refused."""


def node_monitor(facts: Facts) -> Finding | None:
    """Ray ended a worker because the node was low on memory; its name for that is OutOfMemoryError."""
    hit = facts.failing("host.ray_monitor")
    if hit is None:
        return None
    failure, _ = hit
    return found(
        facts,
        "host_oom_kill" if facts.served else "host_oom_load",
        0.88,
        "Ray's monitor ended a worker because the host, not the GPU, was low on memory.",
        cite_failure(failure),
        strength=NAMED_CHECK,
        order=failure.order,
        values={"stage": "serving" if facts.served else "load"},
    )


def compiler_killed(facts: Facts) -> Finding | None:
    """A build at start failed because its compilers were killed, not because of its code."""
    hit = facts.failing("jit.build")
    if hit is None:
        return None
    failure, _ = hit
    text = "\n".join((failure.message, *(line.text for line in failure.details)))
    if not _COMPILER_KILLED.search(text):
        return None
    return found(
        facts,
        "host_oom_jit",
        0.85,
        "A compiler that builds kernels at start was killed: many of them at once used up the host's memory, the GPU is not"
        " involved.",
        cite_failure(failure),
        strength=ARITHMETIC,
        order=failure.order,
        values={"stage": "compile"},
        unseen=() if facts.has_kernel else ("The kernel's own line: `journalctl -k` or `dmesg`.",),
    )


def residency_refused(facts: Facts) -> Finding | None:
    """Windows' paravirtual driver could not make GPU memory resident (``dxgkio_make_resident: -12``)."""
    lines = [c for c in facts.kernel if "dxgkio" in c.event.text]
    if not lines or facts.served or not (facts.failures or facts.messengers):
        return None
    failure = facts.failures[0] if facts.failures else None
    return found(
        facts,
        "wsl_alloc_limit",
        0.82,
        "The virtualised Windows driver could not make GPU memory resident, although the card may count enough as free:"
        " a limit of the virtual machine, not of the card.",
        [
            *(c.evidence() for c in lines[:2]),
            *(cite_failure(failure) if failure is not None else ()),
        ],
        strength=KERNEL,
        values={"stage": facts.run.stage if facts.run else "init"},
        at=lines[0].event.at,
    )


RULES: Final[tuple[Rule, ...]] = (node_monitor, compiler_killed, residency_refused)
