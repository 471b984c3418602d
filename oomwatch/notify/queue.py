"""The messages that wait for one receiver: which may go next, and which go together.

Messages of one incident go in their order, one after the other, and so do those of incidents that
a receiver may take for the same alert; others do not wait for each other. After three failed
attempts in a row the receiver itself is taken to be in trouble and all of them wait.
All times are monotonic seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

from oomwatch.config.notify import NotifySettings
from oomwatch.notify.backoff import MOST_ASKED_SECONDS, pause_seconds
from oomwatch.records import OutboxRow

GROUP_MOST: Final = 40
"""Messages that one message stands for, at most."""
_GROUPED: Final = frozenset({"opened", "updated", "resolved", "escalated"})
IN_TROUBLE: Final = 3
"""Failed attempts in a row after which the receiver is taken to be in trouble."""
_UNSTORED_SECONDS: Final = 0.5
"""The store has so long to write a message before it is sent; then it is sent all the same."""
_UNSTORED_GROUP_SECONDS: Final = 5.0
"""The same of one that stands for others: if that is not written, they are told again."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    row: OutboxRow
    subjects: frozenset[str]
    due: float
    expires: float
    gives_up: float
    """The same for one that could not be tried since the agent runs: a clock may have been set."""
    handed: float
    stored: bool
    sealed: bool
    """Whether it may have been sent: then nothing about it may change."""
    asked: bool = False
    """Whether somebody wants it to be tried now."""
    tried: bool = False

    @property
    def ends(self) -> float:
        """When it is given up."""
        return self.expires if self.tried else self.gives_up


