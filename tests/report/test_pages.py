from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from oomwatch.causes import CAUSES, class_of
from oomwatch.report.pages import SECTIONS, docs_index, meaning, page, title

ALL = [cause for causes in CAUSES.values() for cause in causes]
ROOT = Path(__file__).parents[2]
BOTH = pytest.mark.parametrize("lang", ["en", "zh"])


def sections(text: str) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(parts[1::2], parts[2::2], strict=True)}


@BOTH
@pytest.mark.parametrize("cause", ALL)
def test_every_cause_has_a_whole_page(cause: str, lang: str) -> None:
    text = page(cause, lang)
    assert text.startswith("# ")
    assert text.endswith("\n")
    assert 15 <= text.count("\n") <= 42
    assert re.fullmatch(r"# [^\n]+\n\n[^#\n][^#]*?\n\n## .*", text, re.DOTALL)
    found = sections(text)
    assert tuple(found) == SECTIONS[lang]
    looks, nearest, remedies, why = (found[name] for name in SECTIONS[lang])
    assert looks.startswith("- ")
    assert nearest.startswith("- ")
    numbers = re.findall(r"^(\d+)\. ", remedies, re.MULTILINE)
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert numbers
    assert len(why) > (12 if lang == "zh" else 40)


@BOTH
@pytest.mark.parametrize("cause", ALL)
def test_title_and_meaning_are_one_line_each(cause: str, lang: str) -> None:
    from rich.cells import cell_len

    assert "\n" not in title(cause, lang)
    assert cell_len(title(cause, lang)) <= 64
    sentence = meaning(cause, lang)
    assert sentence
    assert sentence.endswith("。" if lang == "zh" else ".")
    assert "\n" not in sentence


@pytest.mark.parametrize("cause", ALL)
def test_look_alikes_are_causes_and_never_the_page_itself(cause: str) -> None:
    for lang in ("en", "zh"):
        nearest = sections(page(cause, lang))[SECTIONS[lang][1]]
        named = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", nearest)
        assert all(class_of(word) for word in named), named
        assert cause not in named


@pytest.mark.parametrize("cause", ALL)
def test_both_languages_say_the_same_things(cause: str) -> None:
    def marks(text: str) -> dict[str, int]:
        return {
            "bullets": len(re.findall(r"^- ", text, re.MULTILINE)),
            "steps": len(re.findall(r"^\d+\. ", text, re.MULTILINE)),
        }

    english, chinese = page(cause, "en"), page(cause, "zh")
    assert marks(english) == marks(chinese)
    flags = {
        lang: set(re.findall(r"--[a-z][a-z-]+[a-z]", page(cause, lang))) for lang in ("en", "zh")
    }
    assert flags["en"] == flags["zh"]


@BOTH
def test_titles_differ(lang: str) -> None:
    assert len({title(cause, lang) for cause in ALL}) == len(ALL)
    assert len({meaning(cause, lang) for cause in ALL}) == len(ALL)


@pytest.mark.parametrize("cause", ALL)
def test_chinese_pages_are_chinese(cause: str) -> None:
    text = page(cause, "zh")
    assert len(re.findall(r"[\u4e00-\u9fff]", text)) > 60
    assert not re.search(r"[\u4e00-\u9fff][,;:?!][\u4e00-\u9fff]", text)
    assert not re.search(r"[\u4e00-\u9fff]", page(cause, "en"))


def test_no_page_is_left_over() -> None:
    for lang in ("en", "zh"):
        folder = ROOT / "oomwatch/report/pages" / lang
        assert {path.stem for path in folder.iterdir()} == set(ALL)


@pytest.mark.parametrize("cause", [c for c in CAUSES["long_context"] if c.startswith("kv_")])
def test_run_time_kv_causes_never_ask_for_a_smaller_pool(cause: str) -> None:
    for lang in ("en", "zh"):
        steps = sections(page(cause, lang))[SECTIONS[lang][2]]
        assert not re.search(
            r"(mem-fraction-static|gpu-memory-utilization)` (down|减)|Lower `--(mem-fraction|gpu-memory)|调低 `--(mem-fraction|gpu-memory)",
            steps,
        )


def test_unknown_causes_have_no_page() -> None:
    with pytest.raises(KeyError):
        page("../../etc/passwd", "en")
    assert meaning("nonsense", "en") is None
    assert title("nonsense", "en") == "nonsense"


def test_the_index_in_docs_is_up_to_date() -> None:
    path = ROOT / "docs/causes.md"
    if os.environ.get("OOMWATCH_UPDATE_GOLDEN") == "1":
        path.write_text(docs_index(), encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    assert text == docs_index()
    for link in re.findall(r"\]\((\.\./[^)]+)\)", text):
        assert (path.parent / link).is_file()
