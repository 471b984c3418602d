"""Fixed texts of the reports: one catalogue per language, the same keys in each.

Sentences that rules and remedies make stay English; the cause's title and its one-sentence
meaning come from pages/ in either language, the remedies' Chinese titles from `zh_remedies`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, Literal

Language = Literal["en", "zh"]
LANGUAGES: Final[tuple[Language, ...]] = ("en", "zh")


def choose_language(lang: str, environ: Mapping[str, str]) -> Language:
    """The language for `--lang`; "auto" follows LC_ALL, LC_MESSAGES, LANG, as POSIX orders them."""
    if lang == "auto":
        names = ("LC_ALL", "LC_MESSAGES", "LANG")
        lang = next((environ[name] for name in names if environ.get(name)), "en")
    return "zh" if lang.lower().startswith("zh") else "en"


def catalogue(lang: Language) -> Mapping[str, str]:
    """The fixed texts of one language; only that language is imported."""
    texts: Mapping[str, str] = importlib.import_module(f"oomwatch.report.locale.{lang}").TEXTS
    return texts
