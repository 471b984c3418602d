"""The page over real sockets: what is answered, to whom, and to those who mean no good."""

from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import os
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path

import pytest

from oomwatch.config import ConfigError
from oomwatch.config.export import ExportConfig
from oomwatch.export.access import Access, load_access
from oomwatch.export.page import PageHead
from oomwatch.export.request import BadRequestError, parse_request
from oomwatch.export.server import MetricsServer, is_open
from oomwatch.export.site import Site, takes_gzip

PAGE = b"# HELP oomwatch_x X.\n# TYPE oomwatch_x gauge\noomwatch_x 1\n" * 100


class Served:
    """A server on a free port; `page` may be set, `asked` is who has asked for it."""

    def __init__(self, address: str = "127.0.0.1:0", access: Access | None = None, **options):
        self.page: bytes | None = PAGE
        self.asked: list[tuple[str, str]] = []
        site = Site(self._make, lambda: self.page is not None, {"kv": "# 显存"}.get)
        self.server = MetricsServer(address, site, access or Access(), **options)
        self.server.start()
        assert self.server.bound.wait(10)

    def _make(self, form, asking):
        self.asked.append((form.format, asking))
        if self.page == b"broken":
            raise RuntimeError("broken")
        if self.page is None:
            return None
        half = len(self.page) // 2
        return PageHead(self.page[:half], packed=form.packed).with_end(self.page[half:])

    def get(self, path="/metrics", method="GET", context=None, **headers):
        kind = http.client.HTTPSConnection if context else http.client.HTTPConnection
        more = {"context": context} if context else {}
        connection = kind(
            "localhost" if context else "127.0.0.1", self.server.port, timeout=10, **more
        )
        with contextlib.closing(connection):
            names = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=names)
            answer = connection.getresponse()
            return answer.status, dict(answer.headers), answer.read()

    def raw(self, data: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self.server.port), 10) as connection:
            connection.sendall(data)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def served():
    one = Served()
    yield one
    one.server.close()


# ---------------------------------------------------------------- what is answered
def test_the_page(served):
    status, headers, body = served.get(User_Agent="Prometheus/2.42")
    assert (status, body) == (200, PAGE)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert served.asked == [("text", "127.0.0.1 Prometheus/2.42")]


def test_the_page_in_the_form_that_is_asked_for(served):
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
    _, headers, body = served.get(Accept=accept, Accept_Encoding="gzip")
    assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(body) == PAGE
    assert int(headers["Content-Length"]) == len(body) < len(PAGE)


@pytest.mark.parametrize(
    ("header", "taken"),
    [("gzip", True), ("br, gzip;q=0.5", True), ("*", True), ("gzip;q=0", False), ("br", False)],
)
def test_gzip_if_asked(header, taken):
    assert takes_gzip(header) is taken


def test_ready_once_something_was_read(served):
    served.page = None
    for path in ("/-/ready", "/metrics"):
        status, headers, _ = served.get(path)
        assert (status, headers["Retry-After"]) == (503, "2")
    assert served.get("/-/healthy")[0] == 200
    served.page = PAGE
    assert served.get("/-/ready")[::2] == (200, b"ready\n")


def test_pages_of_causes(served):
    assert served.get("/runbooks/kv")[::2] == (200, "# 显存".encode())
    assert served.get("/runbooks/kv.md")[0] == 200
    assert served.get("/runbooks/../../etc/passwd")[0] == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 200),
        ("GET", "/metrics?x=1", 200),
        ("GET", "/nothing", 404),
        ("POST", "/metrics", 405),
        ("DELETE", "/", 405),
    ],
)
def test_other_requests(served, method, path, status):
    assert served.get(path, method)[0] == status


def test_head_has_no_body(served):
    status, headers, body = served.get(method="HEAD")
    assert (status, body, int(headers["Content-Length"])) == (200, b"", len(PAGE))


def test_a_fault_of_ours_is_told_and_is_not_the_end(served):
    served.page = b"broken"
    assert served.get()[0] == 500
    served.page = PAGE
    assert served.get()[0] == 200


# ---------------------------------------------------------------- those who mean no good
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: 1\r\n folded\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 4000 + b"\r\n", 431),
        (b"GET /" + b"a" * 20_000, 431),
    ],
)
def test_requests_that_are_none(served, data, status):
    assert served.raw(data).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://gpu-1:9400/metrics", "/metrics"),
        ("HTTPS://gpu-1/-/ready?x=/y", "/-/ready"),
        ("http://gpu-1", "/"),
        ("http://gpu-1?x=/metrics", "/"),
        ("/runbooks/a://b/c", "/runbooks/a://b/c"),
    ],
)
def test_an_address_asks_for_its_path(target, path):
    assert parse_request(f"GET {target} HTTP/1.1\r\n\r\n".encode(), "").path == path


