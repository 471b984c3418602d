"""From inputs to facts: which log belongs to which engine, which processes, which samples."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from oomwatch.diagnose.engines import describe_engine
from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.facts import Facts, KernelCitation
from oomwatch.diagnose.inputs import Inputs, PageInput
from oomwatch.diagnose.runs import STAGES, Run, RunBuilder
from oomwatch.diagnose.series import SeriesFacts, summarise
from oomwatch.engines.patterns import Pattern
from oomwatch.records import EngineSample, RecordedEngine, Series

_DECIDING = ("check", "oom", "failure")
_PASSING = frozenset({"lifecycle", "hint", "detail"})


def assemble(inputs: Inputs) -> list[Facts]:
    """The facts of every start, the newest of each engine first."""
    logs = _read_logs(inputs)
    recorded = list(inputs.engines)
    all_facts: list[Facts] = []
    kernel = tuple(KernelCitation(event, k.name) for k in inputs.kernel for event in k.events)
    groups: list[tuple[RecordedEngine | None, list[Run]]] = []
    if recorded:
        groups = [(engine, logs.pop(engine.id, [])) for engine in recorded]
    rest = [run for runs in logs.values() for run in runs]
    if rest:
        if len(groups) == 1 and not groups[0][1]:
            groups = [(groups[0][0], rest)]
        else:
            groups.append((None, rest))
    if not groups:
        groups = [(None, [])]
    for index, (engine, runs) in enumerate(groups):
        pages = tuple(
            p for p in inputs.pages if p.engine_id in (None, engine.id if engine else None)
        )
        series = _series_of(inputs, engine, pages, alone=len(groups) == 1)
        newest_first: Sequence[Run | None] = list(reversed(runs)) or [None]
        for age, run in enumerate(newest_first):
            identity = _identity(engine, run, inputs, index, age)
            described = describe_engine(identity, run, inputs, engine, pages if age == 0 else ())
            failures, messengers = _split(run)
            all_facts.append(
                Facts(
                    engine=described,
                    run=run,
                    failures=failures,
                    messengers=messengers,
                    kernel=kernel if age == 0 else (),
                    series=series if age == 0 else SeriesFacts(),
                    loads=tuple(run.loads) if run else (),
                    orphans=inputs.orphans if age == 0 and index == 0 else (),
                    tree_pids=_tree(engine, run, inputs.series) if age == 0 else frozenset(),
                    gpu_names=tuple(gpu.name for gpu in inputs.gpus if gpu.name),
                    has_log=run is not None and run.lines > 0,
                    has_kernel=bool(inputs.kernel),
                    is_document=run is not None and run.is_document,
                )
            )
    return all_facts


def _read_logs(inputs: Inputs) -> dict[str | None, list[Run]]:
    """Runs by engine id; logs of one engine that were written side by side become one run."""
    by_engine: dict[str | None, list[list[Run]]] = defaultdict(list)
    for log in inputs.logs:
        builder = RunBuilder()
        for line in log.lines:
            builder.feed(line)
        by_engine[log.engine_id].append(builder.close())
    return {engine: _merge_logs(logs) for engine, logs in by_engine.items()}


def _merge_logs(logs: list[list[Run]]) -> list[Run]:
    if len(logs) == 1:
        return logs[0]
    merged: list[Run] = []
    for runs in logs:
        for run in runs:
            partner = next((m for m in reversed(merged) if _side_by_side(m, run)), None)
            if partner is None:
                merged.append(run)
            else:
                _merge(partner, run)
    return sorted(merged, key=lambda run: (run.first.at or 0.0) if run.first else 0.0)


def _side_by_side(a: Run, b: Run) -> bool:
    """Whether two runs are two outputs of one start: shared processes, or one that names no engine."""
    if a.pids & b.pids:
        return True
    banner = ("vllm.api_banner", "vllm.logo_version", "sglang.server_args")
    return a.find(*banner) is None or b.find(*banner) is None


def _merge(into: Run, other: Run) -> None:
    for name in (
        "engine",
        "version",
        "generation",
        "model",
        "architecture",
        "printed",
        "ended",
        "first",
    ):
        if getattr(into, name) is None:
            setattr(into, name, getattr(other, name))
    into.config = {**other.config, **into.config}
    into.numbers = {**other.numbers, **into.numbers}
    into.events += other.events
    into.failures += other.failures
    into.loads += other.loads
    into.pids |= other.pids
    into.lines += other.lines
    into.served = into.served or other.served
    into.is_document = into.is_document and other.is_document
    if STAGES.index(other.stage) > STAGES.index(into.stage):
        into.stage = other.stage
    for name, ranks in other.by_rank.items():
        into.by_rank.setdefault(name, {}).update(ranks)


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
        before = [item for item in (*deciding, *messengers) if item.order < stop.order]
        if not before:
            # Asked to stop while well: errors after that line are the stop itself.
            return (), ()
    return tuple(deciding), tuple(messengers)


def _trusted(run: Run, event: LogEvent) -> bool:
    """Whether a bare line may speak for a failure: an engine's log, or a form only a program prints."""
    pattern: Pattern = event.pattern
    if event.line.level in ("INFO", "WARNING", "DEBUG"):
        # A server that goes on may mention limits and failures in passing.
        return False
    if pattern.id in ("argparse.error", "click.error", "rust.argument"):
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


def _series_of(
    inputs: Inputs, engine: RecordedEngine | None, pages: tuple[PageInput, ...], *, alone: bool
) -> SeriesFacts:
    samples: list[EngineSample] = [
        sample
        for sample in inputs.series.engines
        if alone or engine is None or sample.engine == engine.id
    ]
    samples += [sample for page in pages for sample in page.samples]
    series = dataclasses.replace(inputs.series, engines=tuple(sorted(samples, key=lambda s: s.at)))
    return summarise(series)


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
