"""The page of a cause for whoever is woken by an alert, served beside the metrics."""

from __future__ import annotations


def runbook(cause: str) -> str | None:
    """The page in both languages; None for a cause that there is not."""
    # The pages are read by somebody who asks, which may never happen.
    from oomwatch.report.runbook import runbook_page  # noqa: PLC0415

    return runbook_page(cause)
