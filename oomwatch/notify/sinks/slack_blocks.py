"""A message as Slack draws it: a header, then rich text, then where to read on.

Rich text is shown as it is: nothing in it is taken for a mention, a link or markup, whoever wrote
it. Only `text`, which stands in notifications and for programs that copy Slack's webhooks without
its blocks, is markup, and escaped. The whole message stays below 12,000 characters: Slack refuses
somewhat more, which it does not document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from oomwatch.notify import text
from oomwatch.notify.notice import IncidentNotice, Notice
from oomwatch.notify.text import DETAILS, Detail
from oomwatch.notify.wording import words
from oomwatch.report.locale import Language
from oomwatch.report.sanitize import clean

_MESSAGE: Final = 12_000
_HEADER: Final = 150
_TEXT: Final = 2_500
_ZERO_WIDTH: Final = "\u200b"
_DOTTED: Final = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)+")
_DOT: Final = re.compile(r"\.(?=[A-Za-z]{2})")
_CALL: Final = re.compile(r"(?<=[a-z]):(?=//)|@(?=\w)")
_NO_DOMAIN: Final = re.compile(
    r"\.(?:log|py|pyx|json|jsonl|txt|toml|ya?ml|cfg|conf|ini|out|err|bin|safetensors|gguf|so|cu|cpp"
    r"|service|slice|scope|[A-Z][A-Za-z]*(?:Error|Exception|Warning))$"
)
"""Ends of names of files, units and Python's classes: none is taken for a domain to link to."""
_NOT_ASKED: Final = {"unfurl_links": False, "unfurl_media": False, "link_names": False}


def slack_payload(notice: Notice, lang: Language, *, whole: bool = False) -> dict[str, Any]:
    """`text` and `blocks` of a message; `whole` tells of a resolved incident what it was, too."""
    fallback = fallback_text(notice, lang)
    for detail in DETAILS:
        payload = _payload(notice, _parts(notice, lang, detail, whole=whole), lang, fallback)
        if _size(payload) <= _MESSAGE:
            return payload
    room = _MESSAGE - _size(_payload(notice, (), lang, fallback)) - 200
    lines = text.fit(notice, lang, room, lambda body: len(json.dumps(body, ensure_ascii=False)))
    return _payload(notice, ([_section(_plain(lines))],), lang, fallback)


def fallback_text(notice: Notice, lang: Language) -> str:
    """The message as markup, in which what others wrote can neither call nor link."""
    commands = {" ".join(r.flags) for i in notice.incidents for r in i.remedies if r.flags}
    body = text.fit(notice, lang, _TEXT, lambda body: len(_escaped(body)))
    lines = [f"*{_harmless(text.subject(notice, lang))}*"]
    for line in body.split("\n"):
        command = line.strip()
        is_code = command in commands and "`" not in command
        lines.append(f"`{_escaped(command)}`" if is_code else _harmless(line))
    return "\n".join(lines)


def shown(payload: dict[str, Any]) -> str:
    """What people see of the blocks, as plain text."""
    return "\n\n".join(filter(None, (_shown_block(block) for block in payload["blocks"])))


def _payload(
    notice: Notice, parts: Iterable[Sequence[dict[str, Any]]], lang: Language, fallback: str
) -> dict[str, Any]:
    title = {
        "type": "plain_text",
        "text": clean(text.subject(notice, lang), _HEADER) or "oomwatch",
        "emoji": False,
    }
    blocks: list[dict[str, Any]] = [{"type": "header", "text": title}]
    blocks += [{"type": "rich_text", "elements": list(part)} for part in parts if part]
    return {"text": fallback, "blocks": blocks, **_NOT_ASKED}


