"""Opening: where a store may be, what it is set to, what is refused, what is put aside."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_store import NOW, Store

from oomwatch.errors import NoInputError
from oomwatch.records import HostSample
from oomwatch.store.clock import Clock, ClockWatch, read_boot_id
from oomwatch.store.database import (
    BrokenStoreError,
    open_reader,
    open_writer,
    quarantine,
    raw_connection,
    read_quick_check,
)
from oomwatch.store.dictionary import read_last_clock
from oomwatch.store.location import StoreError, network_filesystem, parse_store
from oomwatch.store.migrations import MIGRATIONS
from oomwatch.store.queries import read_window
from oomwatch.store.schema import metadata

HOST = HostSample(NOW, 1, 2, 3, 4)


# ---------------------------------------------------------------- where
@pytest.mark.parametrize(
    ("text", "database"),
    [
        ("/a/b.db", "/a/b.db"),
        ("sqlite:////a/b.db", "/a/b.db"),
        ("sqlite:///b.db", str(Path.cwd() / "b.db")),
        ("b c.db", str(Path.cwd() / "b c.db")),
    ],
)
def test_files_are_named_by_path_or_url(text, database):
    url = parse_store(text)
    assert (url.get_backend_name(), url.database) == ("sqlite", database)


def test_servers_are_named_by_url():
    for scheme in ("postgresql", "postgres", "postgresql+psycopg"):
        url = parse_store(f"{scheme}://me:secret@db/oomwatch")
        assert (url.drivername, url.host) == ("postgresql+psycopg", "db")


@pytest.mark.parametrize(
    "text", ["mysql://x/y", "sqlite://", ":memory:", "", "://", "postgresql://h:x/y"]
)
def test_what_is_no_store_is_refused_in_one_line(text):
    with pytest.raises(StoreError) as caught:
        parse_store(text)
    assert "\n" not in str(caught.value)


MOUNTS = """\
22 1 0:21 / / rw - ext4 /dev/sda rw
98 22 0:44 / /mnt/share rw,relatime shared:1 - nfs4 server:/export rw
99 98 8:1 / /mnt/share/disk rw - xfs /dev/sdb rw
97 22 0:45 / /mnt/two\\040words rw - fuse.sshfs me@host: rw
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", None),
        ("/mnt/share/x", "nfs4"),
        ("/mnt/shared", None),
        ("/mnt/share/disk/x", None),
        ("/mnt/two words/x", "fuse.sshfs"),
    ],
)
def test_network_filesystems_are_known(tmp_path, path, kind):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert network_filesystem(Path(path), mounts) == kind


def test_without_mountinfo_no_filesystem_is_refused(tmp_path):
    assert network_filesystem(tmp_path, tmp_path / "none") is None


# ---------------------------------------------------------------- how
def test_a_new_file_is_set_up(tmp_path):
    path = tmp_path / "new" / "oomwatch.db"
    store = Store(str(path), max_bytes=32 * 1024**2)
    store.write(HOST)
    values = {
        name: raw_connection(store.writer).execute(f"PRAGMA {name}").fetchone()[0]
        for name in (
            "journal_mode",
            "synchronous",
            "auto_vacuum",
            "foreign_keys",
            "busy_timeout",
            "application_id",
            "user_version",
            "journal_size_limit",
            "max_page_count",
        )
    }
    assert values == {
        "journal_mode": "wal",
        "synchronous": 1,
        "auto_vacuum": 2,
        "foreign_keys": 1,
        "busy_timeout": 5000,
        "application_id": 0x6F6F6D77,
        "user_version": MIGRATIONS[-1].number,
        "journal_size_limit": 4 * 1024**2,
        "max_page_count": 24 * 1024**2 // 4096,
    }
    for suffix in ("", "-wal", "-shm"):
        assert stat.S_IMODE(Path(f"{path}{suffix}").stat().st_mode) & ~0o640 == 0
    store.writer.close()


