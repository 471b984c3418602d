"""How a server ended when no error of its own says why: crashed, killed, stopped, or unknown."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.endings import CRASHES, Ending, endings
from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.facts import Facts, KernelCitation, cite
from oomwatch.diagnose.rules.findings import (
    KERNEL,
    LIFECYCLE,
    NAMED_CHECK,
    NOTHING,
    STAGE,
    Rule,
    found,
)
from oomwatch.diagnose.rules.nccl import has_ranks
from oomwatch.diagnose.rules.placing import shows_serving
from oomwatch.records import Finding

_ENGINE_COMM: Final = re.compile(
    r"(?i)(?:VLLM|sglang|python|ray::|pt_main|llama|ollama|text-gener|lmdeploy|Worker|EngineCore)"
)
_SHARED_MEMORY: Final = re.compile(r"[Bb]us error|SIGBUS|insufficient shared memory")


def native_crash(facts: Facts) -> Finding | None:
    """A process ended by SIGSEGV, SIGILL or SIGBUS, or aborted on a broken heap."""
    kernel = next((c for c in facts.kernel if c.event.kind == "native_crash"), None)
    crash = next((e for e in _endings(facts) if _is_crash(e)), None)
    if crash is not None and not _was_stopping(facts, crash.order):
        bus_at_start = _SHARED_MEMORY.search(crash.line.text) is not None and not facts.served
        if bus_at_start and has_ranks(facts):
            return None  # shared memory, see nccl
        return found(
            facts,
            "native_crash",
            0.6 if bus_at_start else 0.85,
            "A process of the engine crashed in native code (segmentation fault, illegal instruction, bus error or a broken heap); memory did not run out.",
            [cite(crash.line), *([kernel.evidence()] if kernel else [])],
            strength=NAMED_CHECK,
            order=crash.order,
            values={"signal": crash.signal, "exit_code": crash.exit_code},
            unseen=(
                "Whether /dev/shm, or the disk that a mapped file lies on, is full or gone: `df -h`.",
            )
            if bus_at_start
            else (),
        )
    if kernel is None or not _concerns(facts, kernel):
        return None
    return found(
        facts,
        "native_crash",
        0.8,
        "The kernel logged a crash of the engine in native code.",
        [kernel.evidence()],
        strength=KERNEL,
    )


def _is_crash(ending: Ending) -> bool:
    return ending.signal in CRASHES or ending.pattern_id == "crash.heap"


def _concerns(facts: Facts, kernel: KernelCitation) -> bool:
    """Whether the crash is one of the engine's own, by number, or by name where it died silently."""
    pids = facts.tree_pids | (facts.run.pids if facts.run else set())
    if kernel.event.fields.get("pid") in pids or not facts.has_log:
        return True
    comm = str(kernel.event.fields.get("comm") or "")
    return (
        not facts.failures
        and bool(facts.messengers or _endings(facts))
        and _ENGINE_COMM.match(comm) is not None
        and not _was_stopping(facts, None)
    )


def orchestrator(facts: Facts) -> Finding | None:
    """A probe, an eviction, a time limit or a reclaim ended the server."""
    run = facts.run
    if run is None:
        return None
    said = [
        e
        for e in run.all("orchestrator.kill", "orchestrator.probe")
        if e.order > run.last_alive and not any(f.order < e.order for f in facts.failures)
    ]
    event = next((e for e in said if e.pattern.id == "orchestrator.kill"), None)
    ended = bool(_endings(facts) or facts.messengers) or facts.said("shutdown.requested")
    if event is None and (facts.failures or not ended):
        return None  # probes fail as long as a start takes
    event = event or next(iter(said), None)
    if event is None:
        return None
    return found(
        facts,
        "killed_by_orchestrator",
        0.8,
        "The orchestrator ended the server (probe, eviction, time limit or reclaim); memory of the engine is not the reason given.",
        [cite(event.line)],
        strength=NAMED_CHECK,
        order=event.order,
    )


