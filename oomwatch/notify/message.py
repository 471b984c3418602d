"""A stored incident as what a message says of it: short enough for a phone at 3 a.m.

The first incident of its diagnosis, else the first risk, gives cause, sentence, flags and memory;
before there is a diagnosis, what set the incident off speaks for it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from oomwatch.engines.secrets import hide_text
from oomwatch.notify.clean import LONGEST, clean_text
from oomwatch.notify.notes import restarts_note
from oomwatch.notify.notice import IncidentNotice, RemedyNotice, Severity
from oomwatch.notify.wording import TRIGGERS, words
from oomwatch.records import (
    Diagnosis,
    EngineFacts,
    Evidence,
    Finding,
    GpuLedger,
    Incident,
    Remedy,
    Risk,
    StoredIncident,
    Trigger,
)
from oomwatch.report import phrases
from oomwatch.report.flags import typed_env, typed_flags
from oomwatch.report.json_read import from_json
from oomwatch.report.ledgers import group_ledgers, part_name
from oomwatch.report.locale import Language, catalogue
from oomwatch.report.pages import meaning, title
from oomwatch.report.sanitize import clean
from oomwatch.selection import set_together
from oomwatch.units import format_bytes

_LOG = logging.getLogger(__name__)

REMEDIES_SHOWN: Final = 3
_EVIDENCE_SHOWN: Final = 6
_PARTS_SHOWN: Final = 5
_HEADLINE: Final = 140
_SENTENCE: Final = 500
_LINE: Final = 300
_FLAGS: Final = 600
"""Characters of the flags of one remedy; longer ones are left out whole, never cut."""

_BROKEN: Final = frozenset({"failure", "gpu", "driver", "zombie"})
"""Families of incidents in which something does not work any more."""
_CALM: Final = frozenset(
    {"shutdown_requested", "bounded_warmup_growth", "request_too_long", "lora_slot_queue"}
)
"""Causes of which nobody need do anything."""


def incident_notice(
    incident: StoredIncident,
    *,
    labels: Mapping[str, str],
    runbook_base: str,
    lang: Language = "en",
) -> IncidentNotice:
    """What a message says of an incident.

    Args:
        incident: as the detector keeps it, with or without a diagnosis.
        labels: what the configuration says of the host and the engine.
        runbook_base: where the causes' pages are; ``{cause}`` in it stands for the cause, which
            else is added at its end. Empty for none.
        lang: the language of titles, remedies and fixed words; what rules say stays English.

    """
    try:
        return _notice(incident, labels, runbook_base, lang)
    except Exception:
        # What is stored may be damaged, or of another version: people must hear of it all the same.
        if incident.diagnosis is None:
            raise
        _LOG.exception("the diagnosis of %s cannot be told; its trigger is", incident.id)
        bare = dataclasses.replace(incident, diagnosis=None)
        return _notice(bare, labels, runbook_base, lang)


def _notice(
    incident: StoredIncident, labels: Mapping[str, str], runbook_base: str, lang: Language
) -> IncidentNotice:
    diagnosis = from_json(incident.diagnosis) if incident.diagnosis is not None else None
    lead = _lead(diagnosis)
    finding = lead.finding if lead is not None else None
    engine = phrases.engine_of(diagnosis, finding) if diagnosis and finding else None
    ledgers = lead.memory if isinstance(lead, Incident) else ()
    loop = _restart_loop(incident)
    gpus = _gpus(incident, lead, engine, ledgers)
    cause = clean_text(finding.cause, 60) if finding is not None else None
    return IncidentNotice(
        id=incident.id,
        fingerprint=clean_text(incident.fingerprint, 200),
        host=clean_text(incident.host or "?", 120),
        severity=severity_of(incident, cause),
        headline=_headline(incident, cause, lang),
        opened_at=incident.opened_at,
        closed_at=incident.closed_at,
        resolution=resolution_of(incident, lang),
        engine_id=clean_text(incident.engine_id, 120) if incident.engine_id else None,
        engine=engine.fork or engine.engine if engine else None,
        version=clean_text(engine.version, 40) if engine and engine.version else None,
        model=clean_text(engine.model, 120) if engine and engine.model else None,
        gpus=gpus,
        incident_class=finding.cls if finding else None,
        cause=cause,
        confidence=finding.confidence if finding else None,
        why=_why(incident, finding, loop, lang),
        remedies=tuple(remedy_notices(incident.id, lead.remedies if lead else (), lang)),
        flags=_set_together(diagnosis, lead),
        memory=memory_line(ledgers, gpus, lang),
        evidence=tuple(_evidence(incident, finding)),
        eta_seconds=_eta_seconds(incident, lead),
        runbook_url=_runbook(runbook_base, cause),
        labels=dict(labels),
        restarts=_starts(loop),
    )


def severity_of(incident: StoredIncident, cause: str | None) -> Severity:
    """Critical: something failed, or is about to. Info: nobody need do anything.

    It follows from what happened and not from its class, so that a second diagnosis takes nothing
    from it but by saying that nobody need do anything. Of an engine that fails again and again none
    can say that.
    """
    if cause in _CALM and _restart_loop(incident) is None:
        return "info"
    if incident.fingerprint.rpartition("/")[2] in _BROKEN:
        return "critical"
    levels = {trigger.values.get("level") for trigger in incident.triggers}
    return "critical" if "critical" in levels else "warning"


def _lead(diagnosis: Diagnosis | None) -> Incident | Risk | None:
    if diagnosis is None:
        return None
    found: tuple[Incident | Risk, ...] = (*diagnosis.incidents, *diagnosis.risks)
    return found[0] if found else None


def _headline(incident: StoredIncident, cause: str | None, lang: Language) -> str:
    if cause is not None:
        return clean_text(title(cause, lang), _HEADLINE)
    kind = incident.triggers[0].kind if incident.triggers else None
    known = TRIGGERS[lang].get(kind) if kind else None  # another version may have stored it
    return known or words(lang)["undiagnosed"]


def _restart_loop(incident: StoredIncident) -> Trigger | None:
    """The last time that an engine was seen to fail with each start; None if it does not."""
    return next((t for t in reversed(incident.triggers) if t.kind == "restart_loop"), None)


def _starts(loop: Trigger | None) -> int | None:
    starts = loop.values.get("starts") if loop is not None else None
    return round(starts) if isinstance(starts, int | float) else None


def _why(
    incident: StoredIncident, finding: Finding | None, loop: Trigger | None, lang: Language
) -> str | None:
    """One sentence of why; before it, how often an engine has failed with it."""
    if finding is None:
        told = next((t.text for t in reversed(incident.triggers) if t.text), None)
        return clean_text(told, _SENTENCE) if told else None
    said = [clean_text(finding.summary, _SENTENCE)]
    if lang != "en":
        said.insert(0, meaning(finding.cause, lang) or "")
    if (starts := _starts(loop)) is not None and loop is not None:
        said.insert(0, restarts_note(starts, loop.values.get("window_seconds"), lang))
    return "".join(f"{text} " if text[-1:] < "\u3000" else text for text in said).strip() or None


def resolution_of(incident: StoredIncident, lang: Language = "en") -> str | None:
    """How it ended, in a sentence; None of one that is not over, or whose end is not known."""
    told = (incident.diagnosis or {}).get("resolution")
    if incident.state != "closed" or not isinstance(told, Mapping):
        return None
    if told.get("command_changed"):
        return words(lang)["cured"]
    return words(lang)["serves_again" if told.get("restarted", True) else "served_on"]


def remedy_notices(
    incident_id: str, remedies: Sequence[Remedy], lang: Language
) -> Iterator[RemedyNotice]:
    """The first remedies as messages say them."""
    texts, own = catalogue(lang), words(lang)
    for made in remedies[:REMEDIES_SHOWN]:
        remedy = phrases.remedy_in(made, lang)
        flags = tuple(map(hide_text, (*typed_flags(remedy.set), *typed_env(remedy.env))))
        todo = [own["remove"].format(flags=" ".join(map(clean, remedy.unset)))]
        todo = [*(todo if remedy.unset else ()), clean_text(remedy.action or "", _LINE)]
        if sum(map(len, flags)) > _FLAGS:
            flags, todo = (), [own["long_flags"].format(id=incident_id), *todo]
        yield RemedyNotice(
            title=clean_text(remedy.title, 120),
            flags=flags,
            action=own["then"].join(filter(None, todo)) or None,
            effect=clean_text(own["then"].join(phrases.effects(remedy.effect, texts)), 200) or None,
            validated=remedy.validated,
        )


def _set_together(diagnosis: Diagnosis | None, lead: Incident | Risk | None) -> tuple[str, ...]:
    """As typed; none where they are too long to be told whole."""
    found = [lead, phrases.memory_behind(diagnosis) if diagnosis is not None else None]
    chosen = next(filter(None, (set_together(one.remedies) for one in found if one)), ())
    env = {name: value for remedy in chosen for name, value in remedy.env.items()}
    changes = {flag: value for remedy in chosen for flag, value in remedy.set.items()}
    flags = tuple(map(hide_text, (*typed_flags(changes), *typed_env(env))))
    return flags if sum(map(len, flags)) <= _FLAGS else ()


def _gpus(
    incident: StoredIncident,
    lead: Incident | Risk | None,
    engine: EngineFacts | None,
    ledgers: Sequence[GpuLedger],
) -> tuple[int, ...]:
    """Those that set it off, else those that were short, else all of the engine."""
    seen = {trigger.gpu for trigger in incident.triggers}
    if isinstance(lead, Risk):
        seen.add(lead.gpu)
    found = {gpu for gpu in seen if gpu is not None}
    found = found or {ledger.gpu for ledger in ledgers if ledger.gpu is not None}
    return tuple(sorted(found or (engine.gpus if engine else ())))


def memory_line(ledgers: Sequence[GpuLedger], gpus: Sequence[int], lang: Language) -> str | None:
    """``GPU 0 (79.2 GiB): weights 38.1 GiB, KV cache 22.0 GiB, free 0.4 GiB``."""
    texts, own = catalogue(lang), words(lang)
    about = [ledger for ledger in ledgers if ledger.gpu in gpus] or ledgers
    grouped = [(label, one) for label, one in group_ledgers(about) if one.parts]
    if not grouped:
        return None
    label, ledger = min(grouped, key=lambda pair: _free_bytes(pair[1]))
    held = sorted(
        (part for part in ledger.parts if part.bytes > 0 and part.name != "free"),
        key=lambda part: -part.bytes,
    )
    shown = [(part.name, part.bytes) for part in held[:_PARTS_SHOWN]]
    if any(part.name == "free" for part in ledger.parts):
        shown.append(("free", _free_bytes(ledger)))
    parts = own["and"].join(
        f"{part_name(name, texts)} {format_bytes(size)}" for name, size in shown
    )
    total = "" if ledger.total_bytes is None else f" ({format_bytes(ledger.total_bytes)})"
    return clean(f"{label}{total}{texts['colon']}{parts}", _LINE)


def _free_bytes(ledger: GpuLedger) -> int:
    return sum(part.bytes for part in ledger.parts if part.name == "free")


def _evidence(incident: StoredIncident, finding: Finding | None) -> Iterator[str]:
    """What decided stands first, as in `oomwatch incidents show`; no line twice."""
    items = finding.evidence if finding is not None else ()
    if not items:
        items = tuple(item for trigger in incident.triggers for item in trigger.evidence)
    lines = map(_quoted, items)
    yield from list(dict.fromkeys(lines))[:_EVIDENCE_SHOWN]


def _quoted(item: Evidence) -> str:
    """``server.log:812: CUDA out of memory``."""
    told = clean_text(phrases.statement(item, LONGEST), _LINE)
    return f"{clean_text(phrases.where(item), 80)}: {told}"


def _eta_seconds(incident: StoredIncident, lead: Incident | Risk | None) -> float | None:
    if isinstance(lead, Risk) and lead.eta_seconds is not None:
        return lead.eta_seconds
    told: list[Any] = [trigger.values.get("eta_seconds") for trigger in incident.triggers]
    known = [eta for eta in told if isinstance(eta, int | float) and math.isfinite(eta)]
    return float(known[-1]) if known else None


def _runbook(base: str, cause: str | None) -> str | None:
    if not base or cause is None:
        return None
    return base.replace("{cause}", cause) if "{cause}" in base else f"{base.rstrip('/')}/{cause}"
