"""`oomwatch run -- SERVER COMMAND`: start a server, stay out of its way, explain its end.

Everything of ours goes to stderr, after the server has ended; the exit status is the server's.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from oomwatch.cli.rendering import FORMATS
from oomwatch.records import Diagnosis, SourceStatus

if TYPE_CHECKING:
    from oomwatch.diagnose.inputs import KernelInput
    from oomwatch.sources.child import ChildEnd
    from oomwatch.sources.ended import EndedEngine

Diagnose = Callable[["EndedEngine"], Diagnosis]
"""Takes the copy of the output, with the command and how it ended."""
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
    type=click.Choice(FORMATS),
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
    started_at = time.time()
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
    ended = _ended(copy.path, server, started_at, end)
    try:
        diagnosis = diagnose(ended)
        found = diagnosis.verdict == "oom" if end.stop_requested else _worth_telling(diagnosis)
        tell = found or (failed and not end.stop_requested)
        report = render(diagnosis, report_format) if tell else None
    except Exception as error:  # noqa: BLE001 - the server's status must come back whatever we do
        _say(f"the output could not be diagnosed: {error}")
        tell, report = failed, None
    if tell and end.signal is not None:
        _say(f"the server was ended by {_signal_name(end.signal)}")
    if report is not None:
        _print_error(report)
    if tell and log_copy is None and copy.path.stat().st_size:
        _keep_end(ended)
        _say(f"the output is kept in {copy.path}")
    elif log_copy is None:
        copy.path.unlink(missing_ok=True)
    return end.status


def _ended(path: Path, server: Sequence[str], started_at: float, end: ChildEnd) -> EndedEngine:
    """What only we know: which process it was, when it lived, and how it ended."""
    from oomwatch.engines.commandline import parse_command
    from oomwatch.records import EngineExit
    from oomwatch.sources.ended import EndedEngine

    command = parse_command(tuple(server))
    at = time.time()
    return EndedEngine(
        "copy",
        str(path),
        at,
        engine=command.engine,
        version=command.version,
        command=tuple(server),
        exit=EngineExit(
            engine=f"{command.engine or 'engine'}-0",
            where="the server",
            at=at,
            exit_code=end.status,
            signal=end.signal,
        ),
        pids=(end.pid,),
        started_at=started_at,
    )


def _keep_end(ended: EndedEngine) -> None:
    """Beside a kept copy, for a later `diagnose`; what cannot be written is no one's trouble."""
    from oomwatch.sources.ended import write_end

    with contextlib.suppress(OSError):
        write_end(ended)


def diagnose_copy(ended: EndedEngine) -> Diagnosis:
    """The diagnosis of a kept copy, with its end and what the kernel said meanwhile."""
    from oomwatch.cli.gather import Gatherer
    from oomwatch.cli.options import Options
    from oomwatch.diagnose.judge import diagnose
    from oomwatch.remedies.prescription import with_remedies

    gatherer = Gatherer(Options(command=shlex.join(ended.command or ())))
    gatherer.add_ended(ended)
    kernel, status = _kernel_since(ended.started_at or 0.0)
    gatherer.kernel += kernel
    gatherer.sources.append(status)
    return with_remedies(diagnose(gatherer.inputs()))


def _kernel_since(started_at: float) -> tuple[list[KernelInput], SourceStatus]:
    """A server that is killed prints nothing; the kernel's log says why, where it may be read."""
    from oomwatch.diagnose.inputs import KernelInput
    from oomwatch.errors import SourceError
    from oomwatch.sources.kernel import read_live_kernel_log

    try:
        events, name = read_live_kernel_log()
    except SourceError as error:
        return [], SourceStatus("kernel log", "not_available", str(error))
    recent = tuple(event for event in events if event.at is not None and event.at >= started_at)
    return [KernelInput(name, recent, live=True)], SourceStatus("kernel log", "ok", name)


def render_report(diagnosis: Diagnosis, report_format: str) -> str:
    """The report for stderr; `cli.rendering.render` is for stdout."""
    from oomwatch.cli.rendering import render, wants_color

    if report_format != "text":
        return render(diagnosis, report_format, {})
    from oomwatch.report.locale import choose_language
    from oomwatch.report.text import render_text

    terminal = sys.stderr.isatty()
    columns = os.get_terminal_size(sys.stderr.fileno()).columns if terminal else 80
    return render_text(
        diagnosis,
        width=max(40, min(columns, 120)),
        color=wants_color("auto", to_terminal=terminal),
        lang=choose_language("auto", os.environ),
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _worth_telling(diagnosis: Diagnosis) -> bool:
    return bool(diagnosis.incidents or diagnosis.risks) or diagnosis.verdict in {"oom", "at_risk"}


def _say(message: str) -> None:
    from oomwatch.report.sanitize import clean

    _print_error(f"oomwatch: {clean(message)}")


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads stderr any more
        print(text.rstrip("\n"), file=sys.stderr, flush=True)
