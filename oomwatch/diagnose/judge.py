"""From findings to one diagnosis: what decides, what is second, what repeats, and the verdict."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Final

from oomwatch.diagnose.assemble import assemble
from oomwatch.diagnose.contradictions import contradictions
from oomwatch.diagnose.engines import printed_arguments
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.inputs import Inputs
from oomwatch.diagnose.ledger import build_ledgers
from oomwatch.diagnose.missing import what_is_missing
from oomwatch.diagnose.privacy import without_secrets
from oomwatch.diagnose.rules import RULES
from oomwatch.diagnose.rules.findings import FAILURES, KERNEL, NOTHING, REQUEST
from oomwatch.diagnose.rules.processes import exit_evidence
from oomwatch.engines.commandline import parse_command
from oomwatch.records import (
    Alternative,
    Diagnosis,
    EngineFacts,
    Finding,
    Gpu,
    Incident,
    Risk,
    SourceStatus,
    Verdict,
)

_MAX_INCIDENTS: Final = 50
_MAX_ALTERNATIVES: Final = 3
_CALM: Final = frozenset({"shutdown_requested", "bounded_warmup_growth"})
"""Causes that are no failure."""


def diagnose(inputs: Inputs) -> Diagnosis:
    """Judge everything that was read. Remedies are added by the caller, from the findings."""
    all_facts = assemble(inputs)
    incidents: list[Incident] = []
    risks: list[Risk] = []
    newest_seen: set[str] = set()
    failed = False
    is_watched = inputs.live or bool(inputs.exits)
    for facts in all_facts:
        base = facts.engine.id.partition("#")[0]
        newest = base not in newest_seen
        newest_seen.add(base)
        findings = find_all(facts)
        if not findings:
            continue
        if facts.engine.phase == "exited":
            findings = _end_first(findings)
        lead, others = findings[0], findings[1:]
        if lead.risk:
            if newest:
                risks += [_risk(f) for f in findings if f.risk]
                later = [
                    f
                    for f in others
                    if not f.risk and (f.strength > REQUEST or (is_watched and _is_stop(f)))
                ]
                if later:
                    incidents.append(_incident(facts, later[0], [lead], inputs))
            continue
        if not newest and lead.cause in (
            "shutdown_requested",
            "bounded_warmup_growth",
            "request_too_long",
        ):
            continue
        if newest:
            risks += [
                _risk(f)
                for f in others
                if f.risk
                and (
                    is_orphan(f)
                    or (
                        f.cls != lead.cls
                        and lead.strength < KERNEL
                        and facts.engine.phase == "serving"
                    )
                )
            ]
        failed = failed or (newest and lead.cause not in _CALM and lead.strength != REQUEST)
        _add(incidents, _incident(facts, lead, others, inputs))
    # A start that was only stopped says less than one before it that failed.
    incidents = sorted(incidents, key=lambda i: i.finding.cause in _CALM)[:_MAX_INCIDENTS]
    engines = tuple(f.engine for f in all_facts if _known(f))[:64]
    sources = list(inputs.sources)
    if inputs.command and any(f.engine.engine and not f.engine.command for f in all_facts):
        detail = "not used: it starts another engine than the one that wrote the log"
        sources.append(SourceStatus("command", "warning", detail))
    elif said := _contradictions(all_facts, inputs):
        detail = f"not that of this log: {'; '.join(said)}; the log's are taken"
        sources.append(SourceStatus("command", "warning", detail))
    verdict = _verdict(incidents, () if failed else risks, all_facts, inputs)
    if verdict == "unknown" and not any(i.finding.unseen for i in incidents):
        sources += what_is_missing(all_facts, inputs)
    return without_secrets(
        Diagnosis(
            verdict=verdict,
            generated_at=inputs.generated_at,
            host=inputs.host,
            engines=engines,
            gpus=_gpus(inputs),
            incidents=tuple(incidents),
            risks=tuple(r for r in risks if verdict != "not_oom" or is_orphan(r.finding)),
            sources=tuple(sources),
        )
    )


def _contradictions(all_facts: Sequence[Facts], inputs: Inputs) -> list[str]:
    """What the given command says otherwise than the newest start of the log."""
    newest = next((facts for facts in all_facts if facts.run is not None), None)
    if not inputs.command or newest is None or newest.run is None:
        return []
    engine = newest.engine
    parsed = parse_command(inputs.command, engine=inputs.engine or "auto", version=engine.version)
    _, given = printed_arguments(newest.run, engine.engine, engine.version)
    return contradictions(parsed, given, newest.run.model)


def find_all(facts: Facts) -> list[Finding]:
    """Every finding on these facts, the deciding one first."""
    findings = [finding for rule in RULES if (finding := rule(facts)) is not None]
    findings.sort(key=_rank)
    return findings


def _is_stop(finding: Finding) -> bool:
    """Whether the server was asked to stop: for who watches it, that is why it ended.

    A log alone that ends so tells most by the risks it ran before.
    """
    return finding.cause == "shutdown_requested"


def is_orphan(finding: Finding) -> bool:
    """Whether it is about processes whose server is gone: a risk beside whatever ended that."""
    return finding.risk and finding.cause == "gpu_busy_other_process"


def _end_first(findings: list[Finding]) -> list[Finding]:
    """What ended the engine before the risks it ran: it does not serve any more."""
    ends = [f for f in findings if not f.risk and f.cause not in _CALM and f.strength != REQUEST]
    return [*ends, *(f for f in findings if f not in ends)]


def _rank(finding: Finding) -> tuple[int, int, int, float]:
    """Kernel first; then failures of the log by place; then the rest by kind of evidence."""
    if finding.strength == KERNEL:
        return (0, 0, 0, -finding.confidence)
    if finding.strength in FAILURES and not finding.risk:
        return (
            1,
            finding.order if finding.order is not None else 0,
            -finding.strength,
            -finding.confidence,
        )
    return (2, 0, -finding.strength, -finding.confidence)


def _incident(facts: Facts, lead: Finding, others: Sequence[Finding], inputs: Inputs) -> Incident:
    alternatives: list[Alternative] = []
    for other in others:
        if (
            other.cause != lead.cause
            and all(a.cause != other.cause for a in alternatives)
            and other.strength > NOTHING
        ):
            alternatives.append(
                Alternative(
                    other.cls,
                    other.cause,
                    min(other.confidence, lead.confidence) * 0.6,
                    _why_less(lead, other),
                )
            )
    samples = inputs.series.gpus if not facts.engine.id.partition("#")[1] else ()
    if facts.exits:
        told = {(e.where, e.text) for e in lead.evidence}
        ends = [e for e in map(exit_evidence, facts.exits) if (e.where, e.text) not in told]
        lead = dataclasses.replace(lead, evidence=(*lead.evidence, *ends))
    memory = build_ledgers(facts, lead, samples) if lead.cls != "not_oom" else ()
    return Incident(
        id=_incident_id(facts.engine, lead),
        finding=lead,
        alternatives=tuple(alternatives[:_MAX_ALTERNATIVES]),
        memory=memory,
    )


def _why_less(lead: Finding, other: Finding) -> str:
    if other.strength == lead.strength:
        return "it comes later in the log, so it is more likely a consequence"
    if other.risk:
        return "it describes the load before the failure, not the failure"
    if other.strength < lead.strength:
        return "its evidence is of a weaker kind than the one that decides"
    return "it comes later than the failure that decides"


def _incident_id(engine: EngineFacts, finding: Finding) -> str:
    where = finding.evidence[0].where if finding.evidence else ""
    text = f"{engine.id}|{finding.cause}|{where}|{finding.at}"
    return "inc-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _add(incidents: list[Incident], incident: Incident) -> None:
    """Append, or fold into the one before if a restart loop repeats it."""
    if incidents:
        last = incidents[-1]
        same = last.finding.cause == incident.finding.cause and _base(last) == _base(incident)
        if same:
            incidents[-1] = dataclasses.replace(last, count=last.count + 1)
            return
    incidents.append(incident)


def _base(incident: Incident) -> str:
    return (incident.finding.engine_id or "").partition("#")[0]


def _risk(finding: Finding) -> Risk:
    eta = finding.values.get("eta_seconds")
    return Risk(
        finding=finding, eta_seconds=eta if isinstance(eta, int | float) and eta > 0 else None
    )


def verdict_of(incidents: Sequence[Incident]) -> Verdict:
    """The verdict on these incidents alone; there must be one."""
    memory = [i.finding for i in incidents if i.finding.cls != "not_oom"]
    if any(f.strength > NOTHING or f.cause == "kv_alloc_overcommit" for f in memory):
        return "oom"
    if memory:
        return "unknown"
    if all(i.finding.cause == "shutdown_requested" for i in incidents):
        return "healthy"
    return "not_oom"


def _verdict(
    incidents: Sequence[Incident], risks: Sequence[Risk], all_facts: Sequence[Facts], inputs: Inputs
) -> Verdict:
    said = verdict_of(incidents) if incidents else None
    if risks and said != "oom":
        return "at_risk"
    if said is not None:
        return said
    if any(_healthy(f) for f in all_facts) or any(p.engine for p in inputs.pages):
        return "healthy"
    return "unknown"


def _healthy(facts: Facts) -> bool:
    if facts.ended and any(e.exit_code != 0 for e in facts.exits):
        return False  # it failed in silence
    return (
        facts.run is not None
        and not facts.is_document
        and (facts.run.served or facts.run.reached("ready"))
    ) or bool(
        facts.series.engine or (facts.series.gpus and facts.run is None and facts.engine.engine)
    )


def _known(facts: Facts) -> bool:
    engine = facts.engine
    return not facts.is_document and any(
        (
            engine.engine,
            engine.version,
            engine.model,
            engine.command,
            engine.arguments,
            engine.kv_tokens,
        )
    )


def _gpus(inputs: Inputs) -> tuple[Gpu, ...]:
    """GPUs with the last figures of the samples."""
    last = {sample.gpu: sample for sample in inputs.series.gpus}
    found = []
    for gpu in inputs.gpus:
        sample = last.get(gpu.index) if gpu.index is not None else None
        if sample is not None and gpu.used_bytes is None:
            found.append(
                dataclasses.replace(
                    gpu,
                    used_bytes=sample.used_bytes,
                    free_bytes=sample.free_bytes,
                    reserved_bytes=sample.reserved_bytes,
                    total_bytes=gpu.total_bytes
                    if gpu.total_bytes is not None
                    else sample.total_bytes,
                )
            )
        else:
            found.append(gpu)
    return tuple(found)
