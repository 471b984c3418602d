"""E-mail: text and simple HTML; the messages of one incident are one thread."""

from __future__ import annotations

import base64
import contextlib
import datetime
import html
import logging
import platform
import re
import smtplib
import ssl
from collections.abc import Mapping, Sequence
from email.message import EmailMessage
from email.policy import SMTP as SMTP_POLICY
from email.utils import format_datetime
from typing import Final

from oomwatch.config.sinks import EmailConfig
from oomwatch.net.deadline import Deadline
from oomwatch.notify import text
from oomwatch.notify.clean import clean_text
from oomwatch.notify.notice import Notice
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused
from oomwatch.notify.quoting import quoted
from oomwatch.notify.sinks.base import BaseSink
from oomwatch.notify.sinks.smtp_connection import WatchedSmtp, WatchedSmtpTls
from oomwatch.notify.tls import trust
from oomwatch.notify.trouble import connection_trouble, timed_out, tls_trouble
from oomwatch.report.locale import Language

_LOG = logging.getLogger(__name__)
_PORTS: Final = {"starttls": 587, "tls": 465, "none": 25}
_BODY: Final = 20_000
_LINK: Final = re.compile(r"https?://[^\s&<>\"']+(?:&amp;[^\s&<>\"']+)*")


def make(config: EmailConfig, environ: Mapping[str, str]) -> EmailSink:
    """Raises `ConfigError` if password or certificates cannot be read."""
    return EmailSink(config, environ)


class EmailSink(BaseSink):
    """Mail through one server. A thread is named by the Message-ID of its first mail."""

    kind = "email"
    groups = True
    per_second = 1.0

    def __init__(self, config: EmailConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._config = config
        self._server = config.server or "localhost"
        self._port = config.port or _PORTS[config.security]
        self._sender = config.sender or "oomwatch"
        self._trust: ssl.SSLContext | None = None
        if config.security != "none":
            self._trust = trust(config.ca_file, f"ca_file of receiver {self.name}")
        self._password()

    def _send(self, notice: Notice, thread: str | None) -> Outcome:
        mail, password = self._mail(notice, thread), self._password()
        place = f"{self._server}:{self._port}"
        with Deadline(self._config.timeout_seconds) as deadline:
            try:
                self._hand_over(mail, password, deadline)
            except (smtplib.SMTPException, OSError, ValueError) as error:
                if deadline.passed or timed_out(error):
                    seconds = self._config.timeout_seconds
                    return Later(f"{place}: no whole answer within {seconds:g} s")
                return _outcome(error, place, self._secrets(password))
        return Delivered(thread or mail["Message-ID"])

    def _hand_over(self, mail: EmailMessage, password: str | None, deadline: Deadline) -> None:
        address = (self._server, self._port, self._config.timeout_seconds, deadline)
        if self._config.security == "tls":
            server: smtplib.SMTP = WatchedSmtpTls(*address, self._trust)
        else:
            server = WatchedSmtp(*address)
        try:
            if self._config.security == "starttls":
                server.starttls(context=self._trust)
            if self._config.user is not None:
                server.login(self._config.user, password or "")
            refused = server.send_message(mail)
        finally:
            with contextlib.suppress(smtplib.SMTPException, OSError):
                server.quit()  # what was taken is not sent again because of a last word
            server.close()
        if refused:
            _LOG.warning("receiver %s: %d recipients were refused", self.name, len(refused))

    def preview(self, notice: Notice, thread: str | None) -> str:
        """Headers and text."""
        mail = self._mail(notice, thread)
        shown = ("From", "To", "Subject", "In-Reply-To")
        head = "\n".join(f"{name}: {mail[name]}" for name in shown if mail[name])
        return f"{head}\n\n{text.fit(notice, self.lang, _BODY)}"

    def _password(self) -> str | None:
        return None if self._config.user is None else self._credentials.get("password")

    def _secrets(self, password: str | None) -> tuple[str, ...]:
        """The password as it is, and as the ways to log in send it."""
        if not password:
            return ()
        sent = (password, f"\0{self._config.user}\0{password}")
        return (password, *(base64.b64encode(one.encode()).decode() for one in sent))

    def _mail(self, notice: Notice, thread: str | None) -> EmailMessage:
        mail = EmailMessage(policy=SMTP_POLICY)
        mail["From"] = self._sender
        mail["To"] = ", ".join(self._config.recipients)
        root = thread or self._root(notice)
        is_first = thread is None and notice.kind in {"opened", "escalated"}
        subject = text.subject(notice, self.lang)
        mail["Subject"] = subject
        mail["Date"] = format_datetime(datetime.datetime.now(datetime.UTC))
        mail["Message-ID"] = root if root and is_first else self._id(notice.id)
        if root and not is_first:
            mail["In-Reply-To"] = mail["References"] = root
        mail["Auto-Submitted"] = "auto-generated"  # so that nobody's holiday answers it
        body = text.fit(notice, self.lang, _BODY)
        mail.set_content(f"{body}\n")
        mail.add_alternative(as_html(notice, subject, body, self.lang), subtype="html")
        return mail

    def _root(self, notice: Notice) -> str | None:
        """The Message-ID of the first mail about an incident."""
        return self._id(notice.incidents[0].id) if len(notice.incidents) == 1 else None

    def _id(self, name: str) -> str:
        domain = self._sender.rpartition("@")[2] or platform.node()
        return f"<{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.oomwatch@{domain}>"


def as_html(notice: Notice, subject: str, body: str, lang: Language) -> str:
    """The text as HTML: flags stand apart to be copied, the runbook is a link, all else is text."""
    commands = {" ".join(r.flags) for i in notice.incidents for r in i.remedies if r.flags}
    runbooks = {html.escape(i.runbook_url) for i in notice.incidents if i.runbook_url}
    lines = []
    for line in body.split("\n"):
        if line.strip() in commands:
            lines.append(f"<pre><b>{html.escape(line.strip())}</b></pre>")
        else:
            shown = _LINK.sub(
                lambda link: (
                    f'<a href="{link[0]}">{link[0]}</a>' if link[0] in runbooks else link[0]
                ),
                html.escape(line),
            )
            lines.append(f"{shown}<br>")
    page = "\n".join(lines)
    return (
        f'<!DOCTYPE html>\n<html lang="{lang}"><body style="font-family: sans-serif">\n'
        f"<h3>{html.escape(subject)}</h3>\n{page}\n</body></html>\n"
    )


def _outcome(error: Exception, place: str, secrets: Sequence[str]) -> Later | Refused:
    if isinstance(error, smtplib.SMTPRecipientsRefused):
        answers = list(error.recipients.values())
        code, said = answers[0] if answers else (550, b"")
        passing = all(400 <= one[0] < 500 for one in answers)
        reason = f"{place} refused every recipient: {_quoted(code, said, secrets)}"
        return Later(reason) if passing else Refused(reason)
    if isinstance(error, smtplib.SMTPResponseException):
        reason = f"{place} answered {_quoted(error.smtp_code, error.smtp_error, secrets)}"
        return Refused(reason) if 500 <= error.smtp_code < 600 else Later(reason)
    if isinstance(error, smtplib.SMTPNotSupportedError):
        return Refused(f"{place} does not offer what is asked: {clean_text(error, 120)}")
    if isinstance(error, ssl.SSLError):
        return Later(f"{place}: {tls_trouble(error)}")
    return Later(f"{place}: {connection_trouble(error)}")


def _quoted(code: int, said: bytes | str, secrets: Sequence[str]) -> str:
    return f"{code} {quoted(said, secrets)}".strip()
