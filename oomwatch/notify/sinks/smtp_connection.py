"""Connections to a mail server that are given to a deadline as soon as they are made."""

from __future__ import annotations

import platform
import smtplib
import socket
import ssl

from oomwatch.notify.deadline import Deadline


class WatchedSmtp(smtplib.SMTP):
    """Connects when it is made; plain at first."""

    def __init__(self, host: str, port: int, seconds: float, deadline: Deadline) -> None:
        self._deadline = deadline
        super().__init__(host, port, own_name(), seconds)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        made: socket.socket = super()._get_socket(host, port, timeout)  # type: ignore[misc]
        self._deadline.watch(made)
        return made


class WatchedSmtpTls(smtplib.SMTP_SSL, WatchedSmtp):
    """The same, under TLS from its first byte."""

    def __init__(
        self,
        host: str,
        port: int,
        seconds: float,
        deadline: Deadline,
        context: ssl.SSLContext | None,
    ) -> None:
        self._deadline = deadline
        self.context = context or ssl.create_default_context()
        smtplib.SMTP.__init__(self, host, port, own_name(), seconds)


def own_name() -> str:
    """What this host calls itself; smtplib would ask the DNS, which may take long."""
    return platform.node() or "localhost"
