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
from collections.abc import Callable, Iterator
from typing import Any, Final

from oomwatch import __version__, sdnotify
from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.explain import Explainer
from oomwatch.agent.logs import LogFollowers
from oomwatch.agent.messages import (
    Discovered,
    GpusSwept,
    HostRead,
    KernelSaid,
    Mailbox,
    PageRead,
    ProcessEnded,
    Reconfigured,
    Seen,
    TellingLines,
)
from oomwatch.agent.named import apply_names, headers_of
from oomwatch.config import Config, ConfigError, Loaded, load_config
from oomwatch.config.secrets import store_address
from oomwatch.detect.gpu import silent
from oomwatch.detect.incidents import IncidentBook
from oomwatch.discovery import discover
from oomwatch.errors import OomwatchError
from oomwatch.records import EngineSample, KernelEvent, ProcessSample, Series, StoredIncident
from oomwatch.sources.cgroup import parse_proc_cgroup
from oomwatch.sources.kernel_follow import follow_kernel
from oomwatch.sources.lifecycle import ExitWatch, MemoryEvents
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import read_host, read_process
from oomwatch.sources.sampler import GpuSampler
from oomwatch.sources.scrape import Scraper
from oomwatch.store.database import open_reader
from oomwatch.store.incidents import list_incidents
from oomwatch.store.location import parse_store
from oomwatch.store.queries import read_positions, read_window
from oomwatch.store.retention import Retention
from oomwatch.store.writer import StoreStatus, StoreWriter

_LOG = logging.getLogger("oomwatch")

_TICK_SECONDS: Final = 0.1
_MAIN_SECONDS: Final = 0.5
_STATUS_SECONDS: Final = 10.0
_ALIVE_SECONDS: Final = 30.0
"""A thread that has not come round for so long is stuck: then systemd is told nothing."""
_HOST_SECONDS: Final = 1.0
_MEMBER_SECONDS: Final = 5.0
"""A look at a process costs as much as one at a GPU, and host memory grows slowly."""
_SURE_SEARCHES: Final = 3
_SELDOM: Final = 6
_END_SECONDS: Final = 1.5


@dataclasses.dataclass(slots=True)
class Beats:
    """When each thread came round last, in monotonic seconds."""

    detector: float = 0.0
    gpus: float = 0.0
    host: float = 0.0


