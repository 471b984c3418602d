"""From events to runs: one start of one engine, with what it said about itself and how it went.

A log may hold several starts, of several processes each; `starts` says where one begins.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from oomwatch.diagnose.events import Extractor, Failure, LogEvent
from oomwatch.diagnose.form import Form
from oomwatch.diagnose.loads import Load, read_load
from oomwatch.diagnose.starts import BANNERS, begins_start
from oomwatch.engines.common import PATTERNS as COMMON
from oomwatch.records import LogLine

__all__ = ["STAGES", "Load", "Run", "RunBuilder", "build_runs"]

STAGES: Final = (
    "init",
    "load",
    "loaded",
    "profile",
    "kv",
    "capture",
    "captured",
    "ready",
    "serving",
)
"""How far a start has come, in order."""

_STAGE_OF: Final[Mapping[str, str]] = {
    "vllm.load_begin": "load",
    "vllm.shards": "load",
    "vllm.shards_loaded": "loaded",
    "vllm.weights_v0": "loaded",
    "vllm.weights_v1": "loaded",
    "vllm.encoder_cache": "profile",
    "vllm.mm_profile_begin": "profile",
    "vllm.compile_begin": "profile",
    "vllm.kv_available": "kv",
    "vllm.blocks": "kv",
    "vllm.kv_tokens": "kv",
    "vllm.kv_fixed": "kv",
    "vllm.capture_notice": "capture",
    "vllm.captured": "captured",
    "vllm.init_done": "captured",
    "sglang.load_begin": "load",
    "sglang.load_end": "loaded",
    "sglang.kv_allocated": "kv",
    "sglang.pool_end": "kv",
    "sglang.capture_begin": "capture",
    "sglang.capture_end": "captured",
    "sglang.capacity": "captured",
    "sglang.ready": "ready",
    "uvicorn.ready": "ready",
    "uvicorn.served": "serving",
    "tgi.connected": "ready",
    "tgi.served": "serving",
    "llama.loading": "load",
    "llama.context": "kv",
    "lmdeploy.block_manager": "kv",
    "llama.ready": "ready",
    "ollama.started": "ready",
    "ollama.served": "serving",
    "llama.served": "serving",
}
_ENGINE_OF: Final = (
    ("vllm.", "vllm"),
    ("sglang.", "sglang"),
    ("tgi.", "tgi"),
    ("lmdeploy.", "lmdeploy"),
    ("llama.", "llama.cpp"),
    ("ollama.", "ollama"),
)
_PACKAGES: Final = (
    ("/sglang/srt/", "sglang"),
    ("/sgl_jax/srt/", "sglang"),
    ("/vllm/", "vllm"),
    ("/text_generation_server/", "tgi"),
    ("/lmdeploy/", "lmdeploy"),
)
_FIELD: Final = re.compile(r"(\w+)=('[^']*'|\"[^\"]*\"|\{[^{}]*\}|[^,\s]+)")
_OFFLINE_BAR: Final = re.compile(r"^Processed prompts:\s+(\d+)%")
SHUTDOWN: Final = next(p for p in COMMON if p.id == "shutdown.requested")
_FATAL: Final = frozenset({"oom", "check", "failure", "messenger", "lifecycle"})
_MAX_STATS: Final = 20_000
_MAX_ALIVE: Final = 20_000
_MAX_EVENTS: Final = 4_000
_MAX_PROBED: Final = 2_000


@dataclasses.dataclass(slots=True)
class Run:
    """One start of one engine, as the log tells it."""

    engine: str | None = None
    version: str | None = None
    generation: str | None = None
    model: str | None = None
    architecture: str | None = None
    printed: str | None = None
    """The arguments as the server printed them: a Namespace, a dict or ServerArgs."""
    config: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fields of the engine's configuration banner."""
    stage: str = "init"
    served: bool = False
    alive: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    """Order and time of lines that show requests being answered, or a stage of the start reached."""
    probed: list[int] = dataclasses.field(default_factory=list)
    """Orders of the lines of health checks that were answered well."""
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Figures the start measured; the last rank to print wins, see `by_rank`."""
    by_rank: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """Figure name to process or rank to value, where ranks may differ."""
    loads: list[Load] = dataclasses.field(default_factory=list)
    events: list[LogEvent] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    container: str | None = None
    first: LogLine | None = None
    last: LogLine | None = None
    ended: LogEvent | None = None
    """The first line that says the server was asked to stop, or that it was killed."""
    lines: int = 0
    pids: set[int] = dataclasses.field(default_factory=set)
    devices: dict[str, str] = dataclasses.field(default_factory=dict)
    prefixed_lines: int = 0
    """Lines that carry an engine's own prefix, outside quotations."""
    is_document: bool = False
    """Whether this is prose that quotes logs (a README, an issue), so that nothing in it happened."""
    is_binary: bool = False
    """Whether this is no text at all."""

    def find(self, *ids: str) -> LogEvent | None:
        """The first event of one of these patterns, or None."""
        return next((event for event in self.events if event.pattern.id in ids), None)

    def find_last(self, *ids: str) -> LogEvent | None:
        """The last event of one of these patterns, or None."""
        return next((event for event in reversed(self.events) if event.pattern.id in ids), None)

    def all(self, *ids: str) -> list[LogEvent]:
        """Every event of these patterns."""
        return [event for event in self.events if event.pattern.id in ids]

    def reached(self, stage: str) -> bool:
        """Whether the start got as far as this stage."""
        return STAGES.index(self.stage) >= STAGES.index(stage)

    def _advance(self, stage: str) -> None:
        if STAGES.index(stage) > STAGES.index(self.stage):
            self.stage = stage
        if stage in ("ready", "serving"):
            self.served = self.served or stage == "serving"

    @property
    def began_at(self) -> float | None:
        """The time of its first line that has one; None in a log without times."""
        said: list[LogEvent | Failure] = [*self.events[:1], *self.failures[:1]]
        times = [item.seen_at for item in said if item.seen_at is not None]
        first = self.first.at if self.first is not None else None
        return first if first is not None else min(times, default=None)

    @property
    def last_alive(self) -> int:
        """Order of the last line that shows life; 0 if there is none."""
        return self.alive[-1][0] if self.alive else 0

    def note_alive(self, event: LogEvent) -> None:
        """Remember that the engine worked at this line."""
        if len(self.alive) >= _MAX_ALIVE:
            del self.alive[-1]
        self.alive.append((event.order, event.seen_at))

    def lives_between(self, first: int, last: float) -> bool:
        """Whether the engine showed life between two places of the log."""
        at = bisect.bisect_right(self.alive, first, key=lambda sign: sign[0])
        return at < len(self.alive) and self.alive[at][0] < last

    def drop_outlived(self) -> None:
        """Forget bare lines that speak of a death which the server outlived.

        A prompt that something printed as it is looks like this; an engine that fails does not go
        on answering. What a program's record introduces is kept.
        """
        if not self.served or not self.prefixed_lines:
            return
        self.failures = [
            failure
            for failure in self.failures
            if failure.announced or failure.line.prefixed or failure.order > self.last_alive
        ]
        self.events = [
            event
            for event in self.events
            if (event.pattern.kind not in _FATAL and event.pattern.kind != "pressure")
            or event.line.prefixed
            or event.order > self.last_alive
        ]
        if self.ended is not None and self.ended not in self.events:
            self.ended = next((e for e in self.events if e.pattern.kind == "lifecycle"), None)

    @property
    def is_empty(self) -> bool:
        """Whether the run holds nothing that an engine said."""
        return self.engine is None and not self.failures and not self.events and not self.loads


