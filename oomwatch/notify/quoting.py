"""What a receiver answered, to be told on: short, clean, and without the secrets it was sent.

A receiver repeats what it was asked in its own way: the path alone, decoded, in JSON, the log-in
without its scheme. All those forms of a secret are looked for; where something of one is left that
is written in yet another way, nothing is repeated.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import html
import json
import re
from collections.abc import Iterable, Iterator
from typing import Final
from urllib.parse import parse_qsl, quote, quote_plus, unquote, unquote_plus, urlsplit

from oomwatch.notify.clean import clean_text

HIDDEN: Final = "***"
_LONGEST: Final = 160
_SEGMENT: Final = 6
"""Characters of a part of a path that may be a secret."""
_VALUE: Final = 4
"""Characters of other parts: a shorter one is none, and would blot out half of the words."""
_COMMON: Final = frozenset(
    {"alertmanager", "alerts", "enqueue", "incoming", "oomwatch", "services", "webhook", "webhooks"}
)
_SCHEME: Final = re.compile(r"(?:bearer|basic|digest|token|apikey)\s+", re.IGNORECASE)


def quoted(said: bytes | str, secrets: Iterable[str], limit: int = _LONGEST) -> str:
    """The words of a receiver without `secrets` (addresses, values of headers, keys); may be "".

    At most `limit` characters.
    """
    text = said.decode("utf-8", "replace") if isinstance(said, bytes) else said
    parts = {part for secret in secrets for part in _parts(secret)}
    forms = sorted({form for part in parts for form in _forms(part)}, key=len, reverse=True)
    if forms:
        text = re.sub("|".join(map(re.escape, forms)), HIDDEN, text, flags=re.IGNORECASE)
        left = _letters(text)
        if any(len(core := _letters(part)) >= _SEGMENT and core in left for part in parts):
            return ""
    return clean_text(text, limit)


def _parts(secret: str) -> Iterator[str]:
    """The secret, and what of it may be repeated alone."""
    if not secret:
        return
    yield secret
    if re.match(r"https?://", secret, re.IGNORECASE):
        yield from _parts_of_url(secret)
        return
    value = _SCHEME.sub("", secret, count=1)
    if len(value) >= _VALUE:
        yield value
    with contextlib.suppress(binascii.Error, UnicodeDecodeError):
        login = base64.b64decode(value, validate=True).decode()
        yield from (one for one in (login, login.partition(":")[2]) if len(one) >= _VALUE)


def _parts_of_url(url: str) -> Iterator[str]:
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        for value in (parts.password, parts.username, parts.query, parts.fragment):
            if value and len(value) >= _VALUE:
                yield value
        for _, value in parse_qsl(parts.query):
            if len(value) >= _VALUE:
                yield value
        for segment in re.split(r"[/;]", parts.path):
            if len(segment) >= _SEGMENT and segment.lower() not in _COMMON:
                yield segment


def _forms(part: str) -> Iterator[str]:
    """The ways in which programs write it."""
    for one in {part, unquote(part), unquote_plus(part), quote(part, ""), quote_plus(part)}:
        as_json = json.dumps(one)[1:-1]
        yield from (one, as_json, as_json.replace("/", r"\/"), html.escape(one))


def _letters(text: str) -> str:
    """Letters and digits alone, however they are encoded and parted."""
    return re.sub(r"[^a-z0-9]", "", unquote(text).lower())
