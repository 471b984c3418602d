"""`oomwatch replay`: a recording as the agent would have seen it, or any command on it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oomwatch.records import StoredIncident

EXAMPLES: Final = """\b
Examples:
  oomwatch replay r.tar.gz                           what would have been seen, and when
  oomwatch replay r.tar.gz --speed 60 -- agent       the same, a minute in a second
  oomwatch replay r.tar.gz --store replayed.db       and keep what the agent would have stored
  oomwatch replay r.tar.gz -- diagnose --format json
  oomwatch replay r.tar.gz -- incidents show
"""
_OF_THE_STORE: Final = ("incidents", "flags", "db")
"""Commands that read what the agent stored: they run on what the replay stored."""
_STORE_VARIABLE: Final = "OOMWATCH_STORE__PATH"


@click.command("replay", epilog=EXAMPLES, context_settings={"allow_interspersed_args": True})
@click.argument("recording", metavar="RECORDING")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND…|agent]")
@click.option(
    "--speed",
    metavar="N|max",
    default="max",
    show_default=True,
    help="Seconds of the recording in one second.",
)
@click.option(
    "--store", metavar="PATH", help="Keep what the agent would have stored, in this file."
)
@click.option("--config", "path", metavar="PATH", help="The configuration with the rules to use.")
@click.pass_context
def command(ctx: click.Context, /, recording: str, words: tuple[str, ...], **given: Any) -> None:
    """Replay a recording through the agent, or run a command on it."""
    name = words[0] if words else "agent"
    store, path, factor = given["store"], given["path"], _factor(given["speed"])
    if name == "diagnose":
        ctx.exit(_run([name, "--recording", recording, *words[1:]]))
    if name != "agent" and name not in _OF_THE_STORE:
        raise UsageError(f"{name[:40]}: only agent, diagnose, incidents, flags and db run on one")
    if name == "agent" and len(words) > 1:
        raise UsageError("agent takes no options here: give --speed and --store before the --")
    if store is not None:
        _replay(recording, store, path, factor, quiet=name != "agent")
        status = 0 if name == "agent" else _run_on(store, words)
    else:
        from oomwatch.agent.record import store_of_its_own

        with store_of_its_own() as own:
            _replay(recording, own, path, factor, quiet=name != "agent")
            status = 0 if name == "agent" else _run_on(own, words)
    ctx.exit(status)


def _factor(speed: str) -> float | None:
    if speed == "max":
        return None
    try:
        factor = float(speed.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 0 < factor < 1e9:
        raise UsageError(f"--speed {speed[:40]!r}: write a number such as 60, or max")
    return factor


def _replay(path: str, store: str, config: str | None, speed: float | None, *, quiet: bool) -> None:
    from oomwatch.agent.replay import Replay
    from oomwatch.config import load_config
    from oomwatch.sources.recording import read_recording

    logging.getLogger("oomwatch").addHandler(logging.NullHandler())
    recording = read_recording(path)
    loaded = load_config(config, overrides={"store.path": store})
    told = _Timeline(quiet=quiet)
    replay = Replay(recording, loaded.config, store, speed=speed, on_incident=told.take)
    for problem in recording.problems:
        _say(f"{path}: {problem}", err=True)
    told.say(replay.begin, _what(recording))
    replay.run()
    ended = recording.ended_at
    if ended is not None:
        told.say(ended, f"the recording ends; {told.open} of {told.total} incidents are not over")
    else:
        told.say(replay.begin, f"{told.open} of {told.total} incidents are not over")


def _what(recording: Any) -> str:
    engines = ", ".join(engine.id for engine in recording.engines) or "no engine"
    window = f", the window of {recording.incident}" if recording.incident else ""
    return f"the recording of {recording.host or 'a host'} begins{window}: {engines}"


class _Timeline:
    """Prints what happens to incidents, at the recording's time."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._seen: dict[str, tuple[str, str]] = {}

    @property
    def total(self) -> int:
        return len(self._seen)

    @property
    def open(self) -> int:
        return sum(1 for state, _ in self._seen.values() if state == "open")

    def take(self, incident: StoredIncident, at: float) -> None:
        from oomwatch.cli.incidents import cause_of

        state, cause = incident.state, cause_of(incident)
        before = self._seen.get(incident.id)
        self._seen[incident.id] = (state, cause)
        who = incident.engine_id or incident.fingerprint.partition("/")[0]
        if before is None:
            text = incident.triggers[0].text if incident.triggers else ""
            self.say(at, f"opened  {incident.id}  {who}  {cause}: {text or ''}")
        elif before[0] != state:
            self.say(at, f"closed  {incident.id}  {who}  {cause}")
        elif before[1] != cause:
            self.say(at, f"judged  {incident.id}  {who}  {before[1]} is {cause} now")

    def say(self, at: float, text: str) -> None:
        if not self._quiet:
            from oomwatch.report.phrases import local_time

            _say(f"{local_time(at)}  {text}")


def _run_on(store: str, words: Sequence[str]) -> int:
    before = os.environ.get(_STORE_VARIABLE)
    os.environ[_STORE_VARIABLE] = store
    try:
        return _run(list(words))
    finally:
        del os.environ[_STORE_VARIABLE]
        if before is not None:
            os.environ[_STORE_VARIABLE] = before


def _run(words: list[str]) -> int:
    from oomwatch.cli import cli

    return int(cli.main(words, prog_name="oomwatch", standalone_mode=False) or 0)


def _say(text: str, *, err: bool = False) -> None:
    from oomwatch.report.sanitize import clean

    click.echo(clean(text, 400), err=err)
