"""What each start of an engine said of its memory in its log, read once it serves."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.diagnose.assemble import assemble
from oomwatch.diagnose.inputs import Inputs, LogInput
from oomwatch.records import EngineFacts

Start = tuple[str, tuple[int, int | None]]
"""Id and root of an engine: those known by their page alone have the same root."""

_SETTLED_SECONDS: Final = 5.0
"""The last lines of a start come a moment after its page answers."""


class StartFacts:
    """Keeps it for as long as that start runs. `look` belongs to one thread."""

    def __init__(self, host: str, table: EngineTable) -> None:
        self._host = host
        self._table = table
        self._known: dict[Start, Mapping[str, int]] = {}

    def look(self) -> Mapping[Start, Mapping[str, int]]:
        """Bytes on one GPU by what they are for, by start; of new starts the log is read."""
        now = time.monotonic()
        engines = {(engine.id, engine.root): engine for engine in self._table}
        self._known = {start: sizes for start, sizes in self._known.items() if start in engines}
        for start, engine in engines.items():
            served = engine.served_monotonic
            if start in self._known or served is None or now - served < _SETTLED_SECONDS:
                continue
            if engine.tails:
                self._known[start] = self._read(engine)
        return dict(self._known)

    def _read(self, engine: WatchedEngine) -> Mapping[str, int]:
        facts = assemble(
            Inputs(
                generated_at=time.time(),
                host=self._host,
                logs=tuple(LogInput(tail.name, tail.lines(), engine.id) for tail in engine.tails),
                engines=(engine.found.recorded,),
            )
        )
        newest = [one.engine for one in facts if one.engine.id == engine.id]
        return components(newest[0]) if newest else {}


def components(engine: EngineFacts) -> dict[str, int]:
    """What is known, by component."""
    found = {
        "weights": engine.weights_bytes,
        "kv": engine.kv_bytes,
        "activation": engine.activation_bytes,
        "cudagraph": engine.graph_bytes,
        "other": engine.non_torch_bytes,
    }
    return {name: size for name, size in found.items() if size is not None and size >= 0}
