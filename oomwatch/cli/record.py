"""`oomwatch record`: a recording of this host, for a time or until an incident."""

from __future__ import annotations

import logging
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from oomwatch.agent.record import LiveRecorder
    from oomwatch.records import StoredIncident

EXAMPLES: Final = """\b
Examples:
  oomwatch record                                until Ctrl-C
  oomwatch record --for 10m -o slow.tar.zst
  oomwatch record --until-incident               until something fails, and a little longer
  oomwatch record --pid 4121 --interval 200ms    one engine only, five times a second

\b
Prompts, answers, users and home paths are taken out as [privacy] of the configuration
says, keys and tokens always. Read it with `oomwatch diagnose --recording PATH`.
"""
_LOOK_SECONDS: Final = 0.2
_SEARCH_SECONDS: Final = 10.0


@click.command("record", epilog=EXAMPLES)
@click.option(
    "-o",
    "--output",
    metavar="PATH",
    help="A directory, or a .tar, .tar.gz or .tar.zst; by default recording-TIME.tar.gz.",
)
@click.option("--for", "duration", metavar="TIME", help="End after that long: 90s, 10m, 2h.")
@click.option(
    "--until-incident", is_flag=True, help="End a while after the first incident, see --after."
)
@click.option(
    "--after",
    metavar="TIME",
    default="30s",
    show_default=True,
    help="How long to go on after the incident of --until-incident: the last lines, a restart.",
)
@click.option(
    "--pid",
    "pids",
    multiple=True,
    type=int,
    metavar="N",
    help="Only the engine that this process belongs to. Repeatable.",
)
@click.option(
    "--interval",
    metavar="TIME",
    default="1s",
    show_default=True,
    help="How often GPUs and metrics pages are read.",
)
@click.option("--no-redact", is_flag=True, help="Leave prompts, users and paths as they are.")
def command(**given: Any) -> None:
    """Record GPUs, engines, processes, logs and the kernel of this host."""
    from oomwatch.agent.record import LiveRecorder, store_of_its_own
    from oomwatch.cli.privacy import make_redactor
    from oomwatch.config import load_config
    from oomwatch.sources.recording_write import RecordingWriter

    seconds = _seconds(given["duration"], "--for") if given["duration"] else None
    interval = _seconds(given["interval"], "--interval")
    _seconds(given["after"], "--after")
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    logging.getLogger("oomwatch").addHandler(logging.NullHandler())
    logging.getLogger("apscheduler").addHandler(logging.NullHandler())
    with store_of_its_own() as store:
        every = f"{max(1, round(interval * 1000))}ms"
        loaded = load_config(
            overrides={
                "store.path": store,
                "agent.sampling_interval": every,
                "agent.scrape_interval": f"{max(100, round(interval * 1000))}ms",
                "discovery.interval": "2s",
            }
        )
        output = given["output"] or time.strftime("recording-%Y%m%d-%H%M%S.tar.gz")
        writer = RecordingWriter(output, make_redactor(redact=not given["no_redact"]))
        try:
            recorder = LiveRecorder(loaded, writer, pids=frozenset(given["pids"]))
            recorder.start()
            _wait(recorder, ending, seconds, given)
            recorder.stop()
        finally:
            writer.abandon()  # nothing, once it is finished
    _say_what_next(Path(output), recorder)


def _wait(
    recorder: LiveRecorder, ending: threading.Event, seconds: float | None, given: dict[str, Any]
) -> None:
    """Until a signal, the time, an incident, or an error of the disk."""
    begun = time.monotonic()
    after = _seconds(given["after"], "--after")
    end = None if seconds is None else begun + seconds
    told: set[str] = set()
    known: list[str] = []
    while not ending.wait(_LOOK_SECONDS) and recorder.error is None:
        now = time.monotonic()
        if recorder.engines != known:
            known = recorder.engines
            _say(f"recording {', '.join(known)}; Ctrl-C ends it")
        if given["pids"] and not known and now - begun > _SEARCH_SECONDS:
            raise NoInputError(f"process {given['pids'][0]} is no engine that is known, or is gone")
        for incident in recorder.incidents:
            if incident.id not in told:
                told.add(incident.id)
                _say(_line(incident))
                if given["until_incident"]:
                    end = min(end or float("inf"), now + after)
        if end is not None and now >= end:
            return


def _line(incident: StoredIncident) -> str:
    from oomwatch.report.phrases import local_time

    text = incident.triggers[0].text if incident.triggers else incident.fingerprint
    return f"{local_time(incident.opened_at)} incident: {text}"


def _seconds(text: str, option: str) -> float:
    from oomwatch.config.quantities import parse_duration

    seconds = parse_duration(text)
    if seconds is None or seconds <= 0:
        raise UsageError(f"{option} {text[:40]!r} is no time: write 200ms, 90s or 10m")
    return seconds


def _say_what_next(path: Path, recorder: LiveRecorder) -> None:
    engines = ", ".join(recorder.engines) or "no engine was found; the host alone was recorded"
    click.echo(f"{path}: {engines}")
    click.echo(f"  oomwatch diagnose --recording {path}    what it shows")
    click.echo(f"  oomwatch replay {path}                  as the agent would have seen it")


def _say(text: str) -> None:
    from oomwatch.report.sanitize import clean

    click.echo(clean(text, 400), err=True)
