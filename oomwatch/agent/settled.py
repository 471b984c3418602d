"""What the starts before have left in a log that a new start goes on writing.

A log that is appended to holds the end of the last start. That was judged then, with how its
processes ended; read again with the new start, it would be a failure of a healthy server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final

from oomwatch.agent.engines import WatchedEngine
from oomwatch.records import Diagnosis, Finding

_MOST_ENGINES: Final = 256


class Settled:
    """Up to where logs were judged with the end of a start, by their own clocks.

    All of it belongs to the detector's thread.
    """

    def __init__(self) -> None:
        self._until: dict[str, Mapping[str, float]] = {}
        """By engine: the time of the last line, by the name of the log."""

    def settle(self, engine: WatchedEngine) -> None:
        """The end of this start was judged."""
        engine.judged_before = self._until.pop(engine.id, {})
        ends = {tail.name: at for tail in engine.tails if (at := tail.last_at) is not None}
        self._until[engine.id] = {**engine.judged_before, **ends}
        if len(self._until) > _MOST_ENGINES:
            del self._until[next(iter(self._until))]

    def own(self, engine: WatchedEngine, diagnosis: Diagnosis) -> Diagnosis:
        """The diagnosis of this start, without what was judged with the end of one before."""
        until = engine.judged_before if engine.settled else self._until.get(engine.id, {})
        own = tuple(i for i in diagnosis.incidents if not _is_of_before(i.finding, until))
        return dataclasses.replace(diagnosis, incidents=own)


def _is_of_before(finding: Finding, until: Mapping[str, float]) -> bool:
    lead = finding.evidence[0] if finding.evidence else None
    if lead is None or lead.source != "log" or lead.at is None:
        return False
    return lead.at <= until.get(lead.where.rpartition(":")[0], float("-inf"))
