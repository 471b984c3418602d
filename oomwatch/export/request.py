"""One HTTP request, read within fixed limits of size and time; nothing of it is trusted."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Mapping
from typing import Final

_MOST_BYTES: Final = 16 * 1024


class BadRequestError(Exception):
    """What came is no request that is answered; `status` says how that is told."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """Method and path of a request, and its headers by lower-case name."""

    method: str
    path: str
    headers: Mapping[str, str]
    client: str = ""
    """Who asks: the address, and the program as it calls itself."""

    def header(self, name: str) -> str:
        """A header's value; empty where there is none."""
        return self.headers.get(name, "")


def read_request(connection: socket.socket, deadline: float, peer: str) -> Request:
    """The request that a client sends until monotonic time `deadline`; a body is not read.

    Raises:
        BadRequestError: it is too large, too slow, or none.
        OSError: the connection broke.

    """
    data = b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        left = deadline - time.monotonic()
        if left <= 0:
            raise BadRequestError(408)
        connection.settimeout(left)
        try:
            more = connection.recv(_MOST_BYTES)
        except TimeoutError:
            raise BadRequestError(408) from None
        if not more:
            raise BadRequestError(400)
        data += more
        if len(data) > _MOST_BYTES:
            raise BadRequestError(431)
    return parse_request(data, peer)


def parse_request(data: bytes, peer: str) -> Request:
    """The request that these bytes begin with; BadRequestError if they are none."""
    head = data.replace(b"\r\n", b"\n").partition(b"\n\n")[0].decode("latin-1")
    line, *rest = head.split("\n")
    words = line.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise BadRequestError(400)
    method, target, _version = words
    headers: dict[str, str] = {}
    for header in rest:
        name, colon, value = header.partition(":")
        if not colon or not name or name != name.strip():
            raise BadRequestError(400)
        headers.setdefault(name.lower(), value.strip())
    client = f"{peer} {headers.get('user-agent', '')[:80]}"
    return Request(method, _path(target), headers, client)


def _path(target: str) -> str:
    """The path of what is asked for, which may be a whole address (RFC 9112, 3.2.2)."""
    target = target.partition("?")[0]
    scheme, colon, rest = target.partition("://")
    if colon and scheme.lower() in {"http", "https"}:
        return "/" + rest.partition("/")[2]
    return target
