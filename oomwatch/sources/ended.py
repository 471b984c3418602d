"""Engines that ended on this host: containers that exited, services that failed, kept copies.

Who keeps a process remembers how it ended: Docker in ``config.v2.json`` (``State``), Podman and
Docker in the answer of ``inspect``, systemd in the properties of a unit (``Result``,
``ExecMainCode``, ``ExecMainStatus``). `oomwatch run` leaves the output of a server that failed.
Nothing is started or changed. What may not be read is said in `denied`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from oomwatch.engines.commandline import parse_command
from oomwatch.errors import SourceUnavailable
from oomwatch.records import EngineExit
from oomwatch.sources.logformat_child import Failed, ask_child
from oomwatch.sources.logformat_time import Clock
from oomwatch.sources.regular_file import changed_at

DOCKER_ROOT: Final = "/var/lib/docker"
SYSTEMD_ROOT: Final = "/run/systemd/system"
COPY_PREFIX: Final = "oomwatch-run-"
_END_SUFFIX: Final = ".json"
_LARGEST_END_BYTES: Final = 1 << 20
_SHELL_SIGNAL: Final = 128
_PROPERTIES: Final = (
    "Id,ActiveState,SubState,Result,NRestarts,ExecMainCode,ExecMainStatus"
    ",ExecMainExitTimestampMonotonic,ExecStart"
)
_ARGV: Final = re.compile(r"argv\[\]=(.*?) ; ignore_errors=", re.DOTALL)
_CLD_EXITED: Final = "1"  # ExecMainCode is si_code of waitid(2)


@dataclasses.dataclass(frozen=True, slots=True)
class EndedEngine:
    """An engine that ran here. `exit` is None where only its output is left."""

    kind: Literal["container", "unit", "copy"]
    name: str
    at: float
    engine: str | None = None
    version: str | None = None
    command: tuple[str, ...] | None = None
    exit: EngineExit | None = None
    pids: tuple[int, ...] = ()
    started_at: float | None = None

    @property
    def id(self) -> str:
        """Its id as an engine."""
        return self.exit.engine if self.exit is not None else f"{self.engine or 'engine'}-0"


def find_ended(
    *,
    docker_root: str = DOCKER_ROOT,
    systemd_root: str = SYSTEMD_ROOT,
    copies: str | None = None,
    denied: list[str] | None = None,
) -> list[EndedEngine]:
    """All of them, the last to end first."""
    denied = [] if denied is None else denied
    found = [
        *find_containers(docker_root, denied),
        *find_units(systemd_root, denied),
        *find_copies(copies or tempfile.gettempdir()),
    ]
    return sorted(found, key=lambda ended: -ended.at)


# ---------------------------------------------------------------- containers
def find_containers(docker_root: str, denied: list[str]) -> list[EndedEngine]:
    """Containers of an engine that do not run now: by Docker's files, else by the commands."""
    rows: dict[str, Mapping[str, Any]] = {}
    refused: list[str] = []
    files = _docker_files(Path(docker_root), refused)
    for row in files or ():
        rows[str(row.get("ID") or "")] = row
    for tool in ("docker", "podman"):
        # Docker may keep its files elsewhere, or run without root: then its command knows.
        if shutil.which(tool) and (tool == "podman" or files is None or refused):
            answer = _ask_runtime(tool, refused)
            if answer is not None and tool == "docker":
                refused.clear()
            for row in answer or ():
                rows.setdefault(str(row.get("Id") or row.get("ID") or ""), row)
    denied += refused
    return [ended for row in rows.values() if (ended := _from_state(row)) is not None]


def _docker_files(root: Path, denied: list[str]) -> list[Mapping[str, Any]] | None:
    """What Docker's own files say; None where there are none to be seen."""
    try:
        folders = sorted((root / "containers").iterdir())
    except PermissionError:
        denied.append(f"{root}/containers may not be read")
        return None
    except OSError:
        return None
    rows: list[Mapping[str, Any]] = []
    for folder in folders:
        try:
            row = json.loads((folder / "config.v2.json").read_bytes())
        except PermissionError:
            denied.append(f"{folder} may not be read")
        except (OSError, ValueError):
            continue
        else:
            if isinstance(row, dict):
                rows.append(row)
    return rows


def _ask_runtime(tool: str, denied: list[str]) -> list[Mapping[str, Any]] | None:
    """What the runtime's command says of containers that do not run; None if it does not answer."""
    states = [f"--filter=status={state}" for state in ("exited", "dead", "restarting")]
    try:
        identities = ask_child([tool, "ps", "--all", "--quiet", "--no-trunc", *states]).split()
        if not identities:
            return []
        rows = json.loads(ask_child([tool, "inspect", "--type", "container", *identities[:200]]))
    except Failed as error:
        if "permission denied" in str(error).lower():
            denied.append(f"{tool} may not be asked ({error})")
        return None
    except (SourceUnavailable, ValueError):
        return None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None


