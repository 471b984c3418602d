"""Sends OTLP/HTTP JSON to a collector. Figures that cannot be sent are let go; incidents wait."""

from __future__ import annotations

import collections
import gzip
import json
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote

from oomwatch.export.otlp import logs_request
from oomwatch.net.deadline import Deadline

_LOG = logging.getLogger(__name__)

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:4318"
_CONNECT_SECONDS: Final = 5.0
_WHOLE_SECONDS: Final = 15.0
_MOST_WAITING: Final = 1024
_AT_ONCE: Final = 128
_MOST_PAUSE_SECONDS: Final = 300.0
_LATER: Final = frozenset({429, 502, 503, 504})
"""What the specification wants to be tried again; anything else is refused for good."""


class OtlpSender:
    """One collector. Calls that send are made by one thread; the others may come from any."""

    def __init__(
        self,
        endpoints: tuple[str, str],
        resource: Mapping[str, Any],
        version: str,
        *,
        headers: Mapping[str, str],
        ca_file: str | None = None,
        whole_seconds: float = _WHOLE_SECONDS,
    ) -> None:
        """`endpoints`: where figures go, and where incidents go.

        The collector has `whole_seconds` to take a request, however it spreads its answer.
        """
        self._metrics_url, self._logs_url = endpoints
        self._resource = resource
        self._version = version
        self._headers = dict(headers)
        self._ca_file = ca_file
        self._whole_seconds = whole_seconds
        self._lock = threading.Lock()
        self._waiting: collections.deque[dict[str, Any]] = collections.deque(maxlen=_MOST_WAITING)
        self._paused_until = 0.0
        self._said = ""
        self.dropped_total = 0

    @property
    def resource(self) -> Mapping[str, Any]:
        """Who sends."""
        return self._resource

    def __len__(self) -> int:
        return len(self._waiting)

    def add_record(self, record: dict[str, Any]) -> None:
        """Send this record once it can be; of too many the oldest are let go."""
        with self._lock:
            self.dropped_total += len(self._waiting) == _MOST_WAITING
            self._waiting.append(record)

    def send_metrics(self, body: Mapping[str, Any]) -> bool:
        """Send figures now, or not at all; whether they were taken."""
        return self._is_open() and self._post(self._metrics_url, body) == "taken"

    def send_records(self) -> bool:
        """Send the records that wait; whether none is left."""
        while self._is_open():
            with self._lock:
                some = [self._waiting[n] for n in range(min(_AT_ONCE, len(self._waiting)))]
            if not some:
                return True
            outcome = self._post(self._logs_url, logs_request(some, self._resource, self._version))
            if outcome == "later":
                return False
            with self._lock:
                for record in some:
                    if self._waiting and self._waiting[0] is record:
                        self._waiting.popleft()
                        self.dropped_total += outcome == "refused"
        return False

    def _is_open(self) -> bool:
        return time.monotonic() >= self._paused_until

    def _post(self, url: str, body: Mapping[str, Any]) -> str:
        # Only where something is sent.
        import requests  # noqa: PLC0415
        from requests.utils import get_environ_proxies  # noqa: PLC0415

        from oomwatch.net.http_adapter import WatchedAdapter  # noqa: PLC0415

        data = gzip.compress(json.dumps(body, separators=(",", ":")).encode(), compresslevel=1)
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip", **self._headers}
        try:
            with Deadline(self._whole_seconds) as deadline, requests.Session() as session:
                session.trust_env = False  # a password of ~/.netrc would replace our headers
                for scheme in ("http://", "https://"):
                    session.mount(scheme, WatchedAdapter(deadline, None))
                with session.post(
                    url,
                    data=data,
                    headers=headers,
                    timeout=(min(_CONNECT_SECONDS, self._whole_seconds), self._whole_seconds),
                    allow_redirects=False,
                    proxies=get_environ_proxies(url),
                    stream=True,  # the answer is not read: it says nothing that is needed
                    verify=self._ca_file or True,
                ) as answer:
                    if deadline.passed:  # what was cut off looks like the end of a head
                        raise requests.Timeout
                    status, pause = answer.status_code, answer.headers.get("Retry-After", "")
        except (requests.RequestException, OSError, ValueError) as error:
            self._say(f"{type(error).__name__}: nothing can be sent to the collector")
            return "later"
        if 200 <= status < 300:
            self._say("")
            return "taken"
        if status in _LATER:
            seconds = float(pause) if pause.isdecimal() else 0.0
            self._paused_until = time.monotonic() + min(seconds, _MOST_PAUSE_SECONDS)
            self._say(f"the collector answers {status}; it is tried again")
            return "later"
        self._say(f"the collector refuses what is sent: {status}")
        return "refused"

    def _say(self, text: str) -> None:
        """Once for each change; neither address nor headers, which may hold a secret."""
        if text != self._said:
            if text:
                _LOG.warning("otlp: %s", text)
            else:
                _LOG.info("otlp: the collector takes what is sent")
        self._said = text


def endpoints_of(endpoint: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Where figures and incidents go: as configured, else as the standard variables say."""
    base = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or DEFAULT_ENDPOINT
    paths = []
    for signal, variable in (("metrics", "METRICS"), ("logs", "LOGS")):
        own = environ.get(f"OTEL_EXPORTER_OTLP_{variable}_ENDPOINT") if endpoint is None else None
        paths.append(own or f"{base.rstrip('/')}/v1/{signal}")
    return paths[0], paths[1]


def headers_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Headers of ``OTEL_EXPORTER_OTLP_HEADERS``: ``name=value,name=value``, percent-encoded."""
    pairs = (
        part.partition("=") for part in environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",")
    )
    return {name.strip(): unquote(value.strip()) for name, equal, value in pairs if equal}
