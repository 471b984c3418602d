"""Whether this user may use the file of a store, before SQLite says only that it cannot."""

from __future__ import annotations

import grp
import os
import stat
from pathlib import Path


def forbidden(path: Path, *, write: bool) -> str | None:
    """What this user may not do, and what helps; None where no right is missing."""
    need = os.R_OK | (os.W_OK if write else 0)
    try:
        held_by = os.stat(path)  # noqa: PTH116 - as the others below, which take names
    except PermissionError:
        return _say(path, "read", _of_folder(path.parent), stat.S_IXGRP)
    except OSError:
        return None  # it is not there, or the disk is at fault
    beside = [f"{path}{suffix}" for suffix in ("", "-wal", "-shm")]
    if all(os.access(name, need) for name in beside if os.path.exists(name)):  # noqa: PTH110
        return None
    if write and os.statvfs(path).f_flag & os.ST_RDONLY:
        return None  # nobody may
    bit = stat.S_IRGRP | (stat.S_IWGRP if write else 0)
    return _say(path, "written" if write else "read", held_by, bit)


def _of_folder(folder: Path) -> os.stat_result | None:
    try:
        return folder.stat()
    except OSError:
        return None


def _say(path: Path, what: str, held_by: os.stat_result | None, bits: int) -> str:
    said = f"{path} may not be {what} by this user: run it with sudo"
    if held_by is None or held_by.st_mode & bits != bits or held_by.st_gid == 0:
        return said
    try:
        group = grp.getgrgid(held_by.st_gid).gr_name
    except KeyError:
        return said
    return f"{said}, or as a member of group {group}"
