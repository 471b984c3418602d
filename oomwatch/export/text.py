"""Samples to a page: Prometheus' text format 0.0.4, or OpenMetrics 1.0."""

from __future__ import annotations

import math
from typing import Final, Literal

from oomwatch.export.samples import Samples

Format = Literal["text", "openmetrics"]

CONTENT_TYPES: Final[dict[Format, str]] = {
    "text": "text/plain; version=0.0.4; charset=utf-8",
    "openmetrics": "application/openmetrics-text; version=1.0.0; charset=utf-8",
}
_KINDS: Final = {"gauge": "gauge", "counter": "counter", "info": "gauge"}


END: Final[dict[Format, bytes]] = {"text": b"", "openmetrics": b"# EOF\n"}
"""What comes after the last part of a page."""


def render(samples: Samples, form: Format = "text") -> bytes:
    """The part of a page that these samples are, UTF-8."""
    is_open = form == "openmetrics"
    lines: list[str] = []
    for metric, found in samples:
        family, kind = metric.name, _KINDS[metric.kind]
        if is_open:
            # There a family goes by the name without what its kind adds to it.
            kind = metric.kind
            family = family.removesuffix({"counter": "_total", "info": "_info"}.get(kind, "\n"))
        lines.append(f"# HELP {family} {_help(metric.help)}")
        lines.append(f"# TYPE {family} {kind}")
        name = metric.name
        lines += [f"{name}{labels.text} {number(value)}" for labels, value in found]
    return "".join(f"{line}\n" for line in lines).encode("utf-8", "replace")


def number(value: float) -> str:
    """A number as both formats write it."""
    if isinstance(value, int):
        return str(int(value))  # a bool too
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf")


def preferred(accept: str) -> Format:
    """The format that an Accept header likes best; what is no such header gets text."""
    best: Format = "text"
    best_weight = 0.0
    for entry in accept.split(","):
        kind, *parameters = (part.strip().lower() for part in entry.split(";"))
        words = dict(part.partition("=")[::2] for part in parameters)
        try:
            weight = float(words.get("q", "1"))
        except ValueError:
            continue
        form: Format | None = None
        if kind == "application/openmetrics-text" and words.get("version", "1.0.0") == "1.0.0":
            form = "openmetrics"
        elif kind in {"text/plain", "text/*", "*/*"}:
            form = "text"
        if form is not None and weight > best_weight:
            best, best_weight = form, weight
    return best


def _help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', "'")