def killed(facts: Facts) -> Finding | None:
    """A process was killed, and nothing in the input says by whom."""
    first_failure = min((f.order for f in facts.failures), default=None)
    gone = [e for e in _endings(facts) if e.killed or (e.exit_code and not e.orderly)]
    ending = next((e for e in gone if e.killed), None) or next(iter(gone), None)
    if ending is None or _was_stopping(facts, ending.order) or _is_crash(ending):
        return None
    if first_failure is not None and (first_failure < ending.order or not ending.killed):
        return None
    return found(
        facts,
        "killed_by_signal",
        0.6 if ending.killed else 0.45,
        "A process of the engine was killed (SIGKILL) and printed no error; the log alone cannot say who sent the signal."
        if ending.killed
        else f"A process of the engine ended with code {ending.exit_code} and printed no error; the log alone cannot say why.",
        [cite(ending.line)],
        strength=STAGE if first_failure is not None else LIFECYCLE,
        order=ending.order,
        values={"signal": ending.signal, "exit_code": ending.exit_code},
        unseen=()
        if facts.has_kernel
        else (
            "Whether the kernel's OOM killer did it: `journalctl -k`, `dmesg`, or the cgroup's memory.events.",
        ),
    )


def stopped(facts: Facts) -> Finding | None:
    """The server was asked to stop, and did."""
    stop = facts.said("shutdown.requested")
    if stop is None or any(f.order < stop.order for f in (*facts.failures, *facts.messengers)):
        return None
    return found(
        facts,
        "shutdown_requested",
        0.8,
        "The server was asked to stop and did; errors after that line mean nothing.",
        [cite(stop.line)],
        strength=LIFECYCLE,
        order=stop.order,
    )


def wrapper_only(facts: Facts) -> Finding | None:
    """Only the message that something failed is in the input, not what."""
    gone = [e for e in _endings(facts) if not e.orderly and not e.killed and not e.exit_code]
    silent: list[Failure | LogEvent | Ending] = [*facts.messengers, *gone]
    if not silent:
        return None
    first = min(silent, key=lambda item: item.order)
    if _was_stopping(facts, first.order):
        return None
    unseen = (
        "The lines of the engine core and its workers, where the cause stands: this log holds only the messenger.",
        "The kernel log of that time: `journalctl -k` or `dmesg`.",
    )[: 1 if facts.has_kernel else 2]
    if shows_serving(facts) or (
        not facts.run_failed_to_start and (facts.ready or _was_asked(facts))
    ):
        cause, share = "irregular_unknown", 0.3
        summary = "The engine died; why is not in this input, only that it did."
    elif (pinned := facts.engine.arguments.get("--kv-cache-memory-bytes")) not in (None, ""):
        cause, share = "kv_alloc_overcommit", 0.4
        summary = f"The start failed and the log holds only the messenger; the KV cache is pinned to {pinned} bytes, which nothing checks against free memory."
    else:
        cause, share = "startup_unknown", 0.3
        summary = "The start failed; why is not in this input, only that it did."
    return found(
        facts,
        cause,
        share,
        summary,
        [cite(first.line)],
        strength=NOTHING,
        order=first.order,
        unseen=unseen,
    )


def _was_asked(facts: Facts) -> bool:
    """Whether a request met the dead engine: then it had been started before."""
    return any(
        m.pattern.id == "vllm.engine_dead"
        if isinstance(m, LogEvent)
        else m.match("vllm.engine_dead") is not None
        for m in facts.messengers
    )


def _endings(facts: Facts) -> tuple[Ending, ...]:
    return endings(facts.run.events if facts.run else (), facts.messengers)


def _was_stopping(facts: Facts, order: int | None) -> bool:
    """Whether the server had been asked to stop before that line, or at all."""
    stop = facts.said("shutdown.requested")
    return stop is not None and (order is None or stop.order < order)


RULES: Final[tuple[Rule, ...]] = (native_crash, orchestrator, killed, stopped, wrapper_only)
