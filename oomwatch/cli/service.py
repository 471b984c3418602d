"""`oomwatch service`: install, remove and look at the agent's unit of systemd."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from oomwatch import __version__
from oomwatch.cli import unit_files
from oomwatch.cli.groups import NamedGroup
from oomwatch.cli.unit_files import ALL_DROP_INS, DROP_INS, UNIT, Layout
from oomwatch.errors import UsageError

EXAMPLES: Final = """\b
Examples:
  sudo oomwatch service install
  sudo oomwatch service install --with logs,other-users
  oomwatch service install --user --dry-run
  oomwatch service status
"""

_SYSTEMCTL_SECONDS: Final = 120.0  # a start waits until the agent is ready
_FIELDS: Final = (
    "ActiveState",
    "SubState",
    "UnitFileState",
    "StatusText",
    "MainPID",
    "NRestarts",
    "Result",
)


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options that all three share."""
    for option in (
        click.option("--user", is_flag=True, help="The service of this user, without root."),
        click.option(
            "--root",
            type=click.Path(file_okay=False),
            default="/",
            metavar="DIR",
            help="Change the tree below DIR, such as an image; nothing is started.",
        ),
    ):
        function = option(function)
    return function


_dry_run = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")


@click.group("service", cls=NamedGroup, epilog=EXAMPLES)
def command() -> None:
    """Run the agent under systemd."""


@command.command(epilog=EXAMPLES)
@_options
@_dry_run
@click.option(
    "--with",
    "drop_ins",
    metavar="NAMES",
    help=f"Optional powers, separated by commas, or none: {', '.join(DROP_INS)}. "
    "Without it those that are installed stay.",
)
@click.option("--exec-path", metavar="PATH", help="The program to start; by default this one.")
@click.option("--no-start", is_flag=True, help="Write the files only.")
def install(
    *,
    user: bool,
    root: str,
    dry_run: bool,
    drop_ins: str | None,
    exec_path: str | None,
    no_start: bool,
) -> None:
    """Write the unit and start it, now and at every boot.

    A unit that oomwatch did not write is left alone.
    """
    layout = _layout(root, user=user, dry_run=dry_run)
    names = _chosen(layout, drop_ins)
    program = _command(layout, exec_path)
    text, notes = unit_files.unit_text(layout, program)
    if missing := _missing_program(layout, program[0]):
        notes.append(missing)
    files = {layout.unit: text, **unit_files.drop_in_texts(layout, names)}
    stale = [
        path
        for path in map(layout.drop_in, ALL_DROP_INS)
        if path not in files and unit_files.owner(path) == "ours"
    ]
    packaged = layout.packaged()
    if packaged is not None:
        raise UsageError(
            f"{packaged} came with a package: use that one (systemctl enable --now {UNIT})"
        )
    for path in files:
        _refuse_others(path)
    for path, content in files.items():
        stamped = unit_files.stamp(content)
        write = functools.partial(unit_files.write_atomically, path, stamped)
        _do(f"write {path}", write, dry_run=dry_run)
    for path in stale:
        _do(f"remove {path}", path.unlink, dry_run=dry_run)
    for note in notes:
        click.echo(f"note: {note}")
    if user:
        click.echo(
            "note: this service sees its user's engines only, and what /proc shows of others; it "
            f"ends at log-out unless: loginctl enable-linger {os.environ.get('USER', '')}".rstrip()
        )
    commands = [["daemon-reload"], ["enable", UNIT], ["restart", UNIT]]
    _manage(layout, commands[:1] if no_start else commands, dry_run=dry_run)


