"""What is repeated of a receiver's answer when it repeats the secrets it was sent."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote, unquote

import pytest

from oomwatch.notify.quoting import quoted

URL = "http://user:pa55word@h.example:80/services/T00000000/B%201234/XXtokenXX?token=QQsecretQQ&x=%20y#frag1"
HEADERS = ("Bearer zzBEARERzz", "Basic b3BzOmh1bnRlcjItc2VjcmV0", "zzPLAINzz")
SECRETS = (URL, *HEADERS)
PATH = "/services/T00000000/B%201234/XXtokenXX?token=QQsecretQQ&x=%20y"
LEAKS = ("XXtoken", "T00000", "QQsecret", "b3BzOmh1", "hunter2", "zzBEARER", "zzPLAIN", "pa55word")


@pytest.mark.parametrize(
    "said",
    [
        f"Cannot POST {PATH}",
        json.dumps({"status": 404, "error": "Not Found", "path": PATH}),
        json.dumps({"url": URL}).replace("/", r"\/"),
        unquote(PATH),
        quote(PATH, ""),
        html.escape(PATH),
        PATH.upper(),
        "no hook XXtokenXX for QQsecretQQ",
        "bad log-in b3BzOmh1bnRlcjItc2VjcmV0",
        "ops:hunter2-secret may not",
        "hunter2-secret is wrong",
        json.dumps(dict(enumerate(HEADERS))),
        "user pa55word",
        "".join(f"%{ord(letter):02x}" for letter in "XXtokenXX"),
        "XX-tok-en-XX, QQ secret QQ",
    ],
)
def test_no_form_of_a_secret_is_repeated(said):
    told = quoted(said.encode(), SECRETS)
    for leak in LEAKS:
        assert leak.lower() not in told.lower().replace("%", "").replace("-", "").replace(" ", "")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("invalid payload: services are down", "invalid payload: services are down"),
        ("Cannot POST /services/T00000000", "Cannot POST /services/***"),
        ("no hook XXtokenXX here", "no hook *** here"),
        ("", ""),
    ],
)
def test_what_is_repeated(said, told):
    assert quoted(said, SECRETS) == told


def test_the_ways_of_a_log_in_by_mail_are_known():
    plain = base64.b64encode(b"\0me\0pa55word").decode()
    assert quoted(f"535 no {plain}", (plain,)) == "535 no ***"
    assert quoted("535 no pa55word", (base64.b64encode(b"x:pa55word").decode(),)) == "535 no ***"