class RunBuilder:
    """Collects the runs of one log, fed line by line."""

    def __init__(self, orders: Iterator[int] | None = None) -> None:
        self.runs: list[Run] = [Run()]
        self._extractor = Extractor(orders)
        self._form = Form()

    def feed(self, line: LogLine) -> None:
        """Take the next line."""
        run = self.runs[-1]
        run.lines += 1
        self._form.look_at(line)
        if line.prefixed and not self._form.quoted:
            run.prefixed_lines += 1
        for item in () if self._form.explains else self._extractor.feed(line):
            self._take(item)
        run = self.runs[-1]
        if run.first is None:
            run.first, run.container = line, line.container
        run.last = line
        if line.pid is not None and line.prefixed and len(run.pids) < 4096:
            run.pids.add(line.pid)
        bar = _OFFLINE_BAR.match(line.text)
        if bar is not None and int(bar[1]) > 0:
            run._advance("serving")  # noqa: SLF001 - the builder fills the run

    def close(self) -> list[Run]:
        """Every run that said something, oldest first."""
        for item in self._extractor.close():
            self._take(item)
        if self._form.is_binary and all(run.is_empty for run in self.runs):
            return [Run(is_binary=True, lines=sum(run.lines for run in self.runs))]
        if self._form.is_document:
            # Nothing that a document quotes has happened.
            return [Run(is_document=True, lines=sum(run.lines for run in self.runs))]
        for run in self.runs:
            run.drop_outlived()
            run.engine = run.engine or _engine_by_failures(run)
        return [run for run in self.runs if not run.is_empty] or self.runs[-1:]

    def _take(self, item: LogEvent | Failure) -> None:
        if isinstance(item, Failure):
            if item.name != "KeyboardInterrupt":
                self.runs[-1].failures.append(item)
                return
            # SIGTERM and Ctrl-C while Python runs: a request to stop.
            item = LogEvent(SHUTDOWN, {}, item.line, item.order, item.seen_at)
        if begins_start(self.runs[-1], item, failing=self._extractor.is_open):
            # What the start before left open is its own.
            self.runs[-1].failures += self._extractor.close()
            self.runs.append(Run())
        _absorb(self.runs[-1], item)