def _from_state(row: Mapping[str, Any]) -> EndedEngine | None:
    """Docker's config.v2.json and the answers of `inspect` have the same names."""
    state, config = _mapping(row.get("State")), _mapping(row.get("Config"))
    at = _time(state.get("FinishedAt"))
    if at is None or state.get("Pid") or state.get("Paused"):
        return None
    path, args = row.get("Path"), _words(row.get("Args"))
    words = (
        (path, *args)
        if isinstance(path, str) and path
        else (*_words(config.get("Entrypoint")), *_words(config.get("Cmd")))
    )
    image = str(config.get("Image") or row.get("ImageName") or "")
    command = parse_command(words)
    if command.engine is None:  # an image whose entry point is a script of its own
        command = parse_command(("docker", "run", image, *words)) if image else command
    if command.engine is None:
        return None
    tagged = parse_command(("docker", "run", image, *words)) if image else command
    name = str(row.get("Name") or row.get("ID") or row.get("Id") or "?").lstrip("/")[:253]
    code, oom = state.get("ExitCode"), state.get("OOMKilled")
    code = code if isinstance(code, int) and not isinstance(code, bool) else None
    restarts = row.get("RestartCount")
    return EndedEngine(
        "container",
        name,
        at,
        engine=command.engine,
        version=command.version or tagged.version,
        command=command.argv or None,
        exit=EngineExit(
            engine=f"{command.engine}-{name}",
            where=f"container {name}",
            at=at,
            exit_code=code,
            signal=signal_of(code),
            oom_killed=oom if isinstance(oom, bool) else None,
            restarts=restarts if isinstance(restarts, int) else None,
            detail=str(state.get("Error") or "")[:300] or None,
        ),
    )


def signal_of(status: int | None) -> int | None:
    """The signal in a status as a shell tells it: 137 is 9."""
    return status - _SHELL_SIGNAL if status is not None and 128 < status <= 192 else None


# ---------------------------------------------------------------- services
def find_units(systemd_root: str, denied: list[str]) -> list[EndedEngine]:
    """Services whose command is an engine's and which do not run now; none without systemd."""
    if not os.access(systemd_root, os.F_OK) or not shutil.which("systemctl"):
        return []
    try:
        text = ask_child(
            ["systemctl", "show", "*.service", "--all", "--no-pager", f"--property={_PROPERTIES}"]
        )
    except (Failed, SourceUnavailable) as error:
        denied.append(f"systemd may not be asked ({error})")
        return []
    return [unit for block in text.split("\n\n") if (unit := _from_properties(block)) is not None]


def _from_properties(block: str) -> EndedEngine | None:
    pairs = (line.partition("=") for line in block.splitlines())
    properties = {name: value for name, equals, value in pairs if equals}
    started = _ARGV.search(properties.get("ExecStart", ""))
    resting = properties.get("SubState") == "auto-restart"
    if started is None or not (resting or properties.get("ActiveState") in ("failed", "inactive")):
        return None
    command = parse_command(started[1].split())  # systemd prints the words unquoted
    microseconds = _number(properties.get("ExecMainExitTimestampMonotonic"))
    name = properties.get("Id", "")
    if command.engine is None or not microseconds or not name:
        return None
    at = time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - microseconds / 1e6)
    status = _number(properties.get("ExecMainStatus"))
    by_signal = properties.get("ExecMainCode") != _CLD_EXITED
    result = properties.get("Result", "")
    oom = True if result == "oom-kill" else None
    return EndedEngine(
        "unit",
        name,
        at,
        engine=command.engine,
        version=command.version,
        command=tuple(started[1].split()),
        exit=EngineExit(
            engine=f"{command.engine}-{name.removesuffix('.service')}",
            where=f"unit {name}",
            at=at,
            exit_code=None if status is None else status + _SHELL_SIGNAL * by_signal,
            signal=status if by_signal else signal_of(status),
            oom_killed=oom,
            restarts=_number(properties.get("NRestarts")),
            detail=f"Result={result}" if result not in ("", "success") else None,
        ),
    )


# ---------------------------------------------------------------- kept copies
def find_copies(folder: str) -> list[EndedEngine]:
    """Outputs that `oomwatch run` kept, of this user only: others' files could say anything."""
    found = []
    try:
        paths = sorted(Path(folder).glob(f"{COPY_PREFIX}*.log"))
    except OSError:  # may not be read
        return []
    for path in paths:
        try:
            status = path.lstat()
        except OSError:
            continue
        own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if own and status.st_size:
            copy = EndedEngine("copy", str(path), changed_at(status))
            found.append(_with_end(copy, path.with_suffix(_END_SUFFIX)))
    return found


def write_end(ended: EndedEngine) -> None:
    """Keep beside a copy how the server ended; OSError where that cannot be written."""
    told = dataclasses.asdict(ended)
    path = Path(ended.name).with_suffix(_END_SUFFIX)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(told, file)


def _with_end(copy: EndedEngine, path: Path) -> EndedEngine:
    """The copy with what stands beside it; older copies have nothing there."""
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return copy
        told = json.loads(path.read_bytes()[:_LARGEST_END_BYTES])
        end = EngineExit(**told["exit"])
        return dataclasses.replace(
            copy,
            engine=told["engine"],
            version=told["version"],
            command=_words(told["command"]) or None,
            exit=end,
            pids=tuple(int(pid) for pid in told["pids"]),
            started_at=float(told["started_at"]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return copy


# ---------------------------------------------------------------- values
def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,) if value else ()
    return tuple(map(str, value)) if isinstance(value, Sequence) else ()


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else None


def _time(text: Any) -> float | None:
    """An RFC 3339 time; None for ``0001-01-01T00:00:00Z``, which is never."""
    at = Clock(datetime.UTC).read_dated(text) if isinstance(text, str) else None
    return at if at is not None and at > 0 else None
