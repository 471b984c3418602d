"""The page of every cause, ``pages/<language>/<cause>.md``: offline, in English and Chinese.

A page is a title, one sentence of meaning, then four sections in a fixed order::

    # KV cache too small for one full-length request

    The memory left for ... cannot hold ...

    ## How it looks
    ## Not to be confused with
    ## What to do
    ## Why it happens
"""

from __future__ import annotations

import functools
import pkgutil
from typing import Final

from oomwatch.causes import CAUSES, class_of
from oomwatch.report.locale import Language, catalogue

SECTIONS: Final[dict[Language, tuple[str, str, str, str]]] = {
    "en": ("How it looks", "Not to be confused with", "What to do", "Why it happens"),
    "zh": ("表现", "容易混淆", "怎么办", "为什么"),
}


@functools.cache
def page(cause: str, lang: Language) -> str:
    """The whole Markdown page of a cause; KeyError for an id that does not exist."""
    text = _read(cause, lang)
    if text is None:
        raise KeyError(cause)
    return text


def title(cause: str, lang: Language) -> str:
    """What the cause is called for people: the page's first line."""
    return (_read(cause, lang) or f"# {cause}").partition("\n")[0].removeprefix("# ")


def meaning(cause: str, lang: Language) -> str | None:
    """The page's one sentence of meaning, on one line; None for an unknown cause."""
    text = _read(cause, lang)
    if text is None:
        return None
    return " ".join(text.partition("\n\n")[2].partition("\n\n")[0].split("\n"))


def docs_index() -> str:
    """``docs/causes.md``: all causes by class, with their meaning and links to both pages."""
    texts = catalogue("en")
    lines = ["# Causes", "", "Offline: `oomwatch explain CAUSE`. Generated from the pages."]
    for cls, causes in CAUSES.items():
        lines += ["", f"## {texts[f'heading.{cls}']}", ""]
        lines += ["| Cause | Meaning | Pages |", "|---|---|---|"]
        for cause in causes:
            links = [
                f"[{name}](../oomwatch/report/pages/{lang}/{cause}.md)"
                for lang, name in (("en", "English"), ("zh", "中文"))
            ]
            lines.append(f"| `{cause}` | {meaning(cause, 'en')} | {' '.join(links)} |")
    return "\n".join(lines) + "\n"


@functools.cache
def _read(cause: str, lang: Language) -> str | None:
    if class_of(cause) is None:
        return None
    try:
        data = pkgutil.get_data("oomwatch.report", f"pages/{lang}/{cause}.md")
    except OSError:  # a report without its page is still a report
        return None
    return None if data is None else data.decode("utf-8")