def build_runs(lines: Iterable[LogLine]) -> list[Run]:
    """The runs of a log, oldest first."""
    builder = RunBuilder()
    for line in lines:
        builder.feed(line)
    return builder.close()


def _engine_by_failures(run: Run) -> str | None:
    """The engine whose code or whose own words a failure shows, where no other line names it."""
    paths = "\n".join(path for failure in run.failures for path in failure.paths)
    for package, engine in _PACKAGES:  # SGLang's first releases call into vLLM
        if package in paths:
            return engine
    said = [pattern.id for failure in run.failures for pattern, _ in failure.matches]
    said += [event.pattern.id for event in run.events if event.pattern.id.startswith("vllm.dump_")]
    return next(
        (engine for name in said for own, engine in _ENGINE_OF if name.startswith(own)), None
    )


def _has_banner(run: Run) -> bool:
    return any(event.pattern.id in BANNERS for event in run.events)


def _absorb(run: Run, event: LogEvent) -> None:
    pattern, fields = event.pattern, event.fields
    for prefix, engine in _ENGINE_OF:
        if pattern.id.startswith(prefix) and (
            run.engine is None or (pattern.kind == "identity" and not _has_banner(run))
        ):
            # Shared words ("hit an exception") must not name the engine.
            if pattern.kind in ("identity", "stage", "capacity", "stats", "pressure"):
                run.engine = engine
            break
    if pattern.kind == "stats":
        if _add_load(run, event):
            run.note_alive(event)
        return
    stage = _STAGE_OF.get(pattern.id)
    if stage is not None:
        run._advance(stage)  # noqa: SLF001
        run.note_alive(event)
    if pattern.kind == "lifecycle" and run.ended is None:
        run.ended = event
    if pattern.id == "uvicorn.probed":
        del run.probed[: max(0, len(run.probed) - _MAX_PROBED)]
        run.probed.append(event.order)
    if pattern.id in ("uvicorn.served", "uvicorn.probed"):
        return
    if pattern.kind in ("capacity", "stage"):
        _add_numbers(run, event)
    elif pattern.kind == "identity":
        _add_identity(run, fields)
    if pattern.id in ("vllm.shards", "vllm.capture_notice") and run.find(pattern.id) is not None:
        return
    if len(run.events) < _MAX_EVENTS:
        run.events.append(event)


def _add_identity(run: Run, fields: Mapping[str, Any]) -> None:
    for name in ("version", "generation", "model", "architecture"):
        value = fields.get(name)
        if value and getattr(run, name) is None:
            setattr(run, name, value)
    arguments = fields.get("arguments")
    if arguments and run.printed is None:
        run.printed = arguments
    config = fields.get("config")
    if config:
        for key, value in _FIELD.findall(config[:8192]):
            run.config.setdefault(key, value.strip("'\""))
        run.model = run.model or run.config.get("model")
    for name in ("max_model_tokens", "batched_tokens", "kv_dtype"):
        if name in fields:
            run.numbers[name] = fields[name]


def _add_numbers(run: Run, event: LogEvent) -> None:
    who = event.line.process or event.line.rank or str(event.line.pid or "")
    if event.line.rank and event.line.process:
        who = f"{event.line.process} {event.line.rank}"
    draft = event.pattern.id == "sglang.load_end" and "weights_bytes" in run.numbers
    for name, value in event.fields.items():
        if isinstance(value, str):
            continue
        if draft and name in ("weights_bytes", "avail_bytes"):
            continue
        if event.pattern.id.startswith("sglang.capture") and name == "graph_bytes":
            value = value + run.numbers.get("graph_bytes", 0)  # noqa: PLW2901 - target and draft graphs add up
        run.numbers[name] = value
        ranks = run.by_rank.setdefault(name, {})
        if len(ranks) < 4096:
            ranks[who] = value
    for name in ("kv_dtype", "device"):
        if isinstance(event.fields.get(name), str):
            run.devices[name] = event.fields[name]


def _add_load(run: Run, event: LogEvent) -> bool:
    """Note a load line; whether tokens were being made at that moment."""
    load = read_load(event)
    if load.kv_usage_ratio is None and load.running is None:
        return False
    if (load.running or 0) > 0 or (load.generation_rate or 0) > 0 or (load.waiting or 0) > 0:
        run._advance("serving")  # noqa: SLF001
    else:
        run._advance("ready")  # noqa: SLF001
    if len(run.loads) >= _MAX_STATS:
        # Keep the shape: drop every second of the older half.
        half = len(run.loads) // 2
        run.loads[:half] = run.loads[:half:2]
    run.loads.append(load)
    return (load.generation_rate or 0) > 0
