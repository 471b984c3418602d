"""Where the configuration and the database are, for a service and for a person."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SYSTEM_CONFIG: Final = Path("/etc/oomwatch/config.toml")
SYSTEM_STORE: Final = Path("/var/lib/oomwatch/oomwatch.db")


def config_paths(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a configuration file is looked for; the first that exists is read.

    systemd names the directory of a unit's configuration in CONFIGURATION_DIRECTORY.
    """
    directory = first_directory(environ, "CONFIGURATION_DIRECTORY")
    if directory is not None:
        return (directory / "config.toml",)
    home = _base(environ, "XDG_CONFIG_HOME", ".config")
    return SYSTEM_CONFIG, *([home / "oomwatch" / "config.toml"] if home else [])


def default_store(environ: Mapping[str, str]) -> Path:
    """The database that the agent writes where the configuration names none.

    In a service the state directory that systemd made for it; the system's for root; else the
    person's own.
    """
    directory = first_directory(environ, "STATE_DIRECTORY")
    if directory is not None:
        return directory / "oomwatch.db"
    home = None if os.geteuid() == 0 else _base(environ, "XDG_STATE_HOME", ".local/state")
    return home / "oomwatch" / "oomwatch.db" if home else SYSTEM_STORE


def first_directory(environ: Mapping[str, str], name: str) -> Path | None:
    """The first directory of a variable of systemd, which separates several by colons."""
    directory = environ.get(name, "").split(":")[0]
    return Path(directory) if directory.startswith("/") else None


def _base(environ: Mapping[str, str], name: str, below_home: str) -> Path | None:
    """An XDG base directory; a relative one is to be ignored, says its specification."""
    given = environ.get(name, "")
    if given.startswith("/"):
        return Path(given)
    home = environ.get("HOME", "")
    return Path(home) / below_home if home.startswith("/") else None
