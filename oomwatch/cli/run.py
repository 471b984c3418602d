"""`oomwatch run -- SERVER COMMAND`: start a server, stay out of its way, explain its end.

Everything of ours goes to stderr, after the server has ended; the exit status is the server's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click

from oomwatch.records import Diagnosis

Diagnose = Callable[[Path, Sequence[str]], Diagnosis]
Render = Callable[[Diagnosis, str], str]

EXAMPLES: Final = """\b
Examples:
  oomwatch run -- vllm serve Qwen/Qwen3-8B --max-model-len 65536
  oomwatch run --log-copy /var/log/vllm.log -- python -m sglang.launch_server --model-path m
"""


@click.command(
    "run",
    context_settings={"allow_interspersed_args": False},  # the server's options are its own
    epilog=EXAMPLES,
)
@click.option(
    "--log-copy",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the copy of the output here (its beginning and end); readable by you only.",
)
@click.option(
    "--format",
    "report_format",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="Form of the report on stderr.",
)
@click.argument("server", nargs=-1, required=True, type=click.UNPROCESSED)
def command(log_copy: Path | None, report_format: str, server: tuple[str, ...]) -> None:
    """Start a server, pass its output through, and diagnose it when it fails.

    The server sees a terminal where you have one, gets your input and signals, and its exit
    status is returned (128 + the signal if one ended it). A failure prints the report on stderr.
    """
    sys.exit(
        run_server(
            server,
            log_copy=log_copy,
            report_format=report_format,
            diagnose=diagnose_copy,
            render=render_report,
        )
    )


def run_server(
    server: Sequence[str],
    *,
    log_copy: Path | None,
    report_format: str,
    diagnose: Diagnose,
    render: Render,
) -> int:
    """Run the command to its end; returns its status. Only a failure leaves the copy behind."""
    from oomwatch.sources.child import CommandNotStartedError, run_child
    from oomwatch.sources.log_copy import LogCopy

    try:
        copy = LogCopy(log_copy)
    except OSError as error:
        _say(f"cannot keep a copy in {log_copy}: {error.strerror or error}")
        return 2
    try:
        with copy:
            end = run_child(server, copy)
    except CommandNotStartedError as error:
        copy.path.unlink(missing_ok=True)
        _say(str(error))
        return error.status
    if copy.error is not None:
        _say(f"the copy of the output is not complete: {copy.error.strerror or copy.error}")

    failed = end.status != 0
    try:
        diagnosis = diagnose(copy.path, server)
        found = diagnosis.verdict == "oom" if end.stop_requested else _worth_telling(diagnosis)
        tell = found or (failed and not end.stop_requested)
        report = render(diagnosis, report_format) if tell else None
    except Exception as error:  # noqa: BLE001 - the server's status must come back whatever we do
        _say(f"the output could not be diagnosed: {error}")
        tell, report = failed, None
    if report is not None:
        _print_error(report)
    if tell and log_copy is None:
        _say(f"the output is kept in {copy.path}")
    elif log_copy is None:
        copy.path.unlink(missing_ok=True)
    return end.status


def diagnose_copy(path: Path, server: Sequence[str]) -> Diagnosis:
    """The diagnosis of a kept copy, with the command that printed it."""
    from oomwatch.cli.diagnose import DiagnoseOptions, run_diagnosis

    return run_diagnosis(DiagnoseOptions(logs=(str(path),), command=shlex.join(server)))


def render_report(diagnosis: Diagnosis, report_format: str) -> str:
    """The report as text for stderr."""
    if report_format == "json":
        from oomwatch.report.json_report import render_json

        return render_json(diagnosis)
    if report_format == "markdown":
        from oomwatch.report.markdown import render_markdown

        return render_markdown(diagnosis)
    from oomwatch.report.text import render_text

    terminal = sys.stderr.isatty()
    width = os.get_terminal_size(sys.stderr.fileno()).columns if terminal else 100
    return render_text(
        diagnosis, width=max(width, 40), color=terminal and "NO_COLOR" not in os.environ
    )


def _worth_telling(diagnosis: Diagnosis) -> bool:
    return bool(diagnosis.incidents or diagnosis.risks) or diagnosis.verdict in {"oom", "at_risk"}


def _say(message: str) -> None:
    from oomwatch.report.sanitize import clean

    _print_error(f"oomwatch: {clean(message)}")


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        print(text.rstrip("\n"), file=sys.stderr, flush=True)
