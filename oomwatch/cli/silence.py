"""`oomwatch silence`: tell the receivers nothing of some incidents for a while."""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.cli.groups import NamedGroup
from oomwatch.cli.stored import begin_of_id, opened, store_option, writing
from oomwatch.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from oomwatch.records import Silence

EXAMPLES: Final = """\b
Examples:
  oomwatch silence add --engine chat-70b --for 2h --reason "new driver"
  oomwatch silence list
  oomwatch silence end sil-3fa9
"""
_SCHEMA: Final = "oomwatch.silence/1"
_LONGEST_SECONDS: Final = 90 * 86_400
_LONGEST_REASON: Final = 500

_json = click.option("--json", "as_json", is_flag=True, help=f"Print JSON ({_SCHEMA}).")


@click.group("silence", cls=NamedGroup, epilog=EXAMPLES)
def command() -> None:
    """Tell the receivers nothing of some incidents for a while.

    Incidents are stored all the same; what is still open at the end of a silence is told then.
    """


@command.command(
    epilog="\b\nExamples:\n"
    '  oomwatch silence add --engine chat-70b --for 2h --reason "new driver"\n'
    '  oomwatch silence add --cause "kv_*" --label team=chat --until 08:00\n'
    '  oomwatch silence add --all --for 30min --reason "the whole rack is moved"'
)
@click.option("--engine", metavar="ID", help="Incidents of this engine; * stands for any text.")
@click.option("--host", metavar="NAME", help="Incidents of this host.")
@click.option("--cause", metavar="CAUSE", help="Incidents of this cause, such as kv_saturation.")
@click.option(
    "--class",
    "incident_class",
    type=click.Choice(["startup", "long_context", "irregular", "not_oom"]),
    help="Incidents of this class.",
)
@click.option(
    "--label", "labels", multiple=True, metavar="NAME=VALUE", help="With this label. Repeatable."
)
@click.option("--all", "everything", is_flag=True, help="All incidents.")
@click.option("--for", "duration", metavar="TIME", help="For so long: 30min, 2h, 3d.")
@click.option(
    "--until",
    metavar="TIME",
    help="Until the clock next says 08:00, or a date and time.",
)
@click.option("--reason", metavar="TEXT", default="", help="Why, for those who ask.")
@click.option("--by", "author", metavar="NAME", help="Who says so; by default who you are.")
@_json
@store_option
def add(
    duration: str | None,
    until: str | None,
    everything: bool,
    as_json: bool,
    store: str | None,
    **given: Any,
) -> None:
    """Begin a silence for all incidents that match everything that is given.

    A running agent obeys within about a second.
    """
    from oomwatch.cli.notify import who
    from oomwatch.records import Silence
    from oomwatch.report.sanitize import clean
    from oomwatch.store.silences import MATCHERS, save_silence

    matchers = {name: given[name] for name in MATCHERS if given[name]}
    if bool(matchers) == everything:
        raise UsageError(
            "say which incidents: --engine, --host, --cause, --class, --label, or --all alone"
        )
    if "cause" in matchers:
        _check_cause(matchers["cause"])
    for label in matchers.get("labels", ()):
        name, _, value = label.partition("=")
        if not name or not value:
            raise UsageError(f"--label {label[:60]}: write NAME=VALUE")
    now = time.time()
    silence = Silence(
        id=f"sil-{uuid.uuid4().hex[:8]}",
        starts_at=now,
        ends_at=_end(duration, until, now),
        reason=clean(given["reason"], _LONGEST_REASON),
        author=who(given["author"]),
        **matchers,
    )
    with writing(store) as connection:
        save_silence(connection, silence)
    if as_json:
        _print_json({"silence": _as_json(silence)})
    else:
        click.echo(_line(silence, now))


def _check_cause(pattern: str) -> None:
    """Raises `UsageError` for one that no cause can match: it would hold nothing."""
    import fnmatch

    from oomwatch.causes import CAUSES
    from oomwatch.cli.explain import near_causes

    known = [cause for causes in CAUSES.values() for cause in causes]
    if any(fnmatch.fnmatchcase(cause, pattern) for cause in known):
        return
    near = near_causes(pattern)
    what = f"that {pattern[:60]} stands for" if "*" in pattern else pattern[:60]
    hint = f"did you mean {' or '.join(near)}?" if near else "`oomwatch explain` lists them"
    raise UsageError(f"there is no cause {what}; {hint}")