def test_a_request_in_pieces(served):
    with socket.create_connection(("127.0.0.1", served.server.port), 10) as connection:
        for piece in (b"GET /-/hea", b"lthy HTTP/1.1\r", b"\nHost: x\r\n\r", b"\n"):
            connection.sendall(piece)
            time.sleep(0.02)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 OK")


def test_a_request_that_never_ends_is_ended():
    served = Served(request_seconds=0.3)
    place = ("127.0.0.1", served.server.port)
    with contextlib.closing(served.server), socket.create_connection(place, 10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        sent = 0
        with contextlib.suppress(OSError):  # a byte now and then extends nothing
            for sent in range(1000):  # noqa: B007
                connection.sendall(b"X")
                time.sleep(0.05)
        assert sent < 900


def test_one_that_asks_nothing_is_told_that_it_took_too_long():
    served = Served(request_seconds=0.2)
    place = ("127.0.0.1", served.server.port)
    with contextlib.closing(served.server), socket.create_connection(place, 4) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 408 ")


def test_slow_clients_lock_nobody_out_and_do_not_pile_up():
    served = Served(request_seconds=600)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(served.server))
        for _ in range(40):
            connection = socket.create_connection(("127.0.0.1", served.server.port), 10)
            stack.enter_context(connection).sendall(b"GET /metrics HTTP/1.1\r\n")
        for _ in range(10):
            assert served.get()[0] == 200
        assert len(served.server._serving) < 6
        assert sum(thread.name == "metrics" for thread in threading.enumerate()) == 6


def test_a_client_that_reads_nothing_is_let_go():
    served = Served(answer_seconds=0.3)
    served.page = b"x" * 50_000_000
    place = ("127.0.0.1", served.server.port)
    with contextlib.closing(served.server), socket.create_connection(place, 10) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        serving = served.server._serving
        deadline = time.monotonic() + 20
        while not serving and time.monotonic() < deadline:
            time.sleep(0.01)
        while serving and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not serving


def test_a_header_that_comes_twice_counts_once():
    request = parse_request(b"GET /metrics?a HTTP/1.0\nAccept: a\nACCEPT: b\n\n", "peer")
    assert (request.path, request.header("accept")) == ("/metrics", "a")
    with pytest.raises(BadRequestError):
        parse_request(b"GET / HTTP/1.1\n: x\n\n", "peer")


# ---------------------------------------------------------------- addresses
def test_a_port_that_is_taken_is_served_once_it_is_free(served, caplog):
    address = f"127.0.0.1:{served.server.port}"
    site = Site(lambda _form, _asking: b"second", lambda: True, lambda _cause: None)
    second = MetricsServer(address, site, Access(), retry_seconds=0.05)
    second.start()
    try:
        assert not second.bound.wait(0.3)
        served.server.close()
        assert second.bound.wait(10)
        assert served_by(second) == b"second"
    finally:
        second.close()
    told = [record.message for record in caplog.records if "export.listen" in record.message]
    assert told == [f"export.listen: {address}: Address already in use; it is tried again"]


def served_by(server: MetricsServer) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        return connection.getresponse().read()


def test_a_unix_socket_also_over_one_that_was_left_behind(tmp_path):
    path = tmp_path / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    served = Served(f"unix:{path}", Access(users={"a": "b"}))
    assert path.stat().st_mode & 0o777 == 0o660
    with socket.socket(socket.AF_UNIX) as connection:  # who may open it needs no password
        connection.connect(str(path))
        connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    assert data.startswith(b"HTTP/1.1 200 OK")
    assert data.endswith(PAGE)
    assert served.asked[0][1].startswith("unix")
    served.server.close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_let_be(tmp_path):
    path = tmp_path / "metrics.sock"
    path.write_text("precious")
    site = Site(lambda _form, _asking: PAGE, lambda: True, lambda _cause: None)
    server = MetricsServer(f"unix:{path}", site, Access(), retry_seconds=0.05)
    server.start()
    assert not server.bound.wait(0.3)
    server.close()
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("127.0.0.1:1", False),
        ("127.8.0.1:1", False),
        ("[::1]:1", False),
        ("localhost:1", False),
        ("unix:/run/x", False),
        ("0.0.0.0:1", True),
        ("[::]:1", True),
        ("10.0.0.7:1", True),
        ("[fe80::1%eth0]:1", True),
        ("gpu-1.internal:1", True),
    ],
)
def test_whether_other_hosts_reach_it(address, reached):
    assert is_open(address) is reached


