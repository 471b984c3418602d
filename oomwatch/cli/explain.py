"""`oomwatch explain [CAUSE]`: the page of a cause, or the list of all; offline."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from typing import Final

import click

from oomwatch.cli import completing

_FEW: Final = 3
"""Names that a hint may hold."""
EXAMPLES: Final = """\b
Examples:
  oomwatch explain                           all causes, by class
  oomwatch explain kv_lt_max_len
  oomwatch explain kv_saturation --lang zh
"""


@click.command("explain", epilog=EXAMPLES)
@click.argument("cause", required=False, shell_complete=completing.causes)
@click.option(
    "--lang",
    type=click.Choice(["en", "zh", "auto"]),
    default="auto",
    show_default=True,
    help="Language of the page; auto follows LC_ALL, LC_MESSAGES and LANG.",
)
@click.pass_context
def command(ctx: click.Context, cause: str | None, lang: str) -> None:
    """Say what a cause is, how it looks, what it is not, and what to do."""
    from oomwatch.causes import class_of
    from oomwatch.report.locale import choose_language
    from oomwatch.report.pages import page

    language = choose_language(lang, os.environ)
    if cause is None:
        click.echo(list_causes(language), nl=False)
        return
    name = cause.strip().lower().replace("-", "_")
    if class_of(name) is None:
        click.echo(unknown_cause(cause), err=True)
        ctx.exit(2)
    text = page(name, language)
    if sys.stdout.isatty():
        print_markdown(text)
    else:
        click.echo(text, nl=False)


def list_causes(language: str) -> str:
    """Every cause with its title, by class, for a terminal or a pipe."""
    from oomwatch.causes import CAUSES
    from oomwatch.report.layout import Sheet
    from oomwatch.report.locale import catalogue, choose_language
    from oomwatch.report.pages import title

    lang = choose_language(language, {})
    texts = catalogue(lang)
    sheet = Sheet(terminal_width(), color=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    column = 2 + max(len(cause) for causes in CAUSES.values() for cause in causes)
    for cls, causes in CAUSES.items():
        sheet.blank()
        sheet.spans((texts[f"heading.{cls}"], "bold"))
        for cause in causes:
            sheet.row(cause, title(cause, lang), ("cyan", ""), indent=2, column=column)
    return sheet.render()


def unknown_cause(cause: str) -> str:
    """One line: there is no such cause, and which one may be meant."""
    from oomwatch.report.sanitize import clean

    near = near_causes(cause)
    hint = f"did you mean {' or '.join(near)}?" if near else "`oomwatch explain` lists all"
    return f"oomwatch: there is no cause {clean(cause, 60)!r}; {hint}"


def near_causes(text: str) -> list[str]:
    """The first causes that begin like that, else the most similar one."""
    from oomwatch.causes import CAUSES

    wanted = text.lower().replace("-", "_")[:80]
    known = [name for causes in CAUSES.values() for name in causes]
    begin = [name for name in known if wanted and name.startswith(wanted)]
    return begin[:_FEW] or difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)


def print_markdown(text: str) -> None:
    """A page on a terminal, with rich's own reading of NO_COLOR and TERM."""
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=terminal_width()).print(Markdown(text))


def terminal_width() -> int:
    """The terminal's width, at most what reads well; 80 where there is none."""
    return min(shutil.get_terminal_size((80, 24)).columns, 100)
