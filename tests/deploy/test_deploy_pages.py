"""Pages that alerts lead to, and that describe what is shipped: links, and commands that there are."""

from __future__ import annotations

import contextlib
import re

import click
import pytest
from test_deploy_rules import DEPLOY, ROOT
from test_docs import FENCE, commands, oomwatch_calls

PAGES = sorted([*DEPLOY.glob("*.md"), *(ROOT / "docs" / "runbooks").glob("*.md")])


def test_there_are_pages():
    assert len(PAGES) > 90


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_commands(path):
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)\)", FENCE.sub("", text)):
        assert link.startswith("http") or (path.parent / link).exists(), link
    for words in oomwatch_calls(text):
        command = commands().get(words[0])
        assert command is not None, words
        with contextlib.suppress(click.exceptions.Exit):
            command.make_context(f"oomwatch {words[0]}", words[1:]).close()


def test_files_that_are_described_are_there():
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for name in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE):
        assert (DEPLOY / name).exists(), name
    described = set(re.findall(r"[\w./]+\.(?:yml|json)", text))
    shipped = {
        str(path.relative_to(DEPLOY))
        for path in DEPLOY.glob("*/*")
        if path.suffix in {".yml", ".json"}
    }
    assert shipped <= described
