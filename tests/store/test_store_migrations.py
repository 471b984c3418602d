"""Steps from one schema to the next, on both databases."""

from __future__ import annotations

import sqlite3

import pytest
from fresh_store import NOW, Store

from oomwatch.records import HostSample
from oomwatch.store.database import open_reader, open_writer
from oomwatch.store.location import StoreError, file_of, parse_store
from oomwatch.store.migrations import MIGRATIONS, Migration, back_up, migrate, version_of


def _add_table(connection):
    connection.exec_driver_sql("CREATE TABLE later (x INTEGER)")
    connection.exec_driver_sql("INSERT INTO later SELECT 1 FROM host_sample")


LAST = MIGRATIONS[-1].number
LATER = (*MIGRATIONS, Migration(LAST + 1, "a later table", _add_table))


def test_numbers_follow_each_other():
    assert [step.number for step in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


def test_a_new_store_has_every_step_with_its_record(store):
    with store.read() as connection:
        rows = connection.exec_driver_sql("SELECT number, name FROM migration").all()
    assert [tuple(row) for row in rows] == [(step.number, step.name) for step in MIGRATIONS]


def test_what_is_missing_is_applied_once_after_a_copy(store):
    store.write(HostSample(NOW))
    path = file_of(store.url)
    assert migrate(store.writer, LATER, path) == [LAST + 1]
    assert migrate(store.writer, LATER, path) == []
    with store.writer.begin():
        assert version_of(store.writer) == LAST + 1
        assert store.writer.exec_driver_sql("SELECT x FROM later").all() == [(1,)]
    if path is not None:
        copy = path.with_name(f"oomwatch.db.schema{LAST}")
        with open_reader(parse_store(str(copy))) as connection:
            assert connection.exec_driver_sql("SELECT count(*) FROM host_sample").scalar() == 1


def test_a_step_that_fails_leaves_nothing_behind(store):
    def fail(connection):
        _add_table(connection)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        migrate(
            store.writer, (*MIGRATIONS, Migration(LAST + 1, "broken", fail)), file_of(store.url)
        )
    with store.writer.begin():
        assert version_of(store.writer) == LAST
    assert migrate(store.writer, LATER, file_of(store.url)) == [LAST + 1]


def test_a_newer_schema_is_refused_in_one_line(store):
    migrate(store.writer, LATER, file_of(store.url))
    for opening in (open_writer, lambda url: open_reader(url).__enter__()):
        with pytest.raises(
            StoreError, match=f"schema {LAST + 1}, this oomwatch knows {LAST}"
        ) as caught:
            opening(store.url)
        assert "\n" not in str(caught.value)


def test_without_room_for_the_copy_nothing_changes(sqlite_store):
    path = file_of(sqlite_store.url)
    path.with_name(f"oomwatch.db.schema{LAST}").mkdir()  # the copy cannot take its name
    (path.with_name(f"oomwatch.db.schema{LAST}") / "x").touch()
    with pytest.raises(StoreError, match="could not be copied"):
        migrate(sqlite_store.writer, LATER, path)
    with sqlite_store.writer.begin():
        assert version_of(sqlite_store.writer) == LAST


def test_a_copy_is_one_sound_file(sqlite_store, tmp_path):
    sqlite_store.write(*(HostSample(NOW + n) for n in range(3000)))
    target = tmp_path / "copy.db"
    back_up(file_of(sqlite_store.url), target)
    assert not target.with_name("copy.db-wal").exists()
    copy = sqlite3.connect(target)
    assert copy.execute("PRAGMA quick_check").fetchone() == ("ok",)
    assert copy.execute("SELECT count(*) FROM host_sample").fetchone() == (3000,)
    copy.close()


def test_a_copy_of_nothing_says_so(tmp_path):
    with pytest.raises(StoreError, match="could not be copied"):
        back_up(tmp_path / "none.db", tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_agents_that_start_at_once_migrate_once(postgres_store):
    import threading

    made = []
    threads = [
        threading.Thread(target=lambda: made.append(Store(postgres_store))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert made[0].count("migration") == LAST
    for store in made:
        store.writer.close()
