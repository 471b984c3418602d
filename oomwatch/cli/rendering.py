"""A diagnosis in the format that was asked for, and where it goes."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any, Final

import click

from oomwatch.errors import OomwatchError
from oomwatch.records import Diagnosis, EngineFacts, Incident, Risk

FORMATS: Final = ("text", "json", "markdown", "html", "args", "env", "compose", "k8s", "python")


def render(diagnosis: Diagnosis, fmt: str, given: dict[str, Any]) -> str:
    """The report in one of `FORMATS`."""
    from oomwatch.report.locale import choose_language

    language = choose_language(given.get("lang", "auto"), os.environ)
    if fmt == "json":
        from oomwatch.report.json_report import render_json

        return render_json(diagnosis)
    if fmt == "markdown":
        from oomwatch.report.markdown import render_markdown

        return render_markdown(diagnosis, lang=language)
    if fmt == "html":
        from oomwatch.report.html import render_html

        return render_html(diagnosis, lang=language)
    if fmt != "text":
        return _render_flags(diagnosis, fmt)
    from oomwatch.report.text import render_text

    to_terminal = given.get("output") is None and sys.stdout.isatty()
    width = shutil.get_terminal_size((80, 24)).columns if to_terminal else 80
    return render_text(
        diagnosis,
        width=max(40, min(width, 120)),
        color=wants_color(given.get("color", "auto"), to_terminal=to_terminal),
        lang=language,
        verbose=bool(given.get("verbose")),
        quiet=bool(given.get("quiet")),
        printer=given.get("printer", "--format args"),
    )


def _render_flags(diagnosis: Diagnosis, fmt: str) -> str:
    from oomwatch.remedies.render import render as render_remedies

    top = to_act_on(diagnosis)
    if top is None:
        return ""
    return render_remedies(top.remedies, engine_hit(diagnosis, top), fmt)


def why_nothing(diagnosis: Diagnosis, fmt: str) -> str:
    """Why there are no settings to print in this format."""
    from oomwatch.remedies.render import absence

    top = to_act_on(diagnosis)
    return absence(top.remedies if top else (), fmt)


def to_act_on(diagnosis: Diagnosis) -> Incident | Risk | None:
    """What the printed settings are for: the newest incident, else the first risk.

    Where that is a failure of another kind that no setting mends, the memory incident before it.
    """
    from oomwatch.remedies.render import combined
    from oomwatch.report.phrases import memory_behind

    found: list[Incident | Risk] = [*diagnosis.incidents, *diagnosis.risks]
    if not found:
        return None
    behind = memory_behind(diagnosis)
    return behind if behind is not None and not combined(found[0].remedies) else found[0]


def engine_hit(diagnosis: Diagnosis, found: Incident | Risk) -> EngineFacts:
    """The engine of an incident or a risk; one of which nothing is known where it is not named."""
    named = (e for e in diagnosis.engines if e.id == found.finding.engine_id)
    return next(named, None) or EngineFacts(id="engine-0")


def wants_color(choice: str, *, to_terminal: bool) -> bool:
    """Whether to colour, by the switch, the environment and where the output goes."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return to_terminal or bool(os.environ.get("FORCE_COLOR"))


def write(text: str, output: str | None) -> None:
    """Print, or put a file in place: complete, as a new file, never through a link of that name."""
    if text and not text.endswith("\n"):
        text += "\n"
    if output in (None, "-"):
        # Colours were decided in `render`; click would strip them where there is no terminal.
        click.echo(text, nl=False, color=True)
        return
    import tempfile
    from pathlib import Path

    path = Path(output)
    try:
        if path.exists() and not path.is_file():  # /dev/null, a named pipe
            path.write_text(text, encoding="utf-8")
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.flush()
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise OomwatchError(f"cannot write {output}: {error.strerror or error}") from error
