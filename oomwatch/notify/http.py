"""One POST to a receiver: bounded in time and size, without redirects, no secret in what it says.

A connection is made for each message: messages are few, and one that was kept open may have died
unnoticed just when it is needed. The deadline holds for all of it, from the first packet to the
last byte of the answer, also where the other side sends a byte now and then: at the deadline the
connection is shut down from a timer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import email.utils
import logging
import re
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import oomwatch
from oomwatch.config.notify import SinkConfig
from oomwatch.net.deadline import Deadline
from oomwatch.notify.outcome import Delivered, Later, Outcome, Refused
from oomwatch.notify.quoting import quoted
from oomwatch.notify.tls import trust
from oomwatch.notify.trouble import connection_trouble, proxy_trouble, tls_trouble

if TYPE_CHECKING:
    import ssl

    import requests

_ANSWER_BYTES: Final = 64 * 1024
_MOST_CONNECT_SECONDS: Final = 10.0
_LONGEST_WAIT_SECONDS: Final = 86_400.0
_WEB_PAGE: Final = re.compile(
    rb"(?:\xef\xbb\xbf)?(?:\s|<\?xml[^>]{0,200}>|<!--.{0,2000}?-->)*+<(?:!doctype\s+html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_TEMPORARY: Final = frozenset({302, 303, 307, 408, 425, 429})


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a receiver answered; of the body no more than 64 KiB."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: bytes
    place: str
    """Host and port that answered, for people."""


class HttpClient:
    """Posts to the addresses of one receiver. For one thread."""

    def __init__(self, config: SinkConfig) -> None:
        """Raises `ConfigError` if the certificates to trust cannot be read."""
        self._timeout_seconds = config.timeout_seconds
        self._proxy = config.proxy
        self._ca_file = config.ca_file
        self._trust: ssl.SSLContext | None = None
        if self._ca_file is not None:
            self._trust = trust(self._ca_file, f"ca_file of receiver {config.name}")

    def post(self, url: str, body: bytes, headers: Mapping[str, str]) -> Answer | Later:
        """Send one message and read the answer; `Later` where there was none."""
        import requests  # noqa: PLC0415 - 80 ms and 6 MiB, only for those who are told by HTTP

        logging.getLogger("urllib3").setLevel(logging.INFO)  # its debug lines tell whole addresses
        place = place_of(url)
        with Deadline(self._timeout_seconds) as deadline, requests.Session() as session:
            self._prepare(session, url, deadline)
            try:
                response = session.post(
                    url,
                    data=body,
                    headers={"User-Agent": user_agent(), "Accept-Encoding": "identity", **headers},
                    timeout=(
                        min(self._timeout_seconds, _MOST_CONNECT_SECONDS),
                        self._timeout_seconds,
                    ),
                    allow_redirects=False,
                    proxies=self._proxies(url),
                    stream=True,
                )
            except (requests.exceptions.RequestException, OSError, ValueError) as error:
                if deadline.passed:
                    return self._too_late(place)
                return self._failed(error, place)
            with response:
                if deadline.passed:  # what was cut off looks like the end of the answer's head
                    return self._too_late(place)
                return Answer(
                    response.status_code,
                    {name.lower(): value for name, value in response.headers.items()},
                    _read_body(response),
                    place,
                )

    def _prepare(self, session: requests.Session, url: str, deadline: Deadline) -> None:
        from oomwatch.net.http_adapter import WatchedAdapter  # noqa: PLC0415 - needs requests

        session.trust_env = False  # no passwords of ~/.netrc
        context = self._context() if url.lower().startswith("https:") else None
        for scheme in ("http://", "https://"):
            session.mount(scheme, WatchedAdapter(deadline, context))

    def _context(self) -> ssl.SSLContext:
        if self._trust is None:
            self._trust = trust(None, "")
        return self._trust

    def _proxies(self, url: str) -> dict[str, str]:
        if self._proxy is not None:
            return {"http": self._proxy, "https": self._proxy}
        from requests.utils import get_environ_proxies  # noqa: PLC0415 - as requests itself

        return dict(get_environ_proxies(url))

    def _too_late(self, place: str) -> Later:
        return Later(f"{place}: no whole answer within {self._timeout_seconds:g} s")

    def _failed(self, error: BaseException, place: str) -> Later:
        """What went wrong, by kinds of errors: their own texts hold whole addresses."""
        import requests  # noqa: PLC0415 - loaded already

        if isinstance(error, requests.exceptions.Timeout):
            return self._too_late(place)
        if isinstance(error, requests.exceptions.ProxyError):
            proxy = "the proxy" if self._proxy is None else f"the proxy {place_of(self._proxy)}"
            return Later(f"{place}: {proxy} {proxy_trouble(error)}")
        if isinstance(error, requests.exceptions.SSLError):
            return Later(f"{place}: {tls_trouble(error)}")
        if isinstance(error, UnicodeError):
            return Later(f"{place}: a token or header holds letters that cannot be sent")
        if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.InvalidSchema):
            return Later(f"{place}: the address is not one that can be posted to")
        return Later(f"{place}: {connection_trouble(error)}")


def outcome(answer: Answer | Later, secrets: Iterable[str] = ()) -> Outcome:
    """What a status means for the message, as Standard Webhooks has it.

    A web page is no success with any status: a log-in has answered for the receiver.
    `secrets` are the address if it may be one, values of headers and keys: what must not be
    repeated, should the receiver quote it.
    """
    if isinstance(answer, Later):
        return answer
    status = answer.status
    if 200 <= status < 300:
        if is_web_page(answer.body):
            return Later(f"{answer.place} answered with a web page; is there a log-in in between?")
        return Delivered()
    reason = f"{answer.place} answered {status}{_said(answer.body, secrets)}"
    if status == 410:
        return Refused(f"{reason}: this address is no longer in use", disable=True)
    if 300 <= status < 400:
        reason = f"{answer.place} answered {status}, a redirect, which is not followed"
    if status in _TEMPORARY or status >= 500:
        return Later(reason, retry_after_seconds(answer.headers))
    return Refused(reason)


def is_web_page(body: bytes) -> bool:
    """Whether this is a page for people."""
    return _WEB_PAGE.match(body) is not None


def retry_after_seconds(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that a ``Retry-After`` asks to wait, from a number or an HTTP date; at most a day."""
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
        seconds = float(text)
    else:
        try:
            moment = email.utils.parsedate_to_datetime(text)
            seconds = moment.timestamp() - (time.time() if now is None else now)
        except (TypeError, ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), _LONGEST_WAIT_SECONDS)


def place_of(url: str) -> str:
    """``hooks.slack.com``, ``127.0.0.1:9093``: where a message goes, without what may be secret."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "an address that cannot be read"
    host = parts.hostname or "?"
    host = f"[{host}]" if ":" in host else host
    return host if port is None else f"{host}:{port}"


def user_agent() -> str:
    """Who asks."""
    return f"oomwatch/{oomwatch.__version__}"


def _read_body(response: requests.Response) -> bytes:
    """The beginning of the body. The status has come: what is missing of the rest changes nothing.

    A message that was taken must not be sent again because the last words of thanks were lost.
    """
    from urllib3.exceptions import HTTPError  # noqa: PLC0415 - comes with requests

    read: Any = getattr(response.raw, "read1", response.raw.read)
    body = bytearray()
    with contextlib.suppress(HTTPError, OSError, ValueError):
        while len(body) < _ANSWER_BYTES and (block := read(_ANSWER_BYTES, decode_content=False)):
            body += block
    return bytes(body[:_ANSWER_BYTES])


def _said(body: bytes, secrets: Iterable[str]) -> str:
    if body.lstrip().startswith(b"<"):  # a page for people says nothing in its first words
        return ""
    text = quoted(body, secrets)
    return f" ({text})" if text else ""
