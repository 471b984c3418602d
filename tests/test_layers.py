"""Imports go one way: stages import leaves, only `cli` and `__main__` wire stages together."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "oomwatch"

LEAVES = {"records", "units", "errors", "causes", "selection", "engines", "memory"}
STAGES = {"sources", "store", "detect", "diagnose", "remedies", "report", "export"}
# What a part may import, besides itself and the package's own version.
ALLOWED = {
    "": set(),  # oomwatch/__init__.py
    "records": set(),
    "units": set(),
    "errors": set(),
    "causes": {"records"},
    "selection": {"records"},
    "engines": {"records", "units", "errors", "causes"},
    "memory": {"records", "units", "errors", "engines"},
    "demo": set(),
    **dict.fromkeys(STAGES, LEAVES),
    "detect": LEAVES | {"config", "store"},
    "net": set(),
    "export": LEAVES | {"config", "net"},
    "notify": LEAVES | {"config", "net", "report", "store"},  # of the store only what is read
    "config": {"errors", "units"},
    "sdnotify": set(),
    "discovery": LEAVES | {"sources"},  # joins what several sources say of one process
    "agent": LEAVES | STAGES | {"config", "discovery", "notify", "sdnotify"},
    "cli": LEAVES | STAGES | {"agent", "config", "demo", "discovery", "notify", "sdnotify"},
    "__main__": {"cli", "errors"},
}
# Slow to import, so a command imports them where it needs them.
HEAVY = {"requests", "rich", "yaml", "sqlalchemy", "apscheduler", "hyperscan", "zstandard"}


def part_of(name: str) -> str:
    """`sources` of `oomwatch.sources.logfile`; empty for the package itself."""
    return ([*name.split("."), ""])[1]


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in the file, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                kept = len(parents) - node.level + is_package
                base = ".".join([*parents[:kept], *filter(None, [base])])
            yield base, node.lineno
            if base == "oomwatch":
                yield from ((f"oomwatch.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # importlib.import_module("oomwatch.x"), tables of lazily loaded commands
            words = node.value.partition(":")[0]
            if words.startswith("oomwatch.") and words.replace(".", "").isidentifier():
                yield words, node.lineno


def wrong_arrows(source: str, module: str, *, is_package: bool = False) -> list[str]:
    own = part_of(module)
    parts = {path.stem for path in PACKAGE.iterdir()} | set(ALLOWED)
    return [
        f"{module}:{line} imports {name}"
        for name, line in imported(ast.parse(source), module, is_package=is_package)
        if name.partition(".")[0] == "oomwatch"
        and (target := part_of(name)) in parts
        and target not in {own, ""}
        and target not in ALLOWED[own]
    ]


def modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


@pytest.mark.parametrize(("module", "path"), modules(), ids=lambda value: str(value)[-40:])
def test_imports_follow_the_arrows(module, path):
    assert part_of(module) in ALLOWED, f"{module}: give its part a place in docs/design.md and here"
    text = path.read_text(encoding="utf-8")
    assert not wrong_arrows(text, module, is_package=path.name == "__init__.py")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("oomwatch.sources.logfile", "from oomwatch.diagnose import facts"),
        ("oomwatch.sources.logfile", "def f():\n    import oomwatch.report.text"),
        ("oomwatch.sources.logfile", "from ..report import text"),
        ("oomwatch.report.text", "from oomwatch import remedies"),
        ("oomwatch.engines.flags", "from oomwatch.memory import budget"),
        ("oomwatch.records", "import oomwatch.units"),
        ("oomwatch.diagnose.judge", "importlib.import_module('oomwatch.cli.run')"),
    ],
)
def test_wrong_arrows_are_seen(module, source):
    assert len(wrong_arrows(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("oomwatch.sources.logfile", "from oomwatch.records import LogLine"),
        ("oomwatch.sources.logfile", "from . import kernel\nfrom .kernel import x"),
        ("oomwatch.report.text", "from oomwatch import __version__"),
        ("oomwatch.cli.run", "from oomwatch.sources.child import run_child"),
        ("oomwatch.report.text", "'oomwatch.diagnosis/1'; 'oomwatch.cli is a package'"),
    ],
)
def test_right_arrows_pass(module, source):
    assert not wrong_arrows(source, module)


def test_the_command_line_starts_without_heavy_imports():
    code = f"import sys, oomwatch.__main__; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
