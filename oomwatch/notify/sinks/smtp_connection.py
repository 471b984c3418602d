"""Connections to a mail server: under a deadline from their start, with replies that end."""

from __future__ import annotations

import errno
import platform
import smtplib
import socket
import ssl
from typing import BinaryIO, Final

from oomwatch.net.deadline import Deadline

_REPLY_BYTES: Final = 64 * 1024


class WatchedSmtp(smtplib.SMTP):
    """Connects when it is made; plain at first."""

    def __init__(self, host: str, port: int, seconds: float, deadline: Deadline) -> None:
        self._deadline = deadline
        super().__init__(host, port, own_name(), seconds)

    def _get_socket(self, host: str, port: int, timeout: float) -> socket.socket:
        made: socket.socket = super()._get_socket(host, port, timeout)  # type: ignore[misc]
        self._deadline.watch(made)
        return made

    def getreply(self) -> tuple[int, bytes]:
        """One reply of the server; smtplib itself keeps as many lines of it as come."""
        if self.file is None and self.sock is not None:
            self.file = _Reply(self.sock.makefile("rb"))
        if isinstance(self.file, _Reply):
            self.file.left_bytes = _REPLY_BYTES
        return super().getreply()


class _Reply:
    """The lines that a server sends, of which one reply may have so many bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left_bytes = _REPLY_BYTES

    def readline(self, limit: int) -> bytes:
        """At most `limit` bytes of a line.

        Raises:
            OSError: the reply has grown too long.

        """
        line = self._file.readline(limit)
        self.left_bytes -= len(line)
        if self.left_bytes < 0:
            raise OSError(errno.EMSGSIZE, "a reply had no end")
        return line

    def close(self) -> None:
        """When the connection is closed."""
        self._file.close()


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
