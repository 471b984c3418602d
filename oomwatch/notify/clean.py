"""What may go into a message of the texts that logs, commands and clients have made.

A message leaves the host, is read on phones, and is drawn by programs that give signs a meaning.
So a text loses, in this order: control and bidirectional characters, keys and tokens, the words
that call people (``<!channel>``, ``@all``, ``<at id=all>``), addresses, and what clients sent.
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.engines.client_text import (
    client_head,
    is_client_text,
    without_input_values,
    without_repeated,
)
from oomwatch.engines.secrets import hide_text
from oomwatch.records import LogLine
from oomwatch.report.sanitize import ELLIPSIS, clean

LONGEST: Final = 8_000
"""Characters of a text that are looked at; none is shown in more than a fourth of it."""
_LONGEST_KEY: Final = 2_000
_DOT: Final = "[.。．｡]"
_LINK: Final = re.compile(
    rf"(?:[a-z][a-z0-9+.-]{{1,20}}[:：]//|https?[:：]/?(?=\w)|javascript:|\b(?:mailto|tel):"
    rf"|www{_DOT}|\bftp{_DOT})[^\s<>\"'`|)\]]*",
    re.IGNORECASE,
)
_BARE_LINK: Final = re.compile(  # what chats make a link of; but images, and Go's functions, stand
    rf"(?<![\w/@.-])(?://)?(?!(?:docker|ghcr|quay|nvcr|gcr)\.|github\.com/ollama/)"
    rf"((?:[\w-]{{1,63}}{_DOT}){{1,6}}"
    r"(?:com|net|org|info|biz|xyz|top|link|site|online|app|dev|io|co|me|cc|cn|ru|su|рф|中国)\b)"
    r"((?::\d{1,5})?[/?][^\s<>\"'`|)\]]*)?",
    re.IGNORECASE,
)
_SLACK_CONTROL: Final = re.compile(r"<([!@#])([^<>|]{0,80})(?:\|([^<>]{0,80}))?>")
_AT_TAG: Final = re.compile(r"</?(?:at\b|users/|mention-tag\b)[^<>]{0,200}>?", re.IGNORECASE)
_ALIKE: Final = {"a": "aа", "c": "cс", "e": "eе", "h": "hһ", "l": "lӏ", "o": "oо", "y": "yу"}
"""Letters with those of other alphabets that look the same."""


def _looks_like(word: str) -> str:
    """A pattern for the word, also in wide letters (which Chinese keyboards write)."""
    wide = ord("ａ") - ord("a")
    return "".join(f"[{_ALIKE.get(one, one)}{chr(ord(one) + wide)}]" for one in word)


_CALLED: Final = "|".join(map(_looks_like, ("here", "channel", "everyone", "all")))
_CALL: Final = re.compile(
    rf"(?<![@＠﹫])[@＠﹫]++(?=(?:{_CALLED}|所有人|全体成员)(?![A-Za-z0-9_]))",
    re.IGNORECASE,
)
_SIGNS: Final = re.compile(r"[<>@＠﹫]")
_PASSES: Final = 8
_REQUEST_TEXT: Final = re.compile(  # a prompt or an answer somewhere in a server's own line
    r"""(
    (?:\b|['"_])(?:prompts?|messages?|content|input_text|text_input|inputs?|query|question
    |prompt_token_ids|system_prompt|user_message|text|instructions?|completion|generated_text
    |output_text|decoded(?:_text)?)['"]?\s{0,4}[=:]\s{0,4}(?=\\*[bru]?['"\[{])
    |\bprompt\s{0,4}[=:]\s{0,4}(?=[^\s\d-])
    |(?<![\w-])(?:user|human|assistant)\s?:\s{1,4}(?=\S+\s+\S|[^\x00-\x7f])
    |<[|｜](?:im_start|start_header_id|start|user|assistant|system)[|｜]>|<start_of_turn>|\[INST\]
    ).*""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def clean_text(text: object, limit: int) -> str:
    """One line of at most `limit` characters (up to 2,000) that is fit for a message."""
    line = clean(text, LONGEST)
    if line.endswith(ELLIPSIS):  # half a key is not recognized as one
        line = line[: max(line.rfind(" "), LONGEST - _LONGEST_KEY)] + ELLIPSIS
    # Requests are looked for twice: what hides a key may take the name of the field beside it.
    return clean(_without_request(_without_signs(_without_request(line))), limit)


def without_calls(text: str) -> str:
    """The text without what calls people in Slack, DingTalk, Feishu, WeCom, Teams or Discord."""
    for _ in range(_PASSES):  # what is taken out of the middle of a word may leave another one
        before = text
        text = _SLACK_CONTROL.sub(lambda match: match[3] or match[2], text)
        text = _CALL.sub("", _AT_TAG.sub("", text))
        if text == before:
            return text
    return _SIGNS.sub("", text)  # nobody nests so many by chance


def _without_signs(line: str) -> str:
    """Keys are looked for twice: as they were written, and where a sign parted one in two."""
    line = hide_text(without_calls(hide_text(line)))
    return without_calls(_BARE_LINK.sub(_without_link, _LINK.sub("[link]", line)))


def _without_link(match: re.Match[str]) -> str:
    """A name of a host stays if it leads nowhere and is written in plain letters."""
    return match[0] if match[2] is None and match[1].isascii() else "[link]"


def _without_request(line: str) -> str:
    """Without what a client sent: whole lines of request loggers, and what other lines repeat."""
    if is_client_text(LogLine("", 0, line)):
        return client_head(line) + ELLIPSIS
    line = without_repeated(without_input_values(line))
    return _REQUEST_TEXT.sub(rf"\1{ELLIPSIS}", line)
