"""From inputs to facts: which log belongs to which engine, which processes, which samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oomwatch.diagnose.engines import describe_engine
from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.facts import Facts, KernelCitation
from oomwatch.diagnose.inputs import Inputs, PageInput
from oomwatch.diagnose.kernel_log import kernel_of, traces_of
from oomwatch.diagnose.kernel_words import kernel_words
from oomwatch.diagnose.kills import Tie, tie
from oomwatch.diagnose.logs import read_runs
from oomwatch.diagnose.runs import Run
from oomwatch.diagnose.series import SeriesFacts, summarise, with_engine
from oomwatch.engines.patterns import Pattern
from oomwatch.engines.pytorch import parse_oom
from oomwatch.records import EngineSample, RecordedEngine, Series

_DECIDING = ("check", "oom", "failure")
_PASSING = frozenset({"lifecycle", "hint", "detail"})
_BY_PROGRAMS = frozenset(
    {
        "argparse.error",
        "click.error",
        "host.ray_monitor",
        "rust.argument",
        "torch.memory_saver",
        "torch.memory_saver_other",
    }
)
"""Patterns of lines whose form only a program prints, whoever else is silent."""
_WHAT = "what():  "
"""How C++ prints the words of an exception that nobody caught."""


def assemble(inputs: Inputs) -> list[Facts]:
    """The facts of every start, the newest of each engine first."""
    logs = read_runs(inputs)
    recorded = list(inputs.engines)
    all_facts: list[Facts] = []
    kernel = tuple(KernelCitation(event, k.name) for k in inputs.kernel for event in k.events)
    read_as_kernel = {(citation.source, citation.event.number) for citation in kernel}
    groups: list[tuple[RecordedEngine | None, list[Run]]] = []
    if recorded:
        groups = [(engine, logs.pop(engine.id, [])) for engine in recorded]
    rest = [run for runs in logs.values() for run in runs]
    if rest:
        if len(groups) == 1 and not groups[0][1]:
            groups = [(groups[0][0], rest)]
        else:
            groups += [(None, found) for found in _by_container(rest)]
    if not groups:
        groups = [(None, [])]
    shared = summarise(inputs.series)
    for index, (engine, runs) in enumerate(groups):
        pages = tuple(
            p for p in inputs.pages if p.engine_id in (None, engine.id if engine else None)
        )
        series = _series_of(inputs, shared, engine, pages, alone=len(groups) == 1)
        newest_first: Sequence[Run | None] = list(reversed(runs)) or [None]
        trees = [_tree(engine, newest_first[0], inputs.series)]
        trees += [frozenset()] * (len(newest_first) - 1)
        traces = traces_of(newest_first, trees, engine, inputs)
        for age, run in enumerate(newest_first):
            identity = _identity(engine, run, inputs, index, age)
            described = describe_engine(identity, run, inputs, engine, pages if age == 0 else ())
            gone = age == 0 and engine is not None and engine.ended
            if gone:
                described = dataclasses.replace(described, phase="exited")
            elif inputs.live and pages and age == 0:
                described = dataclasses.replace(described, load=one_sample(pages[-1]))
            failures, messengers = _split(run)
            copied = tuple(
                dataclasses.replace(word, tie=max(Tie.NEIGHBOUR, tie(word.event, traces[age])))
                for word in kernel_words(run, read_as_kernel)
            )
            all_facts.append(
                Facts(
                    engine=described,
                    run=run,
                    failures=failures,
                    messengers=messengers,
                    kernel=kernel_of(traces, age, kernel, live=inputs.live) + copied,
                    series=series if age == 0 else SeriesFacts(),
                    loads=tuple(run.loads) if run else (),
                    orphans=tuple(o for o in inputs.orphans if o.engine_id == engine.id)
                    if engine and age == 0
                    else (),
                    exits=tuple(e for e in inputs.exits if e.engine == engine.id)
                    if engine and age == 0
                    else (),
                    noticed=tuple(t for t in inputs.noticed if t.engine_id == engine.id)
                    if engine and age == 0
                    else (),
                    live=inputs.live,
                    ended=gone,
                    tree_pids=trees[age],
                    gpu_names=tuple(gpu.name for gpu in inputs.gpus if gpu.name),
                    has_log=run is not None and run.lines > 0 and not run.is_empty,
                    has_kernel=bool(inputs.kernel or copied),
                    kernel_is_live=any(log.live for log in inputs.kernel),
                    is_document=run is not None and run.is_document,
                )
            )
    return all_facts


def _by_container(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs of each container apart: starts of two servers are no restarts of one."""
    found: dict[str | None, list[Run]] = {}
    for run in runs:
        found.setdefault(run.container, []).append(run)
    return list(found.values())


