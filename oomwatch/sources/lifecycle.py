"""How processes end, at once: a descriptor of each (pidfd) wakes whoever waits.

Nobody but the parent may wait for a process; how it ended is read from where else it is told (see
`pidfd`) and is None where it is not. Whether the kernel killed it for memory is told by the count
of its cgroup (see `memory_events`), and by what `explain_end` is given: lines of the kernel log and
the word of its keeper (see `keeper`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import threading
import time
from collections.abc import Iterable
from typing import Final

from oomwatch.records import KernelEvent
from oomwatch.sources.keeper import KeptExit
from oomwatch.sources.memory_events import MemoryEvents
from oomwatch.sources.pidfd import (
    ExitStatus,
    exit_status,
    open_pidfd,
    read_cgroup_paths,
    read_exit,
    read_state,
)
from oomwatch.sources.procfs import PROC_ROOT

__all__ = ["Ended", "ExitWatch", "MemoryEvents", "explain_end"]

_SIGKILL: Final = 9
_POLL_SECONDS: Final = 0.1
"""Between two looks at processes without a descriptor."""
_STATUS_SECONDS: Final = 0.25
"""A parent fetches the status within milliseconds, or takes its time: then it is not waited for."""
_STATUS_LOOK_SECONDS: Final = 0.02
_MOST_DESCRIPTORS: Final = 256
_SAME_END_SECONDS: Final = 60.0
_SHELL_SIGNAL: Final = 128
_SELDOM_CHOSEN: Final = frozenset({"server", "api"})
"""Roles that the OOM killer seldom chooses: it takes the largest, an engine core or a worker."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ended:
    """A watched process has ended. `exit_code` is as a shell tells it, 128 + the signal."""

    pid: int
    engine_id: str
    at: float
    name: str | None = None
    role: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    oom_killed: bool | None = None
    """Whether the kernel's OOM killer ended it; None where that cannot be told."""
    detail: str | None = None
    """Who says so, in its words."""


