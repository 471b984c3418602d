"""What the processes themselves tell: stopped, at a standstill, or ended as their keeper saw it."""

from __future__ import annotations

import signal
from typing import Final

from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.rules.endings import wrapper_only
from oomwatch.diagnose.rules.findings import COUNTERS, KERNEL, LIFECYCLE, NAMED_CHECK, Rule, found
from oomwatch.records import EngineExit, EngineSample, Evidence, Finding
from oomwatch.units import format_count, format_duration

_STOPPED: Final = frozenset("Tt")
_IN_THE_KERNEL: Final = "D"
_LEAST_STANDSTILL_SECONDS: Final = 5.0
_CRASHES: Final = frozenset({signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE})
_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


def stopped(facts: Facts) -> Finding | None:
    """A process of the engine is stopped by a signal or a debugger: the others wait for it."""
    held = [
        process
        for process in facts.series.processes
        if process.state in _STOPPED and process.pid in facts.tree_pids
    ]
    if not held:
        return None
    names = ", ".join(f"{p.name} (PID {p.pid})" for p in held[:4])
    pids = " ".join(str(p.pid) for p in held[:16])
    return found(
        facts,
        "rpc_timeout_hang",
        0.92,
        f"{names} {'is' if len(held) == 1 else 'are'} stopped, by SIGSTOP or a debugger, and the"
        f" engine waits; memory is not the reason. `kill -CONT {pids}` lets it go on.",
        [
            Evidence(
                "process",
                str(p.pid),
                at=p.last_seen,
                text=f"{p.name}: state {p.state} (stopped)",
                value=p.state,
            )
            for p in held[:4]
        ],
        strength=COUNTERS,
        values={"pid": held[0].pid, "process_name": held[0].name, "stage": "serving"},
    )


def standstill(facts: Facts) -> Finding | None:
    """Requests run and not a token comes out: a hang, or one very long prompt."""
    samples = [s for s in facts.series.engine if s.generation_tokens_total is not None]
    if not facts.live or facts.ended or len(samples) < 2:
        return None
    first = next((s for s in samples if _tokens(s) == _tokens(samples[-1])), samples[-1])
    last = samples[-1]
    seconds = last.at - first.at
    if not last.running or not first.running or seconds < _LEAST_STANDSTILL_SECONDS:
        return None
    in_kernel = [
        p for p in facts.series.processes if p.state == _IN_THE_KERNEL and p.pid in facts.tree_pids
    ]
    evidence = [
        Evidence(
            "metrics",
            "generation_tokens_total",
            at=last.at,
            text=f"stands at {last.generation_tokens_total:g} for {format_duration(seconds)} with "
            f"{last.running:g} running and {last.waiting or 0:g} waiting",
            value=last.generation_tokens_total,
            unit="tokens",
        )
    ]
    evidence += [
        Evidence("process", str(p.pid), at=p.last_seen, text=f"{p.name}: state D, in the kernel")
        for p in in_kernel[:4]
    ]
    return found(
        facts,
        "rpc_timeout_hang",
        0.7 if in_kernel else 0.5,
        f"{format_count(last.running)} requests run and not one token came out in"
        f" {format_duration(seconds)}: a worker hangs, or works on one very long prompt.",
        evidence,
        strength=COUNTERS,
        risk=True,
        values={
            "running": last.running,
            "waiting": last.waiting,
            "kv_usage_ratio": last.kv_usage_ratio,
        },
        unseen=(
            "Whether it goes on: run this again in a minute; `py-spy dump --pid PID` of the "
            "worker shows where it is.",
        ),
    )


def _tokens(sample: EngineSample) -> tuple[float | None, float | None]:
    return sample.generation_tokens_total, sample.prompt_tokens_total


def ended(facts: Facts) -> Finding | None:
    """The keeper of the process knows how it ended: an OOM flag, a signal, a status."""
    for end in facts.exits:
        if end.oom_killed and not any(c.event.kind == "oom_kill" for c in facts.kernel):
            return _oom_killed(facts, end)
        if end.signal is None or facts.failures:
            continue
        return _by_signal(facts, end, end.signal)
    return None


