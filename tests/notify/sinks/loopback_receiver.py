"""Receivers on loopback: real HTTP servers that answer as they are told and keep what came."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Got:
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    status: int = 200
    body: bytes = b"ok"
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Receiver:
    """Answers with `replies` in turn, the last of them for ever."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.got: list[Got] = []
        self.replies: list[Reply | Callable[[Got], Reply]] = [Reply()]
        self.targets: list[str] = []
        """What was asked for by CONNECT: then this is a proxy."""
        self.logins: list[str | None] = []
        """With which log-in."""
        self._stop = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                names = {name.lower(): value for name, value in self.headers.items()}
                got = Got(self.path, names, body)
                receiver.got.append(got)
                reply = receiver.replies[0]
                if len(receiver.replies) > 1:
                    receiver.replies.pop(0)
                if callable(reply):
                    reply = reply(got)
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            def do_GET(self) -> None:
                self.do_POST()

            def do_CONNECT(self) -> None:
                """As a proxy that answers itself for every host, with its own certificate."""
                receiver.targets.append(self.path)
                receiver.logins.append(self.headers.get("Proxy-Authorization"))
                self.send_response(200)
                self.end_headers()
                self.wfile.flush()
                assert context is not None
                with (
                    context.wrap_socket(self.connection, server_side=True) as secured,
                    secured.makefile("rb") as self.rfile,
                    secured.makefile("wb", buffering=0) as self.wfile,
                ):
                    self.handle_one_request()
                self.close_connection = True

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def use_tls(self, context: ssl.SSLContext) -> Receiver:
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def answer(self, *replies: Reply | Callable[[Got], Reply]) -> None:
        self.replies = list(replies)

    def clear(self) -> None:
        self.got.clear()
        self.targets.clear()
        self.replies = [Reply()]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that does not trust us, or went away, is what the test is about."""


class RawReceiver:
    """Takes connections and leaves each to a function, which may hang, drip or flood."""

    def __init__(self, serve: Callable[[socket.socket, threading.Event], None]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.connections = 0
        self.finished = 0
        """Connections that were served to their end, rather than left by the other side."""
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._serve = serve
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._one, args=(connection,))
                self._threads.append(thread)
                thread.start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self._serve(connection, self._stop)
            self.finished += not self._stop.is_set()

    def close(self) -> None:
        self._stop.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in [self._accepting, *self._threads]:
            thread.join()


def hang(connection: socket.socket, stop: threading.Event) -> None:
    connection.recv(65536)
    stop.wait()


def drip(connection: socket.socket, stop: threading.Event) -> None:
    """One byte of the answer's head at a time, each well within any time-out; 20 s in all."""
    connection.recv(65536)
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1_000:
        if stop.wait(0.02):
            return
        connection.sendall(bytes([byte]))


def flood(connection: socket.socket, stop: threading.Event) -> None:
    """An answer of a hundred megabytes."""
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    block = b"x" * 65536
    for _ in range(1600):
        if stop.is_set():
            return
        connection.sendall(block)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
