"""A Diagnosis as one self-contained HTML file: no script, nothing loaded from elsewhere.

The same order as on a terminal. All text passes `sanitize.clean` and then `html.escape`.
"""

from __future__ import annotations

import html
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

_QUOTE_LIMIT: Final = 2000
_COLORS: Final = {
    "weights": "#3b78d8",
    "kv_cache": "#2f9e57",
    "kv_and_activation": "#2f9e57",
    "engine": "#3b78d8",
    "engine_other": "#b04bb8",
    "activation": "#b04bb8",
    "cuda_graphs": "#1d9aa8",
    "non_torch": "#c98a16",
    "fragmentation": "#d9b310",
    "other_processes": "#d1443c",
    "driver_reserved": "#7a7f87",
    "unattributed": "#a9adb3",
    "free": "#e4e6ea",
}
_VERDICT_COLORS: Final = {
    "oom": "#c62828",
    "at_risk": "#b26a00",
    "healthy": "#2e7d32",
    "not_oom": "#8e24aa",
    "unknown": "#00788a",
}
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; margin-bottom: .2rem; }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
.facts, footer { opacity: .7; font-size: .9rem; }
pre, code { font: .88rem/1.45 ui-monospace, monospace; }
pre { background: #8881; padding: .5rem .7rem; margin: .3rem 0; white-space: pre-wrap;
      overflow-wrap: anywhere; border-radius: 4px; }