def _split(run: Run | None) -> tuple[tuple[Failure, ...], tuple[Failure | LogEvent, ...]]:
    """Failures that may decide, and mere messengers; lines that say a failure without a traceback count too."""
    if run is None or run.is_document:
        return (), ()
    deciding: list[Failure] = []
    messengers: list[Failure | LogEvent] = [e for e in run.events if e.pattern.kind == "messenger"]
    lines = set()
    for failure in run.failures:
        if not failure.name and failure.matches and failure.kinds <= _PASSING:
            continue  # a logged line, kept as an event
        lines.add((failure.line.source, failure.line.number))
        messenger = "messenger" in failure.kinds
        if messenger and not failure.kinds & set(_DECIDING):
            messengers.append(failure)
        else:
            deciding.append(failure)
    for event in run.events:
        if (
            event.pattern.kind in _DECIDING
            and (event.line.source, event.line.number) not in lines
            and _trusted(run, event)
        ):
            lines.add((event.line.source, event.line.number))
            deciding.append(_as_failure(event, run))
    deciding.sort(key=lambda f: f.order)
    stop = run.find("shutdown.requested")
    if stop is not None:
        before = [item for item in (*deciding, *messengers) if _may_precede(item, stop)]
        if not before:
            # Asked to stop while well: errors after that line are the stop itself.
            return (), ()
    return tuple(deciding), tuple(messengers)


def _may_precede(item: Failure | LogEvent, stop: LogEvent) -> bool:
    """Whether it came before the stop; lines of two files without a time have no order."""
    apart = stop.line.at is None and item.line.source != stop.line.source
    return item.order < stop.order or apart


def _trusted(run: Run, event: LogEvent) -> bool:
    """Whether a bare line may speak for a failure: an engine's log, or a form only a program prints."""
    pattern: Pattern = event.pattern
    if pattern.id.startswith("nccl.") and event.line.level == "WARNING":
        # NCCL's word for an error is WARN; a start that goes on has got over it.
        return not run.reached("ready")
    if pattern.id == "torch.allocator_warning":
        return event.order > run.last_alive  # what is asked for again and got is no failure
    if event.line.level in ("INFO", "WARNING", "DEBUG"):
        # A server that goes on may mention limits and failures in passing, and refuse a request.
        return pattern.cause == "request_too_long"
    if pattern.id in _BY_PROGRAMS or event.line.text.lstrip().startswith(_WHAT):
        return True
    if pattern.id == "files.limit" and not event.line.prefixed and run.engine is None:
        return False
    return (
        run.engine is not None or run.prefixed_lines > 0 or run.find("crash.terminate") is not None
    )


def _as_failure(event: LogEvent, run: Run) -> Failure:
    near = tuple(
        other.line
        for other in run.events
        if other.pattern.kind == "detail"
        and other.line.source == event.line.source
        and 0 < other.line.number - event.line.number <= 8
    )
    return Failure(
        name="",
        message=event.line.text,
        frames=(),
        paths=(),
        line=event.line,
        order=event.order,
        matches=((event.pattern, event.fields),),
        details=near,
        oom=parse_oom(event.line.text),
    )


def _identity(
    engine: RecordedEngine | None, run: Run | None, inputs: Inputs, index: int, age: int
) -> str:
    if engine is not None:
        base = engine.id
    else:
        name = inputs.engine or (run.engine if run else None) or "engine"
        base = f"{name}-{index}"
    return base if age == 0 else f"{base}#{age}"


def one_sample(page: PageInput) -> EngineSample | None:
    """The figures of a page as one sample: the engines of a data-parallel server together.

    Counts add up; of the shares of the caches in use the highest counts, as that one saturates.
    """
    samples = page.samples
    if len(samples) < 2:
        return samples[0] if samples else None
    values: dict[str, float | None] = {}
    for field in dataclasses.fields(EngineSample):
        if field.name in ("at", "engine", "extra"):
            continue
        known = [v for s in samples if (v := getattr(s, field.name)) is not None]
        largest = field.name in ("kv_usage_ratio", "block_size_tokens")
        values[field.name] = (max(known) if largest else sum(known)) if known else None
    names = {name for sample in samples for name in sample.extra}
    extra = {name: sum(s.extra.get(name, 0) for s in samples) for name in sorted(names)}
    return EngineSample(at=samples[0].at, engine="all", extra=extra, **values)


def _series_of(
    inputs: Inputs,
    shared: SeriesFacts,
    engine: RecordedEngine | None,
    pages: tuple[PageInput, ...],
    *,
    alone: bool,
) -> SeriesFacts:
    samples: list[EngineSample] = [
        sample
        for sample in inputs.series.engines
        if alone or engine is None or sample.engine == engine.id
    ]
    samples += [sample for page in pages if (sample := one_sample(page)) is not None]
    return with_engine(shared, samples)


def _tree(engine: RecordedEngine | None, run: Run | None, series: Series) -> frozenset[int]:
    """The engine's processes: those named, and all their descendants."""
    parents = {p.pid: p.ppid for p in series.processes}
    roots = set(engine.pids) if engine else set()
    if not roots and run is not None:
        roots = {
            pid
            for pid in run.pids
            if pid in parents or any(g.pid == pid for g in series.gpu_processes[:4096])
        }
    if not roots:
        return frozenset()
    return frozenset(roots | _descendants(roots, parents))


def _descendants(roots: set[int], parents: dict[int, int | None]) -> set[int]:
    found: set[int] = set()
    for pid in parents:
        chain: list[int] = []
        at: int | None = pid
        while at is not None and at not in roots and at not in found and len(chain) < 64:
            chain.append(at)
            at = parents.get(at) or None
        if at in roots or at in found:
            found.update(chain)
    return found
