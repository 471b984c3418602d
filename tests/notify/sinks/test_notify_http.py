from __future__ import annotations

import datetime
import email.utils
import logging
import socket

import pytest
from loopback_receiver import RawReceiver, Receiver, Reply, drip, flood, hang

from oomwatch.config.load import ConfigError
from oomwatch.config.notify import SinkConfig
from oomwatch.notify.http import Answer, HttpClient, outcome, place_of, retry_after_seconds
from oomwatch.notify.outcome import Delivered, Later, Refused

SECRET = "T00SECRET00TOKEN"  # noqa: S105 - a sample


def post(url, **keys):
    keys = {"timeout_seconds": 10.0, **keys}
    client = HttpClient(SinkConfig(name="hook", **keys))
    url = f"{url.rstrip('/')}/services/{SECRET}"
    said = outcome(client.post(url, b"{}", {"Content-Type": "application/json"}), (url, SECRET))
    assert SECRET not in repr(said)
    return said


@pytest.fixture
def raw():
    made = []

    def start(serve):
        made.append(RawReceiver(serve))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def tls_receiver(tls_context):
    server = Receiver().use_tls(tls_context)
    yield server
    server.close()


def test_a_redirect_is_not_followed(receiver):
    receiver.answer(Reply(301, b"", {"Location": f"{receiver.url}elsewhere"}))
    said = post(receiver.url)
    assert isinstance(said, Refused)
    assert "redirect, which is not followed" in said.reason
    assert len(receiver.got) == 1

    receiver.answer(Reply(307, b"", {"Location": f"{receiver.url}elsewhere"}))
    assert isinstance(post(receiver.url), Later)
    assert len(receiver.got) == 2


def test_410_disables_and_other_refusals_do_not(receiver):
    receiver.answer(Reply(410, b"gone"))
    said = post(receiver.url)
    assert isinstance(said, Refused)
    assert said.disable

    receiver.answer(Reply(400, b"bad labels"))
    assert post(receiver.url) == Refused(f"127.0.0.1:{receiver.port} answered 400 (bad labels)")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_go_well_later(receiver, status):
    receiver.answer(Reply(status, b"", {"Retry-After": "7"}))
    assert post(receiver.url) == Later(f"127.0.0.1:{receiver.port} answered {status}", 7.0)


def test_what_quotes_the_secret_is_told_without_it(receiver):
    receiver.answer(Reply(404, f"no hook {SECRET} here\x1b[31m".encode()))
    said = post(receiver.url)
    assert isinstance(said, Refused)
    assert "no hook *** here" in said.reason
    assert said.reason.isprintable()


def test_the_time_that_is_asked_for():
    date = email.utils.format_datetime(datetime.datetime.fromtimestamp(1030, datetime.UTC), True)
    assert retry_after_seconds({"retry-after": "120"}) == 120
    assert retry_after_seconds({"retry-after": date}, now=1000) == 30
    assert retry_after_seconds({"retry-after": date}, now=2000) == 0
    assert retry_after_seconds({"retry-after": "9" * 9}) == 86400
    for useless in ({}, {"retry-after": "soon"}, {"retry-after": "-5"}, {"retry-after": "1" * 400}):
        assert retry_after_seconds(useless) is None


def test_a_receiver_that_hangs_is_left(raw):
    server = raw(hang)
    said = post(server.url, timeout_seconds=0.3)
    assert said == Later(f"127.0.0.1:{server.port}: no whole answer within 0.3 s")


def test_a_receiver_that_drips_is_left_at_the_deadline(raw):
    """Each byte comes within the time-out; only the whole does not."""
    server = raw(drip)
    said = post(server.url, timeout_seconds=0.5)
    assert said == Later(f"127.0.0.1:{server.port}: no whole answer within 0.5 s")
    assert not server.finished


def test_a_huge_answer_is_not_read(raw):
    server = raw(flood)
    assert post(server.url) == Delivered()
    assert not server.finished


def test_what_was_taken_is_not_sent_again_because_the_rest_is_missing(raw):
    def cut(connection, _stop):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nthank")

    assert post(raw(cut).url) == Delivered()


def test_a_connection_that_is_closed(raw):
    def close(connection, _stop):
        connection.recv(10)

    said = post(raw(close).url)
    assert isinstance(said, Later)


def test_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = post(f"http://127.0.0.1:{port}")
    assert said == Later(f"127.0.0.1:{port}: the connection was refused; is the receiver running?")


def test_a_name_that_does_not_exist():
    said = post("http://no-such-host.invalid")
    assert said == Later("no-such-host.invalid: the name cannot be resolved")


def test_a_certificate_of_an_unknown_authority_is_refused(tls_receiver):
    tls_receiver.clear()
    said = post(f"https://127.0.0.1:{tls_receiver.port}")
    assert isinstance(said, Later)
    assert "its certificate is not trusted (unable to get local issuer" in said.reason
    assert "name that in ca_file" in said.reason
    assert not tls_receiver.got


