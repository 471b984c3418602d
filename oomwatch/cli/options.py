"""What `diagnose` was asked for, and where it looks for that on this host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

Progress = Callable[[int, int | None], None]
"""Told of bytes read, and of how many there are where that is known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """Where this host's trees are.

    None: the usual folder, the running kernel's own log, the store that the configuration names.
    """

    proc_root: str = "/proc"
    docker_root: str = "/var/lib/docker"
    systemd_root: str = "/run/systemd/system"
    copies: str | None = None
    kernel_log: str | None = None
    store: str | None = None


@dataclasses.dataclass(slots=True)
class Options:
    """What was asked for, as the command line gives it."""

    logs: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    containers: tuple[str, ...] = ()
    pods: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    kernel_logs: tuple[str, ...] = ()
    recordings: tuple[str, ...] = ()
    command: str | None = None
    model_config: str | None = None
    engine: str | None = None
    engine_version: str | None = None
    pids: tuple[int, ...] = ()
    incidents: tuple[str, ...] = ()
    store: str | None = None
    since: float | None = None
    until: float | None = None
    live: bool = False
    full: bool = False
    progress: Progress | None = None
    waiting: Callable[[str], None] | None = None
    places: Places = dataclasses.field(default_factory=Places)

    @property
    def names_inputs(self) -> bool:
        """Whether any input was given."""
        return bool(
            self.logs
            or self.units
            or self.containers
            or self.pods
            or self.metrics
            or self.kernel_logs
            or self.recordings
            or self.incidents
            or self.store is not None
        )