def _end(duration: str | None, until: str | None, now: float) -> float:
    from oomwatch.cli.window import parse_time
    from oomwatch.config.quantities import parse_duration
    from oomwatch.units import format_duration

    if (duration is None) == (until is None):
        raise UsageError("say how long: --for 2h, or --until TIME")
    if duration is not None:
        seconds = parse_duration(duration)
        if not seconds:
            raise UsageError(f"--for {duration[:40]!r} is no time: write 30min, 2h or 3d")
        end = now + seconds
    else:
        end = _next_time(until, now) or parse_time(until, now) or now
    if end <= now:
        raise UsageError("that is over already: --until takes a time to come, --for a span")
    if end - now > _LONGEST_SECONDS:
        raise UsageError(
            f"a silence ends within {format_duration(_LONGEST_SECONDS)}; to be told nothing for "
            "longer, change the filters of the receiver"
        )
    return end


def _next_time(clock: str | None, now: float) -> float | None:
    """When the host's clock next says ``08:00``; None for what is no time of a day."""
    import datetime

    try:
        wanted = datetime.time.fromisoformat(clock or "")
    except ValueError:
        return None
    today = datetime.datetime.fromtimestamp(now).astimezone()
    moment = datetime.datetime.combine(today, wanted)
    if moment.astimezone().timestamp() <= now:
        moment += datetime.timedelta(days=1)
    return moment.astimezone().timestamp()


@command.command(
    "list", epilog="\b\nExamples:\n  oomwatch silence list\n  oomwatch silence list --all --json"
)
@click.option("--all", "everything", is_flag=True, help="Those of the last days that are over too.")
@_json
@store_option
def list_(everything: bool, as_json: bool, store: str | None) -> None:
    """List the silences that hold, the first to end first."""
    from oomwatch.store.silences import read_silences

    now = time.time()
    with opened(store) as connection:
        found = read_silences(connection, 0.0 if everything else now)
    if as_json:
        _print_json({"silences": [_as_json(silence) for silence in found]})
        return
    if not found:
        click.echo("no silences")
    for silence in found:
        click.echo(_line(silence, now))


@command.command(epilog="\b\nExamples:\n  oomwatch silence end sil-3fa9")
@click.argument("silence")
@_json
@store_option
def end(silence: str, as_json: bool, store: str | None) -> None:
    """End a silence now: what is open is told within about a second."""
    from oomwatch.store.silences import end_silence, read_silences

    now = time.time()
    begin = begin_of_id(silence, "sil")
    with opened(store) as connection:
        ids = [each.id for each in read_silences(connection, now) if each.id.startswith(begin)]
    if len(ids) != 1:
        found = f"fits {len(ids)} silences; write more of it" if ids else "is none that holds"
        raise NoInputError(f"{silence[:60]} {found}; see `oomwatch silence list`")
    with writing(store) as connection:
        end_silence(connection, ids[0], now)
    if as_json:
        _print_json({"ended": ids[0]})
    else:
        click.echo(f"{ids[0]} is over")


# ---------------------------------------------------------------- shared
def _line(silence: Silence, now: float) -> str:
    from oomwatch.report.phrases import local_time
    from oomwatch.report.sanitize import clean
    from oomwatch.units import format_span

    wanted = {
        "engine": silence.engine,
        "host": silence.host,
        "class": silence.incident_class,
        "cause": silence.cause,
    }
    what = [f"{name}={value}" for name, value in wanted.items() if value is not None]
    until = local_time(silence.ends_at)
    left = silence.ends_at - now
    when = f"until {until} (for {format_span(left)})" if left > 0 else f"over since {until}"
    parts = [
        silence.id,
        " ".join([*what, *silence.labels]) or "all incidents",
        when,
        f"by {silence.author}" if silence.author else "",
        silence.reason,
    ]
    return clean("  ".join(part for part in parts if part), 1000)


def _as_json(silence: Silence) -> dict[str, Any]:
    from oomwatch.units import format_rfc3339

    return {
        "id": silence.id,
        "starts_at": format_rfc3339(silence.starts_at),
        "ends_at": format_rfc3339(silence.ends_at),
        "engine": silence.engine,
        "host": silence.host,
        "class": silence.incident_class,
        "cause": silence.cause,
        "labels": list(silence.labels),
        "reason": silence.reason,
        "by": silence.author,
    }


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": _SCHEMA, **value}, indent=2, ensure_ascii=False))
