"""A Diagnosis as GitHub-flavoured Markdown, to paste into an issue tracker.

The verdict, the sentence and the remedies stand open, the rest folds away. Quotes and commands
stand in fences that they cannot close; other text is escaped so that it neither formats, links,
mentions a person, nor refers to an issue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import oomwatch
from oomwatch.records import Diagnosis, Evidence, Finding, GpuLedger, Remedy
from oomwatch.report import phrases
from oomwatch.report.engine_lines import engine_lines, told_apart
from oomwatch.report.flags import typed_env, typed_flags
from oomwatch.report.later import later_start
from oomwatch.report.ledgers import group_ledgers, part_name
from oomwatch.report.locale import Language, catalogue
from oomwatch.report.pages import meaning, title
from oomwatch.report.sanitize import clean
from oomwatch.units import format_bytes

_QUOTE_LIMIT: Final = 1000
_SHORT: Final = 60  # a reading or short quote stands beside its place
_SPECIAL: Final = re.compile(r"[\\`*\[\]#|~$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LEADING: Final = re.compile(r"^(\d*)([-+=.)])(?=\s|$)")  # a list, or a heading's underline


def render_markdown(diagnosis: Diagnosis, *, lang: Language = "en") -> str:
    """The report as Markdown, ending in a line feed."""
    return _Writer(diagnosis, lang).render()


def escape(text: str) -> str:
    """Text as it is: no formatting, HTML, mention, issue reference or automatic link."""
    text = _SPECIAL.sub(r"\\\g<0>", clean(text))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = _LEADING.sub(r"\1\\\2", text)
    # Trackers look for these after formatting, so a backslash does not stop them.
    text = text.replace("@", "@<!-- -->").replace(r"\#", r"\#<!-- -->")
    return re.sub(r"://|(?i:\bwww\.)", lambda match: match.group()[:-1] + "<!-- -->" +
                  match.group()[-1], text)  # fmt: skip


def code(text: str) -> str:
    """A code span that holds any text."""
    text = clean(text) or " "
    fence = "`" * (_longest_run(text) + 1)
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def fenced(lines: Iterable[str], language: str) -> list[str]:
    """A fenced block whose fence is longer than any run of backticks in it."""
    body = [clean(line) for line in lines]
    fence = "`" * max([3, *(_longest_run(line) + 1 for line in body)])
    return [f"{fence}{language}", *body, fence]


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


class _Writer:
    def __init__(self, diagnosis: Diagnosis, lang: Language) -> None:
        self.diagnosis = diagnosis
        self.lang = lang
        self.texts: Mapping[str, str] = catalogue(lang)
        self.lines: list[str] = []

    def render(self) -> str:
        diagnosis, texts = self.diagnosis, self.texts
        first = True
        behind = phrases.memory_behind(diagnosis)
        for incident in diagnosis.incidents:
            word = phrases.headline_word(diagnosis.verdict, incident.finding, texts)
            times = [texts["count"].format(count=incident.count)] if incident.count > 1 else []
            named = word if first or incident is behind else texts["incident"]
            self._head(named, incident.finding, times)
            self._remedies(incident.remedies)
            self._evidence(incident.finding.evidence)
            self._memory(incident.memory)
            rows = [
                f"{code(item.cause)} ({round(100 * item.confidence)} %): "
                + escape(item.why_less_likely)
                for item in incident.alternatives
            ]
            self._list("alternatives", rows)
            self._list("unseen", map(escape, incident.finding.unseen))
            first = False
        word = texts[f"verdict.{diagnosis.verdict}"]
        for risk in diagnosis.risks:
            self._head(
                word if first else texts["risk"], risk.finding, phrases.risk_facts(risk, texts)
            )
            self._remedies(risk.remedies)
            self._evidence(risk.finding.evidence)
            self._list("unseen", map(escape, risk.finding.unseen))
            first = False
        if first:
            self._add(f"## {word}")
            if why := texts.get(f"verdict.{diagnosis.verdict}.why"):
                self._add(why)
        self._rest()
        return "\n".join(self.lines).strip("\n") + "\n"

    def _add(self, *lines: str) -> None:
        """A block, with an empty line after it."""
        self.lines += [*lines, ""]

    def _head(self, word: str, finding: Finding, more: Sequence[str]) -> None:
        self._add(f"## {word}{self.texts['colon']}{escape(title(finding.cause, self.lang))}")
        engine = phrases.engine_of(self.diagnosis, finding)
        facts = phrases.finding_facts(finding, engine, self.texts)
        facts += told_apart(self.diagnosis, engine)
        self._add(" · ".join([code(facts[0]), *map(escape, (*facts[1:], *more))]))
        if later := later_start(self.diagnosis, finding, self.texts, self.lang):
            self._add(escape(later))
        if self.lang != "en" and (sentence := meaning(finding.cause, self.lang)):
            self._add(escape(sentence))
        self._add(escape(finding.summary))

    def _remedies(self, remedies: Sequence[Remedy]) -> None:
        if not remedies:
            return
        self._add(f"### {self.texts['remedies']}")
        for rank, made in enumerate(remedies, 1):
            remedy = phrases.remedy_in(made, self.lang)
            number = f"{rank}. "
            block = [*self._commands(remedy), *self._reasons(remedy)]
            indent = " " * len(number)
            self.lines.append(f"{number}**{escape(remedy.title)}**")
            self._add(*(indent + line if line else "" for line in ("", *block)))

    def _commands(self, remedy: Remedy) -> list[str]:
        lines: list[str] = []
        for typed in ([" ".join(typed_flags(remedy.set))], typed_env(remedy.env)):
            if any(typed):
                lines += [*fenced(typed, "sh"), ""]
        return lines

    def _reasons(self, remedy: Remedy) -> list[str]:
        texts = self.texts
        rows = (
            ("remove", " ".join(map(code, remedy.unset))),
            ("action", escape(remedy.action or "")),
            ("effect", escape(" · ".join(phrases.effects(remedy.effect, texts)))),
            ("cost", escape(remedy.cost)),
            ("why", escape(phrases.reason(remedy))),
            ("check", escape(phrases.validity(remedy, texts, verbose=True))),
        )
        return [f"- {texts[key]}{texts['colon']}{text}" for key, text in rows if text]

    def _evidence(self, evidence: Sequence[Evidence]) -> None:
        if not evidence:
            return
        lines: list[str] = []
        for item in evidence:
            place, quote = code(phrases.where(item)), phrases.statement(item, _QUOTE_LIMIT)
            if len(quote) <= _SHORT:
                lines.append(
                    f"- {place}{self.texts['colon']}{code(quote)}" if quote else f"- {place}"
                )
            else:
                lines += [f"- {place}", "", *("  " + line for line in fenced([quote], "text")), ""]
        self._folded(f"{self.texts['evidence']} ({len(evidence)})", lines)

    def _memory(self, ledgers: Sequence[GpuLedger]) -> None:
        groups = group_ledgers(ledgers)
        if not groups:
            return
        names = dict.fromkeys(part.name for _, ledger in groups for part in ledger.parts)
        rows = [
            [part_name(name, self.texts), *(_size(ledger, name) for _, ledger in groups)]
            for name in names
        ]
        totals = [format_bytes(ledger.total_bytes) for _, ledger in groups]
        rows.append([self.texts["column.total"], *totals])
        head = [self.texts["column.part"], *(label for label, _ in groups)]
        lines = [_row(head), "|---" + "|---:" * len(groups) + "|"]
        lines += [_row([escape(cell) for cell in row]) for row in rows]
        self._folded(self.texts["memory"], lines)

    def _rest(self) -> None:
        diagnosis, texts = self.diagnosis, self.texts
        self._list("advice", map(escape, diagnosis.advice))
        self._list("engines", map(escape, engine_lines(diagnosis, texts)))
        gpus = [": ".join(phrases.gpu_row(gpu, texts)) for gpu in diagnosis.gpus]
        self._list("gpus", map(escape, gpus))
        sources = [
            f"{texts[f'status.{item.status}']}{texts['colon']}{code(item.name)}"
            + (f" {escape(item.detail)}" if item.detail else "")
            for item in diagnosis.sources
        ]
        self._list("sources", sources)
        when = phrases.local_time(diagnosis.generated_at)
        self._add(f"<sub>{texts['made_by'].format(version=oomwatch.__version__, time=when)}</sub>")

    def _list(self, key: str, items: Iterable[str]) -> None:
        lines = [f"- {item}" for item in items]
        if lines:
            self._folded(self.texts[key], lines)

    def _folded(self, summary: str, lines: Sequence[str]) -> None:
        body = list(lines)
        while body and not body[-1]:
            body.pop()
        self._add("<details>", f"<summary>{summary}</summary>", "", *body, "", "</details>")


def _size(ledger: GpuLedger, name: str) -> str:
    sizes = [part.bytes for part in ledger.parts if part.name == name]
    return format_bytes(sum(sizes)) if sizes else ""


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
