"""Steps where a file system refused what the server wanted to read or write."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import Final, NamedTuple

from oomwatch.remedies.context import Context, Draft

_MOVE: Final = "point HF_HOME (models) or XDG_CACHE_HOME (all caches) to {where}."
_CONTROL: Final = re.compile(r"[^\w.:+/@ ~-]")


class _Step(NamedTuple):
    title: str
    first: str
    where: str
    why: str


_STEPS: Final = {
    "full": _Step(
        "Free the disk, or move the cache to a larger one",
        "Free space where the server writes (df -h{place}; df -hi for inodes), or ",
        "a larger disk",
        "The file system is full, not the memory.",
    ),
    "quota": _Step(
        "Free space within the quota, or move the cache",
        "Delete files within the quota (quota -s; du -sh{place}), or ",
        "a disk without one",
        "The quota of the user or the project is used up, not the memory.",
    ),
    "read_only": _Step(
        "Give the server a directory that it can write",
        "Mount it writable (findmnt -T{place}; without :ro or readOnlyRootFilesystem), or ",
        "a volume that is writable",
        "The file system is mounted read-only; memory is not involved.",
    ),
    "denied": _Step(
        "Give the server's user access to the files",
        "Give the user that runs the server access (id; namei -l{place}), or ",
        "a directory of its own",
        "The file or its directory belongs to another user; memory is not involved.",
    ),
}


def writable_disk(context: Context) -> Draft | None:
    """Room and rights for what the server writes, where the file system refused."""
    step = _STEPS.get(str(context.finding.values.get("disk")))
    if step is None:
        return None
    path = _CONTROL.sub("", str(context.finding.values.get("path") or ""))
    if step is not _STEPS["denied"]:
        path = posixpath.dirname(path)
    place = f" {shlex.quote(path)}" if path else ""
    return Draft(
        id="writable-disk",
        title=step.title,
        why=step.why,
        cost="None.",
        action=step.first.format(place=place) + _MOVE.format(where=step.where),
    )
