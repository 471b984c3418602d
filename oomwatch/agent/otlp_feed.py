"""Figures and incidents on their way to an OpenTelemetry collector."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Protocol

from oomwatch import __version__
from oomwatch.agent.figures import Figures
from oomwatch.agent.repeat import Repeat
from oomwatch.config.export import OtlpConfig
from oomwatch.config.secrets import headers_in
from oomwatch.export.otlp import log_record, metrics_request, resource_of
from oomwatch.export.push import OtlpSender, endpoints_of, headers_of
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import IncidentFigures, Snapshot

_LOG = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 1.0
_MACHINE_ID: Final = "/etc/machine-id"


class Source(Protocol):
    """What makes samples."""

    def samples(self, asking: str) -> tuple[Snapshot, tuple[Samples, Samples]] | None:
        """The samples of now; None before the first look."""


class OtlpFeed:
    """Sends figures every `interval`, and what becomes of incidents within a second or two."""

    def __init__(
        self, config: OtlpConfig, source: Source, figures: Figures, environ: Mapping[str, str]
    ) -> None:
        """Raises ConfigError: the file of headers cannot be read."""
        headers = headers_of(environ)
        if config.headers_file is not None:
            headers |= headers_in(config.headers_file, "export.otlp.headers_file", environ)
        self._source = source
        self._interval_seconds = config.interval_seconds
        self._due = 0.0
        self._open: dict[str, IncidentFigures] | None = None
        self._figures = figures
        self._sender = OtlpSender(
            endpoints_of(config.endpoint, environ),
            resource_of(figures.host, __version__, _machine_id()),
            __version__,
            headers=headers,
            ca_file=config.ca_file,
        )
        self._repeat = Repeat("otlp", _LOOK_SECONDS, self._step)

    def start(self) -> None:
        """Send from now on."""
        self._repeat.start()

    def close(self) -> None:
        """Send no more."""
        self._repeat.close()

    def _step(self) -> None:
        self._note_incidents()
        self._sender.send_records()
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._interval_seconds
            made = self._source.samples("otlp")
            if made is not None:
                snapshot, samples = made
                body = metrics_request(samples, snapshot, self._sender.resource)
                self._sender.send_metrics(body)

    def _note_incidents(self) -> None:
        """What was opened and closed since the last look; those that were open before are not."""
        incidents = {incident.id: incident for incident in self._figures.open_incidents()}
        before, self._open = self._open, incidents
        if before is None:
            return
        at = time.time()
        for name in incidents.keys() - before.keys():
            self._sender.add_record(log_record("opened", incidents[name], at))
        for name in before.keys() - incidents.keys():
            self._sender.add_record(log_record("closed", before[name], at))


def _machine_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path(_MACHINE_ID).read_text(encoding="ascii", errors="replace").strip() or None
    return None
