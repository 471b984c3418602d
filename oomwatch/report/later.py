"""What became of an engine after an incident: a later start may serve again."""

from __future__ import annotations

from collections.abc import Mapping

from oomwatch.records import Diagnosis, Finding
from oomwatch.report.phrases import local_time


def later_start(diagnosis: Diagnosis, finding: Finding, texts: Mapping[str, str]) -> str:
    """That the newest start of the engine serves or is under way; empty where it is this one.

    Starts of an engine before the newest have its id with a ``#`` and their age.
    """
    base, _, age = (finding.engine_id or "").partition("#")
    newest = next((engine for engine in diagnosis.engines if engine.id == base), None)
    if not age or newest is None or newest.phase not in ("serving", "starting"):
        return ""
    at = "" if newest.started_at is None else local_time(newest.started_at)
    when = texts["later.when"].format(time=at) if at else ""
    return texts[f"later.{newest.phase}"].format(when=when)
