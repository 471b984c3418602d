"""A program of the user's own, told by signed JSON as https://www.standardwebhooks.com has it.

webhook-id: msg_6f1c…             the same over all attempts: who has seen it may drop it
webhook-timestamp: 1790000000     of this attempt
webhook-signature: v1,K5oZ… v1,… one for each secret
{"type":"oomwatch.incident.opened","timestamp":"2026-…Z","data":{…}}
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from oomwatch.config.load import ConfigError
from oomwatch.config.sinks import WebhookConfig
from oomwatch.notify.data import compact, event_type, notice_data
from oomwatch.notify.http import HttpClient, outcome
from oomwatch.notify.notice import Notice
from oomwatch.notify.outcome import Outcome
from oomwatch.notify.sinks.base import BaseSink
from oomwatch.units import format_rfc3339

_BODY_BYTES: Final = 19_500
_SECRET_BYTES: Final = (24, 64)
_ADVICE: Final = '; make one with: echo "whsec_$(openssl rand -base64 32)"'


def make(config: WebhookConfig, environ: Mapping[str, str]) -> WebhookSink:
    """Raises `ConfigError` if address or secret are missing."""
    return WebhookSink(config, environ)


class WebhookSink(BaseSink):
    """Signed JSON to one address."""

    kind = "webhook"

    def __init__(self, config: WebhookConfig, environ: Mapping[str, str]) -> None:
        super().__init__(config, environ)
        self._headers = dict(config.headers)
        self._client = HttpClient(config)
        self._credentials.url()
        self._credentials.headers()
        self._secrets()

    def _send(self, notice: Notice, thread: str | None) -> Outcome:  # noqa: ARG002 - it has none
        url, secrets, body = self._credentials.url(), self._secrets(), make_body(notice)
        own = self._credentials.headers()
        headers = {
            **self._headers,
            **own,
            "Content-Type": "application/json",
            **sign(notice.id, round(time.time()), body, secrets),
        }
        answer = self._client.post(url, body, headers)
        return outcome(answer, (url, *own.values(), *self._headers.values()))

    def preview(self, notice: Notice, thread: str | None) -> str:  # noqa: ARG002 - it has none
        """The headers that are its own, and the body."""
        body = json.dumps(_body(notice), ensure_ascii=False, indent=2)
        return (
            f"webhook-id: {notice.id}\nwebhook-timestamp: {round(notice.at)}\n"
            f"webhook-signature: v1,…\n\n{body}"
        )

    def _secrets(self) -> list[bytes]:
        words = self._credentials.get("secret", _ADVICE).split()
        try:
            secrets = [base64.b64decode(w.removeprefix("whsec_"), validate=True) for w in words]
        except (binascii.Error, ValueError):
            secrets = [b""]
        low, high = _SECRET_BYTES
        if not all(low <= len(secret) <= high for secret in secrets):
            raise ConfigError(
                [
                    f"secret_file of receiver {self.name} must hold whsec_ and {low} to {high} "
                    f"bytes in base64{_ADVICE}"
                ]
            )
        return secrets


def make_body(notice: Notice) -> bytes:
    """The body, byte for byte as it is signed; less than 20 kB."""
    return compact(_body(notice))


def sign(message_id: str, timestamp: int, body: bytes, secrets: Sequence[bytes]) -> dict[str, str]:
    """The three headers of Standard Webhooks."""
    signed = b".".join((message_id.encode(), str(timestamp).encode(), body))
    digests = (hmac.digest(secret, signed, hashlib.sha256) for secret in secrets)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(one).decode()}" for one in digests),
    }


def _body(notice: Notice) -> dict[str, Any]:
    return {
        "type": event_type(notice),
        "timestamp": format_rfc3339(notice.at),
        "data": notice_data(notice, _BODY_BYTES),
    }