def test_all_tables_are_strict_and_samples_have_no_rowid(sqlite_store):
    with sqlite_store.read() as connection:
        tables = {
            name: (without_rowid, strict)
            for name, without_rowid, strict in connection.exec_driver_sql(
                "SELECT name, wr, strict FROM pragma_table_list WHERE schema = 'main' "
                "AND name NOT LIKE 'sqlite_%'"
            )
        }
    assert all(strict for _, strict in tables.values())
    assert all(wr for name, (wr, _) in tables.items() if name.endswith(("_sample", "_tier")))
    assert tables.keys() == metadata.tables.keys()


def test_a_write_transaction_takes_the_lock_at_once(sqlite_store):
    with sqlite_store.writer.begin():
        other = sqlite3.connect(sqlite_store.url.database, timeout=0)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()


# ---------------------------------------------------------------- refused and put aside
def test_the_database_of_another_program_is_left_alone(tmp_path):
    path = tmp_path / "other.db"
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE t (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program"):
        open_writer(parse_store(str(path)))
    assert path.read_bytes() == before


def test_a_folder_or_device_is_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"cannot be created|not a regular file"):
        open_writer(parse_store(str(tmp_path)))
    with pytest.raises(StoreError, match="not a regular file"):
        open_writer(parse_store("/dev/null"))
    with pytest.raises(StoreError, match="cannot be created"):
        open_writer(parse_store("/dev/null/x.db"))


