from __future__ import annotations

from html.parser import HTMLParser

import pytest
from golden_files import check_golden
from report_samples import SAMPLES, kv_lt_max_len, prefill_peak
from test_hostile import ATTACKS, poison

import oomwatch
from oomwatch.records import Diagnosis
from oomwatch.report.html import render_html

VOID = {"meta"}
KNOWN = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span", "ul", "ol",
    "li", "i", "code", "pre", "strong", "dl", "dt", "dd", "footer",
}  # fmt: skip


class Reader(HTMLParser):
    """Collects tags and text, and fails on an unbalanced tree."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(diagnosis: Diagnosis, lang: str = "en") -> Reader:
    reader = Reader()
    reader.feed(render_html(diagnosis, lang=lang))
    reader.close()
    assert reader.open == []
    return reader


def test_matches_its_golden_file() -> None:
    text = render_html(prefill_peak()).replace(oomwatch.__version__, "VERSION")
    check_golden("prefill_peak.html", text)


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", SAMPLES)
def test_is_well_formed_and_loads_nothing(name: str, lang: str) -> None:
    reader = read(SAMPLES[name](), lang)
    assert reader.attributes <= {"lang", "charset", "name", "content", "style", "class"}


def test_says_what_the_text_says() -> None:
    text = " ".join(read(kv_lt_max_len()).text)
    for part in (
        "16.0 GiB of KV cache",
        "--max-model-len 77056",
        "server.log:128",
        "KV cache 9.4 GiB",
    ):
        assert part in text


@pytest.mark.parametrize(
    "attack", [*ATTACKS, "<script>alert(1)</script>", "\"'><img src=x onerror=y>", "</pre></body>"]
)
def test_hostile_text_stays_text(attack: str) -> None:
    diagnosis = poison(prefill_peak(), Diagnosis, attack)
    reader = read(diagnosis)
    assert reader.attributes <= {"lang", "charset", "name", "content", "style", "class"}
    assert all(char.isprintable() or char == "\n" for char in render_html(diagnosis))
