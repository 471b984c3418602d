"""One connection that is kept, against a server that answers in every form, byte for byte."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from oomwatch.errors import NoDataError, SourceError, SourceUnavailable, UsageError
from oomwatch.sources.page_connection import PageConnection

BODY = b"vllm:num_requests_running 3\n" * 4000
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"".join(
    b"%x\r\n%s\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:50_000], BODY[50_000:], b"")
)


class Answers:
    """Gives each request the next answer, in the parts it is made of; counts connections."""

    def __init__(self, *answers: tuple[bytes, ...], closes: bool = False) -> None:
        self._answers = list(answers)
        self._closes = closes
        self.connections = 0
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection, contextlib.suppress(OSError):
                    self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while request := connection.recv(65536):
            self.requests.append(request)
            for part in self._answers.pop(0):
                connection.sendall(part)
                time.sleep(0.02)
            if self._closes:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)


@contextlib.contextmanager
def answers(*given: tuple[bytes, ...], closes: bool = False) -> Iterator[Answers]:
    server = Answers(*given, closes=closes)
    try:
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def connection(url: str, **options: int) -> Iterator[PageConnection]:
    kept = PageConnection(
        url, **{"connect_seconds": 5, "answer_seconds": 5, "max_bytes": 1 << 20, **options}
    )
    try:
        yield kept
    finally:
        kept.close()


OK = b"HTTP/1.1 200 OK\r\n"
KEPT = {
    "usual": (OK + LENGTH + b"\r\n" + BODY,),
    "lower case": (
        b"HTTP/1.1 200\r\ncontent-length: %d\r\nserver: uvicorn\r\n\r\n" % len(BODY),
        BODY,
    ),
    "head before body": (OK + LENGTH + b"\r\n", BODY[:9], BODY[9:]),
    "head in two": (OK + LENGTH[:7], LENGTH[7:] + b"\r\n" + BODY),
    "chunked": (OK + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED,),
    "said to be kept": (OK + b"Connection: keep-alive\r\n" + LENGTH + b"\r\n" + BODY,),
    "informed first": (b"HTTP/1.1 100 Continue\r\n\r\n", OK + LENGTH + b"\r\n" + BODY),
    "long head": (OK + b"X: " + b"y" * 9000 + b"\r\n" + LENGTH + b"\r\n" + BODY,),
    "a length in another header": (OK + b"X: Content-Length: 5\r\n" + LENGTH + b"\r\n" + BODY,),
}
CLOSED = {
    "said to be closed": (OK + b"Connection: close\r\n" + LENGTH + b"\r\n" + BODY,),
    "old": (b"HTTP/1.0 200 OK\r\n" + LENGTH + b"\r\n" + BODY,),
    "without a length": (OK + b"Connection: close\r\n\r\n" + BODY,),
}


@pytest.mark.parametrize("form", KEPT)
def test_an_answer_in_any_form_is_read_and_the_connection_kept(form):
    with answers(*[KEPT[form]] * 3) as server, connection(server.url) as kept:
        assert [kept.fetch().data == BODY for _ in range(3)] == [True, True, True]
        assert server.connections == 1
        assert len({*server.requests}) == 1


@pytest.mark.parametrize("form", CLOSED)
def test_a_connection_that_ends_with_its_answer_is_opened_anew(form):
    with answers(*[CLOSED[form]] * 2, closes=True) as server, connection(server.url) as kept:
        assert [kept.fetch().data == BODY for _ in range(2)] == [True, True]
        assert server.connections == 2


def test_answers_of_one_form_after_another_over_one_connection():
    with answers(*KEPT.values()) as server, connection(server.url) as kept:
        assert all(kept.fetch().data == BODY for _ in KEPT)
        assert server.connections == 1


@pytest.mark.parametrize(
    "body", [b"a 1\r\n\r\nb 2\r\n\r\n", b"\r\n", b"a 1\r\nContent-Length: 1\r\n\r\nx"]
)
@pytest.mark.parametrize("length", [b"Content-Length: %d\r\n", b""])
def test_where_the_body_begins_is_told_by_the_head_alone(body, length):
    head = OK + (length % len(body) if length else b"")
    answer = (head + b"\r\n" + body,)
    with answers(answer, answer, closes=not length) as server, connection(server.url) as kept:
        assert [kept.fetch().data for _ in range(2)] == [body, body]


@pytest.mark.parametrize("more", [b"left over", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nold"])
def test_what_a_server_sends_unasked_is_no_answer(more):
    first = (OK + b"Content-Length: 1\r\n\r\n1" + more,)
    second = (OK + b"Content-Length: 1\r\n\r\n2",)
    with answers(first, second) as server, connection(server.url) as kept:
        assert kept.fetch().data == b"1"
        assert kept.fetch().data == b"2"
        assert server.connections == 2


@pytest.mark.parametrize("address", ["http://a..b/", "http://{}/m\xe9", "http://{}/a b"])
def test_an_address_that_nothing_can_be_asked_by_is_told_in_one_line(address):
    with answers() as server:
        url = address.format(server.url.removeprefix("http://"))
        with connection(url) as kept, pytest.raises(UsageError, match="not an address"):
            kept.fetch()


def test_the_request_is_whole():
    with answers(KEPT["usual"]) as server, connection(server.url + "/metrics?x=1") as kept:
        kept.fetch()
        first, *headers = server.requests[0].decode().split("\r\n")
    assert first == "GET /metrics?x=1 HTTP/1.1"
    assert headers[-2:] == ["", ""]
    assert f"Host: {server.url.removeprefix('http://')}" in headers


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), NoDataError),
        ((b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",), SourceError),
        ((b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno",), SourceUnavailable),
        ((OK + b"Content-Length: 2000000\r\n\r\n",), SourceError),
        ((OK + b"Content-Length: 9999999999999\r\n\r\n",), SourceError),
        ((OK + b"Content-Length: 10\r\n\r\nshort",), SourceUnavailable),
        (
            (OK + b"Content-Length: -1\r\nConnection: close\r\n\r\n" + b"x" * 2_000_000,),
            SourceError,
        ),
        ((b"\r\n\r\n",), SourceUnavailable),
        ((b"220 smtp.example ESMTP\r\n",), SourceUnavailable),
        ((b"",), SourceUnavailable),
    ],
)
def test_what_is_no_page_is_told_and_the_next_request_begins_anew(answer, error):
    with (
        answers(answer, answer, closes=True) as server,
        connection(server.url, answer_seconds=2) as kept,
    ):
        for _ in range(2):
            with pytest.raises(error):
                kept.fetch()
        assert server.connections == 2
