"""`oomwatch diagnose`: the one-shot report. Parses, gathers, judges, adds remedies, prints."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shutil
import sys
import time
from typing import Any, Final

import click

from oomwatch.cli.completing import files
from oomwatch.cli.gather import Gatherer
from oomwatch.cli.options import Options
from oomwatch.errors import OomwatchError, UsageError
from oomwatch.records import Diagnosis, EngineFacts, Incident, Risk

DiagnoseOptions = Options

FORMATS: Final = ("text", "json", "markdown", "html", "args", "env", "compose", "k8s", "python")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)")
_SECONDS: Final = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}

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
        nothing = "" if text else _why_nothing(diagnosis, fmt)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    if not text:
        from oomwatch.cli import print_error

        print_error(f"no change for --format {fmt} in this answer: {nothing}; see --format text")
    _write(text, given["output"])
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


def parse_time(text: str | None, now: float) -> float | None:
    """Epoch seconds of a time or of a span before now; local time unless it names a zone.

    Raises:
        UsageError: it is neither.

    """
    if text is None:
        return None
    span = _DURATION.fullmatch(text.strip())
    if span is not None:
        return now - float(span[1]) * _SECONDS[span[2]]
    try:
        return datetime.datetime.fromisoformat(text.strip()).astimezone().timestamp()
    except (ValueError, OverflowError, OSError):
        raise UsageError(f"'{text[:60]}' is no time: write 2h, 30min or 2026-11-29T03:00") from None


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


def _why_nothing(diagnosis: Diagnosis, fmt: str) -> str:
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


def _write(text: str, output: str | None) -> None:
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
