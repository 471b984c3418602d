"""Against a real mail server (aiosmtpd), with STARTTLS, TLS and log-in."""

from __future__ import annotations

import contextlib
import email
import email.policy
import socket

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from loopback_receiver import RawReceiver
from notice_samples import FLAGS, INCIDENT, SECOND, notice

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import EmailConfig
from oomwatch.notify.outcome import Delivered, Later, Refused
from oomwatch.notify.sinks import make_sink

PASSWORD = "pa55w0rd"  # noqa: S105 - a sample


class Inbox:
    """Takes mail, or answers as it is told."""

    def __init__(self) -> None:
        self.mails: list[email.message.EmailMessage] = []
        self.envelopes = []
        self.recipient_answer = self.data_answer = None

    def clear(self) -> Inbox:
        self.__init__()
        return self

    async def handle_RCPT(self, _server, _session, envelope, address, _options):  # noqa: N802
        if self.recipient_answer:
            return self.recipient_answer
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server, _session, envelope):  # noqa: N802
        if self.data_answer:
            return self.data_answer
        self.envelopes.append(envelope)
        self.mails.append(email.message_from_bytes(envelope.content, policy=email.policy.default))
        return "250 taken"


@contextlib.contextmanager
def serving(inbox, **options):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(inbox, hostname="127.0.0.1", port=port, **options)
    controller.start()
    try:
        yield port
    finally:
        controller.stop()


@pytest.fixture(scope="module")
def shared_inbox():
    inbox = Inbox()
    with serving(inbox) as port:
        yield inbox, port


@pytest.fixture
def inbox(shared_inbox):
    return shared_inbox[0].clear()


@pytest.fixture
def sink(shared_inbox):
    shared_inbox[0].clear()
    return sink_of(shared_inbox[1], security="none")


def sink_of(port, **keys):
    keys = {
        "recipients": ("oncall@example.com", "team@example.com"),
        "timeout_seconds": 10.0,
        **keys,
    }
    config = EmailConfig(
        name="mail", server="127.0.0.1", port=port, sender="oomwatch@gpu.example.com", **keys
    )
    return make_sink(config, {})


def test_an_incident_is_a_mail_in_text_and_html(sink, inbox):
    told = sink.send(notice("opened"), None)
    assert told == Delivered("<inc-0123456789ab.oomwatch@gpu.example.com>")
    [mail] = inbox.mails
    assert inbox.envelopes[0].rcpt_tos == ["oncall@example.com", "team@example.com"]
    assert mail["Subject"].startswith("[CRITICAL] A long prefill needed more activation memory")
    assert mail["From"] == "oomwatch@gpu.example.com"
    assert mail["Auto-Submitted"] == "auto-generated"
    plain = mail.get_body(("plain",)).get_content()
    page = mail.get_body(("html",)).get_content()
    for part in (FLAGS, "3.1 GiB asked", "inc-0123456789ab", "83 % sure", "gpu-07.example.com"):
        assert part in plain
        assert part in page
    assert f"<pre><b>{FLAGS}</b></pre>" in page
    assert f'<a href="{INCIDENT.runbook_url}">' in page


def test_the_mails_of_an_incident_are_one_thread(sink, inbox):
    first = sink.send(notice("opened"), None).reference
    assert sink.send(notice("updated"), first) == Delivered(first)
    assert sink.send(notice("resolved"), first) == Delivered(first)
    opened, updated, resolved = inbox.mails
    assert opened["Message-ID"] == first
    assert opened["References"] is None
    for later in (updated, resolved):
        assert later["In-Reply-To"] == later["References"] == first
    assert len({mail["Message-ID"] for mail in inbox.mails}) == 3
    assert resolved["Subject"].startswith("[RESOLVED]")


def test_a_second_attempt_has_the_same_id(sink, inbox):
    for kind, thread in (("opened", None), ("resolved", "<x@y>"), ("grouped", None)):
        inbox.clear()
        sink.send(notice(kind), thread)
        sink.send(notice(kind), thread)
        first, second = inbox.mails
        assert first["Message-ID"] == second["Message-ID"]


def test_a_group_is_one_mail(sink, inbox):
    sink.send(notice("grouped"), None)
    [mail] = inbox.mails
    assert "2 incidents on gpu-07.example.com" in mail["Subject"]
    body = mail.get_body(("plain",)).get_content()
    assert INCIDENT.id in body
    assert SECOND.id in body


def test_chinese_arrives(inbox, shared_inbox):
    sink_of(shared_inbox[1], security="none", lang="zh").send(notice("resolved"), None)
    assert inbox.mails[0]["Subject"].startswith("【已恢复】")
    assert "处理手册" in inbox.mails[0].get_body(("plain",)).get_content()


@pytest.mark.parametrize(
    ("answers", "kind", "says"),
    [
        ({"data_answer": "451 try later"}, Later, "answered 451 try later"),
        ({"data_answer": "554 spam"}, Refused, "answered 554 spam"),
        ({"recipient_answer": "450 greylisted"}, Later, "refused every recipient: 450 greylisted"),
        ({"recipient_answer": "550 unknown"}, Refused, "refused every recipient: 550 unknown"),
    ],
)
def test_what_the_server_answers(sink, inbox, answers, kind, says):
    for name, value in answers.items():
        setattr(inbox, name, value)
    told = sink.send(notice("opened"), None)
    assert isinstance(told, kind)
    assert says in told.reason