def _oom_killed(facts: Facts, end: EngineExit) -> Finding:
    run = facts.run
    serving = run is None or run.served or run.reached("ready")
    return found(
        facts,
        "host_oom_kill" if serving else "host_oom_load",
        0.88,
        f"{_where(end)} was ended by the kernel's OOM killer: its host memory was used up"
        f"{'' if serving else ' while the engine started'}.",
        [exit_evidence(end)],
        strength=KERNEL,
        values={
            "exit_code": end.exit_code,
            "constraint": "memcg",
            "host_total_bytes": facts.series.host_total_bytes,
            "stage": "serving" if serving else run.stage if run else None,
        },
        at=end.at,
        unseen=(
            "Which process was killed, and at which limit: the kernel log (`dmesg`, `journalctl "
            "-k`).",
        ),
    )


def _by_signal(facts: Facts, end: EngineExit, number: int) -> Finding | None:
    name = _signal_name(number)
    if number in _CRASHES:
        return found(
            facts,
            "native_crash",
            0.8,
            f"{_where(end)} crashed in native code ({name}); memory did not run out.",
            [exit_evidence(end)],
            strength=NAMED_CHECK,
            values={"signal": name, "exit_code": end.exit_code},
            at=end.at,
        )
    if number in _STOPS:
        if facts.messengers:
            return None
        return found(
            facts,
            "shutdown_requested",
            0.75,
            f"{_where(end)} was asked to stop ({name}) and did.",
            [exit_evidence(end)],
            strength=LIFECYCLE,
            values={"signal": name, "exit_code": end.exit_code},
            at=end.at,
        )
    if number != signal.SIGKILL:
        return None
    return found(
        facts,
        "killed_by_signal",
        0.65,
        f"{_where(end)} was killed (SIGKILL) and printed no error{_not_for_memory(facts, end)}.",
        [exit_evidence(end)],
        strength=LIFECYCLE,
        values={"signal": name, "exit_code": end.exit_code},
        at=end.at,
        unseen=()
        if facts.has_kernel
        else ("Whether the host's OOM killer did it: `journalctl -k` or `dmesg`.",),
    )


def _not_for_memory(facts: Facts, end: EngineExit) -> str:
    if facts.kernel_is_live and not any(c.event.kind == "oom_kill" for c in facts.kernel):
        return "; the kernel's log has no OOM kill of it"
    return "; not for its memory limit" if end.oom_killed is False else ""


def vanished(facts: Facts) -> Finding | None:
    """The engine died without a word, and the kernel, whose log was read, killed nothing."""
    if not facts.kernel_is_live or any(c.event.kind == "oom_kill" for c in facts.kernel):
        return None
    silent = wrapper_only(facts)
    if silent is None or silent.cause != "irregular_unknown":
        return None
    return found(
        facts,
        "killed_by_signal",
        0.6,
        "A process of the engine is gone and printed no error, and the kernel's log has no OOM "
        "kill of it: somebody or something killed it (SIGKILL), or it crashed.",
        silent.evidence,
        strength=LIFECYCLE,
        order=silent.order,
        unseen=(
            "Who sent the signal: the shell history, the supervisor, or audit logs of that time.",
        ),
    )


def exit_evidence(end: EngineExit) -> Evidence:
    """How an engine ended, as evidence."""
    parts = [
        "" if end.exit_code is None else f"status {end.exit_code}",
        _signal_name(end.signal) if end.signal else "",
        "" if end.oom_killed is None else f"killed for memory: {'yes' if end.oom_killed else 'no'}",
        f"restarted {end.restarts} times" if end.restarts else "",
        end.detail or "",
    ]
    return Evidence(
        "process",
        end.where,
        at=end.at,
        text="ended: " + (", ".join(part for part in parts if part) or "nothing more is known"),
        value=end.exit_code,
    )


def _where(end: EngineExit) -> str:
    return f"{end.where[:1].upper()}{end.where[1:]}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


RULES: Final[tuple[Rule, ...]] = (stopped, standstill, ended, vanished)
