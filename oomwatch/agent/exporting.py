"""Serves, writes and sends the agent's figures, each in a thread of its own."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Final, Protocol

from oomwatch.agent.figures import Figures
from oomwatch.agent.otlp_feed import OtlpFeed
from oomwatch.agent.own_figures import OwnFigures
from oomwatch.agent.pages import Pages
from oomwatch.agent.repeat import Repeat
from oomwatch.agent.runbooks import runbook
from oomwatch.agent.start_facts import StartFacts
from oomwatch.config import Config, ConfigError
from oomwatch.config.export import ExportConfig
from oomwatch.export.access import load_access
from oomwatch.export.families import Exporter
from oomwatch.export.page import Form
from oomwatch.export.samples import Samples
from oomwatch.export.server import MetricsServer, is_open
from oomwatch.export.site import Site
from oomwatch.export.snapshot import Snapshot
from oomwatch.export.textfile import remove_textfile, write_textfile

_LOG = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0


class Part(Protocol):
    """One way out for the figures."""

    def start(self) -> None:
        """Begin."""

    def close(self) -> None:
        """End; what hangs is not waited for."""


class Exporting:
    """From `start` to `close`. What is wrong with one way out is said, and the others go on."""

    def __init__(
        self,
        config: Config,
        figures: Figures,
        own: OwnFigures,
        facts: StartFacts,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._config = config.export
        self._figures = figures
        self._own = own
        self._facts = facts
        self._environ = os.environ if environ is None else environ
        self._pages = Pages(figures, own)
        self._site = Site(self.page, figures.is_ready, runbook)
        self._look = Repeat("export", _LOOK_SECONDS, self._look_around)
        self._serving: list[MetricsServer] = []
        self._sending: list[Part] = []

    # ---------------------------------------------------------------- life
    def start(self) -> None:
        """Serve, write and send from now on."""
        self._look.start()
        self._set_labels()
        self._serve()
        self._send()

    def close(self) -> None:
        """Serve no more."""
        self._look.close()
        for part in (*self._serving, *self._sending):
            part.close()

    def reconfigure(self, config: Config) -> None:
        """Use another configuration from now on; certificates and users are read anew."""
        before, self._config = self._config, config.export
        after = self._config
        self._set_labels()
        if before != after or after.tls_certificate_file or after.users_file:
            self._serve()
        if _what_is_sent(before) != _what_is_sent(after):
            self._send()

    def _set_labels(self) -> None:
        self._figures.process_ids = self._config.process_ids
        self._pages.exporter = Exporter(dcgm_labels=self._config.dcgm_labels)

    def _serve(self) -> None:
        for server in self._serving:
            server.close()
        self._serving = list(self._servers(self._config))
        for server in self._serving:
            server.start()

    def _send(self) -> None:
        for part in self._sending:
            part.close()
        self._sending = list(self._others(self._config))
        for part in self._sending:
            part.start()

    def _servers(self, config: ExportConfig) -> Iterator[MetricsServer]:
        try:
            access = load_access(config, self._environ)
        except ConfigError as error:
            _LOG.error("metrics are not served: %s; `oomwatch config check`, then reload", error)
            return
        for address in config.listen:
            if access.users is None and is_open(address):
                _LOG.warning(
                    "whoever reaches %s can read the metrics: set export.users_file", address
                )
            yield MetricsServer(address, self._site, access)

    def _others(self, config: ExportConfig) -> Iterator[Part]:
        if config.textfile is not None:
            yield Textfile(config.textfile, config.textfile_interval_seconds, self)
        if config.otlp.enabled:
            try:
                yield OtlpFeed(config.otlp, self, self._figures, self._environ)
            except ConfigError as error:
                _LOG.error("nothing is sent to the collector: %s", error)

    # ---------------------------------------------------------------- figures
    def page(self, form: Form, asking: str) -> bytes | None:
        """The page for whoever asks; None before the first look at everything."""
        return self._pages.page(form, asking)

    def samples(self, asking: str) -> tuple[Snapshot, tuple[Samples, Samples]] | None:
        """What the page is made of, its peaks apart, and the snapshot behind it."""
        return self._pages.samples(asking)

    def _look_around(self) -> None:
        """Look at what no page may wait for: our own process, files, the logs of new starts."""
        self._own.look()
        self._pages.prepare()
        self._figures.components = self._facts.look()


def _what_is_sent(config: ExportConfig) -> tuple[object, ...]:
    return config.textfile, config.textfile_interval_seconds, config.otlp


@dataclasses.dataclass(slots=True)
class Textfile:
    """Writes the page to a file again and again, and takes it away at the end."""

    path: str
    interval_seconds: float
    exporting: Exporting
    _repeat: Repeat = dataclasses.field(init=False)
    _said: str = ""

    def __post_init__(self) -> None:
        self._repeat = Repeat("textfile", self.interval_seconds, self._write)

    def start(self) -> None:
        """Write now, and then on."""
        self._repeat.start()

    def close(self) -> None:
        """Write no more."""
        self._repeat.close()
        remove_textfile(self.path)

    def _write(self) -> None:
        page = self.exporting.page(Form(), "textfile")
        if page is None:
            return
        try:
            write_textfile(self.path, page)
            said = ""
        except OSError as error:
            said = f"export.textfile: {self.path}: {error.strerror or error}"
        if said and said != self._said:
            _LOG.warning("%s; it is tried again", said)
        self._said = said
