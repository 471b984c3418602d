"""From incidents to messages: the policy asked at every change and in time, its answers delivered.

It stands between the detector and the store: an incident and the messages about it are handed to
the writer as one, and only then to the receivers' threads.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from sqlalchemy import Connection

from oomwatch.config.notify import SinkConfig
from oomwatch.config.schema import Config
from oomwatch.notify.delivery import Delivery, SinkStatus
from oomwatch.notify.ledger import QUIET_KINDS, Change, Ledger
from oomwatch.notify.message import incident_notice
from oomwatch.notify.notice import IncidentNotice, Notice, notice_from_json
from oomwatch.notify.outbox import FIRST, Outbox, in_order, incidents_in, lang_of
from oomwatch.notify.outcome import Sink
from oomwatch.notify.queue import IN_TROUBLE
from oomwatch.notify.sinks import make_sink
from oomwatch.notify.undelivered import undelivered_message
from oomwatch.records import IncidentExcerpt, OutboxRow, Silence, StoredIncident
from oomwatch.report.locale import Language
from oomwatch.store.control import last_change
from oomwatch.store.incidents import get_incident
from oomwatch.store.outbox import PENDING, read_outbox
from oomwatch.store.silences import read_acknowledged, read_silences
from oomwatch.store.watching import Watcher

_LOG = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 30.0
"""The wall clock may be set: what waits for a time of day is looked at this often."""
_MOST_ROWS: Final = 5000
_LEAST_WAIT_SECONDS: Final = 1.0
"""Whatever the clock says, it is not looked at more often than this."""


class Recorder(Protocol):
    """Where incidents and messages are kept."""

    def save_incident(self, incident: StoredIncident, outbox: Iterable[OutboxRow] = ()) -> None:
        """Store an incident, and messages about it with it."""

    def save_outbox(self, rows: Iterable[OutboxRow]) -> None:
        """Store messages, or what became of them."""

    def save_excerpt(self, excerpt: IncidentExcerpt) -> None:
        """Store what an incident can be judged again by."""

    def watch(self, watcher: Watcher) -> None:
        """Tell this one what was written."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Said:
    """What people have said through the store since it was looked at last."""

    silences: tuple[Silence, ...]
    acknowledged: frozenset[str]
    again: tuple[OutboxRow, ...]
    incidents: tuple[StoredIncident, ...]
    """Those that the messages to be sent again are about: they may be over by now."""


