"""The agent as a process: its threads, its signals, and what it tells systemd.

Each thread has a clock of its own, so that what hangs in one of them (the driver, a server, the
disk) leaves the others alone. All of them are daemonic: none holds up the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from oomwatch import __version__, sdnotify
from oomwatch.agent.allocator import spare_the_collector
from oomwatch.agent.burst import Burst
from oomwatch.agent.detecting import Detecting
from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable
from oomwatch.agent.explain import Explainer
from oomwatch.agent.exporting import Exporting
from oomwatch.agent.feeds import Feeds
from oomwatch.agent.figures import Figures
from oomwatch.agent.following import Following
from oomwatch.agent.logs import LogFollowers
from oomwatch.agent.messages import Mailbox, Reconfigured, TellingLines
from oomwatch.agent.notifying import Notifier
from oomwatch.agent.own_figures import OwnFigures
from oomwatch.agent.own_usage import OwnUsageMeter
from oomwatch.agent.repeat import keep_running
from oomwatch.agent.retention import retention_of
from oomwatch.agent.start_facts import StartFacts
from oomwatch.config import Config, ConfigError, Loaded, load_config
from oomwatch.config.secrets import store_address
from oomwatch.detect.incidents import IncidentBook
from oomwatch.errors import OomwatchError
from oomwatch.records import Series, StoredIncident
from oomwatch.store.database import open_reader
from oomwatch.store.incidents import list_incidents
from oomwatch.store.lease import Lease
from oomwatch.store.location import StoreError, parse_store
from oomwatch.store.queries import read_positions, read_window
from oomwatch.store.writer import StoreStatus, StoreWriter

_LOG = logging.getLogger("oomwatch")

_MAIN_SECONDS: Final = 1.0
_STATUS_SECONDS: Final = 10.0
_ALIVE_SECONDS: Final = 30.0
"""A thread that has not come round for so long is stuck: then systemd is told nothing."""
_KNOWN_SECONDS: Final = 86_400.0
_MOST_KNOWN: Final = 256
"""Incidents of the last day, and all that are open, are known again after a restart."""
_END_SECONDS: Final = 1.5


class Agent:
    """The whole agent; `run` returns when it is told to stop."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        host: str | None = None,
        reload: Callable[[], Loaded] | None = None,
        make_writer: Callable[..., StoreWriter] = StoreWriter,
    ) -> None:
        """`make_writer` may give a writer that hands on what it is given."""
        self.config: Config = loaded.config
        self._loaded = loaded
        self._reload = reload or (lambda: load_config(str(loaded.path) if loaded.path else None))
        self.host = host or socket.gethostname()
        self.address = store_address(self.config)
        self._stop = threading.Event()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lease = Lease(parse_store(self.address), self.host)
        store = self.config.store
        self.writer = make_writer(
            self.address,
            self.host,
            retention=retention_of(store),
            on_status=self._on_store,
            interval_seconds=store.commit_interval_seconds,
            capacity=self.config.agent.queue_size,
        )
        self.notifier = Notifier(self.config, self.host, self.writer)
        self.mailbox = Mailbox(self.config.agent.queue_size)
        self.table = EngineTable()
        self.feeds = Feeds(self.config, self.table, self.writer, self.mailbox, self._stop)
        self.detector: Detector | None = None
        self._burst = Burst(self.table, lambda: self.detector)
        self.detecting: Detecting | None = None
        self.following: Following | None = None
        self.own = OwnFigures(
            self.mailbox, self.writer, self.address, self.stuck, self.notifier.statuses
        )
        self.figures = Figures(
            self.host, self.table, self.feeds, lambda: self.detector, self.own.figures
        )
        facts = StartFacts(self.host, self.table)
        self.exporting = Exporting(self.config, self.figures, self.own, facts)

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        """Open the store, start all threads.

        Raises:
            OomwatchError: the store cannot be used.

        """
        faulthandler.enable()
        if not self._lease.take():
            self._thread("lease", self._await_lease)
        self.writer.start()
        known, positions = self._read_store()
        explainer = Explainer(self.host, self._read_window)
        now = time.monotonic()
        book = IncidentBook(self.host, self.config.incidents, known, now=now)
        detector = self.detector = Detector(
            self.config,
            self.table,
            explainer,
            self.notifier,
            book,
            logs_read_at=lambda: logs.looked_at,
        )
        detecting = self.detecting = Detecting(self.mailbox, detector, self._stop)
        logs = LogFollowers(
            self.config.sources,
            self.writer,
            lambda engine_id: self.mailbox.put(TellingLines(time.monotonic(), engine_id)),
            positions,
            judged_at=detector.judged_at,
            in_hurry=lambda: detector.in_hurry,
        )
        following = self.following = Following(
            self.config,
            self.table,
            self.mailbox,
            logs,
            on_page=self.feeds.on_page,
            last_reading=lambda: self.feeds.last_reading,
            stop=self._stop,
        )
        self.figures.incidents.start(known)
        self.feeds.on_reading = self.figures.on_reading
        if self.config.sources.nvml:
            self.feeds.start_sampler()
        self.notifier.start()
        self._thread("notify", lambda: self.notifier.run(self._stop))
        self._thread("detector", detecting.run)
        self._thread("host", self.feeds.watch_host)
        self._thread("logs", lambda: logs.run(self._stop))
        self._thread("exits", following.watch_exits)
        if self.config.sources.kernel:
            self._thread("kernel", self.feeds.watch_kernel)
        if self.config.discovery.enabled or self.config.engines:
            self._thread("discovery", following.search)
        self.exporting.start()
        self._start_scheduler()
        spare_the_collector()

    def run(self) -> int:
        """Start, serve until a signal says stop, end with everything written; an exit status."""
        for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(name, self._on_signal)
        self.start()
        _LOG.info("oomwatch %s watches %s; store %s", __version__, self.host, self.address)
        self._await_first_look()
        sdnotify.ready(self.status_line())
        interval = sdnotify.watchdog_interval()
        next_ping = next_status = 0.0
        while not self._stop.is_set():
            self._take_signal()
            now = time.monotonic()
            self.feeds.set_rate(fast=self._burst.is_on(self.config.agent, now))
            self.feeds.check_driver(now)
            if interval is not None and now >= next_ping and not self.stuck(now):
                next_ping = now + interval
                sdnotify.watchdog()
            if now >= next_status:
                next_status = now + _STATUS_SECONDS
                sdnotify.status(self.status_line())
        self.stop()
        return 0

    def stop(self) -> None:
        """End within two seconds, with all that was seen written."""
        sdnotify.stopping("writing what is left")
        self._stop.set()
        deadline = time.monotonic() + _END_SECONDS
        self.exporting.close()
        if self.following is not None:
            self.following.close()
        if self.feeds.sampler is not None:
            self.feeds.sampler.stop()
        with contextlib.suppress(Exception):
            self._scheduler.shutdown(wait=False)
        for thread in self._threads:
            thread.join(max(0.05, min(0.5, deadline - time.monotonic())))
        if not self.writer.stop(max(0.3, deadline - time.monotonic())):
            _LOG.error("the store did not take everything; %s", self.writer.status)
        self._lease.close()

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(
            target=keep_running, args=(name, work, self._stop), name=name, daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _await_lease(self) -> None:
        try:
            self._lease.take_later(self._stop)
        except StoreError as error:  # another agent of this host was faster
            _LOG.error("%s", error)
            self._signals.put(signal.SIGTERM)

    # ---------------------------------------------------------------- signals
    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.put(number)  # the one queue that a signal may interrupt in any state

    def _take_signal(self) -> None:
        """Wait for a signal, for a moment; of several that came together the end comes first."""
        try:
            came = {self._signals.get(timeout=_MAIN_SECONDS)}
        except queue.Empty:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                came.add(self._signals.get_nowait())
        ends = came - {signal.SIGHUP}
        if ends:
            _LOG.info("%s: ending", signal.Signals(min(ends)).name)
            self._stop.set()
        else:
            self.reload()

    def reload(self) -> bool:
        """Read the configuration anew and use it; keep the old one if it is wrong."""
        sdnotify.reloading()
        try:
            loaded = self._reload()
            store_address(loaded.config)
        except (ConfigError, OomwatchError) as error:
            _LOG.error("the configuration is wrong and the old one stays: %s", error)
            sdnotify.ready(f"old configuration, the new one is wrong: {error}")
            self.own.reload_ok = False
            return False
        self.own.reload_ok = True
        if loaded.config.store != self.config.store:
            _LOG.warning("[store] has changed: that takes effect with the next start")
        self.config = dataclasses.replace(loaded.config, store=self.config.store)
        self.feeds.config = self.config
        self.mailbox.put(Reconfigured(time.monotonic(), self.config))
        self.notifier.reconfigure(self.config)
        if self.following is not None:
            self.following.reconfigure(self.config)
        self.exporting.reconfigure(self.config)
        _LOG.info("the configuration was read anew")
        sdnotify.ready(self.status_line())
        return True

    # ---------------------------------------------------------------- the store
    def _read_store(self) -> tuple[list[StoredIncident], dict[str, dict[str, Any]]]:
        try:
            with open_reader(parse_store(self.address)) as connection:
                lately = time.time() - _KNOWN_SECONDS
                known = (
                    *list_incidents(connection, state="open", limit=_MOST_KNOWN),
                    *list_incidents(connection, since=lately, limit=_MOST_KNOWN),
                )
                incidents = [i for i in known if i.host in {None, self.host}]
                try:
                    self.notifier.read(connection, incidents)
                except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
                    _LOG.exception("some messages that wait in the store cannot be taken up")
                return incidents, read_positions(connection, self.host)
        except OomwatchError as error:
            _LOG.warning("what was stored before cannot be read: %s", error)
            return [], {}

    def _read_window(self, begin: float, end: float) -> Series:
        self.writer.flush(1.0)
        with open_reader(parse_store(self.address)) as connection:
            return read_window(connection, begin, end, host=self.host, step=0)

    def _on_store(self, status: StoreStatus) -> None:
        if status.notice:
            log = _LOG.info if status.mode == "ok" else _LOG.error
            log("store: %s", status.notice)

    # ---------------------------------------------------------------- housekeeping
    def _start_scheduler(self) -> None:
        # It is loaded by a process that serves for weeks, and by nobody who only asks for help.
        from apscheduler.schedulers.background import BackgroundScheduler  # noqa: PLC0415

        self._scheduler = BackgroundScheduler(
            timezone="UTC",
            daemon=True,
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
        )
        self._scheduler.add_job(
            self.writer.keep_house,
            "interval",
            seconds=self.config.agent.housekeeping_interval_seconds,
        )
        self._own_usage = OwnUsageMeter()
        self._scheduler.add_job(self._say_how_it_goes, "interval", seconds=3600)
        self._scheduler.start()

    def _say_how_it_goes(self) -> None:
        _LOG.info("%s; the agent itself: %s", self.status_line(), self._own_usage.read())

    def _await_first_look(self) -> None:
        """Ready means that everything was tried once, not that it succeeded."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not self._stop.is_set():
            feeds, sampler = self.feeds, self.feeds.sampler
            swept = sampler is None or feeds.swept_at or sampler.silent_seconds > 1
            if swept and self._detected_at() and feeds.host_read_at:
                return
            time.sleep(0.05)

    def _detected_at(self) -> float:
        return 0.0 if self.detecting is None else self.detecting.came_round_at

    def stuck(self, now: float) -> list[str]:
        """Threads that have not come round; a hung driver call is no fault of the agent's."""
        writer = self.writer.status.last_tick_monotonic or 0.0
        rounds = {
            "detector": self._detected_at(),
            "host": self.feeds.host_read_at,
            "writer": writer,
        }
        return [name for name, at in rounds.items() if at and now - at > _ALIVE_SECONDS]

    def status_line(self) -> str:
        """One line about everything: engines, GPUs, incidents, the store, what was lost."""
        engines = [engine.id for engine in self.table if engine.ended_at is None]
        reading = self.feeds.last_reading
        gpus = len(reading.gpus) if reading is not None else 0
        parts = [
            f"{len(engines)} engine(s)" + (f" ({', '.join(engines[:4])})" if engines else ""),
            f"{gpus} GPU(s)",
        ]
        if self.detector is not None:
            parts.append(f"{len(self.detector.book.open)} open incident(s)")
        status = self.writer.status
        if status.mode != "ok":
            parts.append(f"STORE {status.mode.upper()}: {status.notice or ''}".strip())
        lost = status.dropped_samples_total + status.dropped_events_total
        if lost or self.mailbox.dropped_total:
            parts.append(f"{lost + self.mailbox.dropped_total} records dropped")
        if self.feeds.driver_silent:
            parts.append("DRIVER SILENT")
        parts += self.notifier.troubles()
        return ", ".join(parts)


def main_agent(path: str | None, overrides: dict[str, Any]) -> int:
    """Load the configuration and run; an exit status.

    Raises:
        OomwatchError: the configuration is wrong, or the store cannot be used.

    """

    def load() -> Loaded:
        return load_config(path, overrides=overrides)

    sdnotify.keep_to_ourselves()
    loaded = load()
    logging.basicConfig(
        level=getattr(logging, loaded.config.agent.log_level.upper()),
        format="%(levelname)s %(message)s"
        if os.environ.get("JOURNAL_STREAM")
        else "%(asctime)s %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S %Z",
    )
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    for warning in loaded.warnings:
        _LOG.warning("%s", warning)
    return Agent(loaded, reload=load).run()