class Agent:
    """The whole agent; `run` returns when it is told to stop."""

    def __init__(
        self, loaded: Loaded, *, host: str | None = None, reload: Callable[[], Loaded] | None = None
    ) -> None:
        self.config: Config = loaded.config
        self._loaded = loaded
        self._reload = reload or (lambda: load_config(str(loaded.path) if loaded.path else None))
        self.host = host or socket.gethostname()
        self.address = store_address(self.config)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.beats = Beats()
        self._threads: list[threading.Thread] = []
        self._scrapers: dict[str, tuple[str, Scraper]] = {}
        """By engine: the address and who reads it."""
        self._discover_now = threading.Event()
        self._burst_until = 0.0
        self._processes: set[str] = set()
        self._unchanged = 0
        self._silent_told = False
        self._outcome = ""
        self.last_reading: NvmlReading | None = None
        self._store_status: StoreStatus | None = None
        store = self.config.store
        self.writer = StoreWriter(
            self.address,
            self.host,
            retention=Retention(
                raw_seconds=int(store.raw_retention_seconds),
                tier_seconds={
                    10: int(store.ten_second_retention_seconds),
                    60: int(store.minute_retention_seconds),
                    3600: int(store.hour_retention_seconds),
                },
                incident_seconds=int(store.incident_retention_seconds),
                max_bytes=store.max_size_bytes,
            ),
            on_status=self._on_store,
            interval_seconds=store.commit_interval_seconds,
        )
        self.mailbox = Mailbox(self.config.agent.queue_size)
        self.table = EngineTable()
        self.memory_events = MemoryEvents()
        self.exits = ExitWatch(self.memory_events)
        self.sampler: GpuSampler | None = None
        self.logs: LogFollowers | None = None
        self.detector: Detector | None = None

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        """Open the store, start all threads.

        Raises:
            OomwatchError: the store cannot be used.

        """
        faulthandler.enable()
        self.writer.start()
        known, positions = self._read_store()
        explainer = Explainer(self.host, self._read_window)
        book = IncidentBook(self.host, self.config.incidents, known, now=time.monotonic())
        self.detector = Detector(self.config, self.table, explainer, self.writer, book)
        self.logs = LogFollowers(self.config.sources, self.writer, self._telling_lines, positions)
        if self.config.sources.nvml:
            self.sampler = GpuSampler(
                self._on_sweep, interval_seconds=self.config.agent.sampling_interval_seconds
            )
            self.sampler.start()
        self._thread("detector", self._detect)
        self._thread("host", self._watch_host)
        self._thread("logs", self._run_logs)
        self._thread("exits", self._watch_exits)
        if self.config.sources.kernel:
            self._thread("kernel", self._watch_kernel)
        if self.config.discovery.enabled or self.config.engines:
            self._thread("discovery", self._search)
        self._start_scheduler()

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
            self._wake.wait(_MAIN_SECONDS)
            self._wake.clear()
            self._take_signals()
            now = time.monotonic()
            self._set_rate(now)
            self._check_driver(now)
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
        for _, scraper in list(self._scrapers.values()):
            scraper.stop()
        if self.sampler is not None:
            self.sampler.stop()
        self.exits.close()
        with contextlib.suppress(Exception):
            self._scheduler.shutdown(wait=False)
        for thread in self._threads:
            thread.join(max(0.05, min(0.5, deadline - time.monotonic())))
        if not self.writer.stop(max(0.3, deadline - time.monotonic())):
            _LOG.error("the store did not take everything; %s", self.writer.status)
        self.memory_events.close()

    def _thread(self, name: str, work: Callable[[], None]) -> None:
        def guarded() -> None:
            while not self._stop.is_set():
                try:
                    work()
                except Exception:  # noqa: BLE001 - one fault must not end the agent
                    _LOG.exception("the thread %s failed; it starts again", name)
                    self._stop.wait(1.0)
                else:
                    return

        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---------------------------------------------------------------- signals
    def _on_signal(self, number: int, _frame: object) -> None:
        self._signals.put(number)
        self._wake.set()

    def _take_signals(self) -> None:
        while not self._signals.empty():
            number = self._signals.get()
            if number == signal.SIGHUP:
                self.reload()
            else:
                _LOG.info("%s: ending", signal.Signals(number).name)
                self._stop.set()

    def reload(self) -> bool:
        """Read the configuration anew and use it; keep the old one if it is wrong."""
        sdnotify.reloading()
        try:
            loaded = self._reload()
            store_address(loaded.config)
        except (ConfigError, OomwatchError) as error:
            _LOG.error("the configuration is wrong and the old one stays: %s", error)
            sdnotify.ready(f"old configuration, the new one is wrong: {error}")
            return False
        if loaded.config.store != self.config.store:
            _LOG.warning("[store] has changed: that takes effect with the next start")
        self.config = dataclasses.replace(loaded.config, store=self.config.store)
        self.mailbox.put(Reconfigured(time.monotonic(), self.config))
        if self.logs is not None:
            self.logs.reconfigure(self.config.sources)
        for _, scraper in list(self._scrapers.values()):
            scraper.interval_seconds = self.config.agent.scrape_interval_seconds
        _LOG.info("the configuration was read anew")
        sdnotify.ready(self.status_line())
        return True

    # ---------------------------------------------------------------- the store
    def _read_store(self) -> tuple[list[StoredIncident], dict[str, dict[str, Any]]]:
        try:
            with open_reader(parse_store(self.address)) as connection:
                lately = time.time() - 86_400
                incidents = [
                    i
                    for i in list_incidents(connection, since=lately)
                    if i.host in {None, self.host}
                ]
                return incidents, read_positions(connection, self.host)
        except OomwatchError as error:
            _LOG.warning("what was stored before cannot be read: %s", error)
            return [], {}

    def _read_window(self, begin: float, end: float) -> Series:
        self.writer.flush(1.0)
        with open_reader(parse_store(self.address)) as connection:
            return read_window(connection, begin, end, host=self.host, step=0)

    def _on_store(self, status: StoreStatus) -> None:
        self._store_status = status
        if status.notice:
            log = _LOG.info if status.mode == "ok" else _LOG.error
            log("store: %s", status.notice)

    # ---------------------------------------------------------------- sources
    def _on_sweep(self, reading: NvmlReading, now: float) -> None:
        self.last_reading = reading
        self.beats.gpus = now
        if reading.outcome != self._outcome:
            self._outcome = reading.outcome
            log = _LOG.info if reading.outcome in {"ok", "no_driver"} else _LOG.warning
            log("NVIDIA driver: %s", reading.detail or reading.outcome)
        self.writer.put((*reading.samples, *reading.processes))
        lost = {
            gpu.sample.gpu: gpu.note or "the driver does not reach it"
            for gpu in reading.gpus
            if gpu.outcome == "gpu_lost"
        }
        self.mailbox.put(GpusSwept(now, reading.samples, reading.processes, lost))

    def _on_page(
        self, engine_id: str, samples: tuple[EngineSample, ...], now: float, _latency: float
    ) -> None:
        # One start is one engine: the label of its first one is its id; others stay apart.
        named = tuple(
            dataclasses.replace(
                sample, engine=engine_id if index == 0 else f"{engine_id}/{sample.engine}"
            )
            for index, sample in enumerate(samples)
        )
        self.writer.put(named)
        self.mailbox.put(PageRead(now, engine_id, named))

    def _telling_lines(self, engine_id: str) -> None:
        self.mailbox.put(TellingLines(time.monotonic(), engine_id))

    def _run_logs(self) -> None:
        assert self.logs is not None  # noqa: S101 - started after it
        self.logs.run(self._stop)

    def _watch_host(self) -> None:
        """Memory of the host once a second, of the engines' processes less often."""
        due = members_due = time.monotonic()
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            now, at = time.monotonic(), time.time()
            due = max(due + _HOST_SECONDS, now)
            if self.config.sources.procfs:
                sample = read_host(at=at)
                self.writer.put((sample, *(self._members(at) if now >= members_due else ())))
                self.mailbox.put(HostRead(now, sample))
            if now >= members_due:
                members_due = now + (_HOST_SECONDS if now < self._burst_until else _MEMBER_SECONDS)
            self.beats.host = now

    def _members(self, at: float) -> list[ProcessSample]:
        """The processes of the engines."""
        return [
            process.sample(at)
            for engine in self.table
            for member in engine.found.members
            if (process := read_process(member.process.pid)) is not None
            and process.start_ticks == member.process.start_ticks
        ]

    def _watch_exits(self) -> None:
        while not self._stop.is_set():
            for ended in self.exits.wait(1.0):
                self.mailbox.put(ProcessEnded(time.monotonic(), ended))
                self._discover_now.set()

    def _watch_kernel(self) -> None:
        try:
            for event in follow_kernel(self._stop):
                self._on_kernel(event)
        except OomwatchError as error:
            _LOG.warning("kernel log: %s", error)

    def _on_kernel(self, event: KernelEvent) -> None:
        self.writer.put_events([event])
        self.mailbox.put(KernelSaid(time.monotonic(), event))

    # ---------------------------------------------------------------- engines
    def _search(self) -> None:
        """Search for engines now and then, and at once when one has ended."""
        while not self._stop.is_set():
            self._discover()
            self._discover_now.wait(self.config.discovery.interval_seconds)
            if self._discover_now.is_set():
                self._discover_now.clear()
                self._stop.wait(1.0)  # its keeper takes a moment to start it again

    def _discover(self) -> None:
        """Search; seldom while the host has the same processes as at the searches before."""
        running = {name for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - names
        same = running <= self._processes and not any(engine.broken for engine in self.table)
        self._unchanged = self._unchanged + 1 if same else 0
        self._processes = running
        # A launcher becomes the server without a new process: a few searches are made all the same.
        if self._unchanged > _SURE_SEARCHES and self._unchanged % _SELDOM:
            return
        found = apply_names(self.config, discover(nvml=self.last_reading))
        before = {id(engine) for engine in self.table}
        done = threading.Event()
        self.mailbox.put(Discovered(time.monotonic(), found, done))
        done.wait(5.0)
        for engine in self.table:
            if id(engine) not in before or not engine.tails:
                self._attach(engine)
        ids = {engine.id for engine in self.table}
        for gone in set(self._scrapers) - ids:
            self._scrapers.pop(gone)[1].stop()

    def _attach(self, engine: WatchedEngine) -> None:
        """Follow everything an engine has."""
        assert self.logs is not None  # noqa: S101 - started after it
        for member in engine.found.members:
            process = member.process
            if process.start_ticks is not None:
                self.exits.watch(
                    process.pid,
                    process.start_ticks,
                    engine.id,
                    name=process.comm,
                    role=member.role,
                )
            if self.config.sources.cgroup:
                self._watch_cgroup(process.pid)
        for reason in self.logs.attach(engine):
            _LOG.warning("%s: no log: %s", engine.id, reason)
        url = engine.found.recorded.metrics_url
        known = self._scrapers.get(engine.id)
        if known is not None and known[0] != url:
            self._scrapers.pop(engine.id)[1].stop()
            known = None
        if url is None or known is not None or not self.config.sources.metrics:
            return
        try:
            headers, ca_file = headers_of(self.config, engine.id)
        except ConfigError as error:
            _LOG.error("%s: no metrics: %s", engine.id, error)
            return
        scraper = Scraper(
            engine.id,
            url,
            self._on_page,
            headers=headers,
            ca_file=ca_file,
            interval_seconds=self.config.agent.scrape_interval_seconds,
            answer_seconds=self.config.agent.scrape_timeout_seconds,
        )
        self._scrapers[engine.id] = (url, scraper)
        scraper.start()

    def _watch_cgroup(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/cgroup", encoding="utf-8") as file:  # noqa: PTH123 - hot path
                paths = parse_proc_cgroup(file.read())
            self.memory_events.watch(paths)

    # ---------------------------------------------------------------- detection
    def _detect(self) -> None:
        detector = self.detector
        assert detector is not None  # noqa: S101 - started after it
        tick_due = 0.0
        while not self._stop.is_set():
            message = self.mailbox.take(_TICK_SECONDS)
            if message is not None:
                detector.handle(message)
                if isinstance(message, Discovered) and message.done is not None:
                    message.done.set()
            now = time.monotonic()
            if now >= tick_due:
                tick_due = now + _TICK_SECONDS
                detector.tick(now)
            self.beats.detector = now

    def _check_driver(self, now: float) -> None:
        """A driver call that does not come back is a finding, not a fault of ours."""
        seconds = self.sampler.silent_seconds if self.sampler is not None else 0.0
        if seconds < self.config.detect.driver_unresponsive.after_seconds:
            self._silent_told = False
        elif not self._silent_told:
            self._silent_told = True
            self.mailbox.put(Seen(now, silent(time.time(), seconds)))

    def _set_rate(self, now: float) -> None:
        """Look more often while something happens that is over in a moment."""
        agent = self.config.agent
        if any(self._burst_reasons(now)):
            self._burst_until = now + agent.burst_hold_seconds
        fast = now < self._burst_until
        if self.sampler is not None:
            self.sampler.interval_seconds = (
                agent.burst_interval_seconds if fast else agent.sampling_interval_seconds
            )

    def _burst_reasons(self, now: float) -> Iterator[bool]:
        on = self.config.agent.burst_on
        engines = [engine for engine in self.table if engine.ended_at is None]
        detector = self.detector
        yield "start" in on and any(engine.is_starting(now) for engine in engines)
        limit = self.config.agent.burst_kv_usage_ratio
        pools = [pool for engine in engines for pool in engine.watches.values()]
        yield "kv_usage" in on and any((pool.kv_usage_ratio or 0) > limit for pool in pools)
        yield "preemptions" in on and any((pool.preemptions_per_minute or 0) > 0 for pool in pools)
        if detector is not None:
            soonest = detector.headroom_lasts_seconds()
            headroom = self.config.agent.burst_headroom_seconds
            yield "headroom" in on and soonest is not None and soonest < headroom
            yield "incident" in on and detector.opened_lately(60.0, now)

    # ---------------------------------------------------------------- housekeeping
    def _start_scheduler(self) -> None:
        # It is loaded by a process that serves for weeks, and by nobody who only asks for help.
        from apscheduler.schedulers.background import (  # noqa: PLC0415
            BackgroundScheduler,
        )

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
        self._scheduler.add_job(self._say_how_it_goes, "interval", seconds=3600)
        self._scheduler.start()

    def _say_how_it_goes(self) -> None:
        _LOG.info("%s", self.status_line())

    def _await_first_look(self) -> None:
        """Ready means that everything was tried once, not that it succeeded."""
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline and not self._stop.is_set():
            swept = self.sampler is None or self.beats.gpus or self.sampler.silent_seconds > 1
            if swept and self.beats.detector and self.beats.host:
                return
            time.sleep(0.05)

    def stuck(self, now: float) -> list[str]:
        """Threads that have not come round; a hung driver call is no fault of the agent's."""
        writer = self.writer.status.last_tick_monotonic or 0.0
        beats = {"detector": self.beats.detector, "host": self.beats.host, "writer": writer}
        return [name for name, at in beats.items() if at and now - at > _ALIVE_SECONDS]

    def status_line(self) -> str:
        """One line about everything: engines, GPUs, incidents, the store, what was lost."""
        engines = [engine.id for engine in self.table if engine.ended_at is None]
        gpus = len(self.last_reading.gpus) if self.last_reading is not None else 0
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
        if self._silent_told:
            parts.append("DRIVER SILENT")
        return ", ".join(parts)


def main_agent(path: str | None, overrides: dict[str, Any]) -> int:
    """Load the configuration and run; an exit status.

    Raises:
        OomwatchError: the configuration is wrong, or the store cannot be used.

    """

    def load() -> Loaded:
        return load_config(path, overrides=overrides)

    loaded = load()
    logging.basicConfig(
        level=getattr(logging, loaded.config.agent.log_level.upper()),
        format="%(levelname)s %(message)s"
        if os.environ.get("JOURNAL_STREAM")
        else "%(asctime)s %(levelname)s %(message)s",
    )
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    for warning in loaded.warnings:
        _LOG.warning("%s", warning)
    return Agent(loaded, reload=load).run()
