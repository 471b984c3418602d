"""From logs to runs: several files, several containers in one file, several ranks of one engine.

Each container of a compose or kubectl log is read by itself, so that the words of a database beside
the server are not the server's. What was written side by side becomes one run, in order of time.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from oomwatch.diagnose.answers import MOST_LINES, answered
from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.inputs import Inputs, LogInput
from oomwatch.diagnose.runs import STAGES, Run, RunBuilder
from oomwatch.diagnose.starts import BANNERS
from oomwatch.records import LogLine

_EXITED: Final = re.compile(r"([\w.-]{1,128}) exited with code -?\d+")
_MAX_CONTAINERS: Final = 64
_SAME_MOMENT: Final = 2.0
"""Seconds between the copies of a line that two outputs of one start carry."""


def read_runs(inputs: Inputs) -> dict[str | None, list[Run]]:
    """Runs by engine id, oldest first; logs of one engine written side by side become one run."""
    by_engine: dict[str | None, list[list[Run]]] = defaultdict(list)
    orders = itertools.count(1)
    files = 0
    for log in inputs.logs:
        files += 1
        by_engine[log.engine_id] += _read(log, orders)
    if files > 1:
        _order_by_time([run for logs in by_engine.values() for runs in logs for run in runs])
    return {engine: _merge_logs(logs) for engine, logs in by_engine.items()}


def _read(log: LogInput, orders: itertools.count[int]) -> list[list[Run]]:
    builders: dict[str | None, RunBuilder] = {}
    head: list[LogLine] = []
    for line in log.lines:
        if len(head) <= MOST_LINES:
            head.append(line)
        name = line.container if len(builders) < _MAX_CONTAINERS else None
        said = _EXITED.match(line.text) if name is None else None
        if said is not None and said[1] in builders:
            name = said[1]  # compose speaks of the container without its prefix
        builder = builders.get(name)
        if builder is None:
            builder = builders[name] = RunBuilder(orders)
        builder.feed(line)
    found = [builder.close() for builder in builders.values()] or [RunBuilder(orders).close()]
    engines = [runs for runs in found if any(_by_engine(run) for run in runs)]
    return engines or _answer(head, orders) or found


def _answer(lines: Sequence[LogLine], orders: itertools.count[int]) -> list[list[Run]]:
    """The run that a server's answer is about, where nothing but the answer was given."""
    builder = RunBuilder(orders)
    for line in answered(lines):
        builder.feed(line)
    runs = [run for run in builder.close() if run.events or run.failures]
    for run in runs:
        run.served, run.stage = True, STAGES[-1]  # who answers is up
    return [runs] if runs else []


def _by_engine(run: Run) -> bool:
    return run.engine is not None or run.prefixed_lines > 0


def _order_by_time(runs: list[Run]) -> None:
    """Number what several files say in order of time; a file without any time comes last."""
    items: list[Failure | LogEvent] = []
    for run in runs:
        items += [*run.events, *run.failures]
    timed = [(item.line.source, item.seen_at) for item in items if item.seen_at is not None]
    first: dict[str, float] = {}
    for source, at in timed:
        first[source] = min(at, first.get(source, at))
    last = max((at for _, at in timed), default=0.0)

    def key(item: Failure | LogEvent) -> tuple[float, int]:
        at = item.seen_at
        return (first.get(item.line.source, last) if at is None else at, item.order)

    keys = {key(item) for item in items}
    keys |= {(last if at is None else at, order) for run in runs for order, at in run.alive}
    place = {order: n for n, (_, order) in enumerate(sorted(keys), 1)}
    for run in runs:
        run.alive = sorted(((place[order], at) for order, at in run.alive), key=lambda s: s[0])
        run.events = [dataclasses.replace(e, order=place[e.order]) for e in run.events]
        run.failures = [dataclasses.replace(f, order=place[f.order]) for f in run.failures]
        if run.ended is not None:
            order = place.get(run.ended.order, run.ended.order)
            run.ended = dataclasses.replace(run.ended, order=order)


def _merge_logs(logs: list[list[Run]]) -> list[Run]:
    if len(logs) == 1:
        return logs[0]
    merged: list[Run] = []
    for runs in logs:
        others = list(merged)  # starts of one log are no outputs of one start
        for run in runs:
            partner = next((m for m in reversed(others) if _side_by_side(m, run)), None)
            if partner is None:
                merged.append(run)
            else:
                others = [other for other in others if other is not partner]
                _merge(partner, run)
    return sorted(merged, key=lambda run: (run.first.at or 0.0) if run.first else 0.0)


def _side_by_side(a: Run, b: Run) -> bool:
    """Whether two runs are two outputs of one start: shared processes, or one that names no engine."""
    first, second = a.find(*BANNERS), b.find(*BANNERS)
    if first is None or second is None:
        return True
    if a.container != b.container or _apart(first, second):
        return False  # every container has a process 1
    return bool(a.pids & b.pids)


def _apart(a: LogEvent, b: LogEvent) -> bool:
    """Whether two banners of processes of one name are of two starts, by their times."""
    return (
        a.line.process == b.line.process
        and None not in (a.seen_at, b.seen_at)
        and abs((a.seen_at or 0.0) - (b.seen_at or 0.0)) > _SAME_MOMENT
    )


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
    into.events = sorted(into.events + other.events, key=lambda event: event.order)
    into.failures = sorted(into.failures + other.failures, key=lambda failure: failure.order)
    into.loads += other.loads
    into.pids |= other.pids
    into.lines += other.lines
    into.prefixed_lines += other.prefixed_lines
    into.served = into.served or other.served
    into.alive = sorted(into.alive + other.alive, key=lambda sign: sign[0])
    into.is_document = into.is_document and other.is_document
    if STAGES.index(other.stage) > STAGES.index(into.stage):
        into.stage = other.stage
    for name, ranks in other.by_rank.items():
        into.by_rank.setdefault(name, {}).update(ranks)
