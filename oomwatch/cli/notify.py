"""`oomwatch notify`: try the receivers, see what was told, what waits and what failed."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

import click

from oomwatch.cli.groups import NamedGroup
from oomwatch.cli.stored import (
    begin_of_id,
    find_incident,
    opened,
    remember_config,
    store_alone,
    store_option,
    writing,
)
from oomwatch.errors import NoInputError, UsageError

if TYPE_CHECKING:
    from oomwatch.config import Config
    from oomwatch.config.notify import SinkConfig
    from oomwatch.notify.notice import Notice
    from oomwatch.report.locale import Language

EXAMPLES: Final = """\b
Examples:
  oomwatch notify test                     a test message to every receiver
  oomwatch notify test oncall --dry-run    what it would say
  oomwatch notify list --failed            what was not delivered, and why
  oomwatch notify retry --all              send it again
  oomwatch notify preview slack            every kind of message, in this terminal
  oomwatch notify ack 3fa9                 somebody looks after it: no escalation
"""
_SCHEMA: Final = "oomwatch.notify/1"
_MOST_LISTED: Final = 5000
_LONGEST_NAME: Final = 100

_config = click.option(
    "--config",
    "path",
    metavar="PATH",
    callback=remember_config,
    help="The file; by default $OOMWATCH_CONFIG, /etc/oomwatch/config.toml, or "
    "$XDG_CONFIG_HOME/oomwatch/config.toml.",
)
_json = click.option("--json", "as_json", is_flag=True, help=f"Print JSON ({_SCHEMA}).")


@click.group("notify", cls=NamedGroup, epilog=EXAMPLES)
def command() -> None:
    """Try the receivers of alerts; see what was told, what waits and what failed."""


# ---------------------------------------------------------------- test
@command.command(
    epilog="\b\nExamples:\n  oomwatch notify test\n  oomwatch notify test oncall\n"
    "  oomwatch notify test --dry-run"
)
@click.argument("receiver", required=False)
@click.option("--dry-run", is_flag=True, help="Print what would be sent, and send nothing.")
@_config
@_json
@click.pass_context
def test(
    ctx: click.Context, receiver: str | None, dry_run: bool, path: str | None, as_json: bool
) -> None:
    """Send a test message to one receiver or to all, from here, and say what became of it.

    Exit status 3 if one did not take it. Secrets that systemd gives to the service alone cannot be
    read here.
    """
    from oomwatch.notify.notice import Notice
    from oomwatch.report.sanitize import clean

    loaded = _load(path)
    sinks = _sinks(loaded, receiver)
    now = time.time()
    found = []
    for config in sinks:
        identity = f"msg-test-{uuid.uuid4().hex[:12]}"
        notice = Notice(identity, "test", now, labels=dict(loaded.notify.labels))
        if dry_run:
            shown = _preview(config, notice) or ""
            found.append({"receiver": config.name, "kind": config.kind, "preview": shown})
            if not as_json:
                click.echo(f"--- {config.name} ({config.kind})\n{_lines(shown)}\n")
            continue
        result, reason = _send(config, notice)
        found.append(
            {"receiver": config.name, "kind": config.kind, "result": result, "reason": reason}
        )
        if not as_json:
            more = f": {reason}" if reason else ""
            click.echo(clean(f"{config.name} ({config.kind}): {result}{more}", 1000))
    if as_json:
        _print_json({"receivers": found})
    if any(each.get("result", "delivered") != "delivered" for each in found):
        ctx.exit(3)


def _send(config: SinkConfig, notice: Notice) -> tuple[str, str | None]:
    """What the receiver made of a message, in a word, and why."""
    from oomwatch.config import ConfigError
    from oomwatch.notify.outcome import Delivered, Later
    from oomwatch.notify.sinks import make_sink

    try:
        outcome = make_sink(config).send(notice, None)
    except ConfigError as error:
        return "not sent", str(error)
    if isinstance(outcome, Delivered):
        return "delivered", None
    return ("failed" if isinstance(outcome, Later) else "refused"), outcome.reason


# ---------------------------------------------------------------- list
@command.command(
    "list",
    epilog="\b\nExamples:\n  oomwatch notify list\n  oomwatch notify list --failed --json",
)
@click.option("--failed", is_flag=True, help="Only what was refused or given up.")
@click.option("--waiting", is_flag=True, help="Only what still waits, also for its time.")
@click.option("--receiver", metavar="NAME", help="Only messages to this one.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="At most so many."
)
@_json
@store_option
def list_(  # noqa: PLR0917 - as many as there are options
    failed: bool,
    waiting: bool,
    receiver: str | None,
    limit: int,
    as_json: bool,
    store: str | None,
) -> None:
    """Say what was told, what waits and until when, and what failed and why; the newest first."""
    from oomwatch.cli.message_lines import line_of, message_as_json, paused, pauses_of
    from oomwatch.report.sanitize import clean
    from oomwatch.store.outbox import PENDING, read_outbox

    states = [*(["failed"] if failed else []), *(PENDING if waiting else [])]
    now = time.time()
    with opened(store) as connection:
        rows = read_outbox(connection, states=states or None, limit=_MOST_LISTED)
        pending = read_outbox(connection, states=PENDING, limit=_MOST_LISTED)
    pauses = pauses_of(pending, now)
    rows = tuple(paused(row, pauses, now) for row in rows if receiver in {None, row.sink})[:limit]
    if as_json:
        _print_json({"messages": [message_as_json(row) for row in rows]})
        return
    if not rows:
        click.echo("no messages")
    hosts = {row.host for row in rows}
    for row in rows:
        host = f"{row.host}  " if len(hosts) > 1 else ""
        click.echo(clean(f"{host}{line_of(row, now)}", 1000))


# ---------------------------------------------------------------- retry, ack
@command.command(
    epilog="\b\nExamples:\n  oomwatch notify retry msg-4f21\n  oomwatch notify retry --all"
)
@click.argument("message", required=False)
@click.option("--all", "everything", is_flag=True, help="All that failed or waits.")
@_json
@store_option
def retry(message: str | None, everything: bool, as_json: bool, store: str | None) -> None:
    """Have the agent send what failed once more, and what waits for another attempt now.

    A receiver that has disabled itself is tried again too.
    """
    from oomwatch.store.outbox import ask_again, read_outbox

    if (message is None) != everything:
        raise UsageError("say which message, or --all; `oomwatch notify list --failed` lists them")
    ids = None
    if message is not None:
        begin = begin_of_id(message, "msg")
        with opened(store) as connection:
            rows = read_outbox(connection, states=("failed", "waiting"), limit=_MOST_LISTED)
        ids = [row.id for row in rows if row.id.startswith(begin)]
        if len(ids) != 1:
            found = f"fits {len(ids)} messages; write more of it" if ids else "is none that failed"
            raise NoInputError(f"{message[:60]} {found}; see `oomwatch notify list --failed`")
    with writing(store) as connection:
        count = ask_again(connection, ids, time.time())
    if as_json:
        _print_json({"messages": count})
    else:
        click.echo(f"{count} message(s): the agent sends them within about a second, if it runs")


@command.command(
    epilog="\b\nExamples:\n  oomwatch notify ack 3fa9\n  oomwatch notify ack 3fa9 --by ann"
)
@click.argument("incident")
@click.option("--by", "author", metavar="NAME", help="Who looks after it; by default who you are.")
@_json
@store_option
def ack(incident: str, author: str | None, as_json: bool, store: str | None) -> None:
    """Say that somebody looks after an incident, so that it is not escalated."""
    from oomwatch.store.silences import Acknowledgement, acknowledge

    with opened(store) as connection:
        found = find_incident(connection, begin_of_id(incident, "inc"))
    by = who(author)
    with writing(store) as connection:
        acknowledge(connection, Acknowledgement(found.id, time.time(), by))
    if as_json:
        _print_json({"incident": found.id, "by": by, "open": found.state == "open"})
        return
    over = "" if found.state == "open" else "; it is over already"
    click.echo(f"{found.id} is acknowledged by {by}{over}")


# ---------------------------------------------------------------- preview
@command.command(
    epilog="\b\nExamples:\n  oomwatch notify preview\n  oomwatch notify preview slack --lang zh\n"
    "  oomwatch notify preview oncall --incident 3fa9 --kind opened"
)
@click.argument("receiver", required=False, metavar="[RECEIVER|KIND]")
@click.option("--incident", metavar="ID", help="Of this incident, rather than of an example.")
@click.option(
    "--kind", "only", metavar="KIND", help="Only messages of this kind, such as resolved."
)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="In this language.")
@_config
@store_alone
def preview(  # noqa: PLR0917 - as many as there are options
    receiver: str | None,
    incident: str | None,
    only: str | None,
    lang: str | None,
    path: str | None,
    store: str | None,
) -> None:
    """Show every kind of message as a receiver would get it; sends nothing, reads no secret.

    RECEIVER is one that is configured, KIND one of slack, webhook, alertmanager,
    alertmanager_webhook, pagerduty, email and apprise. Without, all that are configured.
    """
    from oomwatch.notify.example import KINDS, example_incident, example_notices

    config = _load(path)
    if only is not None and only not in KINDS:
        raise UsageError(f"--kind {only[:40]}: there are {', '.join(KINDS)}")
    now = time.time()
    for sink in _shown_sinks(config, receiver, lang):
        language: Language = getattr(sink, "lang", "en")
        about = (
            example_incident(language, now)
            if incident is None
            else _notice_of(config, incident, store, language)
        )
        for notice in example_notices(about, language, now):
            if only not in {None, notice.kind}:
                continue
            head = f"--- {sink.name} ({sink.kind}): {notice.kind}"
            shown = _preview(sink, notice)
            if shown is None:
                click.echo(f"{head}\nthis receiver is told of each incident by itself\n")
            else:
                click.echo(f"{head}\n{_lines(shown)}\n")


def _shown_sinks(config: Config, receiver: str | None, lang: str | None) -> list[SinkConfig]:
    from oomwatch.config.sinks import SINKS
    from oomwatch.notify.example import example_sink

    configured = config.notify.sinks
    sinks = [sink for sink in configured if receiver in {None, sink.name}]
    if not sinks and receiver is not None and receiver in SINKS:
        sinks = [sink for sink in configured if sink.kind == receiver] or [
            example_sink(receiver, "zh" if lang == "zh" else "en")
        ]
    if not sinks and receiver is not None:
        names = ", ".join(str(sink.name) for sink in configured) or "none"
        raise UsageError(
            f"{receiver[:60]} is no receiver and no kind of one; receivers: {names}; kinds: "
            f"{', '.join(SINKS)} (apprise is for all others)"
        )
    if not sinks:
        sinks = _sinks(config, receiver)
    if lang is None:
        return sinks
    spoken: Any = {"lang": lang}
    return [
        dataclasses.replace(sink, **spoken) if hasattr(sink, "lang") else sink for sink in sinks
    ]


def _notice_of(config: Config, incident: str, store: str | None, lang: Language) -> Any:
    from oomwatch.notify.message import incident_notice

    with opened(store) as connection:
        found = find_incident(connection, incident)
    return incident_notice(
        found,
        labels=config.notify.labels,
        runbook_base=config.notify.runbook_url or "",
        lang=lang,
    )


def _preview(config: SinkConfig, notice: Notice) -> str | None:
    """What a receiver shows; None of what it is not sent."""
    from oomwatch.notify.example import without_secrets
    from oomwatch.notify.sinks import make_sink

    shown, environ = without_secrets(config)
    sink = make_sink(shown, environ)
    if notice.kind == "grouped" and not sink.groups:
        return None
    is_answer = config.kind == "slack" and notice.kind in {"updated", "resolved", "escalated"}
    return sink.preview(notice, "C0/1.0" if is_answer else None)


# ---------------------------------------------------------------- shared
def _load(path: str | None) -> Config:
    from oomwatch.cli import print_error
    from oomwatch.config import load_config

    loaded = load_config(path)
    for warning in loaded.warnings:
        print_error(f"warning: {warning}")
    return loaded.config


def _sinks(config: Config, receiver: str | None) -> list[SinkConfig]:
    """The receivers that are switched on, or the one that is named."""
    sinks = config.notify.sinks
    if not sinks:
        raise UsageError(
            "no receiver is configured: add a table such as [[notify.slack]]; see "
            "`oomwatch config default`"
        )
    if receiver is None:
        return [sink for sink in sinks if sink.enabled]
    found = [sink for sink in sinks if sink.name == receiver]
    if not found:
        names = ", ".join(str(sink.name) for sink in sinks)
        raise UsageError(f"there is no receiver {receiver[:60]}; there are {names}")
    return found


def _lines(text: str) -> str:
    from oomwatch.report.sanitize import clean

    return "\n".join(
        line[: len(line) - len(line.lstrip(" "))] + clean(line.lstrip(" "))
        for line in text.splitlines()
    )


def who(given: str | None = None) -> str:
    """The name that was given, in at most 100 characters, or who runs this, also behind sudo."""
    import getpass
    import os

    from oomwatch.report.sanitize import clean

    if name := clean(given or "", _LONGEST_NAME):
        return name
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def _print_json(value: dict[str, Any]) -> None:
    click.echo(json.dumps({"schema": _SCHEMA, **value}, indent=2, ensure_ascii=False))
