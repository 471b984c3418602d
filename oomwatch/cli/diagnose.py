"""`oomwatch diagnose`: the one-shot report. Parses, gathers, judges, adds remedies, prints."""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any, Final

import click

from oomwatch.cli.completing import files
from oomwatch.cli.gather import Gatherer
from oomwatch.cli.options import Options
from oomwatch.cli.rendering import FORMATS, render, why_nothing, write
from oomwatch.cli.window import parse_time
from oomwatch.errors import UsageError
from oomwatch.records import Diagnosis

EXAMPLES: Final = """\b
Examples:
  oomwatch diagnose                                what runs on this host
  oomwatch diagnose --log server.log
  journalctl -u vllm -o export | oomwatch diagnose --log -
  oomwatch diagnose --unit vllm.service --since 2h
  oomwatch diagnose --log server.log --kernel-log dmesg.txt --metrics http://127.0.0.1:8000/metrics
  oomwatch diagnose --log server.log --command "vllm serve /models/m --max-model-len 32768"
  oomwatch diagnose --incident 3fa9                what the agent stored, judged anew
  oomwatch diagnose --store oomwatch.db --since 2h
  oomwatch diagnose --log server.log --format args     only the flags, to paste
  oomwatch diagnose --log server.log --format html -o report.html

\b
The numbered steps of a report are alternatives, the best first. --format args, env,
compose, k8s and python print the first that is predicted to be enough alone; where
none is known to be, the first with up to two that combine with it.

\b
Exit status: 0 healthy or nothing decided, 1 an incident or a risk was found,
2 wrong use, 3 no input could be read, 4 internal fault.
"""


