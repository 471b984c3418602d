"""What other monitors may read, and where it is sent."""

# ruff: noqa: RUF009 - the functions of `fields` return dataclass fields

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from oomwatch.config.fields import Problem, duration, key, section, switch
from oomwatch.config.values import FilePath, Texts, Url

DEFAULT_LISTEN: Final = "127.0.0.1:20666"


@dataclasses.dataclass(frozen=True, slots=True)
class OtlpConfig:
    """Sending figures and incidents to an OpenTelemetry collector, as OTLP/HTTP JSON."""

    enabled: bool = switch(False, "Whether anything is sent.")
    endpoint: str | None = key(
        Url(("http", "https"), "http://127.0.0.1:4318"),
        None,
        "The collector; /v1/metrics and /v1/logs are added. Not set: as "
        "$OTEL_EXPORTER_OTLP_ENDPOINT says, else http://127.0.0.1:4318.",
        '"http://127.0.0.1:4318"',
        secret=True,  # it may hold a password
    )
    headers_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `Name: value` lines to send along, or the name of a systemd credential.",
        '"otlp-headers"',
    )
    ca_file: str | None = key(
        FilePath(),
        None,
        "Certificates to trust for an https collector, instead of those of the system.",
        '"/etc/ssl/certs/internal-ca.pem"',
    )
    interval_seconds: float = duration("30s", "How often figures are sent.", "1s", "1h")


@dataclasses.dataclass(frozen=True, slots=True)
class ExportConfig:
    """The metrics page for Prometheus, and other ways to the same figures."""

    listen: tuple[str, ...] = key(
        Texts(
            r"(\[[0-9a-fA-F:.%\w]+\]|[A-Za-z0-9.-]+):\d{1,5}|unix:/[^\s,]{1,100}",
            DEFAULT_LISTEN,
        ),
        (DEFAULT_LISTEN,),
        'Where /metrics is served: HOST:PORT, or "unix:/run/oomwatch/metrics.sock". An empty list '
        "serves nothing.",
    )
    tls_certificate_file: str | None = key(
        FilePath(),
        None,
        "The certificate, with those that vouch for it: then HOST:PORT speaks https only.",
        '"/etc/oomwatch/tls/metrics.pem"',
    )
    tls_key_file: str | None = key(
        FilePath(secret=True),
        None,
        "The key of the certificate, or the name of a systemd credential.",
        '"metrics-key"',
    )
    users_file: str | None = key(
        FilePath(secret=True),
        None,
        "A file of `user:password` lines, or the name of a systemd credential: who may read it at "
        "HOST:PORT. Not set: whoever can connect.",
        '"metrics-users"',
    )
    process_ids: bool = switch(
        False, "Whether memory of GPUs is told by process, with its pid, rather than by holder."
    )
    dcgm_labels: bool = switch(
        False,
        "Whether oomwatch_gpu_info has modelName and device too, for dashboards of dcgm-exporter; "
        "`promtool check metrics` calls those names bad style.",
    )
    textfile: str | None = key(
        FilePath(),
        None,
        "A file that is written with the same page, for node_exporter's textfile collector.",
        '"/var/lib/node_exporter/oomwatch.prom"',
    )
    textfile_interval_seconds: float = duration(
        "15s", "How often that file is written.", "1s", "1h"
    )
    otlp: OtlpConfig = section(OtlpConfig)

    def problems(self) -> Iterator[Problem]:
        """A certificate has a key; ports are numbers that there are; a textfile is a .prom file."""
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            missing = "tls_key_file" if self.tls_key_file is None else "tls_certificate_file"
            yield missing, "is missing: a certificate and its key go together"
        for address in self.listen:
            if not address.startswith("unix:") and int(address.rpartition(":")[2]) > 65535:
                yield "listen", f"has a port that there is not: {address}"
        if self.textfile is not None and not self.textfile.endswith(".prom"):
            yield "textfile", "must end in .prom: node_exporter reads no others"
