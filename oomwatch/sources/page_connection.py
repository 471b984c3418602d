"""Gets one metrics page again and again over one connection that is kept open.

For the resident agent: `http.client` costs 0.7 MiB of memory where `requests` costs 6, and a third
of its time. Half of that is saved again: the request is written once, and the usual answer (200, so
many bytes, in plain) is read without taking its headers apart; `http.client` reads any other.

The same cautions as in `metrics_fetch`: time and size are capped, redirects are not followed, and
nothing of the environment (proxies, ``.netrc``) is used.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import re
import select
import socket
import time
import zlib
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
    UsageError,
)
from oomwatch.sources.metrics_fetch import metrics_url, shown_url

_BLOCK_BYTES: Final = 256 * 1024
_GZIP_MAGIC: Final = b"\x1f\x8b"
_HEAD_BYTES: Final = 4096
_USUAL: Final = re.compile(
    rb"HTTP/1\.1 200 .*\r\n"
    rb"(?:(?!Content-Length|Transfer-Encoding|Connection|\s).+\r\n)*"
    rb"Content-Length: (\d{1,9})\r\n"
    rb"(?:(?!Content-Length|Transfer-Encoding|Connection|\s).+\r\n)*"
    rb"\r\n",
    re.IGNORECASE,
)
"""The head of an answer of a known length, after which the connection stays open."""


class FetchedPage(NamedTuple):
    """The text of a page, and when the server began to answer, on both clocks."""

    data: bytes
    at: float
    monotonic: float


class _Usual(NamedTuple):
    """An answer that can be read by its length; nothing of it is taken from the socket yet."""

    socket: socket.socket
    head_bytes: int
    body_bytes: int


class _Written:
    """Stands for a socket, and keeps what is sent."""

    def __init__(self) -> None:
        self.data = b""

    def sendall(self, data: bytes) -> None:
        """Keep it."""
        self.data += data


def _is_quiet(open_socket: socket.socket) -> bool:
    """Whether nothing lies there unasked: the server's end, or more than it had announced.

    Read as the next answer it would put every later one out of step.
    """
    waiting = select.poll()
    waiting.register(open_socket, select.POLLIN)
    return not waiting.poll(0)


class PageConnection:
    """One address. `fetch` is for one thread; `abort` may be called from another."""

    def __init__(
        self,
        url: str,
        *,
        connect_seconds: float,
        answer_seconds: float,
        max_bytes: int,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        """Raises `UsageError` for what is no address of a page."""
        url = metrics_url(url)
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host, self._port = "", None
        if parts.scheme not in ("http", "https") or not self._host:
            raise UsageError(f"{url!r}: not an address that can be read")
        self.shown = shown_url(url)
        self._secure = parts.scheme == "https"
        self._target = f"{parts.path}?{parts.query}" if parts.query else parts.path
        self._headers = {
            "Accept": "text/plain;version=0.0.4",
            "Accept-Encoding": "identity",
            "User-Agent": "oomwatch",
        }
        if parts.username is not None:
            user = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(user).decode()}"
        self._headers.update(headers or {})
        self._ca_file = ca_file
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._max_bytes = max_bytes
        self._socket: socket.socket | None = None
        self._reusable = False
        self._aborted = False

    def fetch(self) -> FetchedPage:
        """The page. Every step may take as long as was said, and so may the whole body.

        Raises:
            NoDataError: there is no such page.
            PermissionDeniedError: the server refuses.
            SourceUnavailable: no answer, or cut short; trying again may help.
            SourceError: too large, damaged, or a redirect.
            UsageError: nothing can be asked for by this address.

        """
        self._reusable = False
        try:
            return self._fetch()
        except (http.client.InvalidURL, UnicodeError):
            raise UsageError(f"{self.shown!r}: not an address that can be read") from None
        except TimeoutError:
            raise SourceUnavailable(
                f"{self.shown}: no answer within {self._answer_seconds:g} s"
            ) from None
        except (http.client.HTTPException, OSError) as error:
            # What such an error says was written by the other side: only its kind is told.
            raise SourceUnavailable(
                f"{self.shown}: the connection was closed early ({type(error).__name__})"
            ) from None
        finally:
            if not self._reusable:
                self.close()

    def abort(self) -> None:
        """End a `fetch` that waits for an answer in another thread, and any later one."""
        self._aborted = True
        waiting = self._socket
        if waiting is not None:
            with contextlib.suppress(OSError):
                waiting.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the connection; `fetch` opens another one."""
        open_socket, self._socket = self._socket, None
        if open_socket is not None:
            open_socket.close()

    def _fetch(self) -> FetchedPage:
        begun = None
        if self._socket is not None and _is_quiet(self._socket):
            # The server may close an idle connection at this very moment: that is no failure.
            with contextlib.suppress(
                http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError
            ):
                begun = self._ask(self._socket)
        if begun is None:
            self.close()
            begun = self._ask(self._connect())
        at, monotonic = time.time(), time.monotonic()
        deadline = monotonic + self._answer_seconds
        if isinstance(begun, _Usual):
            data = self._read_usual(begun, deadline)
            self._reusable = True
        else:
            with begun:
                self._check(begun)
                data = self._read(begun, deadline)
                self._reusable = not begun.will_close
        return FetchedPage(self._unpacked(data), at, monotonic)

    @functools.cached_property
    def _request(self) -> bytes:
        """All of it, as `http.client` writes it."""
        written = _Written()
        writer = http.client.HTTPConnection(self._host, self._port)
        writer.sock = written
        writer.request("GET", self._target, headers=self._headers)
        return written.data

    def _connect(self) -> socket.socket:
        made: http.client.HTTPConnection
        if self._secure:
            import ssl  # noqa: PLC0415 - 3 MB, only for addresses that want it

            context = ssl.create_default_context()
            if self._ca_file is not None:
                try:
                    context.load_verify_locations(self._ca_file)
                except (OSError, ssl.SSLError):
                    raise SourceUnavailable(
                        f"{self.shown}: the certificates in {self._ca_file} cannot be read"
                    ) from None
            made = http.client.HTTPSConnection(
                self._host,
                self._port,
                timeout=self._connect_seconds,
                context=context,
            )
        else:
            made = http.client.HTTPConnection(self._host, self._port, timeout=self._connect_seconds)
        try:
            made.connect()
        except OSError as error:
            made.close()
            if error.__class__.__module__ == "ssl":
                reason = "the TLS connection failed"
            else:
                reason = "cannot connect; is the server running?"
            raise SourceUnavailable(f"{self.shown}: {reason}") from None
        made.sock.settimeout(self._answer_seconds)
        self._socket = made.sock
        return self._socket

    def _ask(self, open_socket: socket.socket) -> _Usual | http.client.HTTPResponse:
        """Send the request and wait for the beginning of the answer."""
        if self._aborted:
            raise ConnectionAbortedError
        open_socket.sendall(self._request)
        if not self._secure:  # nothing can be looked at in advance under TLS
            begun = open_socket.recv(_HEAD_BYTES, socket.MSG_PEEK)
            usual = _USUAL.match(begun)
            if usual is not None:
                return _Usual(open_socket, usual.end(), int(usual[1]))
        response = http.client.HTTPResponse(open_socket, method="GET")
        response.begin()
        return response

    def _check(self, response: http.client.HTTPResponse) -> None:
        status = response.status
        if 300 <= status < 400:
            raise SourceError(
                f"{self.shown}: answers with a redirect, which is not followed; give its target"
            )
        if status in {401, 403}:
            raise PermissionDeniedError(f"{self.shown}: answers {status}; it wants credentials")
        if status == 404:
            raise NoDataError(
                f"{self.shown}: no metrics there (404); SGLang publishes them with "
                "--enable-metrics only"
            )
        if status != 200:
            raise SourceUnavailable(f"{self.shown}: answers {status}")

    def _read_usual(self, answer: _Usual, deadline: float) -> bytes:
        if answer.body_bytes > self._max_bytes:
            raise SourceError(self._too_large())
        data = bytearray(answer.head_bytes + answer.body_bytes)
        room, read = memoryview(data), 0
        while read < len(data):
            count = answer.socket.recv_into(room[read:])
            if not count:
                raise SourceUnavailable(f"{self.shown}: the connection was closed early")
            read += count
            self._check_time(deadline)
        return bytes(room[answer.head_bytes :])

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        blocks: list[bytes] = []
        size = 0
        while block := response.read1(_BLOCK_BYTES):
            blocks.append(block)
            size += len(block)
            if size > self._max_bytes:
                raise SourceError(self._too_large())
            self._check_time(deadline)
        if response.length:
            raise SourceUnavailable(f"{self.shown}: the connection was closed early")
        return b"".join(blocks)

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise SourceUnavailable(
                f"{self.shown}: page not complete within {self._answer_seconds:g} s"
            )

    def _unpacked(self, data: bytes) -> bytes:
        """The page itself: some proxies pack it though nobody asked."""
        if not data.startswith(_GZIP_MAGIC):
            return data
        try:
            unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            data = unpacker.decompress(data, self._max_bytes + 1)
        except zlib.error:
            raise SourceError(f"{self.shown}: damaged gzip data") from None
        if len(data) > self._max_bytes:
            raise SourceError(self._too_large())
        return data

    def _too_large(self) -> str:
        return f"{self.shown}: more than {self._max_bytes // 2**20} MiB, not a metrics page"