@click.command("diagnose", epilog=EXAMPLES)
@click.option(
    "--log",
    "logs",
    multiple=True,
    shell_complete=files,
    metavar="PATH",
    help="A server log; - is stdin; .gz, .zst and .xz are opened. Repeatable.",
)
@click.option(
    "--unit",
    "units",
    multiple=True,
    metavar="NAME",
    help="A systemd unit's journal, its last start.",
)
@click.option(
    "--container",
    "containers",
    multiple=True,
    metavar="NAME|ID",
    help="A Docker or Podman container's log.",
)
@click.option("--pod", "pods", multiple=True, metavar="NS/NAME", help="A Kubernetes pod's log.")
@click.option(
    "--metrics",
    "metrics",
    multiple=True,
    metavar="URL|PATH",
    help="A metrics page of vLLM or SGLang.",
)
@click.option(
    "--kernel-log",
    "kernel_logs",
    multiple=True,
    shell_complete=files,
    metavar="PATH",
    help="dmesg or journalctl -k output.",
)
@click.option(
    "--recording",
    "recordings",
    multiple=True,
    shell_complete=files,
    metavar="DIR|TAR",
    help="A recording of an incident.",
)
@click.option(
    "--command", "server_command", metavar="TEXT", help="The command line that started the server."
)
@click.option(
    "--model-config", metavar="PATH", shell_complete=files, help="The model's config.json."
)
@click.option(
    "--engine",
    type=click.Choice(["vllm", "sglang", "auto"]),
    default="auto",
    show_default=True,
    help="Which server wrote the log.",
)
@click.option("--engine-version", metavar="V", help="Its version, where the log does not say.")
@click.option(
    "--pid", "pids", multiple=True, type=int, metavar="N", help="A running engine, by process id."
)
@click.option(
    "--incident",
    "incidents",
    multiple=True,
    metavar="ID",
    help="An incident that the agent has stored, by today's rules.",
)
@click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=files,
    help="The agent's store: what it holds from --since to --until, or of --incident.",
)
@click.option("--live", is_flag=True, help="Read this host as well as what was given.")
@click.option(
    "--full",
    is_flag=True,
    help="Read every line of logs over 16 MiB, not only those around something telling.",
)
@click.option("--since", metavar="TIME", help="Only from then on: 2h, 30min, or 2026-11-29 03:00.")
@click.option("--until", metavar="TIME", help="Only up to then.")
@click.option(
    "--format",
    "fmt",
    type=click.Choice(FORMATS),
    default="text",
    show_default=True,
    help="How to print it.",
)
@click.option("--json", "as_json", is_flag=True, help="Short for --format json.")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    shell_complete=files,
    help="Write to a file instead, whole or not at all; readable by you only.",
)
@click.option(
    "--lang",
    type=click.Choice(["en", "zh", "auto"]),
    default="auto",
    show_default=True,
    help="Language of the report.",
)
@click.option(
    "--color",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Colours; NO_COLOR is honoured.",
)
@click.option(
    "-q", "--quiet", is_flag=True, help="The verdict, the reason and the first remedy only."
)
@click.option(
    "-v", "--verbose", is_flag=True, help="Everything: less likely causes and all sources too."
)
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Say what ran out, why, and which flags fix it.

    With no inputs it finds what runs on this host; with any, it reads only what it is given.
    """
    try:
        options = _options(given)
        fmt = "json" if given["as_json"] else given["fmt"]
        options.progress = _progress(fmt)
        options.waiting = _waiting(fmt)
        diagnosis = run_diagnosis(options)
        text = render(diagnosis, fmt, given)
        nothing = "" if text else why_nothing(diagnosis, fmt)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    if not text:
        from oomwatch.cli import print_error

        print_error(f"no change for --format {fmt} in this answer: {nothing}; see --format text")
    write(text, given["output"])
    ctx.exit(exit_status(diagnosis))


def _options(given: dict[str, Any]) -> Options:
    now = time.time()
    if given["server_command"] is not None:
        from oomwatch.engines.shell import split_commands

        if not split_commands(given["server_command"])[1]:
            raise UsageError("--command: a quote in it is not closed")
    return Options(
        logs=given["logs"],
        units=given["units"],
        containers=given["containers"],
        pods=given["pods"],
        metrics=given["metrics"],
        kernel_logs=given["kernel_logs"],
        recordings=given["recordings"],
        command=given["server_command"],
        model_config=given["model_config"],
        engine=None if given["engine"] == "auto" else given["engine"],
        engine_version=given["engine_version"],
        pids=given["pids"],
        incidents=given["incidents"],
        store=given["store"],
        since=parse_time(given["since"], now),
        until=parse_time(given["until"], now),
        live=given["live"],
        full=given["full"],
    )


def run_diagnosis(options: Options) -> Diagnosis:
    """Gather, judge, and add the remedies.

    Raises:
        NoInputError: nothing of what was named could be read.
        UsageError: an option makes no sense.

    """
    from oomwatch.diagnose.judge import diagnose
    from oomwatch.remedies.prescription import with_remedies

    gatherer = Gatherer(options)
    diagnosis = diagnose(gatherer.gather())
    late = gatherer.late_notes()
    named = {status.name for status in late}
    sources = (*(s for s in diagnosis.sources if s.name not in named or s.status != "ok"), *late)
    return with_remedies(dataclasses.replace(diagnosis, sources=sources))


def exit_status(diagnosis: Diagnosis) -> int:
    """0 healthy, or unknown without a sign of a failure; 1 any incident or risk."""
    calm = all(i.finding.cause == "shutdown_requested" for i in diagnosis.incidents)
    if diagnosis.verdict == "healthy" and calm:
        return 0
    return 1 if diagnosis.incidents or diagnosis.risks else 0


def _progress(fmt: str) -> Any:
    """A progress line on a terminal for reads that take more than a second."""
    if fmt != "text" or not sys.stderr.isatty():
        return None
    state = {"begun": time.monotonic(), "shown": 0.0}

    def show(done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - state["begun"] > 1.0 and now - state["shown"] > 0.2:
            state["shown"] = now
            share = f"{done / total:.0%}" if total else f"{done / 2**20:.0f} MiB"
            sys.stderr.write(f"\rreading … {share}\x1b[K")
            sys.stderr.flush()
        if total and done >= total and state["shown"]:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    return show


def _waiting(fmt: str) -> Any:
    """A line on a terminal that says what is waited for; an empty text takes it away."""
    if fmt != "text" or not sys.stderr.isatty():
        return None

    def show(text: str) -> None:
        sys.stderr.write(f"\r{text}\x1b[K")
        sys.stderr.flush()

    return show