@pytest.mark.parametrize("damage", ["header", "middle", "cut"])
def test_a_damaged_file_is_seen(tmp_path, damage):
    path = tmp_path / "oomwatch.db"
    store = Store(str(path))
    store.write(*(HostSample(NOW + n, n, n, n, n) for n in range(5000)))
    store.writer.close()
    with path.open("r+b") as file:
        if damage == "header":
            file.write(b"not a database!!")
        elif damage == "middle":
            for page in range(1, path.stat().st_size // 4096):
                file.seek(page * 4096)
                file.write(b"\xff" * 64)
        else:
            file.truncate(path.stat().st_size // 2)
    with pytest.raises(BrokenStoreError) as caught:
        open_writer(parse_store(str(path)))
    assert "damaged" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_put_aside_do_not_pile_up(tmp_path):
    path = tmp_path / "oomwatch.db"
    for n in range(6):
        path.write_text(str(n))
        aside = quarantine(path)
        assert aside.read_text() == str(n)
        assert not path.exists()
    assert len(list(tmp_path.iterdir())) <= 4


# ---------------------------------------------------------------- readers
def test_a_reader_of_nothing_says_so(tmp_path):
    with (
        pytest.raises(NoInputError, match="no store there"),
        open_reader(parse_store(str(tmp_path / "none.db"))),
    ):
        pass
    empty = tmp_path / "empty.db"
    empty.touch()
    with (
        pytest.raises(StoreError, match="no oomwatch store yet"),
        open_reader(parse_store(str(empty))),
    ):
        pass
    text = tmp_path / "text.db"
    text.write_text("x" * 9000)
    with pytest.raises(BrokenStoreError), open_reader(parse_store(str(text))):
        pass


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_store(tmp_path, make):
    make(tmp_path / "store.db")
    with (
        pytest.raises(StoreError, match="not a regular file"),
        open_reader(parse_store(str(tmp_path / "store.db"))),
    ):
        pass


def test_a_reader_cannot_write(store):
    with (
        pytest.raises(StoreError, match=r"readonly|read-only"),
        open_reader(store.url) as connection,
    ):
        connection.exec_driver_sql("INSERT INTO meta VALUES ('a', 'b')")


def test_two_readers_beside_the_writer_each_see_one_moment(store):
    store.write(HOST)
    with store.read() as first:
        assert len(read_window(first, NOW, NOW + 9).hosts) == 1
        store.write(HostSample(NOW + 1, 1, 2, 3, 4))
        with store.read() as second:
            assert len(read_window(second, NOW, NOW + 9).hosts) == 2
            if first.dialect.name == "sqlite":
                assert len(read_window(first, NOW, NOW + 9).hosts) == 1


def test_a_copied_file_is_read_from_a_folder_that_may_not_be_written(sqlite_store, tmp_path):
    sqlite_store.write(HOST)
    sqlite_store.writer.close()  # the log goes into the file
    folder = tmp_path / "archive"
    folder.mkdir()
    copy = shutil.copy(sqlite_store.url.database, folder / "copy.db")
    read = (
        "import sys; from oomwatch.store.database import open_reader\n"
        "from oomwatch.store.location import parse_store\n"
        "with open_reader(parse_store(sys.argv[1])) as c:\n"
        "    print(c.exec_driver_sql('SELECT count(*) FROM host_sample').scalar_one())\n"
    )
    folder.chmod(0o555)
    try:
        done = subprocess.run(
            [*_unprivileged(), sys.executable, "-c", read, str(copy)],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        folder.chmod(0o755)
    if "Permission denied" in done.stderr and os.geteuid() == 0:
        pytest.skip("another user may not run this interpreter")
    assert (done.stdout.strip(), done.stderr) == ("1", "")
    assert [entry.name for entry in folder.iterdir()] == ["copy.db"]


def _unprivileged() -> list[str]:
    """Root may write everywhere; without its capabilities it may not."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv to give up root's powers")
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def test_a_quick_check_of_a_sound_file_finds_nothing(store):
    store.write(HOST)
    with store.read() as connection:
        assert read_quick_check(connection) == []


# ---------------------------------------------------------------- clocks
class SetClock:
    def __init__(self) -> None:
        self.wall, self.boot = 1_000_000, 500
        self.watch = ClockWatch(wall=lambda: self.wall, boot=lambda: self.boot, boot_id="b")

    def tick(self, ms: int, step: int = 0) -> Clock:
        self.wall, self.boot = self.wall + ms + step, self.boot + ms
        return self.watch.now()


def test_a_clock_goes_on_until_it_is_set():
    host = SetClock()
    first = host.tick(0)
    assert host.tick(10_000, step=300) is first
    second = host.tick(1000, step=-3_600_000)
    assert second.offset_ms == first.offset_ms + 300 - 3_600_000
    assert second.from_ms == host.wall
    back = host.tick(1000, step=3_600_000)
    assert back not in {first, second}


def test_a_clock_goes_on_after_a_restart_of_the_agent_and_not_of_the_host():
    last = Clock("b", 999_600, 5)
    kept = ClockWatch(last, wall=lambda: 1_000_000, boot=lambda: 500, boot_id="b")
    assert kept.now() is last
    other = ClockWatch(last, wall=lambda: 1_000_000, boot=lambda: 500, boot_id="c")
    assert other.now() == Clock("c", 999_500, 1_000_000)


def test_the_last_clock_is_read_back(store):
    with store.read() as connection:
        assert read_last_clock(connection, "host-a") is None
    clocks = [Clock("b", 1, 0), Clock("b", 2000, 10)]
    for clock in clocks:
        store.write(HOST, clock=clock)
    with store.read() as connection:
        assert read_last_clock(connection, "host-a") == clocks[1]
        assert read_last_clock(connection, "host-b") is None


def test_the_kernel_names_its_boot(tmp_path):
    assert len(read_boot_id()) == 36
    assert read_boot_id(tmp_path / "hidden") == ""


def test_after_the_clock_was_set_back_no_row_is_lost_and_the_newest_stand(sqlite_store):
    before, after = Clock("b", 1, 0), Clock("b", -3_600_000, 0)
    old = [HostSample(NOW + n, n) for n in range(0, 7200, 60)]
    new = [HostSample(NOW + 3600 + n, -1 - n) for n in range(0, 1200, 60)]
    sqlite_store.write(*old, clock=before)
    sqlite_store.write(*new, clock=after)
    assert sqlite_store.count("host_sample") == len(old) + len(new)
    with sqlite_store.read() as connection:
        window = read_window(connection, NOW, NOW + 7200, step=0).hosts
    overlapped = [sample for sample in old if not new[0].at <= sample.at <= new[-1].at]
    assert list(window) == sorted(overlapped + new, key=lambda sample: sample.at)
