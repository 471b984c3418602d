"""The writer thread: nothing that was committed is lost, whatever happens to the file."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_store import NOW
from test_store_outbox import ROW
from test_store_round_trip import INCIDENT, LINE

from oomwatch.records import GpuSample, HostSample, LogLine
from oomwatch.store import database
from oomwatch.store.clock import ClockWatch
from oomwatch.store.database import open_reader, read_quick_check
from oomwatch.store.location import StoreError, parse_store
from oomwatch.store.outbox import read_outbox
from oomwatch.store.queries import get_incident, read_events, read_positions, read_window
from oomwatch.store.retention import Retention
from oomwatch.store.writer import StoreStatus, StoreWriter


class Watched(StoreWriter):
    """A writer whose notices are kept, and that does not wait for its second."""

    def __init__(self, store: str, **options) -> None:
        self.seen: list[StoreStatus] = []
        super().__init__(
            store, "host-a", on_status=self.seen.append, interval_seconds=0.02, **options
        )

    def put_hosts(self, first: int, last: int) -> None:
        self.put(HostSample(NOW + n, mem_total_bytes=n) for n in range(first, last))

    def wait_for(self, condition, seconds: float = 30) -> None:
        until = time.monotonic() + seconds
        while not condition(self.status):
            assert time.monotonic() < until, self.status
            time.sleep(0.01)

    def notices(self) -> list[str]:
        return [status.notice for status in self.seen if status.notice]


@contextlib.contextmanager
def writing(store: str, **options) -> Iterator[Watched]:
    writer = Watched(store, **options)
    writer.start()
    try:
        yield writer
    finally:
        writer.stop(10)


def hosts_in(store: str) -> list[int | None]:
    with open_reader(parse_store(store)) as connection:
        assert read_quick_check(connection) == []
        return [s.mem_total_bytes for s in read_window(connection, 0, NOW * 2, step=0).hosts]


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "oomwatch.db")
    return request.getfixturevalue("postgres_store")


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "oomwatch.db"


# ---------------------------------------------------------------- when all is well
def test_everything_handed_over_is_there_after_a_flush(place):
    with writing(place) as writer:
        writer.put_hosts(0, 5000)
        writer.put_events([LINE], "vllm")
        writer.save_incident(INCIDENT)
        writer.save_position("a.log", {"offset": 5})
        assert writer.flush(30)
        assert hosts_in(place) == list(range(5000))
        with open_reader(parse_store(place)) as connection:
            assert len(list(read_events(connection, NOW - 1, NOW + 1))) == 1
            assert get_incident(connection, "inc-1") == INCIDENT
            assert read_positions(connection, "host-a") == {"a.log": {"offset": 5}}
        assert writer.status.written_total == 5003
        assert writer.status.commits_total >= 3
    assert (writer.seen[-1].mode, writer.seen[-1].pending) == ("stopped", 0)


def test_stopping_writes_what_waits(path):
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        assert writer.stop(10)
        assert not writer.flush(1)
        with pytest.raises(StoreError, match="closed"):
            writer.call(lambda connection: connection).result(1)
    assert [entry.name for entry in path.parent.iterdir()] == ["oomwatch.db"]
    assert hosts_in(str(path)) == list(range(10))


def test_many_threads_hand_over_at_once(path):
    with writing(str(path)) as writer:

        def put(thread: int) -> None:
            for n in range(200):
                writer.put([GpuSample(NOW + n, thread)])

        threads = [threading.Thread(target=put, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.flush(30)
        assert writer.status.written_total == 1200
    with open_reader(parse_store(str(path))) as connection:
        assert len(read_window(connection, 0, NOW * 2, step=0).gpus) == 1200


def test_a_start_that_cannot_be_is_an_error_at_once(tmp_path):
    with pytest.raises(StoreError, match="not a regular file"):
        StoreWriter("/dev/null", "host").start()
    with pytest.raises(StoreError, match="of another program"):
        StoreWriter(str(_database_of_another_program(tmp_path)), "host").start()


def _database_of_another_program(folder: Path) -> Path:
    path = folder / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE theirs (x)")
    return path


def test_work_runs_in_the_thread_and_its_error_is_the_callers(place):
    with writing(place) as writer:
        assert writer.call(lambda _: threading.current_thread().name).result(10) == "store-writer"

        def fail(_connection):
            raise KeyError("x")

        with pytest.raises(KeyError):
            writer.call(fail).result(10)
        with pytest.raises(StoreError, match="nonsense"):
            writer.call(lambda c: c.exec_driver_sql("SELECT nonsense")).result(10)
        writer.wait_for(lambda status: status.mode == "ok")
        writer.put_hosts(0, 1)
        assert writer.flush(30)


def test_housekeeping_runs_between_writes(path):
    with writing(str(path)) as writer:
        now = int(time.time())
        writer.put(HostSample(now - n * 10, mem_available_bytes=n) for n in range(1000, 0, -1))
        writer.keep_house()
        writer.wait_for(lambda status: status.commits_total > 0)

        def counted(connection):
            with connection.begin():
                return connection.exec_driver_sql("SELECT count(*) FROM host_tier").scalar_one()

        until = time.monotonic() + 30
        while (found := writer.call(counted).result(10)) < 1100:
            assert time.monotonic() < until, found
            time.sleep(0.05)


def test_one_record_that_cannot_be_stored_holds_up_no_other(path):
    with writing(str(path)) as writer:
        bad = [HostSample(float("nan")), HostSample(-5.0), GpuSample(NOW, 2**70)]
        writer.put([HostSample(NOW, 1), *bad, HostSample(NOW + 1, 2)])
        writer.save_incident(dataclasses.replace(INCIDENT, opened_at=float("inf")))
        writer.save_incident(dataclasses.replace(INCIDENT, id="good"))
        assert writer.flush(30)
        assert writer.status.rejected_total == 4
        assert writer.status.mode == "ok"
    assert hosts_in(str(path)) == [1, 2]


def test_the_clock_of_the_host_may_be_set_while_writing(path):
    wall = [int(NOW * 1000)]
    boot = [0]
    watch = ClockWatch(wall=lambda: wall[0], boot=lambda: boot[0], boot_id="b")
    with writing(str(path), clock=watch) as writer:
        for n in range(4000):
            if n == 2000:
                wall[0] -= 3_600_000
            wall[0], boot[0] = wall[0] + 1000, boot[0] + 1000
            writer.put([HostSample(wall[0] / 1000, mem_total_bytes=n)])
        assert writer.flush(30)
    database_file = sqlite3.connect(path)
    ordered = database_file.execute(
        "SELECT mem_total_bytes FROM host_sample s JOIN clock c ON c.id = s.clock_id "
        "ORDER BY s.ts_ms - c.offset_ms"
    ).fetchall()
    assert [value for (value,) in ordered] == list(range(4000))
    database_file.close()


# ---------------------------------------------------------------- crash
CRASHING = """
import sys, time
from oomwatch.records import HostSample, LogLine
from oomwatch.store.writer import StoreWriter
writer = StoreWriter(sys.argv[1], "host-a", interval_seconds=0.001)
writer.start()
first = int(sys.argv[2])
for n in range(first, first + 1_000_000):
    writer.put([HostSample(1e9 + n, mem_total_bytes=n)])
    writer.put_events([LogLine("a.log", n, f"line {n}", 1e9 + n)])
    writer.save_position("a.log", {"line": n})
    assert writer.flush(30)
    print(n, flush=True)
