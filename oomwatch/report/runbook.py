"""One page per cause for whoever is woken by an alert: what it is, how to be sure, what to do.

Made of the page of the cause (`pages`) and of how to be sure of it here and now. ``agent`` and
``unknown`` are pages too: of alerts about the agent itself, and of incidents without a cause.
"""

from __future__ import annotations

import pkgutil
from typing import Final

from oomwatch.causes import CAUSES, HOST_CAUSES, class_of
from oomwatch.records import CauseClass
from oomwatch.report.locale import Language, catalogue
from oomwatch.report.pages import SECTIONS, meaning, page, title

OTHERS: Final = ("agent", "unknown")
"""Pages that are not of a cause."""

_BE_SURE: Final[dict[Language, str]] = {"en": "How to be sure", "zh": "如何确认"}
_WITH_AGENT: Final[dict[Language, str]] = {
    "en": "The alert names the incident: `oomwatch incidents show ID` on that host prints the "
    "evidence, who holds the memory, and what was considered instead.",
    "zh": "告警里有事件编号：在该主机上运行 `oomwatch incidents show ID`，"
    "会打印证据、显存归属，以及排除过的其他可能。",
}
_WITHOUT_AGENT: Final[dict[Language, str]] = {
    "en": "Without the agent: `{command}`.",
    "zh": "没有运行 agent 时：`{command}`。",
}
_IN_FIGURES: Final[dict[Language, str]] = {
    "en": "In Prometheus: {queries}.",
    "zh": "在 Prometheus 中：{queries}。",
}
_FLAGS: Final[dict[Language, str]] = {
    "en": "`oomwatch flags ID` prints the flags that help here, with this server's numbers and in "
    "the spelling of its version. In general:",
    "zh": "`oomwatch flags ID` 打印适用于本机、数值算好、拼写符合当前版本的参数。一般做法：",
}
_COMMANDS: Final[dict[CauseClass, str]] = {
    "startup": "oomwatch diagnose --log server.log",
    "long_context": "oomwatch diagnose --log server.log --metrics http://127.0.0.1:8000/metrics",
    "irregular": "oomwatch diagnose --log server.log --kernel-log dmesg.txt --live",
    "not_oom": "oomwatch diagnose --log server.log --kernel-log dmesg.txt",
}
_HOST_COMMAND: Final = "oomwatch diagnose --log server.log --kernel-log dmesg.txt"
_QUERIES: Final[dict[CauseClass, tuple[str, ...]]] = {
    "startup": ("oomwatch_gpu_holder_memory_bytes", "oomwatch_gpu_memory_free_bytes"),
    "long_context": (
        "oomwatch_kv_usage_ratio",
        "oomwatch_requests_waiting",
        "oomwatch_preemptions_per_minute",
    ),
    "irregular": (
        "oomwatch_gpu_memory_used_max_bytes",
        "oomwatch_gpu_memory_unattributed_bytes",
        "oomwatch_forecast_exhaustion_seconds",
    ),
    "not_oom": ("oomwatch_engine_state", "oomwatch_gpu_success"),
}
_HOST_QUERIES: Final = ("oomwatch_host_memory_available_bytes", "oomwatch_host_swap_used_bytes")


def runbook_names() -> tuple[str, ...]:
    """The names of all pages."""
    return (*(cause for causes in CAUSES.values() for cause in causes), *OTHERS)


def runbook_page(name: str) -> str | None:
    """A page in Markdown, English and then Chinese; None for a name that there is not."""
    if name in OTHERS:
        data = pkgutil.get_data("oomwatch.report", f"runbooks/{name}.md")
        return (data or b"").decode("utf-8")
    cls = class_of(name)
    if cls is None:
        return None
    head = f"# {title(name, 'en')}\n\n`{name}` · {catalogue('en')[f'heading.{cls}']}"
    chinese = f"# {title(name, 'zh')}\n\n`{name}` · {catalogue('zh')[f'heading.{cls}']}"
    return f"{head}\n\n{_body(name, cls, 'en')}\n\n---\n\n{chinese}\n\n{_body(name, cls, 'zh')}\n"


def runbook_index() -> str:
    """The list of all pages, for the folder that they are in."""
    lines = ["# Runbooks", "", "One page per cause, and for the agent itself. Generated."]
    for cls, causes in CAUSES.items():
        lines += ["", f"## {catalogue('en')[f'heading.{cls}']}", ""]
        lines += [f"- [`{cause}`]({cause}.md) {title(cause, 'en')}" for cause in causes]
    lines += ["", "## Others", "", "- [`agent`](agent.md)", "- [`unknown`](unknown.md)"]
    return "\n".join(lines) + "\n"


def _body(cause: str, cls: CauseClass, lang: Language) -> str:
    looks, confused, steps, reasons = SECTIONS[lang]
    parts = _parts(page(cause, lang))
    of_host = cause in HOST_CAUSES
    command = _HOST_COMMAND if of_host else _COMMANDS[cls]
    queries = ", ".join(f"`{name}`" for name in (_HOST_QUERIES if of_host else _QUERIES[cls]))
    sure = (
        f"- {_WITH_AGENT[lang]}\n"
        f"- {_WITHOUT_AGENT[lang].format(command=command)}\n"
        f"- {_IN_FIGURES[lang].format(queries=queries)}"
    )
    flags = "" if cls == "not_oom" else f"{_FLAGS[lang]}\n\n"
    sections = (
        (looks, parts.get(looks, "")),
        (_BE_SURE[lang], sure),
        (confused, parts.get(confused, "")),
        (steps, flags + parts.get(steps, "")),
        (reasons, parts.get(reasons, "")),
    )
    text = [meaning(cause, lang) or ""]
    text += [f"## {heading}\n\n{content}" for heading, content in sections if content]
    return "\n\n".join(text)


def _parts(text: str) -> dict[str, str]:
    """The sections of a page, by heading."""
    sections = text.split("\n## ")[1:]
    return {
        heading: content.strip() for heading, _, content in (s.partition("\n") for s in sections)
    }
