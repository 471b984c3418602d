"""What became of an engine after an incident: a later start may serve again."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.records import Diagnosis, Finding
from oomwatch.report.locale import Language
from oomwatch.report.pages import title
from oomwatch.report.phrases import local_time


def later_start(
    diagnosis: Diagnosis, finding: Finding, texts: Mapping[str, str], lang: Language
) -> str:
    """That the newest start of the engine serves or is under way; empty where it is this one.

    What that start is itself at risk of is said beside it: "serves" alone would reassure.

    Starts of an engine before the newest have its id with a ``#`` and their age.
    """
    base, _, age = (finding.engine_id or "").partition("#")
    newest = next((engine for engine in diagnosis.engines if engine.id == base), None)
    if not age or newest is None or newest.phase not in ("serving", "starting"):
        return ""
    at = "" if newest.started_at is None else local_time(newest.started_at)
    when = texts["later.when"].format(time=at) if at else ""
    said = texts[f"later.{newest.phase}"].format(when=when)
    risks = dict.fromkeys(
        title(risk.finding.cause, lang)
        for risk in diagnosis.risks
        if risk.finding.engine_id == newest.id
    )
    return said + "".join(texts["later.risk"].format(risk=risk) for risk in risks)
