"""Keeps what follows the engines in step with the engines that run: searches, ends, logs, pages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.logs import LogFollowers
from oomwatch.agent.messages import Discovered, Mailbox, ProcessEnded, Seen
from oomwatch.agent.named import apply_names, headers_of
from oomwatch.agent.newcomers import Newcomers
from oomwatch.config import Config, ConfigError
from oomwatch.detect.host import cgroup_kill
from oomwatch.discovery import DiscoveredEngine, discover
from oomwatch.sources.cgroup import CgroupIdentity
from oomwatch.sources.keeper import KeptExit, ask_keeper
from oomwatch.sources.lifecycle import Ended, ExitWatch, MemoryEvents, explain_end
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import ProcessInfo
from oomwatch.sources.scrape import HandOn, Scraper

_LOG = logging.getLogger(__name__)

_MAX_PAGE_BYTES: Final = 8 << 20
"""Of a metrics page: vLLM's is 0.1 MB for each engine. It is read into our own memory."""
_GLANCE_SECONDS: Final = 1.0
_COUNT_SECONDS: Final = 2.0
"""Between two looks at kill counts that wake nobody (cgroup v1); an end is looked at at once."""
_TAKEN_SECONDS: Final = 5.0
_KEEPER_SECONDS: Final = 2.0
_MOST_GROUPS: Final = 1024


