"""Which container runtimes can be asked here, and why a container is not known to them."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

RUNTIMES: Final = ("docker", "podman", "nerdctl")
"""Their commands, in the order in which they are asked."""
_NO_DAEMON: Final = "no daemon is running"
_NOT_THERE: Final = re.compile(r"(?i)no such (?:container|object)|not found|no container with")
"""How the commands say that they do not have a container."""


def note_silence(tool: str, said: str, denied: list[str], silent: dict[str, str]) -> None:
    """Note why a runtime's command gave no answer, unless it only does not have the container."""
    lower = said.lower()
    if "permission denied" in lower:
        denied.append(f"{tool} may not be asked ({said})")
    elif "daemon" in lower and "connect" in lower:
        silent[tool] = _NO_DAEMON
    elif not _NOT_THERE.search(said):
        silent[tool] = f"{tool} says: {said}"


def why_unknown(silent: Mapping[str, str], roots: Iterable[str]) -> str:
    """Whether no container can be known here at all, or only this one is not.

    `roots` are the folders in which the runtimes keep their files.
    """
    tools = [tool for tool in RUNTIMES if shutil.which(tool)]
    if not any(Path(root).exists() for root in roots):
        if not tools:
            return "no container runtime is seen on this host"
        if all(silent.get(tool) == _NO_DAEMON for tool in tools):
            return f"{_NO_DAEMON} ({', '.join(tools)})"
    said = (text for text in silent.values() if text != _NO_DAEMON)
    return next(said, "not in the files of Docker, Podman or nerdctl, nor known to their commands")
