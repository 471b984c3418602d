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

_LOOKS_SECONDS: Final = (5.0, 60.0)
"""After the page first answered: the last lines of a start come later, or are read later."""


class StartFacts:
    """Keeps it for as long as that start runs. `look` belongs to one thread."""

    def __init__(self, host: str, table: EngineTable) -> None:
        self._host = host
        self._table = table
        self._known: dict[Start, Mapping[str, int]] = {}
        self._looks: dict[Start, int] = {}

    def look(self) -> Mapping[Start, Mapping[str, int]]:
        """Bytes on one GPU by what they are for, by start; of new starts the log is read."""
        now = time.monotonic()
        engines = {(engine.id, engine.root): engine for engine in self._table}
        self._known = {start: sizes for start, sizes in self._known.items() if start in engines}
        self._looks = {start: count for start, count in self._looks.items() if start in engines}
        for start, engine in engines.items():
            served, looks = engine.served_monotonic, self._looks.get(start, 0)
            if served is None or start in self._known or looks == len(_LOOKS_SECONDS):
                continue
            if now - served >= _LOOKS_SECONDS[looks] and engine.tails:
                self._looks[start] = looks + 1
                if found := self._read(engine):
                    self._known[start] = found
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