@dataclasses.dataclass(slots=True)
class _Watched:
    pid: int
    start_ticks: int
    engine_id: str
    name: str | None
    role: str | None
    descriptor: int | None = None
    cgroup: str | None = None
    ended_at: float | None = None
    given_up_at: float = 0.0
    """Monotonic time from which its status is not waited for."""

    @property
    def key(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    @property
    def patience_seconds(self) -> float:
        return min(_STATUS_LOOK_SECONDS, self.given_up_at - time.monotonic())

    def mark_ended(self) -> None:
        if self.ended_at is None:
            self.ended_at = time.time()
            # Without a descriptor the status is gone as soon as the parent has fetched it.
            patience = 0.0 if self.descriptor is None else _STATUS_SECONDS
            self.given_up_at = time.monotonic() + patience


@dataclasses.dataclass(frozen=True, slots=True)
class _Round:
    """What is waited for, until that changes: hundreds of processes run on for weeks."""

    waiting: select.poll
    counts: tuple[int, ...]
    """Descriptors of kill counts."""
    by_descriptor: dict[int, _Watched]
    looked_at: list[_Watched]
    """Those without a descriptor."""
    ended: list[_Watched]
    """Those whose status may still come."""


class ExitWatch:
    """Waits for processes that are not ours to end.

    `watch`, `forget` and `close` may be called from any thread, and reach the one that waits. A
    process without a descriptor (no pidfd here, more than `most_descriptors` processes, too many
    open files, or numbers of another pid namespace under `proc_root`) is looked at ten times a
    second instead.
    """

    def __init__(
        self,
        events: MemoryEvents | None = None,
        *,
        proc_root: str = PROC_ROOT,
        use_pidfd: bool | None = None,
        most_descriptors: int = _MOST_DESCRIPTORS,
    ) -> None:
        self._events = events
        self._proc_root = proc_root
        self._use_pidfd = proc_root == PROC_ROOT if use_pidfd is None else use_pidfd
        self._free_descriptors = most_descriptors
        self._watched: dict[tuple[int, int], _Watched] = {}
        self._round: _Round | None = None
        self._retired: list[int] = []  # descriptors to close when nobody polls them
        self._lock = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._waiting = False
        self._closed = False

    def __len__(self) -> int:
        return len(self._watched)

    def watch(
        self,
        pid: int,
        start_ticks: int,
        engine_id: str,
        *,
        name: str | None = None,
        role: str | None = None,
    ) -> None:
        """Watch the process of that number that started then; one that is gone is told of next."""
        watched = _Watched(pid, start_ticks, engine_id, name, role)
        with self._lock:
            if self._closed:
                return
            known = self._watched.get(watched.key)
            if known is not None:  # a process may take its name, and so its role, after a while
                known.engine_id, known.name, known.role = engine_id, name, role
                return
            self._open(watched)
            self._watched[watched.key] = watched
            self._round = None
            self._wake_up()

    def forget(self, pid: int, start_ticks: int) -> None:
        """Watch it no longer."""
        with self._lock:
            self._retire(self._watched.get((pid, start_ticks)))
            self._wake_up()

    def wait(self, timeout_seconds: float) -> list[Ended]:
        """Those that ended. Nothing after the timeout, or sooner if a kill count of `events` rose.

        One thread at a time may wait.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            self._waiting = True
        try:
            while not self._closed:
                killed = self._sleep(deadline)
                ended = self._collect()
                if ended or killed or time.monotonic() >= deadline:
                    return ended
            return []
        finally:
            with self._lock:
                self._waiting = False
                self._close_retired()

    def close(self) -> None:
        """Watch nothing any longer; who waits returns."""
        with self._lock:
            if self._closed:
                return
            for watched in list(self._watched.values()):
                self._retire(watched)
            self._wake_up()
            self._closed = True
            self._retired.append(self._wake)
            if not self._waiting:
                self._close_retired()

    # ---------------------------------------------------------------- one process
    def _open(self, watched: _Watched) -> None:
        """Get hold of the process, then make sure that it is the one that was meant."""
        if self._use_pidfd and self._free_descriptors > 0:
            try:
                watched.descriptor = open_pidfd(watched.pid)
            except ProcessLookupError:
                watched.mark_ended()
                return
            self._free_descriptors -= watched.descriptor is not None
        try:
            state = read_state(watched.pid, proc_root=self._proc_root)
        except OSError:
            return  # it will show later
        if state is None and watched.descriptor is None:
            watched.mark_ended()
        elif state is not None and state.start_ticks != watched.start_ticks:
            self._let_go(watched)
            watched.mark_ended()
        elif self._events is not None:
            watched.cgroup = self._events.watch(
                read_cgroup_paths(watched.pid, proc_root=self._proc_root)
            )

    def _is_gone(self, watched: _Watched) -> bool:
        try:
            state = read_state(watched.pid, proc_root=self._proc_root)
        except OSError:
            return False
        return state is None or state.start_ticks != watched.start_ticks or state.ended

    def _status(self, watched: _Watched) -> ExitStatus | None:
        state = None
        with contextlib.suppress(OSError):
            state = read_state(watched.pid, proc_root=self._proc_root)
        same = state is not None and state.start_ticks == watched.start_ticks
        if state is not None and same and state.wait_status is not None:
            return exit_status(state.wait_status)
        return None if watched.descriptor is None else read_exit(watched.descriptor)

    def _retire(self, watched: _Watched | None) -> None:
        if watched is None:
            return
        self._watched.pop(watched.key, None)
        self._round = None
        self._let_go(watched)

    def _let_go(self, watched: _Watched) -> None:
        if watched.descriptor is not None:
            self._retired.append(watched.descriptor)
            self._free_descriptors += 1
            watched.descriptor = None

    def _close_retired(self) -> None:
        while self._retired:
            os.close(self._retired.pop())

    def _wake_up(self) -> None:
        if not self._closed:
            os.eventfd_write(self._wake, 1)

    # ---------------------------------------------------------------- all of them
    def _sleep(self, deadline: float) -> bool:
        """Until something happens; whether that is a kill count."""
        counts = () if self._events is None else self._events.descriptors
        with self._lock:
            self._close_retired()
            if self._round is None or self._round.counts != counts:
                self._round = self._prepare(counts)
            now = self._round
        seconds = deadline - time.monotonic()
        seconds = min([seconds, *(watched.patience_seconds for watched in now.ended)])
        if now.looked_at:
            seconds = min(seconds, _POLL_SECONDS)
        ready = dict(now.waiting.poll(max(0.0, seconds) * 1000))
        if self._wake in ready and not self._closed:
            os.eventfd_read(self._wake)
        for descriptor in ready.keys() & now.by_descriptor.keys():
            watched = now.by_descriptor[descriptor]
            watched.mark_ended()
            self._round = None
            if ready[descriptor] & select.POLLHUP:
                watched.given_up_at = 0.0  # fetched: it is told now, or never
        for watched in now.looked_at:
            if watched.ended_at is None and self._is_gone(watched):
                watched.mark_ended()
                self._round = None
        if self._events is None or ready.keys().isdisjoint(counts):
            return False
        return self._events.look()

    def _prepare(self, counts: tuple[int, ...]) -> _Round:
        found = _Round(select.poll(), counts, {}, [], [])
        found.waiting.register(self._wake, select.POLLIN)
        for descriptor in counts:
            found.waiting.register(descriptor, select.POLLPRI)
        for watched in self._watched.values():
            if watched.ended_at is not None:
                found.ended.append(watched)
            if watched.descriptor is None:
                found.looked_at.append(watched)
                continue
            found.by_descriptor[watched.descriptor] = watched
            # POLLHUP, which needs no asking, says that the parent has fetched the status.
            events = select.POLLIN if watched.ended_at is None else 0
            found.waiting.register(watched.descriptor, events)
        return found

    def _collect(self) -> list[Ended]:
        """Those that ended and whose status is known, or will not come."""
        found: list[Ended] = []
        with self._lock:
            for watched in [one for one in self._watched.values() if one.ended_at is not None]:
                status = self._status(watched)
                if status is None and watched.patience_seconds > 0:
                    continue
                self._retire(watched)
                found.append(self._describe(watched, status))
        return found

    def _describe(self, watched: _Watched, status: ExitStatus | None) -> Ended:
        killed: bool | None = False
        if status is None and self._has_likelier_victim(watched):
            killed = None
        elif status is None or status.signal == _SIGKILL:
            killed = None if self._events is None else self._events.claim(watched.cgroup)
        return Ended(
            pid=watched.pid,
            engine_id=watched.engine_id,
            at=watched.ended_at or time.time(),
            name=watched.name,
            role=watched.role,
            exit_code=None if status is None else status.code,
            signal=None if status is None else status.signal,
            oom_killed=killed,
        )

    def _has_likelier_victim(self, watched: _Watched) -> bool:
        """Whether a counted kill is rather that of a process whose end is still to come.

        systemd ends a whole unit once the kernel has chosen a process of it (``OOMPolicy=stop``):
        a server is gone while its core still gives back its memory.
        """
        return watched.role in _SELDOM_CHOSEN and any(
            other.cgroup == watched.cgroup and other.role not in _SELDOM_CHOSEN
            for other in self._watched.values()
        )


def explain_end(
    ended: Ended, *, kernel: Iterable[KernelEvent] = (), kept: KeptExit | None = None
) -> Ended:
    """The same end, with what the kernel log and its keeper add; both may come later than it.

    What is known already stays: a keeper speaks of the main process, or of the unit as a whole.
    That a count of kills rose is no knowledge of whom: a process that left by itself was not it.
    """
    for event in kernel:
        if event.fields.get("pid") != ended.pid or not _is_near(event.at, ended.at):
            continue
        if event.kind == "oom_kill":
            return dataclasses.replace(
                ended,
                exit_code=_SHELL_SIGNAL + _SIGKILL,
                signal=_SIGKILL,
                oom_killed=True,
                detail=event.text,
            )
        if event.kind == "native_crash":
            ended = dataclasses.replace(ended, detail=event.text)
    if kept is None or not _is_near(kept.exit.at, ended.at):
        return ended
    told = kept.exit
    if kept.pid == ended.pid and ended.exit_code is None:
        ended = dataclasses.replace(ended, exit_code=told.exit_code, signal=told.signal)
        if told.exit_code is not None and told.signal != _SIGKILL:
            ended = dataclasses.replace(ended, oom_killed=False)
    if ended.oom_killed is None:
        # Of a unit it says that some process was killed: not one that left with a status.
        left = ended.exit_code is not None and ended.signal != _SIGKILL
        ended = dataclasses.replace(ended, oom_killed=False if left else told.oom_killed)
    said = f"{told.where}: {told.detail}" if told.detail else None
    return dataclasses.replace(ended, detail=ended.detail or said)


def _is_near(at: float | None, ended_at: float) -> bool:
    return at is None or abs(at - ended_at) <= _SAME_END_SECONDS
