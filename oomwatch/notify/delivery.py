"""One thread for each receiver: sends what waits for it, and says what became of it.

A receiver that hangs holds up its own thread and nothing else, not even the end of the agent:
what was being sent then waits in the store, and goes out under the same id after the next start.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Final

from oomwatch.config.notify import NotifySettings, SinkConfig
from oomwatch.errors import OomwatchError
from oomwatch.notify.grouping import grouped_message
from oomwatch.notify.notice import Notice, notice_from_json
from oomwatch.notify.outbox import lang_of, subjects_of
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused, Sink
from oomwatch.notify.queue import IN_TROUBLE, SinkQueue
from oomwatch.records import OutboxRow
from oomwatch.units import format_span

_LOG = logging.getLogger(__name__)
_SAY_AGAIN_SECONDS: Final = 3600.0
_REFRESH_RETRY_SECONDS: Final = 15.0


@dataclasses.dataclass(frozen=True, slots=True)
class SinkStatus:
    """How one receiver does."""

    name: str
    kind: str
    waiting: int = 0
    held: int = 0
    """Messages whose time has not come: quiet hours, silences, cooldowns, escalation."""
    delivered_total: int = 0
    failed_total: int = 0
    """Messages that were refused or given up."""
    attempts_failed_total: int = 0
    failures_in_row: int = 0
    disabled: str | None = None
    """Why nothing is sent any more."""
    trouble: str | None = None
    """What went wrong last, while it has not gone well since."""


class Delivery:
    """Sends the messages of one receiver.

    `report` is called, in the thread, with the new forms of messages; `thread_of` gives the
    receiver's name for the first message about the same incident; `open_notices` gives what a
    receiver has to be reminded of.
    """

    def __init__(
        self,
        config: SinkConfig,
        settings: NotifySettings,
        *,
        make: Callable[[SinkConfig], Sink],
        report: Callable[[Sequence[OutboxRow]], None],
        thread_of: Callable[[OutboxRow], str | None] = lambda _row: None,
        open_notices: Callable[[], Sequence[Notice]] = tuple,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.name = config.name or config.kind
        self._make, self._report, self._wall = make, report, wall
        self._thread_of, self._open_notices = thread_of, open_notices
        self._condition = threading.Condition()
        self._queue = SinkQueue(settings)
        self._sink: Sink | None = None
        self._stopping = False
        self._refresh_at = 0.0
        self._said_at = float("-inf")
        self._status = SinkStatus(self.name, config.kind)
        self._thread = threading.Thread(target=self._run, name=f"to {self.name}", daemon=True)

    # ---------------------------------------------------------------- any thread
    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send nothing more; does not wait for what is being sent."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()

    def reconfigure(self, config: SinkConfig, settings: NotifySettings) -> None:
        """Use other settings from now on; a receiver that was disabled is tried again."""
        with self._condition:
            self.config, self._queue.settings, self._sink = config, settings, None
            self._status = dataclasses.replace(self._status, kind=config.kind, disabled=None)
            self._condition.notify_all()

    def add(self, rows: Iterable[OutboxRow], *, from_store: bool = False) -> None:
        """Queue messages; with `from_store` they are on disk, from an earlier run of the agent.

        Of those the first that was not tried may have been sent when that ended.
        """
        now, wall = time.monotonic(), self._wall()
        begun = from_store
        with self._condition:
            for row in rows:
                self._queue.add(
                    row,
                    now,
                    subjects=subjects_of(row),
                    age_seconds=wall - row.created_at,
                    delay_seconds=_delay_seconds(row, wall) if from_store else 0.0,
                    stored=from_store,
                    sealed=begun,
                )
                begun = begun and row.attempts > 0
            self._condition.notify_all()

    def ask_again(self, row: OutboxRow) -> None:
        """Try a message now, whatever pause was kept, and also if the receiver is disabled."""
        with self._condition:
            self._status = dataclasses.replace(self._status, disabled=None)
            self._queue.ask_again(row, time.monotonic(), subjects_of(row))
            self._condition.notify_all()

    def replace(self, old_id: str, row: OutboxRow | None) -> bool:
        """Let a message take another form, or go; False if it may have been sent already."""
        with self._condition:
            return self._queue.replace(old_id, row, time.monotonic())

    def mark_stored(self, ids: Iterable[str]) -> None:
        """These messages are on disk."""
        with self._condition:
            self._queue.mark_stored(ids)
            self._condition.notify_all()

    @property
    def status(self) -> SinkStatus:
        """How it does now."""
        with self._condition:
            return dataclasses.replace(
                self._status, waiting=len(self._queue), failures_in_row=self._queue.failures
            )

    # ---------------------------------------------------------------- the thread
    def _run(self) -> None:
        while not self._stopping:
            sink = self._made()
            with self._condition:
                now = time.monotonic()
                given_up, rows = self._next(now)
                if not rows and not given_up and not self._is_to_refresh(sink, now):
                    if not self._stopping:
                        self._condition.wait(self._idle_seconds(sink, now))
                    continue
            try:
                if given_up:
                    self._give_up(given_up)
                elif rows:
                    self._send(sink, rows)
                elif sink is not None:
                    self._refresh(sink)
            except Exception:  # noqa: BLE001 - one fault must not end the alerts
                _LOG.error("receiver %s: %s", self.name, _fault())
                with self._condition:
                    self._queue.let_go()
                    self._condition.wait(1.0)

    def _next(self, now: float) -> tuple[Sequence[OutboxRow], Sequence[OutboxRow]]:
        """What is to be given up, and what to be sent; never both."""
        if self._status.disabled is not None:
            return self._queue.rows, ()
        given_up = self._queue.expired(now)
        return given_up, () if given_up else self._queue.take(now)

    def _made(self) -> Sink | None:
        """The receiver, made from its section; None while a secret or the like is missing."""
        sink, config = self._sink, self.config
        if sink is not None:
            return sink
        try:
            sink = self._make(config)
        except OomwatchError as error:
            self._trouble(str(error))
            return None
        except Exception:  # noqa: BLE001 - a sink of somebody else's
            self._trouble(_fault())
            return None
        with self._condition:
            self._queue.groups, self._queue.per_second = sink.groups, sink.per_second
            self._status = dataclasses.replace(self._status, trouble=None)
            if config is self.config:  # else it was configured anew meanwhile
                self._sink = sink
        return sink

    def _idle_seconds(self, sink: Sink | None, now: float) -> float | None:
        waits = [self._queue.wait_seconds(now)]
        if sink is not None and sink.refresh_seconds is not None:
            waits.append(max(0.0, self._refresh_at - now))
        known = [wait for wait in waits if wait is not None]
        return min(known) if known else None

    def _send(self, sink: Sink | None, rows: Sequence[OutboxRow]) -> None:
        row = rows[0]
        if len(rows) > 1:
            row = grouped_message(rows, self._wall(), lang_of(self.config))
            members = [
                dataclasses.replace(
                    one, state="grouped", reason=row.id, changed_at=self._wall(), due_at=None
                )
                for one in rows
            ]
            now = time.monotonic()
            with self._condition:
                self._queue.settle(one.id for one in members)
                self._queue.let_go()
                self._queue.add(row, now, subjects=subjects_of(row))
            # All of them in one transaction; it is sent once that is on disk.
            self._report([*members, row])
            return
        outcome = self._attempt(sink, row)
        now, wall = time.monotonic(), self._wall()
        with self._condition:
            changed = self._settled(row, outcome, now, wall)
        self._report([changed])
        self._say(changed, outcome)

    def _attempt(self, sink: Sink | None, row: OutboxRow) -> Outcome:
        if sink is None:
            return Later(self._status.trouble or "it is not set up")
        try:
            notice = notice_from_json(row.notice or {})
        except (KeyError, TypeError, ValueError):
            return Refused("the stored message cannot be read")
        try:
            return sink.send(notice, self._thread_of(row))
        except Exception:  # noqa: BLE001 - a sink of somebody else's
            return Later(_fault())

    def _settled(self, row: OutboxRow, outcome: Outcome, now: float, wall: float) -> OutboxRow:
        """The new form of a message after an attempt."""
        tried = dataclasses.replace(
            row, attempts=row.attempts + 1, changed_at=wall, due_at=None, reason=None
        )
        status = self._status
        match outcome:
            case Delivered(reference):
                self._queue.went_well(now)
                self._queue.settle([row.id])
                self._status = dataclasses.replace(
                    status, delivered_total=status.delivered_total + 1, trouble=None
                )
                return dataclasses.replace(
                    tried, state="delivered", reference=reference, notice=None
                )
            case Refused(reason, disable):
                self._queue.went_well(now)  # it answers
                self._queue.settle([row.id])
                self._status = dataclasses.replace(
                    status,
                    failed_total=status.failed_total + 1,
                    attempts_failed_total=status.attempts_failed_total + 1,
                    disabled=reason if disable else None,
                    trouble=reason,
                )
                return dataclasses.replace(tried, state="failed", reason=reason)
            case Later(reason, after_seconds):
                pause = self._queue.went_wrong(tried, now, after_seconds)
                self._status = dataclasses.replace(
                    status,
                    attempts_failed_total=status.attempts_failed_total + 1,
                    trouble=reason,
                )
                waits = dataclasses.replace(
                    tried, state="waiting", reason=reason, due_at=wall + pause
                )
                self._queue.add(waits, now, delay_seconds=pause)
                return waits

    def _give_up(self, rows: Sequence[OutboxRow]) -> None:
        wall, disabled = self._wall(), self._status.disabled
        failed = []
        for row in rows:
            after = format_span(wall - row.created_at)
            why = f"given up after {after}: {row.reason or 'it was never tried'}"
            failed.append(
                dataclasses.replace(
                    row,
                    state="failed",
                    changed_at=wall,
                    due_at=None,
                    reason=why if disabled is None else f"not sent: {disabled}",
                )
            )
        with self._condition:
            self._queue.settle(row.id for row in rows)
            self._status = dataclasses.replace(
                self._status, failed_total=self._status.failed_total + len(rows)
            )
        self._report(failed)
        for row in failed:
            _LOG.error("receiver %s: %s failed: %s", self.name, _named(row), row.reason)

    # ---------------------------------------------------------------- reminders
    def _is_to_refresh(self, sink: Sink | None, now: float) -> bool:
        if sink is None or sink.refresh_seconds is None or self._status.disabled is not None:
            return False
        return now >= self._refresh_at

    def _refresh(self, sink: Sink) -> None:
        notices = self._open_notices()
        every = sink.refresh_seconds or _REFRESH_RETRY_SECONDS
        self._refresh_at = time.monotonic() + every
        if not notices:
            return
        outcome = sink.refresh(notices)
        if isinstance(outcome, Delivered):
            with self._condition:
                if not self._queue.failures:
                    self._status = dataclasses.replace(self._status, trouble=None)
            return
        self._refresh_at = time.monotonic() + min(every, _REFRESH_RETRY_SECONDS)
        self._trouble(outcome.reason)

    # ---------------------------------------------------------------- what is said
    def _trouble(self, reason: str) -> None:
        """Note trouble that is about no message, and say it now and then."""
        is_new = self._status.trouble != reason
        self._status = dataclasses.replace(self._status, trouble=reason)
        now = time.monotonic()
        if is_new or now - self._said_at > _SAY_AGAIN_SECONDS:
            self._said_at = now
            _LOG.error("receiver %s: %s", self.name, reason)

    def _say(self, row: OutboxRow, outcome: Outcome) -> None:
        now = time.monotonic()
        match outcome:
            case Delivered():
                _LOG.info("told %s: %s", self.name, _named(row))
                if self._said_at > float("-inf"):
                    self._said_at = float("-inf")
                    _LOG.warning("receiver %s takes messages again", self.name)
            case Refused(reason, disable):
                _LOG.error("receiver %s refused %s: %s", self.name, _named(row), reason)
                if disable:
                    _LOG.error(
                        "receiver %s is DISABLED, it wants no more messages; after it is set "
                        "right reload the configuration or run `oomwatch notify retry --all`",
                        self.name,
                    )
            case Later(reason):
                status = self.status
                if status.failures_in_row < IN_TROUBLE:
                    _LOG.info(
                        "receiver %s, attempt %d, %s: %s",
                        self.name,
                        row.attempts,
                        _named(row),
                        reason,
                    )
                elif now - self._said_at > _SAY_AGAIN_SECONDS:
                    self._said_at = now
                    _LOG.error(
                        "receiver %s FAILS, %d waiting: %s", self.name, status.waiting, reason
                    )


def _named(row: OutboxRow) -> str:
    """``opened inc-4f21 (msg-…)``: which message is meant, for the log."""
    return f"{row.kind} {row.incident_id or row.headline} ({row.id})"


def _delay_seconds(row: OutboxRow, wall: float) -> float:
    """How long a stored message still waits; never longer than it was to, wherever the clock is."""
    due = wall if row.due_at is None else row.due_at
    return max(0.0, min(due - wall, due - row.changed_at))


def _fault() -> str:
    """Where a fault happened; its own text may hold an address with a token in it."""
    import sys  # noqa: PLC0415 - only here

    kind, error, _ = sys.exc_info()
    frames = traceback.extract_tb(error.__traceback__ if error is not None else None)
    place = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"internal fault: {kind.__name__ if kind else '?'} at {place}"
