"""Whether it is time to search the host for engines again: a search reads every process."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from typing import Final

from oomwatch.agent.engines import EngineTable
from oomwatch.discovery import may_be_of_engine
from oomwatch.sources.procfs import PROC_ROOT, glance_at

_YOUNG_LOOKS: Final = 3
"""A launcher becomes the server without a new process: new ones are looked at more than once."""
_SELDOM: Final = 6
"""Every so many looks all processes are searched, whatever came."""
_MOST_GLANCED_AT: Final = 64
"""Of the processes that came since the last look, where a build starts them by the hundred."""


class Newcomers:
    """Looks at the processes that came since the last look, and only at them."""

    def __init__(self, table: EngineTable, *, proc_root: str = PROC_ROOT) -> None:
        self._table = table
        self._proc_root = proc_root
        self._known: frozenset[str] = frozenset()
        """Names in the folder at the last look: numbers of processes, and a few others."""
        self._young: dict[int, int] = {}
        """Processes that came lately, and how often they will be looked at again."""
        self._holders: frozenset[int] = frozenset()
        self._looks = 0

    def ask_for_search(self) -> None:
        """Let the next look be a search."""
        self._looks = 0

    def has_come(self) -> bool:
        """Whether what may be an engine of its own came since the last look: one listing, mostly.

        What an engine starts itself can wait for the next look.
        """
        came = sorted(self._pids(self._names() - self._known))[-_MOST_GLANCED_AT:]
        members = self._table.live_pids() if came else set()
        processes = (glance_at(pid, proc_root=self._proc_root) for pid in came)
        return any(
            process is not None and process.ppid not in members and may_be_of_engine(process)
            for process in processes
        )

    def call_for_search(self, now: float, holders: AbstractSet[int]) -> bool:
        """Whether a search may find what the last one did not.

        `holders` are the processes that hold GPU memory, `now` is monotonic time.
        """
        names = self._names()
        self._young.update(dict.fromkeys(self._pids(names - self._known), _YOUNG_LOOKS))
        self._known = names
        new_holders = holders - self._holders
        self._holders = frozenset(holders)
        members = self._table.live_pids()
        newcomers = [
            pid
            for pid in list(self._young)
            if self._may_matter(pid, members, holders) and pid not in members
        ]
        unsettled = any(engine.broken or engine.is_starting(now) for engine in self._table)
        due = self._looks % _SELDOM == 0
        self._looks += 1
        return due or unsettled or bool(newcomers or new_holders - members)

    def _names(self) -> frozenset[str]:
        return frozenset(os.listdir(self._proc_root))  # noqa: PTH208 - names

    @staticmethod
    def _pids(names: AbstractSet[str]) -> list[int]:
        return [int(name) for name in names if name.isdigit()]

    def _may_matter(self, pid: int, members: set[int], holders: AbstractSet[int]) -> bool:
        left = self._young.pop(pid) - 1
        process = glance_at(pid, proc_root=self._proc_root)
        if process is None:
            return False
        if left:
            self._young[pid] = left
        return pid in holders or process.ppid in members or may_be_of_engine(process)