def test_an_ipv6_address():
    site = Site(lambda _form, _asking: PAGE, lambda: True, lambda _cause: None)
    server = MetricsServer("[::1]:0", site, Access())
    server.start()
    with contextlib.closing(server):
        if not server.bound.wait(2):
            pytest.skip("this host has no IPv6")
        with socket.create_connection(("::1", server.port), 10) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")


def test_it_ends_at_once_whoever_is_connected(served):
    with socket.create_connection(("127.0.0.1", served.server.port), 10):
        served.server.close()
    assert not served.server._thread.is_alive()
    with pytest.raises(OSError, match="refused"):
        served.raw(b"GET / HTTP/1.1\r\n\r\n")


# ---------------------------------------------------------------- TLS and passwords
@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    words += ["-keyout", str(key), "-out", str(certificate), "-days", "2"]
    try:
        subprocess.run(words, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return certificate, key


def test_tls_with_a_key_from_a_credential(certificate):
    chain, key = certificate
    config = ExportConfig(tls_certificate_file=str(chain), tls_key_file=key.name)
    access = load_access(config, {"CREDENTIALS_DIRECTORY": str(key.parent)})
    served = Served(access=access)
    with contextlib.closing(served.server):
        context = ssl.create_default_context(cafile=chain)
        assert served.get(context=context)[::2] == (200, PAGE)
        # Neither one that speaks no TLS nor one that does not trust it is the end.
        with contextlib.suppress(ConnectionResetError):
            assert not served.raw(b"GET / HTTP/1.1\r\n\r\n").startswith(b"HTTP")
        with pytest.raises(ssl.SSLCertVerificationError):
            served.get(context=ssl.create_default_context())
        assert served.get(context=context)[0] == 200


def test_slow_clients_lock_nobody_out_of_tls_either(certificate):
    chain, key = certificate
    config = ExportConfig(tls_certificate_file=str(chain), tls_key_file=str(key))
    served = Served(access=load_access(config, {}), request_seconds=600)
    context = ssl.create_default_context(cafile=chain)
    place = ("127.0.0.1", served.server.port)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(served.server))
        for _ in range(20):
            stack.enter_context(socket.create_connection(place, 10))  # and no handshake
        for _ in range(20):
            plain = stack.enter_context(socket.create_connection(place, 10))
            slow = context.wrap_socket(plain, server_hostname="localhost")
            stack.enter_context(slow).sendall(b"GET /met")
        assert served.get(context=context)[0] == 200


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (basic("prom:geheim:1"), 200),
        (basic("other:值"), 200),
        (basic("prom:wrong"), 401),
        (basic("prom"), 401),
        ("Bearer geheim:1", 401),
        ("Basic !!!", 401),
        ("", 401),
    ],
)
def test_users(tmp_path, given, status):
    file = tmp_path / "users"
    file.write_text("prom:geheim:1\n\nother:值\n")
    access = load_access(ExportConfig(users_file=str(file)), {})
    assert "geheim" not in repr(access)
    served = Served(access=access)
    with contextlib.closing(served.server):
        answer = served.get(Authorization=given) if given else served.get()
        assert answer[0] == status
        if status == 401:
            assert answer[1]["WWW-Authenticate"] == 'Basic realm="oomwatch"'
            assert not served.asked
        assert served.get("/-/ready")[0] == 200


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"users_file": "/nowhere/users"}, "export.users_file: /nowhere/users cannot be read"),
        ({"users_file": "PIPE"}, "not a regular file"),
        ({"tls_certificate_file": "PIPE", "tls_key_file": "USERS"}, "not a regular file"),
        ({"users_file": "USERS"}, "each line must be user:password"),
        (
            {"tls_certificate_file": "/nowhere/c.pem", "tls_key_file": "/nowhere/k.pem"},
            "export.tls_certificate_file, export.tls_key_file: no such file",
        ),
        ({"tls_certificate_file": "USERS", "tls_key_file": "USERS"}, "export.tls_key_file: "),
        (
            {"tls_certificate_file": "/c.pem", "tls_key_file": "metrics-key"},
            "names the credential metrics-key, and systemd passed none",
        ),
    ],
)
def test_files_that_are_wrong_are_told_in_one_line(tmp_path, config, message):
    os.mkfifo(tmp_path / "pipe")
    users = tmp_path / "users"
    users.write_text("secret-without-colon\n")
    given = {"USERS": users, "PIPE": tmp_path / "pipe"}
    config = {name: str(given.get(value, value)) for name, value in config.items()}
    with pytest.raises(ConfigError) as caught:
        load_access(ExportConfig(**config), {})
    assert message in str(caught.value)
    assert "secret-without-colon" not in str(caught.value)
    assert "\n" not in str(caught.value)
