"""How the main process of one service or container ended, as its keeper remembers it.

systemd keeps ``Result``, ``ExecMainPID``, ``ExecMainCode`` and ``ExecMainStatus`` of a unit; Docker
keeps ``State`` in ``config.v2.json``, and Podman and Docker tell it by `inspect`. `ended` looks for
all engines that ended on this host; this asks about one that was watched. Nothing is changed.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from oomwatch.errors import SourceUnavailable
from oomwatch.records import EngineExit
from oomwatch.sources.cgroup import CgroupIdentity
from oomwatch.sources.ended import DOCKER_ROOT, signal_of
from oomwatch.sources.logformat_child import Failed, ask_child
from oomwatch.sources.logformat_time import Clock

_PROPERTIES: Final = (
    "Result,NRestarts,ExecMainPID,ExecMainCode,ExecMainStatus,ExecMainExitTimestampMonotonic"
)
_UNIT: Final = re.compile(r"[\w.@:\\-]{1,255}\.(?:service|scope)")
_CONTAINER: Final = re.compile(r"[0-9a-f]{64}")
_CLD_EXITED: Final = "1"  # ExecMainCode is si_code of waitid(2)
_SHELL_SIGNAL: Final = 128


@dataclasses.dataclass(frozen=True, slots=True)
class KeptExit:
    """What a keeper says; `pid` is the main process that it speaks of, where it says so."""

    exit: EngineExit
    pid: int | None = None


def ask_keeper(
    identity: CgroupIdentity, engine_id: str, *, docker_root: str = DOCKER_ROOT
) -> KeptExit | None:
    """How the container or unit of a cgroup ended; None where nobody knows, or it runs.

    May take 20 s where the keeper hangs: not for a thread that others wait for.
    """
    if identity.container and _CONTAINER.fullmatch(identity.container):
        return _ask_container(identity.container, engine_id, Path(docker_root))
    if identity.unit and _UNIT.fullmatch(identity.unit):
        return _ask_unit(identity.unit, engine_id)
    return None


def _ask_unit(unit: str, engine_id: str) -> KeptExit | None:
    try:
        text = ask_child(["systemctl", "show", "--no-pager", f"--property={_PROPERTIES}", unit])
    except (Failed, SourceUnavailable):
        return None
    pairs = (line.partition("=") for line in text.splitlines())
    properties = {name: value for name, equals, value in pairs if equals}
    microseconds = _number(properties.get("ExecMainExitTimestampMonotonic"))
    if not microseconds:
        return None  # its main process runs, or it has none
    status = _number(properties.get("ExecMainStatus"))
    by_signal = properties.get("ExecMainCode") != _CLD_EXITED
    result = properties.get("Result", "")
    told = EngineExit(
        engine=engine_id,
        where=f"unit {unit}",
        at=time.time() - (time.clock_gettime(time.CLOCK_MONOTONIC) - microseconds / 1e6),
        exit_code=None if status is None else status + _SHELL_SIGNAL * by_signal,
        signal=status if by_signal else signal_of(status),
        oom_killed=True if result == "oom-kill" else None,
        restarts=_number(properties.get("NRestarts")),
        detail=f"Result={result}" if result not in ("", "success") else None,
    )
    return KeptExit(told, _number(properties.get("ExecMainPID")) or None)


def _ask_container(container: str, engine_id: str, docker_root: Path) -> KeptExit | None:
    row = _read_docker(docker_root / "containers" / container / "config.v2.json")
    for tool in ("docker", "podman"):
        if row is None and shutil.which(tool):
            row = _inspect(tool, container)
    state = row.get("State") if row is not None else None
    if row is None or not isinstance(state, dict) or state.get("Pid") or state.get("Running"):
        return None
    finished = state.get("FinishedAt")
    at = Clock(datetime.UTC).read_dated(finished) if isinstance(finished, str) else None
    if at is None or at <= 0:  # 0001-01-01T00:00:00Z: it never ended
        return None
    code, oom = state.get("ExitCode"), state.get("OOMKilled")
    code = code if isinstance(code, int) and not isinstance(code, bool) else None
    restarts = row.get("RestartCount")
    name = str(row.get("Name") or container[:12]).lstrip("/")[:253]
    told = EngineExit(
        engine=engine_id,
        where=f"container {name}",
        at=at,
        exit_code=code,
        signal=signal_of(code),
        oom_killed=oom if isinstance(oom, bool) else None,
        restarts=restarts if isinstance(restarts, int) else None,
        detail=str(state.get("Error") or "")[:300] or None,
    )
    return KeptExit(told)


def _read_docker(path: Path) -> Mapping[str, Any] | None:
    try:
        row = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def _inspect(tool: str, container: str) -> Mapping[str, Any] | None:
    try:
        rows = json.loads(ask_child([tool, "inspect", "--type", "container", container]))
    except (Failed, SourceUnavailable, ValueError):
        return None
    row = rows[0] if isinstance(rows, list) and rows else None
    return row if isinstance(row, dict) else None


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 20 else None