def test_starttls_with_a_log_in(tls_context, ca_file, secret):
    seen = []

    def check(_server, _session, _envelope, _mechanism, data):
        seen.append((data.login, data.password))
        return AuthResult(success=data.password == PASSWORD.encode(), handled=False)

    inbox = Inbox()
    options = {"tls_context": tls_context, "require_starttls": True, "authenticator": check}
    with serving(inbox, auth_required=True, **options) as port:
        keys = {"ca_file": ca_file, "user": "me"}
        sink = sink_of(port, password_file=secret(PASSWORD), **keys)
        assert isinstance(sink.send(notice("opened"), None), Delivered)
        assert seen == [(b"me", PASSWORD.encode())]
        assert len(inbox.mails) == 1

        wrong = sink_of(port, password_file=secret("wr0ng"), **keys).send(notice("opened"), None)
        assert isinstance(wrong, Refused)
        assert "answered 535" in wrong.reason
        assert "wr0ng" not in wrong.reason

        stranger = sink_of(port, user="me", password_file=secret(PASSWORD))
        told = stranger.send(notice("opened"), None)
        assert isinstance(told, Later)
        assert "its certificate is not trusted" in told.reason
        assert len(inbox.mails) == 1


def test_tls_from_the_first_byte(tls_context, ca_file):
    inbox = Inbox()
    with serving(inbox, ssl_context=tls_context) as port:
        told = sink_of(port, security="tls", ca_file=ca_file).send(notice("opened"), None)
        assert isinstance(told, Delivered)
        refused = sink_of(port, security="tls").send(notice("opened"), None)
        assert isinstance(refused, Later)
        assert "name that in ca_file" in refused.reason
    assert len(inbox.mails) == 1


def test_a_server_without_starttls_gets_no_mail(inbox, shared_inbox):
    told = sink_of(shared_inbox[1], security="starttls").send(notice("opened"), None)
    assert isinstance(told, Refused)
    assert "STARTTLS" in told.reason
    assert not inbox.mails


def test_nobody_there_and_nobody_answering():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        silent = sink_of(port, security="none", timeout_seconds=0.3)
        assert silent.send(notice("opened"), None) == Later(
            f"127.0.0.1:{port}: no whole answer within 0.3 s"
        )
    gone = sink_of(port, security="none").send(notice("opened"), None)
    assert gone == Later(f"127.0.0.1:{port}: the connection was refused; is the receiver running?")


def test_a_server_that_drips_is_left_at_the_deadline():
    def greet_slowly(connection, stop):
        for byte in b"220-" + b"x" * 1_000:
            if stop.wait(0.02):
                return
            connection.sendall(bytes([byte]))

    server = RawReceiver(greet_slowly)
    try:
        told = sink_of(server.port, security="none", timeout_seconds=0.5).send(
            notice("opened"), None
        )
        assert told == Later(f"127.0.0.1:{server.port}: no whole answer within 0.5 s")
        assert not server.finished
    finally:
        server.close()


@pytest.mark.parametrize("greets", [False, True])
def test_a_reply_without_end_is_not_read(greets):
    """It comes as fast as it can, each line a short one."""

    def flood(connection, stop):
        if greets:
            connection.sendall(b"220 hi\r\n")
            connection.recv(1000)
        for _ in range(2_000):
            if stop.is_set():
                return
            connection.sendall((b"250-" + b"B" * 4_000 + b"\r\n") * 20)

    server = RawReceiver(flood)
    try:
        told = sink_of(server.port, security="none").send(notice("opened"), None)
        assert told == Later(f"127.0.0.1:{server.port}: a reply had no end")
        assert not server.finished
    finally:
        server.close()


@pytest.mark.parametrize("methods", ["PLAIN", "LOGIN"])
def test_a_server_that_repeats_the_log_in_is_told_on_without_it(secret, methods):
    def repeat(connection, _stop):
        lines = connection.makefile("rb")
        connection.sendall(b"220 hi\r\n")
        for line in lines:
            if line.startswith(b"ehlo"):
                connection.sendall(b"250-mx\r\n250 AUTH " + methods.encode() + b"\r\n")
            elif line.startswith(b"AUTH LOGIN"):
                connection.sendall(b"334 UGFzc3dvcmQ6\r\n")
            elif line.startswith(b"quit"):
                lines.close()
                return
            else:
                sent = line.split()[-1]
                connection.sendall(b"535 no " + sent + b" or pa55w0rd here\r\n")

    server = RawReceiver(repeat)
    try:
        sink = sink_of(server.port, security="none", user="me", password_file=secret(PASSWORD))
        assert sink.send(notice("opened"), None) == Refused(
            f"127.0.0.1:{server.port} answered 535 no *** or *** here"
        )
    finally:
        server.close()


def test_a_server_that_goes_away_after_it_took_the_mail_has_taken_it():
    def take(connection, _stop):
        lines = connection.makefile("rb")
        connection.sendall(b"220 hi\r\n")
        for line in lines:
            if line.upper().startswith(b"DATA"):
                connection.sendall(b"354 go\r\n")
                while lines.readline() != b".\r\n":
                    pass
                connection.sendall(b"250 taken\r\n")
                lines.close()
                return
            connection.sendall(b"250 ok\r\n")

    server = RawReceiver(take)
    try:
        told = sink_of(server.port, security="none").send(notice("opened"), None)
        assert isinstance(told, Delivered)
    finally:
        server.close()


def test_the_password_is_needed():
    with pytest.raises(ConfigError, match="OOMWATCH_NOTIFY_MAIL_PASSWORD"):
        sink_of(25, user="me")


def test_preview(sink, inbox):
    said = sink.preview(notice("resolved"), "<first@x>")
    assert "To: oncall@example.com, team@example.com" in said
    assert "Subject: [RESOLVED]" in said
    assert "In-Reply-To: <first@x>" in said
    assert not inbox.mails