.bar { display: flex; height: 1.2rem; border-radius: 3px; overflow: hidden; }
.legend { display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: .9rem; padding: 0; }
.legend li { list-style: none; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem .9rem; margin: .3rem 0; }
dt { opacity: .7; }
dd { margin: 0; overflow-wrap: anywhere; }
"""


def render_html(diagnosis: Diagnosis, *, lang: Language = "en") -> str:
    """The whole page, ending in a line feed."""
    return _Page(diagnosis, lang).render()


def _text(text: str, limit: int = _QUOTE_LIMIT) -> str:
    return html.escape(clean(text, limit))


class _Page:
    def __init__(self, diagnosis: Diagnosis, lang: Language) -> None:
        self.diagnosis = diagnosis
        self.lang = lang
        self.texts: Mapping[str, str] = catalogue(lang)
        self.body: list[str] = []

    def render(self) -> str:
        diagnosis, texts = self.diagnosis, self.texts
        lead = diagnosis.incidents[0].finding if diagnosis.incidents else None
        word = phrases.headline_word(diagnosis.verdict, lead, texts)
        heads = [word]
        behind = phrases.memory_behind(diagnosis)
        for incident in diagnosis.incidents:
            finding = incident.finding
            more = [texts["count"].format(count=incident.count)] if incident.count > 1 else []
            named = heads.pop() if heads else texts["incident"]
            if incident is behind:
                named = phrases.headline_word(diagnosis.verdict, finding, texts)
            self._head(named, finding, more)
            self._memory(incident.memory)
            self._evidence(finding.evidence)
            self._remedies(incident.remedies)
            likely = [f"{item.cause}: {item.why_less_likely}" for item in incident.alternatives]
            self._list("alternatives", likely)
            self._list("unseen", finding.unseen)
        for risk in diagnosis.risks:
            more = phrases.risk_facts(risk, texts)
            self._head(heads.pop() if heads else texts["risk"], risk.finding, more)
            self._evidence(risk.finding.evidence)
            self._remedies(risk.remedies)
            self._list("unseen", risk.finding.unseen)
        if heads:
            color = _VERDICT_COLORS[diagnosis.verdict]
            self.body.append(f'<h1 style="color:{color}">{_text(word)}</h1>')
            self.body.append(f"<p>{_text(texts.get(f'verdict.{diagnosis.verdict}.why', ''))}</p>")
        self._list("advice", diagnosis.advice)
        self._list("engines", engine_lines(diagnosis, texts))
        gpus = [texts["colon"].join(phrases.gpu_row(gpu, texts)) for gpu in diagnosis.gpus]
        self._list("gpus", gpus)
        sources = [
            f"{texts[f'status.{item.status}']}{texts['colon']}{item.name} {item.detail or ''}"
            for item in diagnosis.sources
        ]
        self._list("sources", sources)
        when = phrases.local_time(diagnosis.generated_at)
        footer = texts["made_by"].format(version=oomwatch.__version__, time=when)
        return "\n".join(
            (
                "<!DOCTYPE html>",
                f'<html lang="{self.lang}">',
                '<head><meta charset="utf-8">',
                '<meta name="viewport" content="width=device-width">',
                f"<title>oomwatch: {_text(word)}</title>",
                f"<style>{_STYLE}</style></head>",
                "<body>",
                *self.body,
                f"<footer>{_text(footer)}</footer>",
                "</body>",
                "</html>\n",
            )
        )

    def _head(self, word: str, finding: Finding, more: Sequence[str]) -> None:
        named = word + self.texts["colon"] + title(finding.cause, self.lang)
        engine = phrases.engine_of(self.diagnosis, finding)
        facts = phrases.finding_facts(finding, engine, self.texts)
        facts += [*told_apart(self.diagnosis, engine), *more]
        verdict = phrases.headed(self.diagnosis.verdict, finding).partition(".")[0]
        color = _VERDICT_COLORS[verdict]
        self.body.append(f'<h1 style="color:{color}">{_text(named)}</h1>')
        self.body.append(f'<p class="facts">{_text(" · ".join(facts))}</p>')
        if later := later_start(self.diagnosis, finding, self.texts, self.lang):
            self.body.append(f"<p>{_text(later)}</p>")
        if self.lang != "en" and (sentence := meaning(finding.cause, self.lang)):
            self.body.append(f"<p>{_text(sentence)}</p>")
        self.body.append(f"<p>{_text(finding.summary)}</p>")

    def _title(self, key: str) -> None:
        self.body.append(f"<h2>{_text(self.texts[key])}</h2>")

    def _memory(self, ledgers: Sequence[GpuLedger]) -> None:
        if ledgers:
            self._title("memory")
        for label, ledger in group_ledgers(ledgers):
            parts = [part for part in ledger.parts if part.bytes > 0]
            self.body.append(f"<div>{_text(f'{label}  {format_bytes(ledger.total_bytes)}')}</div>")
            self.body.append('<div class="bar">')
            for part in parts:
                color = _COLORS.get(part.name, "#888")
                self.body.append(
                    f'<span style="flex:{part.bytes} 0 2px;background:{color}"></span>'
                )
            self.body.append('</div><ul class="legend">')
            for part in parts:
                color = _COLORS.get(part.name, "#888")
                text = _text(f"{part_name(part.name, self.texts)} {format_bytes(part.bytes)}")
                self.body.append(f'<li><i style="background:{color}"></i>{text}</li>')
            self.body.append("</ul>")

    def _evidence(self, evidence: Sequence[Evidence]) -> None:
        if not evidence:
            return
        self._title("evidence")
        for item in evidence:
            self.body.append(f"<code>{_text(phrases.where(item))}</code>")
            self.body.append(f"<pre>{_text(phrases.statement(item, _QUOTE_LIMIT))}</pre>")

    def _remedies(self, remedies: Sequence[Remedy]) -> None:
        if not remedies:
            return
        self._title("remedies")
        self.body.append("<ol>")
        for made in remedies:
            remedy = phrases.remedy_in(made, self.lang)
            self.body.append(f"<li><strong>{_text(remedy.title)}</strong>")
            for typed in ([" ".join(typed_flags(remedy.set))], typed_env(remedy.env)):
                if any(typed):
                    self.body.append("<pre>" + "\n".join(map(_text, typed)) + "</pre>")
            rows = (
                ("remove", " ".join(remedy.unset)),
                ("action", remedy.action or ""),
                ("effect", " · ".join(phrases.effects(remedy.effect, self.texts))),
                ("cost", remedy.cost),
                ("why", phrases.reason(remedy)),
                ("check", phrases.validity(remedy, self.texts, verbose=True)),
            )
            said = "".join(
                f"<dt>{_text(self.texts[key])}</dt><dd>{_text(text)}</dd>"
                for key, text in rows
                if text
            )
            self.body.append(f"<dl>{said}</dl></li>")
        self.body.append("</ol>")

    def _list(self, key: str, items: Iterable[str]) -> None:
        rows = [f"<li>{_text(item)}</li>" for item in items]
        if rows:
            self._title(key)
            self.body += ["<ul>", *rows, "</ul>"]