"""


def test_no_committed_row_is_lost_when_the_writer_is_killed(path):
    committed = -1
    for round_ in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", CRASHING, str(path), str(committed + 1)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        target = committed + 1 + 7 * round_
        for line in process.stdout:
            if int(line) >= target:
                break
        time.sleep(0.003 * round_)  # anywhere in a transaction
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        committed = max([target, *(int(number) for number in rest if number.isdigit())])
        with open_reader(parse_store(str(path))) as connection:
            assert read_quick_check(connection) == []
            rows = (
                connection.exec_driver_sql("SELECT mem_total_bytes FROM host_sample ORDER BY ts_ms")
                .scalars()
                .all()
            )
            lines = connection.exec_driver_sql("SELECT count(*) FROM log_event").scalar_one()
            position = read_positions(connection, "host-a")["a.log"]["line"]
        assert rows[: committed + 1] == list(range(committed + 1))
        assert lines == len(rows) == position + 1  # a transaction is there whole or not at all
        committed = len(rows) - 1


def test_a_call_made_while_another_one_runs_finds_what_was_handed_over_before_it(path):
    inner = []
    with writing(str(path)) as writer:

        def hand_over(_connection):
            writer.put_hosts(0, 10)
            inner.append(
                writer.call(
                    lambda connection: connection.exec_driver_sql(
                        "SELECT count(*) FROM host_sample"
                    ).scalar_one()
                )
            )

        writer.call(hand_over).result(30)
        assert inner[0].result(30) == 10


# ---------------------------------------------------------------- deleted, replaced, damaged
def test_a_deleted_file_is_written_anew_with_all_its_rows(path):
    with writing(str(path)) as writer:
        writer.put_hosts(0, 3000)
        assert writer.flush(30)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        writer.put_hosts(3000, 3100)
        assert writer.flush(30)
        assert writer.status.mode == "ok"
        assert ["was deleted: its rows were saved" in text for text in writer.notices()] == [True]
        assert hosts_in(str(path)) == list(range(3100))
    assert [entry.name for entry in path.parent.iterdir()] == ["oomwatch.db"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert hosts_in(str(path)) == list(range(3100))


def test_another_program_that_writes_and_leaves_takes_nothing_away(path):
    """It must see that this one has the file open, or it deletes the log as the last user."""
    program = (
        "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); "
        "c.execute('BEGIN IMMEDIATE'); c.execute('CREATE TABLE IF NOT EXISTS mine (n)'); "
        "c.execute('COMMIT'); c.close()"
    )
    with writing(str(path)) as writer:
        for n in range(5):  # each look at the file may take the locks away
            writer.put_hosts(n, n + 1)
            assert writer.flush(30)
            log = Path(f"{path}-wal").stat().st_ino
            subprocess.run([sys.executable, "-c", program, str(path)], check=True, timeout=60)
            assert Path(f"{path}-wal").stat().st_ino == log
        assert writer.notices() == []
    assert hosts_in(str(path)) == list(range(5))


def test_a_deleted_folder_is_made_again(path):
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        shutil.rmtree(path.parent)
        writer.put_hosts(10, 20)
        assert writer.flush(30)
    assert hosts_in(str(path)) == list(range(20))


def test_a_deleted_log_is_noticed(path):
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        Path(f"{path}-wal").unlink()
        writer.put_hosts(10, 20)
        assert writer.flush(30)
        assert hosts_in(str(path)) == list(range(20))


def test_another_file_in_its_place_is_used_from_then_on(path, tmp_path):
    other = tmp_path / "other.db"
    with writing(str(other)) as writer:
        writer.put_hosts(500, 510)
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        other.replace(path)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        writer.put_hosts(10, 20)
        assert writer.flush(30)
        assert "was replaced by another file" in writer.notices()[-1]
    assert hosts_in(str(path)) == [*range(10, 20), *range(500, 510)]


def test_a_file_that_is_damaged_at_the_start_is_put_aside(path):
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
    with path.open("r+b") as file:
        file.write(b"\0" * 200)
    with writing(str(path)) as writer:
        assert writer.seen[0].mode == "ok"
        assert "is damaged: it was put aside as oomwatch.db.broken-" in writer.notices()[0]
        writer.put_hosts(10, 20)
        assert writer.flush(30)
    assert hosts_in(str(path)) == list(range(10, 20))
    assert len(list(path.parent.glob("oomwatch.db.broken-*"))) == 1


def test_a_file_that_is_damaged_while_open_is_put_aside(path):
    with writing(str(path)) as writer:
        for n in range(0, 40_000, 2000):  # more than the page cache holds
            writer.put_hosts(n, n + 2000)
            assert writer.flush(60)
        writer.call(
            lambda c: (
                database.raw_connection(c).execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            )
        ).result(30)
        with path.open("r+b") as file:
            for page in range(1, path.stat().st_size // 4096):
                file.seek(page * 4096)
                file.write(b"\xff" * 4096)
        # Late samples go to the front of the tree, which is not in memory.
        writer.put(HostSample(NOW - 10 + n / 100, mem_total_bytes=n) for n in range(100))
        writer.wait_for(lambda _: any("is damaged" in text for text in writer.notices()), 60)
        assert writer.flush(60)
        assert writer.status.mode == "ok"
    assert hosts_in(str(path)) == list(range(100))
    assert len(list(path.parent.glob("oomwatch.db.broken-*[0-9Z]"))) == 1


# ---------------------------------------------------------------- full, read-only, locked, away
@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A disk of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if (
        os.geteuid() != 0
        or subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_samples_in_memory_until_there_is_room(small_disk):
    store = small_disk / "oomwatch.db"
    filler = small_disk / "filler"
    with writing(str(store)) as writer:
        writer.put_hosts(0, 100)
        assert writer.flush(30)
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        for n in range(100, 20_000, 100):
            writer.put_hosts(n, n + 100)
            if writer.status.mode == "memory_only":
                break
            writer.flush(30)
        writer.wait_for(lambda status: status.mode == "memory_only")
        assert "samples are kept in memory only" in writer.notices()[-1]
        assert not writer.flush(5)
        last = n + 100
        writer.put_hosts(last, last + 100)
        writer.save_incident(INCIDENT, [ROW])
        writer.save_outbox([dataclasses.replace(ROW, attempts=1)])
        filler.unlink()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
        assert "nothing was lost" in writer.notices()[-1]
        assert hosts_in(str(store)) == list(range(last + 100))
        with open_reader(parse_store(str(store))) as connection:
            assert get_incident(connection, "inc-1") == INCIDENT
            (row,) = read_outbox(connection)
        assert (row.id, row.attempts) == (ROW.id, 1)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_disk_that_is_full_at_the_start_is_no_reason_not_to_start(small_disk, is_new):
    store, filler = small_disk / "oomwatch.db", small_disk / "filler"
    if not is_new:
        with writing(str(store)) as writer:
            assert writer.flush(30)
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    with writing(str(store)) as writer:
        assert writer.status.mode == "memory_only"
        assert "cannot be" in writer.notices()[-1]
        writer.put_hosts(0, 10)
        writer.save_incident(INCIDENT, [ROW])
        filler.unlink()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(str(store)) == list(range(10))
    with open_reader(parse_store(str(store))) as connection:
        assert read_outbox(connection)[0].id == ROW.id


def test_a_disk_that_turns_read_only_is_survived(small_disk):
    store = small_disk / "oomwatch.db"
    with writing(str(store)) as writer:
        writer.put_hosts(0, 100)
        assert writer.flush(30)
        # The kernel makes no disk read-only that is written to; one is laid over it instead.
        cover = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(small_disk)]
        subprocess.run(cover, check=True)
        try:
            writer.put_hosts(100, 200)
            writer.wait_for(lambda status: status.mode == "memory_only")
            assert "Read-only file system" in writer.notices()[-1]
        finally:
            subprocess.run(["umount", str(small_disk)], check=True)
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
        assert hosts_in(str(store)) == list(range(200))


def test_a_lock_of_another_process_is_waited_out(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writer.put_hosts(10, 20)
        writer.wait_for(lambda status: status.mode == "memory_only")
        assert "locked" in writer.notices()[-1]
        other.execute("ROLLBACK")
        other.close()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(str(path)) == list(range(20))


def test_a_table_that_is_locked_on_a_server_is_waited_out(postgres_store, monkeypatch):
    import psycopg

    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    with writing(postgres_store) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        with psycopg.connect(postgres_store) as other:
            other.execute("LOCK TABLE host_sample IN ACCESS EXCLUSIVE MODE")
            writer.put_hosts(10, 20)
            writer.wait_for(lambda status: status.mode == "memory_only")
            assert "lock timeout" in writer.notices()[-1]
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(postgres_store) == list(range(20))


def test_a_lock_of_another_process_at_the_start_is_no_reason_not_to_start(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    with writing(str(path)) as writer:
        assert writer.flush(30)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with writing(str(path)) as writer:
        writer.put_hosts(0, 10)
        writer.wait_for(lambda status: status.mode == "memory_only")
        other.execute("ROLLBACK")
        other.close()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(str(path)) == list(range(10))


def test_nor_is_a_server_that_is_away(server_to_come):
    with writing(server_to_come.url) as writer:
        assert writer.status.mode == "memory_only"
        writer.put_hosts(0, 10)
        server_to_come.come()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(server_to_come.url) == list(range(10))


def test_overflow_drops_the_oldest_samples_first_and_never_an_incident(path, monkeypatch):
    monkeypatch.setattr(database, "BUSY_TIMEOUT_MS", 50)
    with writing(str(path), capacity=100) as writer:
        assert writer.flush(30)
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        writer.put_events([LogLine("a.log", n, "x", NOW + n) for n in range(60)])
        writer.put_hosts(0, 150)
        for n in range(200):
            writer.save_incident(dataclasses.replace(INCIDENT, id=f"inc-{n}"))
            writer.save_incident(dataclasses.replace(INCIDENT, id=f"inc-{n}", state="closed"))
        writer.put_events([LogLine("a.log", n, "x", NOW + n) for n in range(60, 70)])
        writer.save_position("a.log", {"line": 69})
        writer.wait_for(lambda status: status.mode == "memory_only")
        assert writer.status.dropped_samples_total == 120
        other.execute("ROLLBACK")
        other.close()
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
        assert "120 records were dropped" in writer.notices()[-1]
    assert hosts_in(str(path)) == list(range(120, 150))
    with open_reader(parse_store(str(path))) as connection:
        assert len(list(read_events(connection, NOW - 1, NOW + 99))) == 70
        closed = connection.exec_driver_sql("SELECT count(*) FROM incident WHERE state = 'closed'")
        assert closed.scalar_one() == 200


def test_a_server_that_ends_the_connection_is_called_again(postgres_store):
    with writing(postgres_store) as writer:
        writer.put_hosts(0, 10)
        assert writer.flush(30)
        import psycopg

        with psycopg.connect(postgres_store, autocommit=True) as admin:
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'oomwatch' AND datname = current_database()"
            )
        writer.put_hosts(10, 20)
        writer.wait_for(lambda status: status.mode == "memory_only" or status.written_total == 20)
        writer.wait_for(lambda status: status.mode == "ok" and not status.pending)
    assert hosts_in(postgres_store) == list(range(20))


def test_the_size_limit_is_never_exceeded(path):
    limit = 16 * 1024**2
    largest = 0
    with writing(str(path), retention=Retention(max_bytes=limit)) as writer:
        for chunk in range(120):
            writer.put(
                GpuSample(NOW + chunk * 500 + n, gpu, used_bytes=2**36 + n, free_bytes=2**33)
                for n in range(250)
                for gpu in range(8)
            )
            assert writer.flush(60)
            largest = max(largest, sum(p.stat().st_size for p in path.parent.iterdir()))
        assert writer.status.mode == "ok"
        assert writer.status.written_total == 240_000
    assert largest <= limit + 64 * 1024  # the shared memory of the log
    with open_reader(parse_store(str(path))) as connection:
        gpus = read_window(connection, NOW, NOW * 2, step=0).gpus
    assert gpus[-1].at == NOW + 119 * 500 + 249
    assert 100_000 < len(gpus) < 240_000


# ---------------------------------------------------------------- copies
def test_copies_made_while_it_runs_are_sound(path, tmp_path):
    from oomwatch.store.migrations import back_up

    with writing(str(path)) as writer:
        stop = threading.Event()

        def keep_writing() -> None:
            n = 0
            while not stop.wait(0.002):
                writer.put_hosts(n, n + 20)
                n += 20

        thread = threading.Thread(target=keep_writing)
        thread.start()
        try:
            for n in range(5):
                target = tmp_path / f"copy-{n}.db"
                writer.wait_for(lambda status, n=n: status.written_total > 100 * n)
                back_up(path, target)
                found = hosts_in(str(target))
                assert found == list(range(len(found)))
        finally:
            stop.set()
            thread.join()
        assert writer.status.mode == "ok"
