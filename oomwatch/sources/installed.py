"""Which version of a package a running process uses.

Told by the files that it runs; nothing of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from oomwatch.sources.procfs import PROC_ROOT, ProcessInfo

_SITE: Final = re.compile(r"(/\S*?/(?:site|dist)-packages)/")
_MAPS_BYTES: Final = 4 << 20
_VERSION: Final = re.compile(r"\d+(?:\.\w+)*(?:[-+.]\w+)*")


def installed_version(
    processes: Sequence[ProcessInfo], package: str, *, proc_root: str = PROC_ROOT
) -> str | None:
    """The version of `package` in the environment of the first process that shows one.

    Looked up beside the script that was started, else beside the libraries that are mapped (which
    only the owner and root may see). Local parts (``+cu128``) are kept.
    """
    for process in processes:
        root = f"{proc_root}/{process.pid}/root"
        for folder in (*_beside_script(process, root), *_mapped(process.pid, proc_root)):
            # Seen from inside the process's own mounts first, which may be a container's.
            for base in (Path(root + folder), Path(folder)):
                version = _version_in(base, package)
                if version is not None:
                    return version
    return None


def _beside_script(process: ProcessInfo, root: str) -> list[str]:
    """``/opt/venv/bin/vllm`` and ``/opt/venv/bin/python`` have their packages in ../lib."""
    found = []
    for word in (process.cmdline or ())[:2]:
        folder, slash, _ = word.rpartition("/bin/")
        if slash and folder.startswith("/"):
            for base in (Path(root + folder), Path(folder)):
                try:
                    libraries = sorted(base.glob("lib/python3*/*-packages"))
                except OSError:  # of another user
                    continue
                found += [f"{folder}/{library.relative_to(base)}" for library in libraries]
    return found


def _mapped(pid: int, proc_root: str) -> list[str]:
    try:
        with open(f"{proc_root}/{pid}/maps", "rb") as maps:  # noqa: PTH123 - of every process
            text = maps.read(_MAPS_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return list(dict.fromkeys(match[1] for match in _SITE.finditer(text)))


def _version_in(folder: Path, package: str) -> str | None:
    try:
        names = sorted(entry.name for entry in folder.glob(f"{package}-*.dist-info"))
    except OSError:
        return None
    for name in names:
        version = name.removeprefix(f"{package}-").removesuffix(".dist-info")
        if _VERSION.fullmatch(version):
            return version
    return None