@command.command(
    epilog="\b\nExamples:\n  sudo oomwatch service uninstall\n  oomwatch service uninstall --user"
)
@_options
@_dry_run
def uninstall(user: bool, root: str, dry_run: bool) -> None:
    """Stop the service and remove its unit; configuration and database stay."""
    layout = _layout(root, user=user, dry_run=dry_run)
    files = [layout.unit, *map(layout.drop_in, ALL_DROP_INS)]
    there = [path for path in files if unit_files.owner(path) != "absent"]
    if not there:
        click.echo(f"nothing to remove: {layout.unit} is not there")
        return
    for path in there:
        _refuse_others(path)
    _manage(layout, [["disable", "--now", UNIT]], dry_run=dry_run)
    for path in there:
        _do(f"remove {path}", path.unlink, dry_run=dry_run)
    directory = layout.drop_in("").parent
    if not dry_run and directory.is_dir():
        with contextlib.suppress(OSError):  # drop-ins of others are in it
            directory.rmdir()
    _manage(layout, [["daemon-reload"]], dry_run=dry_run)
    kept = (
        "~/.config/oomwatch and ~/.local/state/oomwatch"
        if user
        else "/etc/oomwatch and /var/lib/oomwatch"
    )
    click.echo(f"kept: {kept}")


@command.command(
    epilog="\b\nExamples:\n  oomwatch service status\n  oomwatch service status --json"
)
@_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON (oomwatch.service/1).")
def status(user: bool, root: str, as_json: bool) -> None:
    """Say what is installed, whether it is this version's, and whether it runs."""
    layout = Layout(Path(root).absolute(), user)
    found = _status(layout)
    if as_json:
        head = {"schema": "oomwatch.service/1", "oomwatch_version": __version__}
        click.echo(json.dumps({**head, **found}, indent=2, ensure_ascii=False))
        return
    from oomwatch.report.sanitize import clean

    for name, value in found.items():
        text = (", ".join(value) or "none") if isinstance(value, list) else value
        if text is not None:
            click.echo(f"{name.replace('_', ' ').ljust(12)} {clean(text, 500)}")


def _status(layout: Layout) -> dict[str, Any]:
    owners = {
        "absent": "not installed",
        "ours": "written by oomwatch",
        "edited": "written by oomwatch and edited since",
        "foreign": "not written by oomwatch",
    }
    packaged = layout.packaged()
    owned = unit_files.owner(layout.unit)
    found: dict[str, Any] = {
        "unit": str(packaged if owned == "absent" and packaged else layout.unit),
        "origin": "from a package" if owned == "absent" and packaged else owners[owned],
        "drop_ins": list(layout.installed_drop_ins()),
    }
    if owned in ("ours", "edited"):
        found["command"] = command = _exec_start(layout.unit)
        program = unit_files.program_of(command or "")
        if program and (missing := _missing_program(layout, program)):
            found["problem"] = missing
        elif owned == "ours" and not _is_current(layout):
            found["problem"] = "another version wrote it: run `oomwatch service install` again"
    running = _show(layout)
    if running:
        found["state"] = f"{running['ActiveState']} ({running['SubState']})"
        found["enabled"] = running["UnitFileState"] or "disabled"
        found["pid"] = int(running["MainPID"]) or None
        found["restarts"] = int(running["NRestarts"])
        found["result"] = running["Result"]
        found["says"] = running["StatusText"] or None
    else:
        found["state"] = "unknown: systemd cannot be asked from here"
    return found


def _missing_program(layout: Layout, program: str) -> str | None:
    """That the program of a unit is not where the unit will look for it; None if it is."""
    if layout.below(program).exists():
        return None
    if layout.root == Path("/"):
        return f"{program} is gone: run `oomwatch service install` again"
    return (
        f"there is no {program} below {layout.root}: install oomwatch there, or give --exec-path "
        "with where it will be"
    )


def _is_current(layout: Layout) -> bool:
    """Whether this version would write the same, whatever program it starts."""
    now = layout.unit.read_text("utf-8", "replace")
    new = unit_files.stamp(unit_files.unit_text(layout, ("x",))[0])
    return _without_command(now) == _without_command(new)


def _without_command(text: str) -> list[str]:
    return [line for line in text.splitlines()[1:] if not line.startswith("ExecStart=")]


def _exec_start(unit: Path) -> str | None:
    lines = unit.read_text("utf-8", "replace").splitlines()
    starts = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    return starts[-1] if starts else None


def _layout(root: str, *, user: bool, dry_run: bool) -> Layout:
    layout = Layout(Path(root).absolute(), user)
    if not dry_run and not user and layout.root == Path("/") and os.geteuid() != 0:
        raise UsageError(
            "a system service needs root: run it with sudo, with --dry-run to see what it would "
            "do, or with --user for a service of your own"
        )
    return layout


