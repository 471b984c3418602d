"""Where a store is, from what a person types: a path, ``sqlite:///…`` or ``postgresql://…``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from oomwatch.errors import OomwatchError

# SQLite's locks and its shared memory need one kernel to see all users of the file.
_NETWORK: Final = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.s3fs", "fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs",
    "nfs4", "ocfs2", "smb3", "smbfs", "virtiofs", "wekafs",
})  # fmt: skip
_POSTGRES: Final = {"postgresql", "postgres", "postgresql+psycopg"}
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


class StoreError(OomwatchError):
    """A store cannot be used; the message says why and what to do."""


def parse_store(text: str) -> URL:
    """The SQLAlchemy URL of a store.

    Raises:
        StoreError: it is neither a path nor a URL of SQLite or PostgreSQL.

    """
    if "://" not in text:
        return _sqlite(text)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError(
            "the store is neither a path nor a URL such as postgresql://HOST/NAME"
        ) from None
    if url.drivername in _POSTGRES:
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() == "sqlite":
        return _sqlite(url.database or "")
    raise StoreError(
        f"stores of kind {url.drivername!r} are not known; give a path or postgresql://HOST/NAME"
    )


def file_of(url: URL) -> Path | None:
    """The file of an SQLite store; None for a server."""
    return Path(url.database or "") if url.get_backend_name() == "sqlite" else None


def _sqlite(path: str) -> URL:
    if not path or path == ":memory:" or "\0" in path:
        raise StoreError("the store needs a file, for example ./oomwatch.db")
    return URL.create("sqlite", database=str(Path(path).expanduser().absolute()))


def network_filesystem(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str | None:
    """The type of the network filesystem that `path` is on; None if it is on none.

    ``98 27 0:44 / /mnt/share rw,relatime - nfs4 server:/export rw`` is a line of mountinfo.
    """
    try:
        lines = mountinfo.read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    target = os.path.realpath(path)
    best, kind = -1, ""
    for line in lines:
        mount, _, filesystem = line.partition(" - ")
        fields = mount.split(" ")
        if len(fields) < 5 or not filesystem:
            continue
        point = _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:  # of several mounts on one point the last one shows
            best, kind = len(point), filesystem.split(" ")[0]
    return kind if kind in _NETWORK else None
