"""A message as plain text: for mail, chats, and as what Slack shows where it draws no blocks.

[CRITICAL] A long prefill needed more activation memory than was left
gpu-07 · chat-70b · vLLM 0.11.0 · Qwen3-32B · GPU 0

The activations of one step, a long prefill, needed more memory than …

What to do (alternatives, the best first):
1. Process at most 4096 prompt tokens in one step
   --max-num-batched-tokens 4096
…
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from oomwatch.config.notify import SEVERITIES
from oomwatch.notify.notes import span
from oomwatch.notify.notice import IncidentNotice, Notice, RemedyNotice
from oomwatch.notify.wording import words
from oomwatch.records import EngineFacts
from oomwatch.report import phrases
from oomwatch.report.locale import Language
from oomwatch.report.sanitize import clean

_SPAN: Final = " · "
_MARK: Final = "- "
_SUBJECT: Final = 200
_NOTE: Final = 600
_WHY_SHORT: Final = 160


@dataclasses.dataclass(frozen=True, slots=True)
class Detail:
    """How much a message says. What is not named here is always said."""

    evidence: int = 6
    effects: bool = True
    memory: bool = True
    whole_why: bool = True
    remedies: int = 3


DETAILS: Final = (
    Detail(),
    Detail(evidence=2),
    Detail(evidence=0),
    Detail(evidence=0, effects=False),
    Detail(evidence=0, effects=False, memory=False),
    Detail(evidence=0, effects=False, memory=False, whole_why=False),
    Detail(evidence=0, effects=False, memory=False, whole_why=False, remedies=1),
)
"""From all to the least: raw lines go first; cause, host, confidence and a first flag never."""


def fit(notice: Notice, lang: Language, limit: int, measure: Callable[[str], int] = len) -> str:
    """The body of a message in at most `limit` characters, or what `measure` counts."""
    body = ""
    for detail in DETAILS:
        body = text_body(notice, lang, detail)
        if measure(body) <= limit:
            return body
    lines = body.split("\n")
    while lines and measure(_cut(notice, lines, lang)) > limit:
        lines.pop()
    return _cut(notice, lines, lang)


def subject(notice: Notice, lang: Language) -> str:
    """The one line by which a message is told on a locked screen."""
    own = words(lang)
    if notice.kind == "test":
        return own["test"]
    if notice.kind == "undelivered":
        return own["undelivered"]
    if len(notice.incidents) != 1:
        hosts = list(dict.fromkeys(one.host for one in notice.incidents))
        shown = own["and"].join(hosts[:3]) + (own["and"] + "…" if len(hosts) > 3 else "")
        text = own["grouped"].format(count=len(notice.incidents), hosts=shown or "?")
        return clean(own["tag"].format(word=own[worst(notice)], text=text), _SUBJECT)
    one = notice.incidents[0]
    text = _SPAN.join(filter(None, (one.headline, one.host, one.engine_id)))
    return clean(own["tag"].format(word=status(notice, one, lang), text=text), _SUBJECT)


def status(notice: Notice, incident: IncidentNotice, lang: Language) -> str:
    """``CRITICAL``, ``UPDATE``, ``CRITICAL, UNACKNOWLEDGED``: what a message begins with."""
    if notice.kind == "escalated":
        return words(lang)[f"{incident.severity}, escalated"]
    is_own = notice.kind in {"updated", "resolved"}
    return words(lang)[notice.kind if is_own else incident.severity]


def worst(notice: Notice) -> str:
    """The highest severity of what is open in a message; ``resolved`` of a group that is over."""
    is_open = [one for one in notice.incidents if one.closed_at is None]
    if notice.kind == "grouped" and not is_open:
        return "resolved"
    found = {one.severity for one in is_open or notice.incidents}
    return next((severity for severity in SEVERITIES if severity in found), "info")


def text_body(notice: Notice, lang: Language, detail: Detail = DETAILS[0]) -> str:
    """The lines below the subject."""
    paragraphs = [note(notice, lang), labels(notice, lang)]
    if len(notice.incidents) == 1:
        paragraphs += _paragraphs(notice, notice.incidents[0], lang, detail)
    else:
        paragraphs += ["\n".join(_item(one, lang, detail)) for one in notice.incidents]
        paragraphs.append("oomwatch incidents" if notice.incidents else "")
    gap = "\n\n" if len(notice.incidents) <= 1 else "\n"
    return gap.join(filter(None, paragraphs))


def note(notice: Notice, lang: Language) -> str:
    """What is said about the message itself."""
    if notice.note is None and notice.kind == "test":
        return words(lang)["test_note"].format(host=platform.node() or "?")
    return clean(notice.note or "", _NOTE)


def labels(notice: Notice, lang: Language) -> str:
    """``Labels: site=fra1, team=chat``: by what a test is routed; empty for all else."""
    if notice.kind != "test":
        return ""
    own = words(lang)
    shown = own["and"].join(f"{name}={value}" for name, value in sorted(notice.labels.items()))
    return clean(f"{own['labels']}{own['colon']}{shown}", _NOTE) if shown else ""


def place(incident: IncidentNotice) -> str:
    """``gpu-07 · chat-70b · vLLM 0.11.0 · Qwen3-32B · GPU 0,1``."""
    program = ""
    if incident.engine or incident.version:
        facts = EngineFacts("", engine=incident.engine, version=incident.version)
        program = phrases.engine_name(facts)
    gpus = f"GPU {_numbers(incident.gpus)}" if incident.gpus else ""
    model = (incident.model or "").rstrip("/").rpartition("/")[2]
    return _SPAN.join(filter(None, (incident.host, incident.engine_id, program, model, gpus)))


def _numbers(gpus: Sequence[int]) -> str:
    """``0,1``, and ``0-7`` where more than two follow each other."""
    is_run = len(gpus) > 2 and list(gpus) == list(range(gpus[0], gpus[-1] + 1))
    return f"{gpus[0]}-{gpus[-1]}" if is_run else ",".join(map(str, gpus))


def cause_line(incident: IncidentNotice, lang: Language) -> str:
    """``prefill_activation_peak, 80 % sure``; empty before there is a diagnosis."""
    if incident.cause is None or incident.confidence is None:
        return incident.cause or ""
    percent = round(100 * incident.confidence)
    return words(lang)["sure"].format(cause=incident.cause, percent=percent)


def when(incident: IncidentNotice, lang: Language) -> list[tuple[str, str]]:
    """Since when, and how long it lasted or what is left, as labels with values."""
    own = words(lang)
    found = [(own["since"], phrases.local_time(incident.opened_at))]
    if incident.closed_at is not None:
        lasted = max(0.0, incident.closed_at - incident.opened_at)
        found.append((own["lasted"], span(lasted, lang)))
    elif incident.eta_seconds is not None:
        found.append((own["eta"], span(incident.eta_seconds, lang)))
    return found


def shown_by(incident: IncidentNotice) -> str:
    """The command that shows an incident whole."""
    return f"oomwatch incidents show {incident.id}"


def more_about(incident: IncidentNotice, lang: Language) -> str:
    """Where the whole story is: the runbook, or the command that tells it offline."""
    if incident.runbook_url:
        return incident.runbook_url
    return words(lang)["explain"].format(cause=incident.cause) if incident.cause else ""


def remedy_notes(remedy: RemedyNotice, lang: Language, *, effects: bool) -> list[str]:
    """What is said below the flags of a remedy."""
    notes = [remedy.action or ""]
    if effects:
        notes.append(remedy.effect or "")
    if remedy.flags and not remedy.validated:
        notes.append(words(lang)["unchecked"])
    return [note for note in notes if note]


def _paragraphs(
    notice: Notice, incident: IncidentNotice, lang: Language, detail: Detail
) -> Iterator[str]:
    own, colon = words(lang), words(lang)["colon"]
    over = notice.kind == "resolved"
    cause = cause_line(incident, lang)
    yield place(incident) + (f"\n{own['cause']}{colon}{cause}" if cause else "")
    if over:
        yield incident.resolution or ""
    elif incident.why:
        yield incident.why if detail.whole_why else clean(incident.why, _WHY_SHORT)
    if not over:
        yield _todo(incident.remedies[: detail.remedies], lang, effects=detail.effects)
    facts = [] if over or not detail.memory else [(own["memory"], incident.memory or "")]
    facts += [*when(incident, lang), (own["incident"], shown_by(incident))]
    facts.append((own["runbook"], more_about(incident, lang)))
    yield "\n".join(f"{label}{colon}{value}" for label, value in facts if value)
    if not over and incident.evidence[: detail.evidence]:
        quoted = (f"- {line}" for line in incident.evidence[: detail.evidence])
        yield "\n".join((own["evidence"] + colon.rstrip(), *quoted))


def _todo(remedies: Sequence[RemedyNotice], lang: Language, *, effects: bool) -> str:
    if not remedies:
        return ""
    own = words(lang)
    lines = [own["todo" if len(remedies) > 1 else "todo_one"] + own["colon"].rstrip()]
    for rank, remedy in enumerate(remedies, 1):
        lines.append(f"{rank}. {remedy.title}")
        if remedy.flags:
            lines.append(f"   {' '.join(remedy.flags)}")
        lines += [f"   {note}" for note in remedy_notes(remedy, lang, effects=effects)]
    return "\n".join(lines)


def _item(incident: IncidentNotice, lang: Language, detail: Detail) -> Iterator[str]:
    """One of several incidents: who and what, and the flags that help first."""
    own = words(lang)
    about = [incident.host, incident.engine_id, incident.cause or incident.headline]
    if detail.whole_why:
        about[2:] = [incident.headline, cause_line(incident, lang)]
    facts = _SPAN.join(filter(None, (*about, incident.id)))
    word = own[incident.severity if incident.closed_at is None else "resolved"]
    yield _MARK + own["tag"].format(word=word, text=facts)
    if incident.note:
        yield f"   {clean(incident.note, _NOTE)}"
    if incident.closed_at is not None:
        return
    if detail.memory and incident.remedies and incident.remedies[0].flags:
        yield f"   {' '.join(incident.remedies[0].flags)}"


def _cut(notice: Notice, lines: Sequence[str], lang: Language) -> str:
    """The first lines of a body; of a group with the number of incidents that are left out."""
    left_out = len(notice.incidents) - sum(line.startswith(_MARK) for line in lines)
    if len(notice.incidents) <= 1 or left_out <= 0:
        return "\n".join(lines)
    return "\n".join((*lines, words(lang)["more"].format(count=left_out)))
