from __future__ import annotations

import re
from typing import get_args

import pytest

from oomwatch import records
from oomwatch.causes import CAUSES
from oomwatch.records import EngineFacts, Finding
from oomwatch.remedies.catalog import prescribe
from oomwatch.report.locale import LANGUAGES, catalogue, choose_language
from oomwatch.report.locale.zh_actions import ACTIONS
from oomwatch.report.locale.zh_reasons import DOUBTS, REASONS
from oomwatch.report.locale.zh_remedies import COSTS, TITLES
from oomwatch.report.phrases import left_in_english


def test_every_text_exists_in_every_language_with_the_same_fields() -> None:
    english = catalogue("en")
    for lang in LANGUAGES:
        texts = catalogue(lang)
        assert set(texts) == set(english)
        for key, text in texts.items():
            assert text.strip(), key
            assert set(re.findall(r"{\w+}", text)) == set(re.findall(r"{\w+}", english[key])), key


def test_every_value_of_the_records_has_a_text() -> None:
    texts = catalogue("en")
    for prefix, values in (
        ("verdict", records.Verdict),
        ("class", records.CauseClass),
        ("heading", records.CauseClass),
        ("phase", records.Phase),
        ("status", records.SourceStatusName),
    ):
        for value in get_args(values):
            assert f"{prefix}.{value}" in texts


@pytest.mark.parametrize(
    ("lang", "environ", "expected"),
    [
        ("en", {"LANG": "zh_CN.UTF-8"}, "en"),
        ("zh", {"LANG": "en_US.UTF-8"}, "zh"),
        ("auto", {"LANG": "zh_CN.UTF-8"}, "zh"),
        ("auto", {"LANG": "zh_TW"}, "zh"),
        ("auto", {"LC_ALL": "C.UTF-8", "LANG": "zh_CN.UTF-8"}, "en"),
        ("auto", {"LC_ALL": "", "LC_MESSAGES": "zh_CN", "LANG": "en_US"}, "zh"),
        ("auto", {"LANG": "de_DE.UTF-8"}, "en"),
        ("auto", {}, "en"),
    ],
)
def test_language_follows_posix(lang: str, environ: dict[str, str], expected: str) -> None:
    assert choose_language(lang, environ) == expected


def test_every_remedy_that_is_prescribed_is_said_in_chinese() -> None:
    named = ("", "vllm", "sglang", "tgi", "llama.cpp", "lmdeploy")
    engines = [EngineFacts("e", name or None, version=v) for name in named for v in VERSIONS]
    used = [
        remedy
        for cls, causes in CAUSES.items()
        for cause in causes
        for engine in engines
        for remedy in prescribe(Finding(cls, cause, 0.9, "x"), engine)
    ]
    assert used
    assert {text for remedy in used for text in left_in_english(remedy, "zh")} == set()


def test_templates_of_remedies_fill_no_place_that_the_english_has_not() -> None:
    for english, chinese in {**TITLES, **COSTS, **ACTIONS, **REASONS, **DOUBTS}.items():
        sure, places = ({*_PLACE.findall(text)} for text in (_OPTIONAL.sub("", english), english))
        assert {*_PLACE.findall(chinese)} <= places, english
        assert {*_PLACE.findall(_OPTIONAL.sub("", chinese))} <= sure, english
        assert re.search(r"[\u3000-\u9fff]", chinese), english


_PLACE = re.compile(r"{(\w+)}")
_OPTIONAL = re.compile(r"\[[^\[\]]*\{[^\[\]]*\]")
VERSIONS = (None, "0.6.3", "0.11.0")