def test_a_certificate_of_the_named_authority_is_taken(tls_receiver, ca_file):
    tls_receiver.clear()
    assert post(f"https://127.0.0.1:{tls_receiver.port}", ca_file=ca_file) == Delivered()
    assert len(tls_receiver.got) == 1


def test_a_certificate_for_another_name_is_refused(tls_receiver, ca_file):
    said = post(f"https://localhost:{tls_receiver.port}", ca_file=ca_file)
    assert isinstance(said, Later)
    assert "not valid for 'localhost'" in said.reason


def test_https_where_there_is_none(receiver):
    said = post(f"https://127.0.0.1:{receiver.port}")
    assert isinstance(said, Later)
    assert "the TLS connection failed" in said.reason


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_bad_ca_file_is_told_at_once(tmp_path, text):
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="ca_file of receiver hook"):
        HttpClient(SinkConfig(name="hook", ca_file=str(path)))


def test_the_proxy_is_used(tls_context, ca_file):
    """A name that exists nowhere is reached through it, under TLS from end to end."""
    proxy = Receiver(tls_context)
    try:
        address = f"http://user:pa55@127.0.0.1:{proxy.port}"
        said = post("https://hooks.slack.com", proxy=address, ca_file=ca_file)
        assert said == Delivered()
        assert proxy.logins == ["Basic dXNlcjpwYTU1"]
        assert proxy.targets == ["hooks.slack.com:443"]
        assert proxy.got[0].path == f"/services/{SECRET}"
    finally:
        proxy.close()


def test_the_proxy_of_the_environment_is_used(tls_context, ca_file, monkeypatch):
    proxy = Receiver(tls_context)
    monkeypatch.setenv("https_proxy", proxy.url.rstrip("/"))
    try:
        assert post("https://hooks.slack.com", ca_file=ca_file) == Delivered()
        assert proxy.targets == ["hooks.slack.com:443"]
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert isinstance(post(f"https://127.0.0.1:{proxy.port}", timeout_seconds=5.0), Later)
        assert len(proxy.targets) == 1
    finally:
        proxy.close()


def test_a_proxy_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    said = post("https://hooks.slack.com", proxy=f"http://user:pa55@127.0.0.1:{port}")
    assert said == Later(
        f"hooks.slack.com: the proxy 127.0.0.1:{port} cannot be used: "
        "the connection was refused; is the receiver running?"
    )


def test_a_proxy_that_refuses(raw):
    def refuse(connection, _stop):
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 407 who are you\r\nContent-Length: 0\r\n\r\n")

    server = raw(refuse)
    said = post("https://hooks.slack.com", proxy=server.url.rstrip("/"))
    assert said == Later(
        f"hooks.slack.com: the proxy 127.0.0.1:{server.port} refused the connection with 407"
    )


def test_no_address_is_logged(receiver, caplog):
    with caplog.at_level(logging.DEBUG):
        logging.getLogger().debug("debug lines are kept")
        post(receiver.url)
    assert "debug lines are kept" in caplog.text
    assert SECRET not in caplog.text


def test_the_password_file_of_the_user_is_not_used(receiver, tmp_path, monkeypatch):
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password pa55\n", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    post(receiver.url)
    assert "authorization" not in receiver.got[0].headers


def test_places():
    assert place_of("https://user:pw@hooks.slack.com/services/x") == "hooks.slack.com"
    assert place_of("http://[::1]:9093/api") == "[::1]:9093"
    assert place_of("http://[bad") == "an address that cannot be read"


def test_an_answer_of_a_web_server_is_not_quoted():
    page = Answer(404, {}, b"<!DOCTYPE html><title>Not found</title>", "a.example")
    assert outcome(page) == Refused("a.example answered 404")


@pytest.mark.parametrize(
    "page",
    [
        b"<html>Please log in</html>",
        b"\xef\xbb\xbf\n<!-- portal --><!DOCTYPE HTML>\n<title>log in",
        b'<?xml version="1.0"?>\n<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0//EN">',
    ],
)
def test_a_web_page_has_not_taken_the_message(page):
    for status in (200, 202):
        assert outcome(Answer(status, {}, page, "a.example")) == Later(
            "a.example answered with a web page; is there a log-in in between?"
        )


@pytest.mark.parametrize("body", [b"", b"ok", b"<ok/>", b"{}", b"<!-- " * 20_000])
def test_what_is_no_web_page(body):
    assert outcome(Answer(200, {}, body, "a.example")) == Delivered()


def test_a_token_that_no_header_can_hold_is_said(receiver):
    client = HttpClient(SinkConfig(name="hook"))
    told = client.post(receiver.url, b"{}", {"Authorization": f"Bearer {SECRET}\u0442"})
    assert told == Later(
        f"127.0.0.1:{receiver.port}: a token or header holds letters that cannot be sent"
    )
