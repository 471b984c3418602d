"""Fixed texts of the reports: one catalogue per language, the same keys in each.

Sentences that rules make stay English. The cause's title and its one-sentence meaning come from
pages/ in either language; what remedies say is made in English and said in Chinese by the templates
of `zh_remedies`, `zh_actions` and `zh_reasons`, so that a stored report reads in either language.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import Final, Literal

from oomwatch.report.locale.phrase_book import PhraseBook

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


@functools.cache
def phrase_book(lang: Language) -> PhraseBook:
    """What says the sentences of remedies in a language; English says them as they are."""
    if lang == "en":
        return PhraseBook()
    from oomwatch.report.locale.zh_actions import ACTIONS  # noqa: PLC0415 - only for Chinese
    from oomwatch.report.locale.zh_reasons import DOUBTS, REASONS  # noqa: PLC0415 - as above
    from oomwatch.report.locale.zh_remedies import COSTS, TITLES  # noqa: PLC0415 - as above

    return PhraseBook(TITLES, ACTIONS, COSTS, REASONS, DOUBTS)