class SinkQueue:
    """One lock around it all is the caller's business."""

    def __init__(
        self, settings: NotifySettings, *, groups: bool = False, per_second: float = 1.0
    ) -> None:
        self.settings = settings
        self.groups = groups
        self.per_second = per_second
        self.failures = 0
        """Failed attempts since the last one that went well."""
        self._waiting: dict[str, _Waiting] = {}
        self._in_flight: frozenset[str] = frozenset()
        self._paused_until = 0.0
        self._free_at = 0.0
        self._window_from = float("-inf")
        self._sent = 0
        self._holding = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def rows(self) -> list[OutboxRow]:
        """All that waits, in order."""
        return [one.row for one in self._waiting.values()]

    # ---------------------------------------------------------------- what comes and goes
    def add(
        self,
        row: OutboxRow,
        now: float,
        *,
        subjects: Iterable[str] = (),
        age_seconds: float = 0.0,
        delay_seconds: float = 0.0,
        stored: bool = False,
        sealed: bool = False,
    ) -> None:
        """Queue a message, behind all others; one that waits already takes its new form.

        `subjects` are what it is about besides its own incident: it waits for all that is about one
        of them. `sealed`: it may have been sent already, so nothing about it may change.
        """
        known = self._waiting.get(row.id)
        if known is not None:
            known.row, known.due = row, now + delay_seconds
            return
        of = {row.incident_id} if row.incident_id is not None else set()
        give_up = self.settings.give_up_after_seconds
        self._waiting[row.id] = _Waiting(
            row=row,
            subjects=frozenset(of | set(subjects)),
            due=now + delay_seconds,
            expires=now + max(0.0, give_up - max(0.0, age_seconds)),
            gives_up=now + give_up,
            handed=now,
            stored=stored,
            sealed=sealed or row.attempts > 0,
        )

    def replace(self, old_id: str, row: OutboxRow | None, now: float) -> bool:
        """Let a message take another form, or go; False if it may have been sent already."""
        known = self._waiting.get(old_id)
        if known is None or known.sealed or old_id in self._in_flight:
            return False
        if row is None:
            del self._waiting[old_id]
        else:
            known.row, known.handed, known.stored = row, now, False
        return True

    def ask_again(self, row: OutboxRow, now: float, subjects: Iterable[str] = ()) -> None:
        """Somebody wants this one tried now: before others, and whatever pause was kept.

        It may have arrived, whatever became of it.
        """
        self.add(row, now, subjects=subjects, sealed=True)
        known = self._waiting[row.id]
        known.expires = known.gives_up = now + self.settings.give_up_after_seconds
        known.asked, known.sealed, self._paused_until = True, True, 0.0

    def mark_stored(self, ids: Iterable[str]) -> None:
        """These are on disk now: they may be sent."""
        for identity in ids:
            known = self._waiting.get(identity)
            if known is not None:
                known.stored = True

    def settle(self, ids: Iterable[str]) -> None:
        """These do not wait any more, and are not being sent."""
        settled = frozenset(ids)
        self._in_flight -= settled
        for identity in settled:
            self._waiting.pop(identity, None)

    # ---------------------------------------------------------------- what goes next
    def take(self, now: float) -> tuple[OutboxRow, ...]:
        """One message to send, or several to be told as one; empty if none may go now."""
        if self._in_flight or now < max(self._paused_until, self._free_at):
            return ()
        for one in sorted(self._heads(now), key=lambda one: not one.asked):
            if not self.groups or one.sealed or one.asked or one.row.kind not in _GROUPED:
                return self._begin((one.row,), now)
            if together := self._in_window(one, now):
                return self._begin(together, now)
        return ()

    @property
    def _window_seconds(self) -> float:
        """No shorter than what a receiver needs that takes few a second, or none would be held."""
        needed = (self.settings.group_limit + 1) / self.per_second
        return max(self.settings.group_window_seconds, needed)

    def _in_window(self, first: _Waiting, now: float) -> tuple[OutboxRow, ...]:
        if now - self._window_from >= self._window_seconds:
            held, self._holding = self._holding, False
            self._window_from, self._sent = now, 0
            if held:
                together = self._together(now)
                more = len(together) > GROUP_MOST
                self._sent, self._holding = (
                    (self.settings.group_limit, True) if more else (1, False)
                )
                return together[:GROUP_MOST]
        if self._sent < self.settings.group_limit:
            self._sent += 1
            return (first.row,)
        self._holding = True
        return ()

    def _together(self, now: float) -> tuple[OutboxRow, ...]:
        """All that can be told as one: in order, and nothing past what must go alone."""
        found: list[OutboxRow] = []
        blocked: set[str] = set()
        for one in self._waiting.values():
            fits = one.row.kind in _GROUPED and not one.sealed and self._may_go(one, now)
            if fits and not one.subjects & blocked:
                found.append(one.row)
            else:
                blocked |= one.subjects
        return tuple(found)

    def _heads(self, now: float) -> Iterable[_Waiting]:
        """The first message of each incident, if it may go."""
        blocked: set[str] = set()
        for one in self._waiting.values():
            if not one.subjects & blocked and self._may_go(one, now):
                yield one
            blocked |= one.subjects

    def _may_go(self, one: _Waiting, now: float) -> bool:
        return one.due <= now and (one.stored or now >= _written_by(one))

    def _begin(self, rows: tuple[OutboxRow, ...], now: float) -> tuple[OutboxRow, ...]:
        self._in_flight = frozenset(row.id for row in rows)
        for row in rows:
            self._waiting[row.id].tried, self._waiting[row.id].asked = True, False
        self._free_at = now + 1 / self.per_second
        return rows

    def wait_seconds(self, now: float) -> float | None:
        """How long until something may go, or is to be given up; None if nothing waits."""
        if not self._waiting:
            return None
        gate = max(self._paused_until, self._free_at)
        moments = [one.ends for one in self._waiting.values()]
        for one in self._waiting.values():
            ready = one.due if one.stored else max(one.due, _written_by(one))
            if ready > now or gate > now:
                moments.append(max(ready, gate))
        if self._holding:
            moments.append(max(gate, self._window_from + self._window_seconds))
        return max(0.0, min(moments) - now)

    # ---------------------------------------------------------------- what became of it
    def went_well(self, now: float) -> None:
        """The receiver takes messages: those that were to wait for it need not."""
        self._in_flight = frozenset()
        if self.failures >= IN_TROUBLE:
            self._paused_until = 0.0
            for one in self._waiting.values():
                one.due = min(one.due, now)
        self.failures = 0

    def went_wrong(self, row: OutboxRow, now: float, asked_seconds: float | None) -> float:
        """The attempt failed, `row` is its new form; the pause until the next one, in seconds.

        That is the pause of the receiver, where all that waits has to wait for it.
        """
        self._in_flight = frozenset()
        self.failures += 1
        first = self.settings.retry_interval_seconds
        if asked_seconds is not None:
            pause = min(max(asked_seconds, 0.0), MOST_ASKED_SECONDS)
            self._paused_until = max(self._paused_until, now + pause)
        else:
            pause = pause_seconds(row.attempts, first)
        if self.failures >= IN_TROUBLE:
            trouble = pause_seconds(self.failures - IN_TROUBLE + 1, first)
            self._paused_until = max(self._paused_until, now + trouble)
        known = self._waiting.get(row.id)
        if known is not None:
            if known.asked:  # while this attempt was under way
                pause = self._paused_until = 0.0
            known.row, known.due, known.sealed = row, now + pause, True
        return max(pause, self._paused_until - now)

    def let_go(self) -> None:
        """Nothing is being sent any more, and that says nothing about the receiver."""
        self._in_flight = frozenset()

    def expired(self, now: float) -> Sequence[OutboxRow]:
        """What has waited for too long and is not being sent."""
        return [
            one.row
            for one in self._waiting.values()
            if now >= one.ends and one.row.id not in self._in_flight
        ]


def _written_by(one: _Waiting) -> float:
    """From when on a message is not waited for that is not on disk."""
    return one.handed + (
        _UNSTORED_GROUP_SECONDS if one.row.kind == "grouped" else _UNSTORED_SECONDS
    )
