"""The kernel's word that stands in a server's log: copied below it, or mixed in by a collector.

A prompt may quote the same line, so it counts only where no server that answers goes on after it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from oomwatch.diagnose.events import LogEvent
from oomwatch.diagnose.facts import KernelCitation
from oomwatch.diagnose.runs import Run
from oomwatch.engines.kernel_words import CONSTRAINT, KILL, NO_MEMORY, XID
from oomwatch.records import KernelEvent, KernelEventKind

_KINDS: Final[Mapping[str, KernelEventKind]] = {
    KILL: "oom_kill",
    CONSTRAINT: "oom_kill",
    NO_MEMORY: "driver_no_memory",
    XID: "xid",
}


def kernel_words(run: Run | None, known: Collection[tuple[str, int]]) -> tuple[KernelCitation, ...]:
    """What the kernel says in this run's log; `known` are file and line of what was read as such."""
    if run is None or run.is_document:
        return ()
    return tuple(
        KernelCitation(_as_kernel(event), event.line.source)
        for event in run.all(*_KINDS)
        if _is_the_kernels(event)
        and (event.line.source, event.line.number) not in known
        and (event.order > run.last_alive or not (run.served or run.reached("ready")))
    )


def _is_the_kernels(event: LogEvent) -> bool:
    line = event.line
    unclaimed = not line.prefixed and line.level is None and line.origin is None
    return unclaimed and line.process in (None, "kernel")


def _as_kernel(event: LogEvent) -> KernelEvent:
    fields: dict[str, Any] = {
        name: int(value) if name in ("pid", "xid") else value
        for name, value in event.fields.items()
        if name != "how"
    }
    how = event.fields.get("how")
    if how is not None:
        fields["scope"] = "cgroup" if str(how).startswith("Memory cgroup") else "host"
    line = event.line
    kind = _KINDS[event.pattern.id]
    return KernelEvent(kind, line.text[:2000], line.number, line.at, None, fields)