class Following:
    """Two threads run in it: the one that searches, and the one that waits for ends."""

    def __init__(
        self,
        config: Config,
        table: EngineTable,
        mailbox: Mailbox,
        logs: LogFollowers,
        *,
        on_page: HandOn,
        last_reading: Callable[[], NvmlReading | None],
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._table = table
        self._mailbox = mailbox
        self._logs = logs
        self._on_page = on_page
        self._last_reading = last_reading
        self._stop = stop
        self._search_now = threading.Event()
        self._memory_events = MemoryEvents()
        self._exits = ExitWatch(self._memory_events if config.sources.cgroup else None)
        self._scrapers: dict[str, tuple[str, Scraper]] = {}
        """By engine: the address and who reads it."""
        self._groups: dict[str, str] = {}
        """By memory cgroup: the engine in it."""
        self._told: dict[str, list[str]] = {}
        """By engine: why it has no log."""
        self._newcomers = Newcomers(table)

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on. From any thread."""
        self._config = config
        self._logs.reconfigure(config.sources)
        for _, scraper in list(self._scrapers.values()):
            scraper.interval_seconds = config.agent.scrape_interval_seconds
        self._search_now.set()

    def close(self) -> None:
        """Follow nothing any longer; both threads return. The stop event was set before."""
        self._search_now.set()
        for _, scraper in list(self._scrapers.values()):
            scraper.stop()
        self._exits.close()
        self._memory_events.close()

    # ---------------------------------------------------------------- searches
    def search(self) -> None:
        """Search for engines now and then, and at once when one has ended."""
        asked = True
        while not self._stop.is_set():
            if asked:
                self._newcomers.ask_for_search()
            reading = self._last_reading()
            holders = {sample.pid for sample in reading.processes} if reading is not None else set()
            if self._newcomers.call_for_search(time.monotonic(), holders):
                self._search_once(reading)
            asked = self._await_reason(self._config.discovery.interval_seconds)
            if asked:
                self._search_now.clear()
                self._stop.wait(1.0)  # its keeper takes a moment to start it again

    def _await_reason(self, seconds: float) -> bool:
        """Wait for the next look, at most so long; whether something asks for a search at once.

        A start that fails within seconds would be over before a look that is made now and then.
        """
        due = time.monotonic() + seconds
        while (left := due - time.monotonic()) > 0:
            if self._search_now.wait(min(_GLANCE_SECONDS, left)):
                return True
            if self._newcomers.has_come():
                break
        return False

    def _search_once(self, reading: NvmlReading | None) -> None:
        found = apply_names(self._config, discover(nvml=reading))
        done = threading.Event()
        self._mailbox.put(Discovered(time.monotonic(), found, done))
        done.wait(_TAKEN_SECONDS)
        engines = list(self._table)
        for engine in engines:  # workers, ports and logs come one after the other
            self._watch_processes(engine)
            self._follow_logs(engine)
            self._read_page(engine)
        ids = {engine.id for engine in engines}
        self._logs.keep(ids)
        for gone in self._scrapers.keys() - ids:
            self._scrapers.pop(gone)[1].stop()
        for gone in self._told.keys() - ids:
            del self._told[gone]

    def _watch_processes(self, engine: WatchedEngine) -> None:
        for member in engine.found.members:
            process = member.process
            if process.start_ticks is None:
                continue
            self._exits.watch(
                process.pid, process.start_ticks, engine.id, name=process.comm, role=member.role
            )
            if self._config.sources.cgroup:
                self._watch_cgroup(engine, process)

    def _watch_cgroup(self, engine: WatchedEngine, process: ProcessInfo) -> None:
        path = self._memory_events.watch(dict(process.cgroup_paths))
        if path is not None:
            self._groups[path] = engine.id
            if len(self._groups) > _MOST_GROUPS:
                del self._groups[next(iter(self._groups))]

    def _follow_logs(self, engine: WatchedEngine) -> None:
        if engine.tails:
            return
        reasons = self._logs.attach(engine)
        if reasons != self._told.get(engine.id, []):
            for reason in reasons:
                _LOG.warning("%s: no log: %s", engine.id, reason)
        self._told[engine.id] = reasons

    def _read_page(self, engine: WatchedEngine) -> None:
        url = engine.found.recorded.metrics_url
        known = self._scrapers.get(engine.id)
        if known is not None and known[0] != url:
            self._scrapers.pop(engine.id)[1].stop()
            known = None
        if url is None or known is not None or not self._config.sources.metrics:
            return
        try:
            headers, ca_file = headers_of(self._config, engine.id)
        except ConfigError as error:
            _LOG.error("%s: no metrics: %s", engine.id, error)
            return
        scraper = Scraper(
            engine.id,
            url,
            self._on_page,
            headers=headers,
            ca_file=ca_file,
            interval_seconds=self._config.agent.scrape_interval_seconds,
            answer_seconds=self._config.agent.scrape_timeout_seconds,
            max_bytes=_MAX_PAGE_BYTES,
        )
        self._scrapers[engine.id] = (url, scraper)
        scraper.start()

    # ---------------------------------------------------------------- ends
    def watch_exits(self) -> None:
        """Wait for processes that end, and for kills that their cgroups count."""
        while not self._stop.is_set():
            for ended in self._exits.wait(_COUNT_SECONDS):
                engine = self._kept(ended)
                if engine is None:
                    self._tell(ended)
                    continue
                # A keeper takes its time, on a host without memory above all: others do not wait.
                threading.Thread(
                    target=self._tell_kept, args=(ended, engine), name="end", daemon=True
                ).start()
            for path, kills in self._memory_events.poll():
                engine_id = self._groups.get(path)
                if engine_id is not None:
                    trigger = cgroup_kill(path, kills, time.time(), engine_id)
                    self._mailbox.put(Seen(time.monotonic(), trigger))

    def _tell(self, ended: Ended) -> None:
        self._mailbox.put(ProcessEnded(time.monotonic(), ended))
        self._search_now.set()

    def _tell_kept(self, ended: Ended, engine: WatchedEngine) -> None:
        kept = _ask_keeper(engine.found)
        self._tell(ended if kept is None else explain_end(ended, kept=kept))

    def _kept(self, ended: Ended) -> WatchedEngine | None:
        """The engine whose keeper is to be asked: the kernel tells only the parent how it ended."""
        engine = self._table.of_process(ended.pid, ended.engine_id)
        is_root = engine is not None and ended.pid == engine.root[0]
        return engine if ended.exit_code is None and is_root else None


def _ask_keeper(found: DiscoveredEngine) -> KeptExit | None:
    """What systemd or the container's runtime says; one that hangs is not waited for."""
    identity = CgroupIdentity("", unit=found.unit, container=found.container)
    answers: list[KeptExit | None] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask_keeper(identity, found.recorded.id)),
        name="keeper",
        daemon=True,
    )
    asking.start()
    asking.join(_KEEPER_SECONDS)
    return answers[0] if answers else None
