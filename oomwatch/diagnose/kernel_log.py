"""Which of the kernel's words are about which start of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oomwatch.diagnose.facts import KernelCitation
from oomwatch.diagnose.inputs import Inputs
from oomwatch.diagnose.kills import Tie, Traces, in_its_life, lived_at, tie
from oomwatch.diagnose.runs import Run
from oomwatch.records import RecordedEngine


def traces_of(
    newest_first: Sequence[Run | None],
    trees: Sequence[frozenset[int]],
    engine: RecordedEngine | None,
    inputs: Inputs,
) -> list[Traces]:
    """What ties kills to each start: its processes (`trees` are known alive), and its time."""
    begun = engine.started_at if engine is not None else None
    known = [run.began_at if run is not None else None for run in newest_first]
    began = [begun if begun is not None else known[0], *known[1:]]
    ended = [_exit_time(engine, inputs), *began]
    return [
        Traces(
            known=engine is not None or (run is not None and run.engine is not None),
            pids=tree | (run.pids if run else set()),
            processes=tuple({p.pid: p for p in inputs.series.processes if p.pid in tree}.values()),
            began_at=began[age],
            ended_at=ended[age],
            last_at=_last_time(run),
            one_clock=inputs.live or any(log.live for log in inputs.kernel),
            watched=inputs.live or bool(inputs.series.hosts),
        )
        for age, (run, tree) in enumerate(zip(newest_first, trees, strict=True))
    ]


def kernel_of(
    starts: Sequence[Traces], age: int, kernel: Sequence[KernelCitation], *, live: bool
) -> tuple[KernelCitation, ...]:
    """The kernel's word on one start: on its own processes, and what no other start can claim.

    Read from files, what tells no time or no process is about the newest start.
    """
    traces = starts[age]
    rest = [start for n, start in enumerate(starts) if n != age]
    others = {pid for start in rest for pid in start.pids} - traces.pids
    found = []
    for citation in kernel:
        event = citation.event
        pid, timed = event.fields.get("pid"), event.at is not None
        if event.kind == "oom_kill":
            by = tie(event, traces)
        else:
            by = Tie.OWN if pid in traces.pids else Tie.NEIGHBOUR
        if by is Tie.OWN:
            about_it = not age or (timed and traces.began_at is not None)
            about_it = about_it and not _is_of_another(citation, traces, rest)
        else:
            about_it = pid not in others and (not age or (live and timed))
            about_it = about_it and (not live or in_its_life(event.at, traces))
        if about_it and by is not Tie.STRANGER:
            found.append(dataclasses.replace(citation, tie=by))
    return tuple(found)


def _is_of_another(citation: KernelCitation, traces: Traces, rest: Sequence[Traces]) -> bool:
    """Whether a number that several starts have had was another's at that time."""
    at, pid = citation.event.at, citation.event.fields.get("pid")
    return not lived_at(at, traces) and any(
        pid in start.pids and lived_at(at, start) for start in rest
    )


def _last_time(run: Run | None) -> float | None:
    if run is None:
        return None
    times = [event.seen_at for event in run.events[-1:]]
    times += [failure.seen_at for failure in run.failures[-1:]]
    times += [at for _, at in run.alive[-1:]]
    times += [run.last.at] if run.last is not None else []
    return max((at for at in times if at is not None), default=None)


def _exit_time(engine: RecordedEngine | None, inputs: Inputs) -> float | None:
    """When the keeper of an engine saw it end, with a minute for those who take longer."""
    times = [e.at for e in inputs.exits if engine and e.engine == engine.id and e.at is not None]
    return max(times) + 60 if times else None
