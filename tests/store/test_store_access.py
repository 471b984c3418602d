"""A store that belongs to somebody else."""

from __future__ import annotations

import contextlib
import grp
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh_store import Store

from oomwatch.store.database import open_reader, open_writer
from oomwatch.store.location import StoreError, parse_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="root may become another user")

NOBODY, GROUP = 65534, 1


@pytest.fixture
def path() -> Iterator[Path]:
    """A store of root's, of which a group may have a part, in a folder that all may enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place = Path(folder) / "oomwatch.db"
        made = Store(str(place))
        for name in Path(folder).iterdir():
            os.chown(name, 0, GROUP)
            name.chmod(0o640)
        yield place
        made.writer.close()


@contextlib.contextmanager
def as_nobody(*groups: int) -> Iterator[None]:
    """A user without rights, for a while."""
    before = os.getgroups()
    os.setgroups(groups)
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)
        os.setgroups(before)


def used(path: Path, how: Callable[..., Any], *groups: int) -> str:
    """What such a user is told."""
    with as_nobody(*groups):
        try:
            with how(parse_store(str(path))):
                return "used"
        except StoreError as error:
            return str(error)


def test_who_may_not_read_is_told_what_helps(path):
    group = grp.getgrgid(GROUP).gr_name
    assert used(path, open_reader) == (
        f"{path} may not be read by this user: run it with sudo, or as a member of group {group}"
    )
    assert used(path, open_reader, GROUP) == "used"
    for name in path.parent.iterdir():
        name.chmod(0o600)
    assert (
        used(path, open_reader, GROUP) == f"{path} may not be read by this user: run it with sudo"
    )


def test_who_may_not_write_is_told_what_helps(path):
    said = f"{path} may not be written by this user: run it with sudo"
    assert used(path, open_writer, GROUP) == said


def test_a_folder_that_may_not_be_entered_is_not_taken_for_an_empty_one(path):
    os.chown(path.parent, 0, GROUP)
    path.parent.chmod(0o750)
    group = grp.getgrgid(GROUP).gr_name
    assert used(path, open_reader) == (
        f"{path} may not be read by this user: run it with sudo, or as a member of group {group}"
    )
    assert used(path, open_reader, GROUP) == "used"
