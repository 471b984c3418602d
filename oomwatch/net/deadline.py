"""A time by which connections are ended, whoever waits for them."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Deadline:
    """Ends the connections that were given to `watch` when the time is over."""

    def __init__(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._expire)
        self._timer.daemon = True
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self.passed = False

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for one in self._sockets:
                one.close()
            self._sockets.clear()

    def watch(self, connection: socket.socket) -> None:
        """Shut this connection down at the deadline, whoever reads or writes it then."""
        own = connection.dup()  # TLS takes the socket over; what is below it stays the same
        with self._lock:
            self._sockets.append(own)
            if self.passed:
                self._shut_down(own)

    def _expire(self) -> None:
        with self._lock:
            self.passed = True
            for one in self._sockets:
                self._shut_down(one)

    @staticmethod
    def _shut_down(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