def _chosen(layout: Layout, drop_ins: str | None) -> tuple[str, ...]:
    if layout.user:
        if drop_ins not in (None, "none", ""):
            raise UsageError("--with is for the system's service: a user has no powers to give")
        return ()
    if drop_ins is None:
        return layout.installed_drop_ins()
    names = [name for name in drop_ins.replace(",", " ").split() if name != "none"]
    unit_files.check_drop_ins(layout, tuple(names))
    return tuple(dict.fromkeys(names))


def _command(layout: Layout, exec_path: str | None) -> tuple[str, ...]:
    if exec_path is not None and not exec_path.startswith("/"):
        raise UsageError("--exec-path must be an absolute path")
    if exec_path is not None and not Path(exec_path).name.startswith("oomwatch"):
        raise UsageError("--exec-path must name an oomwatch, such as /opt/oomwatch/bin/oomwatch")
    command = (exec_path,) if exec_path else unit_files.find_command()
    if not all(word.isprintable() for word in command):
        raise UsageError("the path of the program has characters that a unit cannot hold")
    if layout.user and layout.root == Path("/") and not Path(command[0]).exists():
        raise UsageError(f"there is no {command[0]}")
    if layout.user or layout.root != Path("/"):
        return command
    reason = unit_files.unreachable(command)
    if reason is not None:
        raise UsageError(
            f"the service could not run it: {reason}; install oomwatch in a venv such as "
            "/opt/oomwatch, or give --exec-path"
        )
    return command


def _refuse_others(path: Path) -> None:
    """Raise UsageError for a file that oomwatch did not write as it is."""
    owned = unit_files.owner(path)
    if owned == "foreign":
        what = "is a link (a masked unit?)" if path.is_symlink() else "was not written by oomwatch"
        raise UsageError(f"{path} {what} and is left alone; remove it first if it is not needed")
    if owned == "edited":
        raise UsageError(
            f"{path} was edited since oomwatch wrote it and is left alone; keep the changes in a "
            f"drop-in (systemctl edit {UNIT}) and remove the file"
        )


def _do(what: str, action: Callable[[], object], *, dry_run: bool) -> None:
    click.echo(f"would {what}" if dry_run else what)
    if dry_run:
        return
    try:
        action()
    except OSError as error:
        raise UsageError(f"cannot {what}: {(error.strerror or str(error)).lower()}") from None


def _manage(layout: Layout, commands: list[list[str]], *, dry_run: bool) -> None:
    """Ask systemd, or say what is to be asked where it cannot be."""
    prefix = ["systemctl", *(["--user"] if layout.user else [])]
    here = layout.root == Path("/") and Path("/run/systemd/system").is_dir()
    possible = here and shutil.which("systemctl") is not None
    for arguments in commands:
        line = [*prefix, *arguments]
        shown = " ".join(line)
        if dry_run or not possible:
            reason = "" if dry_run else " (systemd does not run here, or not on this tree)"
            click.echo(f"would run {shown}{reason}")
            continue
        click.echo(f"run {shown}")
        try:
            done = subprocess.run(
                line, capture_output=True, text=True, timeout=_SYSTEMCTL_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UsageError(f"{shown} did not end: {error}") from None
        if done.returncode != 0:
            journal = f"journalctl {'--user ' if layout.user else ''}-u {UNIT}"
            said = " ".join(done.stderr.split())[:300]
            raise UsageError(f"{shown} failed: {said or done.returncode}; see {journal}")


def _show(layout: Layout) -> dict[str, str] | None:
    """Properties of the unit from systemd; None if it cannot be asked."""
    if layout.root != Path("/") or not Path("/run/systemd/system").is_dir():
        return None
    line = ["systemctl", *(["--user"] if layout.user else []), "show", UNIT]
    line += [f"--property={name}" for name in _FIELDS]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = dict(one.split("=", 1) for one in done.stdout.splitlines() if "=" in one)
    return {name: found.get(name, "") for name in _FIELDS} if done.returncode == 0 else None
