"""The remedies of a whole diagnosis: for each incident and risk, and advice on the user's flags."""

from __future__ import annotations

import dataclasses

from oomwatch.records import (
    MODEL_SIZES,
    Diagnosis,
    EngineFacts,
    Finding,
    Incident,
    Remedy,
    Risk,
    SourceStatus,
)
from oomwatch.remedies.advice import wrong_flags
from oomwatch.remedies.catalog import prescribe
from oomwatch.remedies.forecast import model_source


def with_remedies(diagnosis: Diagnosis) -> Diagnosis:
    """The diagnosis with remedies for each incident and risk, and advice on the user's flags."""
    engines = {engine.id: engine for engine in diagnosis.engines}

    def remedies(engine_id: str | None, finding: Finding) -> tuple[Remedy, ...]:
        engine = engines.get(engine_id or "") or EngineFacts(id=engine_id or "engine-0")
        return prescribe(finding, engine)

    incidents: list[Incident] = [
        dataclasses.replace(i, remedies=remedies(i.finding.engine_id, i.finding))
        for i in diagnosis.incidents
    ]
    risks: list[Risk] = [
        dataclasses.replace(r, remedies=remedies(r.finding.engine_id, r.finding))
        for r in diagnosis.risks
    ]
    advice = tuple(
        dict.fromkeys(line for engine in diagnosis.engines[:1] for line in wrong_flags(engine))
    )
    return dataclasses.replace(
        diagnosis,
        incidents=tuple(incidents),
        risks=tuple(risks),
        advice=advice,
        sources=(*diagnosis.sources, *_model_sizes(incidents, risks, engines)),
    )


def _model_sizes(
    incidents: list[Incident], risks: list[Risk], engines: dict[str, EngineFacts]
) -> list[SourceStatus]:
    """Where the model sizes behind the predicted effects are from."""
    names: dict[str, None] = {}
    found: list[Incident | Risk] = [*incidents, *risks]
    for each in found:
        engine = engines.get(each.finding.engine_id or "")
        predicted = any(
            r.effect and r.effect.kv_tokens_after_low is not None for r in each.remedies
        )
        if engine is not None and predicted:
            names[model_source(engine) or ""] = None
    return [SourceStatus(MODEL_SIZES, "ok", name) for name in names if name]
