"""Pages of real servers on loopback that answer, hang, vanish and misbehave."""

from __future__ import annotations

import base64
import gzip
import http.server
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oomwatch.errors import UsageError
from oomwatch.sources.metrics import parse_metrics
from oomwatch.sources.scrape import Scraper, ScrapeState

PAGE = b"""# HELP vllm:num_requests_running x
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0
vllm:request_prompt_tokens_bucket{engine="0",le="100.0",model_name="m"} 5.0
vllm:request_prompt_tokens_count{engine="0",model_name="m"} 5.0
"""
PATIENCE = 20.0


class Server(http.server.ThreadingHTTPServer):
    """Answers any GET by `answer`; counts connections."""

    daemon_threads = True

    def __init__(self, answer: Callable[[Any], None], port: int = 0) -> None:
        self.connections = 0
        self.released = threading.Event()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                owner.connections += 1
                super().setup()

            def do_GET(self):
                answer(self)

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", port), Handler)
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request, client_address):
        """The client hangs up on purpose."""

    def end(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        self.thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(answer: Callable[[Any], None], port: int = 0) -> Server:
        servers.append(Server(answer, port))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def scrape() -> Iterator[Callable[..., tuple[Scraper, queue.Queue[Any]]]]:
    scrapers: list[Scraper] = []

    def start(url: str, **settings: Any) -> tuple[Scraper, queue.Queue[Any]]:
        handed: queue.Queue[Any] = queue.Queue()
        scraper = Scraper("vllm-1", url, lambda *what: handed.put(what), **settings)
        scrapers.append(scraper)
        scraper.start()
        return scraper, handed

    yield start
    for scraper in scrapers:
        scraper.stop()


def reply(handler, body: bytes = PAGE, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", headers.pop("length", str(len(body))))
    for name, value in headers.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def failed(scraper: Scraper) -> ScrapeState:
    until(lambda: scraper.state.failures)
    return scraper.state


# ---------------------------------------------------------------- pages that come
def test_samples_are_handed_on_over_one_connection(serve, scrape):
    server = serve(reply)
    before = time.monotonic()
    scraper, handed = scrape(server.url, interval_seconds=0.05)
    readings = [handed.get(timeout=PATIENCE) for _ in range(5)]
    engine_id, samples, at, latency_seconds = readings[0]
    assert engine_id == "vllm-1"
    assert [(sample.engine, sample.running) for sample in samples] == [("0", 3), ("1", 4)]
    assert before <= at <= time.monotonic()
    assert latency_seconds >= 0
    assert [reading[2] for reading in readings] == sorted(reading[2] for reading in readings)
    assert server.connections == 1
    state = scraper.state
    assert (state.failing_since, state.reason, state.failures) == (None, None, 0)
    assert state.last_at is not None
    assert state.latency_seconds is not None
    assert scraper.page is not None
    assert scraper.page.source == f"{server.url}/metrics"
    assert "kv_usage_ratio" in scraper.page.absent


def test_whatever_changes_from_one_page_to_the_next_is_read(serve, scrape):
    pages = [
        PAGE,
        PAGE.replace(b" 5.0", b" 6.0"),
        PAGE + b'vllm:num_requests_waiting{engine="0",model_name="m"} 9\n',
        PAGE.replace(b"100.0", b"200.0"),
        PAGE,
    ]
    told = iter(pages)
    url = serve(lambda handler: reply(handler, next(told, PAGE))).url
    _, handed = scrape(url, interval_seconds=0.02)
    for page in pages:
        samples = handed.get(timeout=PATIENCE)[1]
        assert samples == parse_metrics(page, at=samples[0].at).samples


def test_the_interval_may_be_changed_while_it_waits(serve, scrape):
    scraper, handed = scrape(serve(reply).url, interval_seconds=1000)
    handed.get(timeout=PATIENCE)
    scraper.interval_seconds = 0.01
    assert scraper.interval_seconds == 0.01
    for _ in range(3):
        handed.get(timeout=PATIENCE)


def test_answers_in_pieces_packed_or_to_the_end_of_the_connection(serve, scrape):
    def chunked(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for start in range(0, len(PAGE), 50):
            piece = PAGE[start : start + 50]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        handler.wfile.write(b"0\r\n\r\n")

    def packed(handler):
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.wfile.write(gzip.compress(PAGE))

    for answer, connections in ((chunked, 1), (packed, 2)):
        server = serve(answer)
        _, handed = scrape(server.url, interval_seconds=0.01)
        for _ in range(2):
            assert handed.get(timeout=PATIENCE)[1][0].running == 3
        assert server.connections >= connections


def test_credentials_of_the_address_are_sent_and_never_shown(serve, scrape):
    seen = []

    def answer(handler):
        seen.append((handler.path, handler.headers["Authorization"]))
        reply(handler, status=403)

    port = serve(answer).server_port
    scraper, _ = scrape(f"http://me:s%40crt@127.0.0.1:{port}/m?x=1")
    reason = failed(scraper).reason
    assert reason is not None
    assert "403" in reason
    assert "crt" not in reason
    assert seen[0] == ("/m?x=1", "Basic " + base64.b64encode(b"me:s@crt").decode())


def test_a_connection_that_was_closed_while_idle_is_no_failure(serve, scrape):

    def answer(handler):
        handler.connection.settimeout(0.05)  # then it hangs up
        reply(handler)

    server = serve(answer)
    scraper, handed = scrape(server.url, interval_seconds=0.3)
    for _ in range(3):
        handed.get(timeout=PATIENCE)
        assert scraper.state.failures == 0
    assert server.connections >= 3


# ---------------------------------------------------------------- servers that do not
def test_nobody_there_then_somebody(serve, scrape):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scraper, handed = scrape(f"http://127.0.0.1:{port}", interval_seconds=0.01)
    until(lambda: scraper.state.failures >= 3)
    state = scraper.state
    assert (
        state.reason == f"http://127.0.0.1:{port}/metrics: cannot connect; is the server running?"
    )
    assert state.failing_since is not None
    assert state.failing_since <= time.time()
    assert state.last_at is None
    serve(reply, port)
    handed.get(timeout=PATIENCE)
    assert scraper.state.failing_since is None


def test_tries_become_rare_where_nobody_is(scrape):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scraper, _ = scrape(f"http://127.0.0.1:{port}", interval_seconds=0.001)
    until(lambda: scraper.state.failures >= 4)
    pauses = []
    for failures in (1, 2, 3, 10, 1000):
        scraper._state = ScrapeState(failures=failures)
        pauses.append(scraper._pause_seconds())
    assert pauses == pytest.approx([0.001, 0.002, 0.004, 0.512, 0.512])
    scraper.interval_seconds = 3
    assert scraper._pause_seconds() == 10
    scraper.interval_seconds = 30
    assert scraper._pause_seconds() == 30


def test_a_server_that_hangs_is_waited_for_and_left_at_once(serve, scrape):
    server = serve(lambda handler: handler.server.released.wait(PATIENCE))
    scraper, handed = scrape(server.url)
    until(lambda: scraper.state.waiting_seconds > 0)
    first = scraper.state.waiting_seconds
    until(lambda: scraper.state.waiting_seconds > first)
    scraper.stop()
    until(lambda: not scraper._thread.is_alive())
    assert not server.released.is_set()  # the thread ended though the server still hangs
    assert scraper.state.waiting_seconds == 0
    assert handed.empty()
    assert scraper.state.failures == 0


def test_a_server_that_hangs_in_the_middle_of_a_page(serve, scrape):
    def answer(handler):
        reply(handler, length="1000000")
        handler.wfile.flush()
        handler.server.released.wait(PATIENCE)

    scraper, handed = scrape(serve(answer).url)
    until(lambda: scraper.state.waiting_seconds > 0)
    scraper.stop()
    until(lambda: not scraper._thread.is_alive())
    assert handed.empty()


def test_the_end_of_patience(serve, scrape):
    server = serve(lambda handler: handler.server.released.wait(PATIENCE))
    scraper, _ = scrape(server.url, answer_seconds=0.2)
    assert failed(scraper).reason == f"{server.url}/metrics: no answer within 0.2 s"


def test_a_server_that_drips(serve, scrape):
    def answer(handler):
        reply(handler, length="1000000")
        while not handler.server.released.wait(0.01):
            handler.wfile.write(b"#")
            handler.wfile.flush()

    scraper, _ = scrape(serve(answer).url, answer_seconds=0.3)
    reason = failed(scraper).reason
    assert reason is not None
    assert "not complete within 0.3 s" in reason


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda h: reply(h, status=503), "answers 503"),
        (lambda h: reply(h, status=404), "--enable-metrics"),
        (lambda h: reply(h, status=401), "wants credentials"),
        (lambda h: reply(h, b"", 302, Location="http://127.0.0.1:9/"), "redirect"),
        (lambda h: reply(h, b"<html>\x00\xff</html>"), "no vLLM or SGLang figures"),
        (lambda h: reply(h, b""), "no vLLM or SGLang figures"),
        (lambda h: reply(h, PAGE * 20_000), "more than 4 MiB"),
        (lambda h: reply(h, gzip.compress(PAGE * 20_000)), "more than 4 MiB"),
        (lambda h: reply(h, b"\x1f\x8b\x08nonsense"), "damaged gzip"),
        (lambda h: h.wfile.write(b"\x00\x01 garbage\x1b[31m\r\n\r\n"), "closed early"),
        (lambda h: h.wfile.write(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 100_000), "closed early"),
        (lambda h: (reply(h, length="10000"), h.connection.shutdown(2)), "closed early"),
        (lambda h: h.connection.shutdown(2), "closed early"),
    ],
)
def test_what_is_no_page(serve, scrape, answer, words):
    server = serve(answer)
    scraper, handed = scrape(server.url, interval_seconds=0.01, max_bytes=4 * 2**20)
    until(lambda: scraper.state.failures >= 2)
    reason = scraper.state.reason
    assert reason is not None
    assert reason.startswith(f"{server.url}/metrics: ")
    assert words in reason
    assert reason.isprintable()
    assert handed.empty()


def test_an_error_of_whoever_takes_the_figures_ends_nothing(serve, caplog):
    seen = threading.Semaphore(0)

    def take(*_what: Any) -> None:
        seen.release()
        raise ValueError("full")

    scraper = Scraper("vllm-1", serve(reply).url, take, interval_seconds=0.01)
    scraper.start()
    for _ in range(3):
        assert seen.acquire(timeout=PATIENCE)
    scraper.stop()
    assert scraper.state.failures == 0
    assert "handing on" in caplog.text


@pytest.mark.parametrize("url", ["ftp://host/metrics", "http://", "http://host:port/", "metrics"])
def test_no_address(url):
    with pytest.raises(UsageError, match="not an address"):
        Scraper("vllm-1", url, print)


def test_stopping_twice_or_before_the_start(serve):
    never = Scraper("vllm-1", "http://127.0.0.1:9", print)
    never.stop()
    scraper = Scraper("vllm-1", serve(reply).url, lambda *_: None)
    scraper.start()
    scraper.stop()
    scraper.stop()
    until(lambda: not scraper._thread.is_alive())
