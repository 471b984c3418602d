"""The docs cannot lie: commands, options, causes, JSON keys and dependencies are all described."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shlex
import tomllib
from pathlib import Path

import click
import jsonschema
import pytest

from oomwatch.causes import CAUSES
from oomwatch.cli import COMMANDS, cli
from oomwatch.cli.rendering import FORMATS
from oomwatch.engines import versions
from oomwatch.report.json_report import read_schema

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
# Pages of commands that are not built yet; they need not be linked until then.
WAITING = {"configuration.md": "config"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def skip_if_waiting(path: Path) -> None:
    command = WAITING.get(path.name)
    if command is not None and command not in COMMANDS:
        pytest.skip(f"oomwatch {command} is not built yet")


def load_generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> dict[str, click.Command]:
    context = click.Context(cli)
    return {name: cli.get_command(context, name) for name in COMMANDS}


def parts_of(name: str) -> list[tuple[str, click.Command]]:
    """A command, without a heading of its own, and its subcommands with theirs."""
    command = commands()[name]
    subcommands = command.commands if isinstance(command, click.Group) else {}
    return [("", command), *((f"oomwatch {name} {sub}", each) for sub, each in subcommands.items())]


def options_of(command: click.Command) -> list[click.Option]:
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def shell_lines(text: str) -> list[str]:
    """The shell commands of a page: in fenced blocks and in code spans, joined over backslashes."""
    found = []
    for language, block in FENCE.findall(text):
        if language in {"sh", "text"}:
            found += block.replace("\\\n", " ").splitlines()
    found += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [line.strip().replace("\\|", "|") for line in found]


def oomwatch_calls(text: str) -> list[list[str]]:
    """The words after `oomwatch` of each command that calls it."""
    calls = []
    for line in shell_lines(text):
        match = re.search(r"(?:^|\| |sudo )oomwatch(?: (.*))?$", line)
        if match is not None:
            # In help texts three blanks or more stand before what an example does.
            words = re.split(r" {3,}| [|>] ", match[1] or "")[0]
            calls.append(shlex.split(words, comments=True))
    return calls


# ------------------------------------------------------------------------------- generated parts
def test_generated_pages_are_up_to_date():
    for path, text in load_generator().pages():
        shown = path.read_text(encoding="utf-8")
        assert shown == text, f"{path.name} is out of date: run `make docs`"


def test_readmes_show_a_real_output():
    for name in ("README.md", "README.zh.md"):
        assert "kv_lt_max_len" in read(name).partition("<!-- output of: ")[2]


# ------------------------------------------------------------------------------- completeness
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name):
    section = read("docs/cli.md").partition(f"## oomwatch {name}\n")[2].partition("\n## ")[0]
    assert section
    for part, command in parts_of(name):
        text = section.partition(f"### {part}\n")[2].partition("\n### ")[0] if part else section
        for option in options_of(command):
            for spelling in option.opts:
                assert spelling in text, f"{part} {spelling}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does(name):
    command = commands()[name]
    assert command.help
    assert "Examples:" in (command.epilog or "")
    for option in options_of(command):
        assert option.help, f"{name} {option.opts[-1]} has no help"


def test_readme_names_every_command():
    readme = read("README.md") + read("docs/sources.md")
    assert not [
        name for name in COMMANDS if f"oomwatch {name}" not in readme and name != "completion"
    ]


def test_readme_names_every_format():
    table = read("README.md").partition("## Output")[2].partition("\n## ")[0]
    assert not [name for name in FORMATS if f"`{name}`" not in table]


@pytest.mark.parametrize("cause", [cause for group in CAUSES.values() for cause in group])
def test_every_cause_is_documented(cause):
    assert f"| `{cause}` |" in read("docs/causes.md")


def test_verdicts_and_their_exit_status_are_in_the_readme():
    readme = read("README.md")
    verdicts = read_schema()["properties"]["verdict"]["enum"]
    assert not [name for name in verdicts if f"| `{name}` |" not in readme]
    assert not [status for status in range(5) if f"| {status} |" not in readme]


def keys_of(schema, seen=frozenset()):
    """Every key that the schema names, at any depth."""
    if isinstance(schema, dict):
        properties = schema.get("properties")
        if isinstance(properties, dict):
            seen |= set(properties)
        for value in schema.values():
            seen = keys_of(value, seen)
    elif isinstance(schema, list):
        for value in schema:
            seen = keys_of(value, seen)
    return seen


def test_every_key_of_the_json_is_documented():
    page = read("docs/json.md")
    missing = [key for key in sorted(keys_of(read_schema())) if f"`{key}`" not in page]
    assert not missing


def test_every_example_in_the_json_page_obeys_the_schema():
    examples = [
        json.loads(block)
        for language, block in FENCE.findall(read("docs/json.md"))
        if language == "json"
    ]
    assert len(examples) >= 2
    for example in examples:
        jsonschema.validate(example, read_schema())


def test_every_source_is_documented():
    page = read("docs/sources.md")
    inputs = ("logs", "units", "containers", "pods", "metrics", "kernel_logs", "recordings")
    options = {option.name: option.opts[0] for option in options_of(commands()["diagnose"])}
    assert not [options[name] for name in inputs if f"`{options[name]} " not in page]


def test_every_dependency_is_explained():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["fast"]
    table = read("README.md").partition("## Dependencies")[2].partition("\n## ")[0]
    rows = {
        re.match(r"[\w-]+", cells[0].strip())[0]: cells
        for line in table.splitlines()
        if (cells := line.strip("| ").split("|")) and len(cells) == 3
    }
    for requirement in needed:
        cells = rows[re.match(r"[\w-]+", requirement)[0]]
        assert all(cell.strip() for cell in cells), requirement


def test_make_targets_are_in_the_readme():
    targets = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)[1].split()
    small = {"help", "lint", "types", "tests"}  # parts of `make test`
    assert not [
        name for name in targets if f"make {name}" not in read("README.md") and name not in small
    ]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_known_releases_are_in_the_readme(engine):
    first, last = versions.sampled(engine)[0], versions.sampled(engine)[-1]
    assert f"{'.'.join(map(str, first))} to {'.'.join(map(str, last))}" in read("README.md")


# ------------------------------------------------------------------------------- truth
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_calls_in_the_docs_can_be_made(path):
    """Each `oomwatch …` of the docs names a command that exists, with options that exist."""
    skip_if_waiting(path)
    for words in oomwatch_calls(path.read_text(encoding="utf-8")):
        if not words or words[0].startswith("-") or words[0] == "COMMAND":
            continue
        command = commands().get(words[0])
        assert command is not None, f"oomwatch {words[0]} does not exist"
        if len(words) == 1 or words[1:] == ["SHELL"]:
            continue
        with contextlib.suppress(click.exceptions.Exit):  # --help
            command.make_context(f"oomwatch {words[0]}", words[1:]).close()


def test_calls_are_found_where_they_are():
    block = "kubectl x | oomwatch diagnose --log - | jq .  # so\nsudo oomwatch run    a word"
    calls = oomwatch_calls(f"`oomwatch check`\n```sh\n{block}\n```")
    assert calls == [["diagnose", "--log", "-"], ["run"], ["check"]]
    assert len(oomwatch_calls(read("README.md"))) > 10


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not link.startswith(("http://", "https://")):
            assert (path.parent / link).exists(), link


def test_paths_in_the_docs_exist():
    """`oomwatch/…` and `tests/…` in code spans are files or folders of this repository."""
    for path in PAGES:
        text = FENCE.sub("", path.read_text(encoding="utf-8"))
        for span in re.findall(r"`((?:oomwatch|tests|docs|benchmarks)/[\w./*-]+)`", text):
            example = "NAME" in span
            assert example or list(ROOT.glob(span.rstrip("/"))), f"{path.name}: {span}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_page_is_reachable(path):
    skip_if_waiting(path)
    pages = {ROOT / "README.md"}
    while True:
        linked = {
            (page.parent / link).resolve()
            for page in pages
            for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        }
        more = linked & set(PAGES) - pages
        if not more:
            break
        pages |= more
    assert path in pages