def _parts(
    notice: Notice, lang: Language, detail: Detail, *, whole: bool
) -> Iterator[list[dict[str, Any]]]:
    """The elements of each block of rich text."""
    if len(notice.incidents) != 1:
        body = text.text_body(notice, lang, detail)
        yield [_section(_plain(body))] if body else []
        return
    incident, own = notice.incidents[0], words(lang)
    over = notice.kind == "resolved"
    if note := text.note(notice, lang):
        yield [_section(_plain(note))]
    head = [_bold(text.place(incident))]
    if cause := text.cause_line(incident, lang):
        head.append(_plain(f"\n{own['cause']}{own['colon']}{cause}"))
    yield [_section(*head)]
    if over and incident.resolution:
        yield [_section(_plain(incident.resolution))]
    if not over or whole:
        why = incident.why or ""
        why = why if detail.whole_why else clean(why, 160)
        yield [_section(_plain(why))] if why else []
        yield list(_todo(incident, lang, detail))
        yield list(_told(incident, lang, detail))
    yield [_section(*_footer(incident, lang))]


def _todo(incident: IncidentNotice, lang: Language, detail: Detail) -> Iterator[dict[str, Any]]:
    own, remedies = words(lang), incident.remedies[: detail.remedies]
    if remedies:
        yield _section(_bold(own["todo" if len(remedies) > 1 else "todo_one"]))
    for rank, remedy in enumerate(remedies, 1):
        yield _section(_plain(f"{rank}. {remedy.title}"))
        if flags := " ".join(remedy.flags):
            yield {"type": "rich_text_preformatted", "elements": [_plain(flags)]}
        if notes := text.remedy_notes(remedy, lang, effects=detail.effects):
            yield _section(_plain("\n".join(notes)))


def _told(incident: IncidentNotice, lang: Language, detail: Detail) -> Iterator[dict[str, Any]]:
    own = words(lang)
    if detail.memory and incident.memory:
        yield _section(_bold(own["memory"] + own["colon"]), _plain(incident.memory))
    if evidence := incident.evidence[: detail.evidence]:
        yield _section(_bold(own["evidence"]))
        yield {"type": "rich_text_quote", "elements": [_plain("\n".join(evidence))]}


def _footer(incident: IncidentNotice, lang: Language) -> Iterator[dict[str, Any]]:
    own = words(lang)
    facts = [f"{label} {value}" for label, value in text.when(incident, lang) if value]
    yield _plain(" · ".join((*facts, text.shown_by(incident))))
    more = text.more_about(incident, lang)
    if incident.runbook_url and incident.runbook_url.startswith(("http://", "https://")):
        yield _plain(" · ")
        yield {"type": "link", "url": incident.runbook_url, "text": own["runbook"]}
    elif more:
        yield _plain(f" · {more}")


def _section(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "rich_text_section", "elements": list(elements)}


def _plain(words_: str) -> dict[str, Any]:
    return {"type": "text", "text": words_}


def _bold(words_: str) -> dict[str, Any]:
    return {"type": "text", "text": words_, "style": {"bold": True}}


def _size(payload: dict[str, Any]) -> int:
    return len(json.dumps(payload, ensure_ascii=False))


def _harmless(line: str) -> str:
    """With zero-width spaces where a name of a host or person would be taken for a link or call.

    Names of files and classes have none: they are copied.
    """
    line = _DOTTED.sub(lambda name: _unlinked(name[0]), line)
    return _escaped(_CALL.sub(lambda sign: sign[0] + _ZERO_WIDTH, line))


def _unlinked(name: str) -> str:
    return name if _NO_DOMAIN.search(name) else _DOT.sub(f".{_ZERO_WIDTH}", name)


def _escaped(line: str) -> str:
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _shown_block(block: dict[str, Any]) -> str:
    if block["type"] == "header":
        return str(block["text"]["text"])
    lines = []
    for element in block["elements"]:
        said = "".join(
            f"{one['text']} ({one['url']})" if one["type"] == "link" else one["text"]
            for one in element["elements"]
        )
        indent = "    " if element["type"] == "rich_text_preformatted" else ""
        quote = "> " if element["type"] == "rich_text_quote" else ""
        lines += [indent + quote + line for line in said.split("\n")]
    return "\n".join(lines)
