"""A Diagnosis for a terminal: verdict first, then why, memory, evidence, remedies, gaps.

Readable at 3 a.m.: nothing before the verdict, one indent, aligned labels, no ornaments. The
newest incident stands in full; earlier ones take a line each unless `verbose`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rich.cells import cell_len

from oomwatch.records import (
    MODEL_SIZES,
    Diagnosis,
    Evidence,
    Finding,
    Incident,
    Remedy,
    Risk,
    SourceStatus,
)
from oomwatch.report import phrases
from oomwatch.report.engine_lines import engine_lines, told_apart
from oomwatch.report.flags import typed_env, typed_flags
from oomwatch.report.later import later_start
from oomwatch.report.layout import Sheet
from oomwatch.report.locale import Language, catalogue
from oomwatch.report.memory_bar import draw_memory
from oomwatch.report.pages import meaning, title
from oomwatch.report.sanitize import clean

_VERDICT_STYLE: Final = {
    "oom": "bold red",
    "at_risk": "bold yellow",
    "healthy": "bold green",
    "not_oom": "bold magenta",
    "unknown": "bold cyan",
}
_STATUS_STYLE: Final = {"ok": "green", "warning": "yellow", "error": "red", "not_available": "dim"}
_QUOTE_LIMIT: Final = 320  # characters of a quoted line: four lines of a narrow terminal
_QUOTE_LIMIT_VERBOSE: Final = 2000
_EVIDENCE_SHOWN: Final = 6
_REMEDIES_SHOWN: Final = 6
_SURE: Final = 0.8  # from here on the less likely causes are noise


def render_text(
    diagnosis: Diagnosis,
    *,
    width: int = 80,
    color: bool = False,
    lang: Language = "en",
    verbose: bool = False,
    quiet: bool = False,
    printer: str = "--format args",
) -> str:
    """The report as text that ends in a line feed; escape sequences only for colours, if on.

    `quiet` leaves the verdict, the sentence, the first remedy and what could not be read;
    `verbose` adds what was cut, the less likely causes and every source. `printer` is what prints
    the flags of this diagnosis alone.
    """
    sheet = Sheet(width, color=color)
    return _Report(diagnosis, sheet, lang, printer, verbose=verbose).render(quiet=quiet)


class _Report:
    def __init__(
        self, diagnosis: Diagnosis, sheet: Sheet, lang: Language, printer: str, *, verbose: bool
    ) -> None:
        self.diagnosis = diagnosis
        self.sheet = sheet
        self.lang = lang
        self.printer = printer
        self.texts: Mapping[str, str] = catalogue(lang)
        self.verbose = verbose

    def render(self, *, quiet: bool) -> str:
        incidents, risks = self.diagnosis.incidents, self.diagnosis.risks
        findings = [*(item.finding for item in incidents), *(item.finding for item in risks)]
        self._verdict(findings[0] if findings else None)
        if incidents:
            self._incident(incidents[0], quiet=quiet)
        elif risks:
            self._risk(risks[0], quiet=quiet)
        else:
            self._nothing_found()
        if (behind := phrases.memory_behind(self.diagnosis)) and not self.verbose:
            self.sheet.blank()
            self._verdict(behind.finding)
            self._incident(behind, quiet=True)
        if not quiet:
            older = [i for i in incidents[1:] if self.verbose or i is not behind]
            self._others(older, risks if incidents else risks[1:])
            if not incidents:
                self._gpus()
            if findings:
                self._running()
            self._list("advice", self.diagnosis.advice, "yellow")
            if findings or self.verbose or self.diagnosis.verdict != "unknown":
                self._sources()  # an undecided answer has named them already
            if findings:
                self.sheet.blank()
                self.sheet.text(self.texts["page"].format(cause=findings[0].cause), "dim")
        elif findings or self.diagnosis.verdict != "unknown":
            self._sources(unread_only=True)
        return self.sheet.render()

    # ------------------------------------------------------------ the first lines
    def _verdict(self, finding: Finding | None) -> None:
        verdict = phrases.headed(self.diagnosis.verdict, finding)
        word, style = self.texts[f"verdict.{verdict}"], _VERDICT_STYLE[verdict.partition(".")[0]]
        if finding is None:
            self.sheet.spans((word, style))
        else:
            self.sheet.heading(word, self._named(finding), style)

    def _facts(self, finding: Finding, *more: str) -> None:
        """The grey line under the verdict: cause, certainty, engine, time."""
        engine = phrases.engine_of(self.diagnosis, finding)
        facts = phrases.finding_facts(finding, engine, self.texts)
        facts += told_apart(self.diagnosis, engine)
        self.sheet.flow([*facts, *more], " · ", "dim")
        if later := later_start(self.diagnosis, finding, self.texts, self.lang):
            self.sheet.text(later)

    def _why(self, finding: Finding) -> None:
        self.sheet.blank()
        if self.lang != "en" and (sentence := meaning(finding.cause, self.lang)):
            self.sheet.text(sentence)
        self.sheet.text(clean(finding.summary, 600))

    def _incident(self, incident: Incident, *, quiet: bool) -> None:
        finding = incident.finding
        times = [self.texts["count"].format(count=incident.count)] if incident.count > 1 else []
        self._facts(finding, *times)
        self._why(finding)
        if quiet:
            self._remedies(incident.remedies[:1])
            return
        if incident.memory:
            self._title("memory")
            draw_memory(self.sheet, incident.memory, self.texts)
        self._evidence(finding.evidence)
        self._remedies(incident.remedies)
        self._alternatives(incident)
        self._list("unseen", finding.unseen)

    def _risk(self, risk: Risk, *, quiet: bool) -> None:
        finding = risk.finding
        self._facts(finding, *phrases.risk_facts(risk, self.texts))
        self._why(finding)
        if quiet:
            self._remedies(risk.remedies[:1])
            return
        self._evidence(finding.evidence)
        self._remedies(risk.remedies)
        self._list("unseen", finding.unseen)

    def _nothing_found(self) -> None:
        verdict = self.diagnosis.verdict
        if why := self.texts.get(f"verdict.{verdict}.why"):
            self.sheet.text(why)
        for line in engine_lines(self.diagnosis, self.texts):
            self.sheet.flow(line.split(" · "), " · ", "dim")
        if verdict == "unknown":
            gaps = [
                f"{clean(item.name)}: {clean(item.detail, _QUOTE_LIMIT)}"
                for item in self.diagnosis.sources
                if item.status != "ok" and item.detail
            ]
            self._list("unseen", gaps)

    # ------------------------------------------------------------ sections
    def _title(self, key: str) -> None:
        self.sheet.blank()
        self.sheet.spans((self.texts[key], "bold"))

    def _evidence(self, evidence: Sequence[Evidence]) -> None:
        if not evidence:
            return
        self._title("evidence")
        shown = evidence if self.verbose else evidence[:_EVIDENCE_SHOWN]
        limit = _QUOTE_LIMIT_VERBOSE if self.verbose else _QUOTE_LIMIT
        rows = [(phrases.where(item), phrases.statement(item, limit)) for item in shown]
        self.sheet.rows(rows, ("cyan", ""))
        self._more(len(evidence) - len(shown))

    def _remedies(self, remedies: Sequence[Remedy]) -> None:
        if not remedies:
            return
        self._title("remedies")
        if len(remedies) > 1:
            told = phrases.printed_steps(remedies, self.printer, self.texts)
            self.sheet.text(told, "dim", indent=2)
        shown = remedies if self.verbose else remedies[:_REMEDIES_SHOWN]
        column = len(f"{len(shown)}. ")
        for rank, made in enumerate(shown, 1):
            remedy = phrases.remedy_in(made, self.lang)
            if rank > 1:
                self.sheet.blank()
            self.sheet.row(
                f"{rank}.",
                clean(remedy.title, 200),
                ("bold", "bold"),
                indent=2,
                column=column,
            )
            self._remedy_rows(remedy, 2 + column)
        self._more(len(remedies) - len(shown))

    def _remedy_rows(self, remedy: Remedy, indent: int) -> None:
        texts = self.texts
        typed = (
            ("flags", typed_flags(remedy.set)),
            ("remove", [clean(flag) for flag in remedy.unset]),
            ("env", typed_env(remedy.env)),
        )
        said = (
            ("action", [clean(remedy.action or "", 1000)]),
            ("effect", phrases.effects(remedy.effect, texts)),
            ("cost", [clean(remedy.cost, 400)]),
            ("why", [clean(phrases.reason(remedy), 600)]),
            ("check", [phrases.validity(remedy, texts, verbose=self.verbose)]),
        )
        keys = [key for key, _ in typed] + [key for key, _ in said]
        column = max(cell_len(texts[key]) for key in keys) + 2
        for key, parts in typed:
            if parts:
                self.sheet.command(texts[key], parts, indent=indent, column=column)
        for key, lines in said:
            label = texts[key]
            for text in filter(None, lines):
                self.sheet.row(label, text, ("dim", ""), indent=indent, column=column)
                label = ""

    def _alternatives(self, incident: Incident) -> None:
        open_question = self.verbose or incident.finding.confidence < _SURE
        shown = incident.alternatives if open_question else ()
        if shown:
            self._title("alternatives")
            rows = [
                (
                    f"{item.cause} ({round(100 * item.confidence)} %)",
                    clean(item.why_less_likely, 400),
                )
                for item in shown
            ]
            self.sheet.rows(rows, ("", ""))

    def _others(self, incidents: Sequence[Incident], risks: Sequence[Risk]) -> None:
        if self.verbose:
            behind = phrases.memory_behind(self.diagnosis)
            for incident in incidents:
                if incident is behind:
                    self.sheet.blank()
                    self._verdict(incident.finding)
                else:
                    self._divide("incident", incident.finding)
                self._incident(incident, quiet=False)
            for risk in risks:
                self._divide("risk", risk.finding)
                self._risk(risk, quiet=False)
            return
        if incidents:
            self._title("older")
            for incident in incidents:
                self._brief(incident.finding, incident.count, ())
        if risks:
            self._title("risk")
            for risk in risks:
                self._brief(risk.finding, 1, phrases.risk_facts(risk, self.texts))

    def _brief(self, finding: Finding, count: int, more: Sequence[str]) -> None:
        when = phrases.local_time(finding.at) if finding.at is not None else ""
        times = self.texts["count"].format(count=count) if count > 1 else ""
        engine = told_apart(self.diagnosis, phrases.engine_of(self.diagnosis, finding))
        facts = [fact for fact in (when, finding.cause, *engine, times, *more) if fact]
        self.sheet.flow(facts, " · ", "dim", indent=2)
        self.sheet.text(clean(finding.summary, 400), indent=2)

    def _divide(self, key: str, finding: Finding) -> None:
        self.sheet.blank()
        self.sheet.heading(self.texts[key], self._named(finding), "bold")

    def _gpus(self) -> None:
        if not self.diagnosis.gpus:
            return
        self._title("gpus")
        self.sheet.rows([phrases.gpu_row(gpu, self.texts) for gpu in self.diagnosis.gpus], ("", ""))

    def _running(self) -> None:
        """What serves at this moment: after a failure people ask whether it does again."""
        self._list("engines", engine_lines(self.diagnosis, self.texts, running=True))

    def _list(self, key: str, items: Sequence[str], style: str = "") -> None:
        if not items:
            return
        self._title(key)
        for item in items:
            self.sheet.row("-", clean(item, 600), (style, style), indent=2, column=2)

    def _sources(self, *, unread_only: bool = False) -> None:
        shown: Sequence[SourceStatus] = [
            item
            for item in self.diagnosis.sources
            if item.status == "error"
            or (
                not unread_only
                and (self.verbose or item.status == "warning" or item.name == MODEL_SIZES)
            )
        ]
        if not shown:
            return
        self._title("sources")
        column = max(cell_len(self.texts[f"status.{item.status}"]) for item in shown) + 2
        for item in shown:
            detail = f": {clean(item.detail, _QUOTE_LIMIT)}" if item.detail else ""
            self.sheet.row(
                self.texts[f"status.{item.status}"], clean(item.name, 200) + detail,
                (_STATUS_STYLE[item.status], ""), indent=2, column=column,
            )  # fmt: skip

    def _more(self, count: int) -> None:
        if count > 0:
            self.sheet.text(self.texts["more"].format(count=count), "dim", indent=2)

    # ------------------------------------------------------------ look-ups
    def _named(self, finding: Finding) -> str:
        return self.texts["colon"] + title(finding.cause, self.lang)
