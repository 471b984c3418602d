"""Serves the site at one address: over TCP, with or without TLS, or over a Unix socket.

Small and strict, since it runs inside a program that has better things to do: one request a
connection, few at a time, each within a fixed time. When all threads are taken, the connection that
has lasted longest loses its own, so that clients that are slow on purpose lock nobody out.
"""

from __future__ import annotations

import contextlib
import errno
import http
import ipaddress
import logging
import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path
from typing import Final

from oomwatch.export.access import Access
from oomwatch.export.request import BadRequestError, Request, read_request
from oomwatch.export.site import Answer, Site, plain

_LOG = logging.getLogger(__name__)

_THREADS: Final = 6
"""Of an address; one of them is always left to take the next connection."""
_LINGER_SECONDS: Final = 0.2
_BACKLOG: Final = 64
_SOCKET_MODE: Final = 0o660
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="oomwatch"'}
_OPEN_PATHS: Final = frozenset({"/-/healthy", "/-/ready"})
"""A probe has no password, and learns nothing that a connection does not tell."""


class MetricsServer:
    """One address; from `start` on until `close`, whether it is free already or not."""

    def __init__(
        self,
        address: str,
        site: Site,
        access: Access,
        *,
        request_seconds: float = 5.0,
        answer_seconds: float = 10.0,
        retry_seconds: float = 5.0,
    ) -> None:
        """`address`: ``HOST:PORT`` or ``unix:/path``; TLS and users are for the first only.

        A request must come, and its answer be taken, within these times; an address that is taken
        is tried again every `retry_seconds`.
        """
        self._request_seconds = request_seconds
        self._answer_seconds = answer_seconds
        self._retry_seconds = retry_seconds
        self.address = address
        self._site = site
        self._is_unix = address.startswith("unix:")
        self._access = Access() if self._is_unix else access
        self._closing = threading.Event()
        self._listener: socket.socket | None = None
        self._lock = threading.Lock()
        self._serving: dict[socket.socket, float] = {}
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self.bound = threading.Event()
        """Set while it listens."""

    @property
    def port(self) -> int | None:
        """The TCP port that it listens at."""
        listener = self._listener
        return None if listener is None or self._is_unix else int(listener.getsockname()[1])

    def start(self) -> None:
        """Listen; an address that is taken is tried again until it is free."""
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and let go of those who are being served."""
        self._closing.set()
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            if self._is_unix:
                with contextlib.suppress(OSError):
                    Path(self.address.removeprefix("unix:")).unlink()
        with self._lock:
            for connection in self._serving:
                _cut(connection)
        if self._thread.is_alive():
            self._thread.join(0.2)

    # ---------------------------------------------------------------- the threads
    def _run(self) -> None:
        """Listen as soon as the address is free, then be the first of those who answer."""
        listener = self._await_address()
        if listener is None:
            return
        _LOG.info("metrics are served at %s", self.address)
        for _ in range(_THREADS - 1):
            threading.Thread(
                target=self._work, args=(listener,), name="metrics", daemon=True
            ).start()
        self.bound.set()
        self._work(listener)

    def _await_address(self) -> socket.socket | None:
        said = ""
        while not self._closing.is_set():
            try:
                self._listener = listen(self.address)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                if reason != said:
                    _LOG.warning("export.listen: %s: %s; it is tried again", self.address, reason)
                said = reason
                self._closing.wait(self._retry_seconds)
            else:
                return self._listener
        return None

    def _work(self, listener: socket.socket) -> None:
        """Take a connection and answer it, again and again: no thread waits for another."""
        while not self._closing.is_set():
            try:
                connection, peer = listener.accept()
            except OSError:
                self._closing.wait(0.1)  # it ends, no descriptor is left, or the client has gone
                continue
            try:
                connection = self._wrapped(connection)
                self._enter(connection)
                self._serve(connection, "unix" if self._is_unix else str(peer[0]))
            except (OSError, ValueError):  # the client has gone, or speaks another protocol
                pass
            except Exception:  # noqa: BLE001 - a fault of ours must not end the thread
                _LOG.exception("answering at %s", self.address)
            finally:
                with self._lock:
                    self._serving.pop(connection, None)
                connection.close()

    def _wrapped(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(self._request_seconds)
        if self._access.tls is None:
            return connection
        return self._access.tls.wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )

    def _enter(self, connection: socket.socket) -> None:
        """Note who is served; where no thread is left for others, let go of the one before all."""
        with self._lock:
            self._serving[connection] = time.monotonic()
            if len(self._serving) == _THREADS:
                oldest = min(self._serving, key=self._serving.__getitem__)
                del self._serving[oldest]
                _cut(oldest)

    def _serve(self, connection: socket.socket, peer: str) -> None:
        deadline = time.monotonic() + self._request_seconds
        if isinstance(connection, ssl.SSLSocket):
            connection.do_handshake()
        try:
            request = read_request(connection, deadline, peer)
            answer = self._answer(request)
            has_body = request.method != "HEAD"
        except BadRequestError as error:
            answer, has_body = plain(error.status, "this request is not understood"), True
        connection.settimeout(self._answer_seconds)
        connection.sendall(_head(answer) + (answer.body if has_body else b""))
        _end(connection)

    def _answer(self, request: Request) -> Answer:
        if request.path not in _OPEN_PATHS and not self._access.admits(
            request.header("authorization")
        ):
            return plain(401, "a user and password are needed", _CHALLENGE)
        try:
            return self._site.answer(request)
        except Exception:  # noqa: BLE001 - a fault of ours is told, and is no reason to be silent
            _LOG.exception("answering %s", request.path)
            return plain(500, "internal error; the agent's log has details")


def listen(address: str) -> socket.socket:
    """A socket that listens at ``HOST:PORT`` or ``unix:/path``.

    Raises:
        OSError: it is taken, or cannot be had; ValueError: there is no such address.

    """
    if address.startswith("unix:"):
        return _listen_unix(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    family, kind, protocol, _, place = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def is_open(address: str) -> bool:
    """Whether other hosts may reach it."""
    if address.startswith("unix:"):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host != "localhost"


def _listen_unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            Path(path).unlink()
        listener.bind(path)
        os.chmod(path, _SOCKET_MODE)  # noqa: PTH101 - a socket, not a file
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_left_behind(path: str) -> bool:
    """Whether it is a socket that nobody listens at any more."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
    except OSError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _head(answer: Answer) -> bytes:
    lines = [
        f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}",
        f"Content-Type: {answer.content_type}",
        f"Content-Length: {len(answer.body)}",
        "Connection: close",
        "X-Content-Type-Options: nosniff",
        *(f"{name}: {value}" for name, value in answer.headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _end(connection: socket.socket) -> None:
    """Say that this was all; what the client still sends must not make the kernel take it back."""
    if not isinstance(connection, ssl.SSLSocket):
        connection.shutdown(socket.SHUT_WR)
    connection.settimeout(_LINGER_SECONDS)
    connection.recv(65536)


def _cut(connection: socket.socket) -> None:
    """Wake the thread that serves it; of a TLS socket, leave its state to that thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