class Notifier:
    """The detector's recorder, the writer's watcher, and the owner of the receivers' threads."""

    def __init__(
        self,
        config: Config,
        host: str,
        recorder: Recorder,
        *,
        make: Callable[[SinkConfig], Sink] = make_sink,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._host, self._recorder = config, host, recorder
        self._make, self._wall = make, wall
        self._lock = threading.RLock()
        self._ledger = Ledger(config.notify, self._replace)
        self._deliveries: dict[str, Delivery] = {}
        self._views: dict[str, dict[Language, IncidentNotice]] = {}
        """Incidents that are open, or about which something waits, in each language in use."""
        self._seen_change: str | None = None
        self._said: _Said | None = None
        self._wake = threading.Event()

    # ---------------------------------------------------------------- life
    def read(self, connection: Connection, known: Iterable[StoredIncident]) -> None:
        """Take up what an earlier run of the agent has left in the store."""
        pending = read_outbox(connection, host=self._host, states=PENDING, limit=None)
        rows = {
            row.id: row
            for row in (*read_outbox(connection, host=self._host, limit=_MOST_ROWS), *pending)
        }
        self._ledger.outbox = Outbox(rows.values())
        self.look(connection)
        for incident in known:
            views = self._look_at(incident)
            self._ledger.history.take(next(iter(views.values())))
            self._views[incident.id] = views
            self._forget(incident.id)
        for row in pending:  # of incidents that the detector has forgotten
            self._recall(row)

    def start(self) -> None:
        """Begin to send what waits."""
        self.reconfigure(self._config)

    def stop(self) -> None:
        """Send nothing more; what waits is in the store."""
        self._wake.set()
        for delivery in list(self._deliveries.values()):
            delivery.stop()

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on; secrets are read anew."""
        with self._lock:
            self._config = config
            self._ledger.reconfigure(config.notify)
            sinks = self._sinks()
            if sinks:
                self._recorder.watch(self)
            gone = self._deliveries.keys() - sinks.keys()
            for name in gone:
                self._deliveries.pop(name).stop()
            changes = self._ledger.put_aside(sinks, self._wall())
            for name, sink in sinks.items():
                if name in self._deliveries:
                    self._deliveries[name].reconfigure(sink, config.notify)
                else:
                    changes += self._ledger.take_up(name, self._wall())
                    self._add_delivery(name, sink)
            changes += self._ask(self._views)
        self._store(changes)

    def _add_delivery(self, name: str, sink: SinkConfig) -> None:
        delivery = self._deliveries[name] = Delivery(
            sink,
            self._config.notify,
            make=self._make,
            report=self._report,
            thread_of=self._thread_of,
            open_notices=lambda: self._open_notices(name),
            wall=self._wall,
        )
        outbox = self._ledger.outbox
        delivery.add(in_order(outbox.in_state("waiting", name)), from_store=True)
        delivery.start()

    def _sinks(self) -> dict[str, SinkConfig]:
        sinks = self._config.notify.sinks
        return {sink.name: sink for sink in sinks if sink.enabled and sink.name is not None}

    # ---------------------------------------------------------------- the detector's recorder
    def save_incident(self, incident: StoredIncident) -> None:
        """Store an incident, or what changed about it, and tell whom it concerns."""
        changes: list[Change] = []
        try:
            with self._lock:
                changes = self._take(incident)
        except Exception:  # noqa: BLE001 - it is stored whatever becomes of its messages
            _LOG.exception("the messages about %s could not be made", incident.id)
        self._recorder.save_incident(incident, [change.row for change in changes])
        self._queue(changes)
        self._wake.set()

    def save_excerpt(self, excerpt: IncidentExcerpt) -> None:
        """Store what an incident can be judged again by."""
        self._recorder.save_excerpt(excerpt)

    def _take(self, incident: StoredIncident) -> list[Change]:
        views = self._views[incident.id] = self._look_at(incident)
        self._ledger.history.take(next(iter(views.values())))
        return self._ask({incident.id, *self._ledger.held_for_others()})

    def _look_at(self, incident: StoredIncident) -> dict[Language, IncidentNotice]:
        settings = self._config.notify
        engine = next((e for e in self._config.engines if e.name == incident.engine_id), None)
        labels = {**settings.labels, **(engine.labels if engine is not None else {})}
        return {
            lang: incident_notice(
                incident, labels=labels, runbook_base=settings.runbook_url or "", lang=lang
            )
            for lang in self._langs()
        }

    def _langs(self) -> set[Language]:
        """Those in use; without receivers the one that most of them have which may be back."""
        return {lang_of(sink) for sink in self._sinks().values()} or {"en"}

    def _recall(self, row: OutboxRow) -> None:
        if row.incident_id is None or row.incident_id in self._views or row.state != "held":
            return
        try:
            (incident,) = notice_from_json(row.notice or {}).incidents
        except (KeyError, TypeError, ValueError):
            return
        self._views[row.incident_id] = dict.fromkeys(self._langs(), incident)

    # ---------------------------------------------------------------- the policy
    def _ask(self, incidents: Iterable[str]) -> list[Change]:
        """What is to be told of these incidents now; with the lock held."""
        now, changes = self._wall(), []
        for incident_id in list(incidents):
            views = self._views.get(incident_id, {})
            any_view = next(iter(views.values()), None)
            for sink in self._sinks().values():
                view = views.get(lang_of(sink), any_view)
                if view is not None:
                    changes += self._ledger.reconcile(view, sink, now)
            self._forget(incident_id)
        self._ledger.outbox.forget(self._views)
        return changes

    def _forget(self, incident_id: str) -> None:
        """Let go what is over and told."""
        ends = [view.closed_at for view in self._views.get(incident_id, {}).values()]
        over_at = None if None in ends else max(filter(None, ends), default=0.0)
        if over_at is not None and self._ledger.is_told(
            incident_id, over_at, self._deliveries, self._wall()
        ):
            self._views.pop(incident_id, None)

    def _replace(self, sink: str, old_id: str, row: OutboxRow | None) -> bool:
        delivery = self._deliveries.get(sink)
        return delivery is not None and delivery.replace(old_id, row)

    def run(self, stop: threading.Event) -> None:
        """Ask again when the time has come for something, or people have said something."""
        ahead = self._wall() - time.monotonic()
        while not stop.is_set():
            self._wake.clear()
            before, ahead = ahead, self._wall() - time.monotonic()
            with self._lock:
                said, self._said = self._said, None
                if said is not None:
                    changes = self._obey(said)
                elif abs(ahead - before) > _LOOK_SECONDS:  # it was set
                    changes = self._ask(self._views)
                else:
                    changes = self._ask(self._ledger.due(self._wall()))
                waits = self._ledger.wait_seconds(self._wall())
            self._store(changes)
            if waits is not None:
                waits = min(max(waits, _LEAST_WAIT_SECONDS), _LOOK_SECONDS)
            self._wake.wait(waits)

    def _obey(self, said: _Said) -> list[Change]:
        self._ledger.silences = said.silences
        self._ledger.acknowledged = said.acknowledged
        _LOG.info(
            "people have said: %d silence(s), %d open incident(s) acknowledged, %d message(s) to "
            "be sent again",
            len(said.silences),
            len(said.acknowledged),
            len(said.again),
        )
        now, changes = self._wall(), []
        for row in in_order(said.again):
            if row.sink in self._deliveries:
                fresh = dataclasses.replace(
                    row, state="waiting", attempts=min(row.attempts, 1), due_at=now, changed_at=now
                )
                self._ledger.outbox.put(fresh)
                changes.append(Change(fresh, to_send=True, asked=True))
        for incident in said.incidents:
            self._views.setdefault(incident.id, self._look_at(incident))
        return changes + self._ask(self._views)

    # ---------------------------------------------------------------- the writer's watcher
    def stored(self, outbox_ids: Sequence[str]) -> None:
        """These messages are on disk: they may be sent."""
        for delivery in list(self._deliveries.values()):
            delivery.mark_stored(outbox_ids)

    def look(self, connection: Connection) -> None:
        """See whether somebody has said something."""
        change = last_change(connection)
        if change == self._seen_change:
            return
        self._seen_change = change
        again = read_outbox(connection, host=self._host, states=["retry"], limit=None)
        about = {str(each.get("id")) for row in again for each in incidents_in(row)}
        found = (get_incident(connection, identity) for identity in about)
        said = _Said(
            silences=read_silences(connection, self._wall()),
            acknowledged=read_acknowledged(connection),
            again=again,
            incidents=tuple(incident for incident in found if incident is not None),
        )
        with self._lock:
            self._said = said
        self._wake.set()

    # ---------------------------------------------------------------- the receivers' threads
    def _store(self, changes: Sequence[Change]) -> None:
        if changes:
            self._recorder.save_outbox([change.row for change in changes])
            self._queue(changes)

    def _queue(self, changes: Iterable[Change]) -> None:
        for change in changes:
            delivery = self._deliveries.get(change.row.sink)
            if delivery is None or not change.to_send:
                continue
            if change.asked:
                delivery.ask_again(change.row)
            else:
                delivery.add([change.row])

    def _report(self, rows: Sequence[OutboxRow]) -> None:
        """Take what became of messages."""
        changes = [Change(row) for row in rows]
        with self._lock:
            for row in rows:
                self._ledger.outbox.put(row)
            for row in rows:
                if row.state == "failed" and row.kind not in QUIET_KINDS:
                    changes += self._ledger.drop_followers(row, self._wall())
                    changes += self._tell_others(row)
                elif row.state == "delivered":
                    changes += self._ledger.take_back(row, self._undelivered, self._wall())
            for incident_id in {row.incident_id for row in rows} - {None}:
                self._forget(str(incident_id))
        self._store(changes)

    def _tell_others(self, row: OutboxRow) -> list[Change]:
        """A message that was lost is told to the other receivers, once an hour for each."""
        changes = []
        for name, delivery in self._deliveries.items():
            if name == row.sink or delivery.status.disabled is not None:
                continue
            told = self._undelivered(row, name, self._wall())
            if self._ledger.outbox.get(told.id) is None:
                self._ledger.outbox.put(told)
                changes.append(Change(told, to_send=True))
        return changes

    def _undelivered(self, row: OutboxRow, name: str, at: float) -> OutboxRow:
        lang = lang_of(self._deliveries[name].config)
        views = {
            incident_id: views[lang] for incident_id, views in self._views.items() if lang in views
        }
        return undelivered_message(
            row, name, at, lang, views=views, labels=self._config.notify.labels
        )

    def _thread_of(self, row: OutboxRow) -> str | None:
        if row.incident_id is None or row.kind in FIRST:
            return None
        first = self._ledger.outbox.first(row.incident_id, row.sink)
        return None if first is None else first.reference

    def _open_notices(self, name: str) -> list[Notice]:
        """The open incidents that a receiver knows of."""
        with self._lock:
            sink = self._sinks().get(name)
            views = [each.get(lang_of(sink)) for each in self._views.values()] if sink else []
        return [
            Notice(first.id, "opened", first.created_at, (view,), self._ledger.back_note(view))
            for view in views
            if view is not None
            and view.closed_at is None
            and (first := self._ledger.outbox.first(view.id, name)) is not None
        ]

    # ---------------------------------------------------------------- how it does
    def statuses(self) -> tuple[SinkStatus, ...]:
        """How each receiver does."""
        held = collections.Counter(row.sink for row in self._ledger.outbox.in_state("held"))
        return tuple(
            dataclasses.replace(delivery.status, held=held[name])
            for name, delivery in list(self._deliveries.items())
        )

    def troubles(self) -> list[str]:
        """For the status line: receivers that do not take messages."""
        found = []
        for status in self.statuses():
            if status.disabled is not None:
                found.append(f"RECEIVER {status.name} DISABLED: {status.disabled[:80]}")
            elif status.trouble is not None and (
                status.failures_in_row >= IN_TROUBLE or not status.failures_in_row
            ):
                found.append(
                    f"RECEIVER {status.name} FAILS, {status.waiting} waiting: {status.trouble[:80]}"
                )
        return found
