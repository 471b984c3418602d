"""What is forgotten when, and what is not."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
from fresh_store import CLOCK, NOW, Store
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from test_store_round_trip import INCIDENT, LINE

from oomwatch.records import GpuSample, HostSample, ProcessSample
from oomwatch.store.chores import chores, make_room
from oomwatch.store.clock import Clock
from oomwatch.store.database import data_limit
from oomwatch.store.lanes import PendingEvent
from oomwatch.store.queries import choose_step, get_incident, read_window
from oomwatch.store.retention import Retention, prune_by_age, prune_by_size, size_of, vacuum
from oomwatch.store.rollup import roll_up
from oomwatch.store.schema import GPU

START = NOW - NOW % 3600
HOUR = 3600


def ms(seconds: float) -> int:
    return round(seconds * 1000)


def fill(store: Store, hours: int, every: int = 60) -> None:
    for hour in range(hours):
        store.write(
            *(HostSample(START + hour * HOUR + n, n) for n in range(0, HOUR, every)),
            events=[
                PendingEvent(dataclasses.replace(LINE, at=START + hour * HOUR), None, CLOCK, 0)
            ],
        )


def times(store: Store) -> list[float]:
    with store.read() as connection:
        return [sample.at - START for sample in read_window(connection, 0, START * 2, step=0).hosts]


def test_each_step_has_an_age_of_its_own(store):
    fill(store, 10)
    now = ms(START + 10 * HOUR + 60)
    sum(roll_up(store.writer, store.host_id(), now))
    keep = Retention(
        raw_seconds=HOUR,
        tier_seconds={10: 2 * HOUR, 60: 4 * HOUR, 3600: 100 * HOUR},
        log_seconds=5 * HOUR,
    )
    list(prune_by_age(store.writer, keep, now))
    assert times(store)[0] == 9 * HOUR
    assert store.count("host_sample") == 60
    with store.read() as connection:
        steps = dict(
            connection.exec_driver_sql("SELECT step, count(*) FROM host_tier GROUP BY step").all()
        )
        assert choose_step(connection, now - ms(HOUR / 6), now) == 0
        assert choose_step(connection, now - ms(1.5 * HOUR), now - ms(1.4 * HOUR)) == 10
        assert choose_step(connection, now - ms(3 * HOUR), now - ms(2.9 * HOUR)) == 60
        assert choose_step(connection, ms(START), ms(START + 60)) == 3600
    assert steps == {10: 119, 60: 239, 3600: 10}
    assert store.count("log_event") == 4


def test_samples_are_not_pruned_before_they_are_counted(store):
    fill(store, 3)
    sum(roll_up(store.writer, store.host_id(), ms(START + 2 * HOUR + 60)))
    list(prune_by_age(store.writer, Retention(raw_seconds=0), ms(START + 99 * HOUR)))
    assert times(store)[0] == 2 * HOUR


def test_windows_of_incidents_outlive_pruning(store):
    fill(store, 5)
    pinned = dataclasses.replace(
        INCIDENT, opened_at=START + HOUR, window_from=START + HOUR, window_to=START + HOUR + 600
    )
    overlapping = dataclasses.replace(
        pinned, id="inc-2", window_from=START + HOUR + 300, window_to=START + HOUR + 900
    )
    store.write(incidents=[pinned, overlapping])
    now = START + 20 * HOUR
    sum(roll_up(store.writer, store.host_id(), ms(now)))
    list(prune_by_age(store.writer, Retention(raw_seconds=0, log_seconds=0), ms(now)))
    assert times(store) == list(range(HOUR, HOUR + 901, 60))
    assert store.count("log_event") == 1
    with store.read() as connection:
        assert choose_step(connection, ms(START + HOUR), ms(START + HOUR + 600)) == 0
        assert choose_step(connection, ms(START + HOUR), ms(START + HOUR + 1000)) != 0


def test_old_closed_incidents_go_and_open_ones_stay(store):
    closed = dataclasses.replace(INCIDENT, state="closed", closed_at=NOW + 1)
    store.write(incidents=[closed, dataclasses.replace(INCIDENT, id="inc-2")])
    list(prune_by_age(store.writer, Retention(incident_seconds=60), ms(NOW + HOUR)))
    with store.read() as connection:
        assert get_incident(connection, "inc-1") is None
        assert get_incident(connection, "inc-2") is not None
    assert store.count("incident_trigger") == len(INCIDENT.triggers)
    assert store.count("pinned_window") == 1


def test_names_of_processes_go_with_their_samples(store):
    store.write(
        *(ProcessSample(START + n * HOUR, 100 + n, rss_bytes=1) for n in range(10)),
        GpuSample(START, 0),
    )
    now = START + 12 * HOUR
    sum(roll_up(store.writer, store.host_id(), ms(now)))
    keep = Retention(raw_seconds=5 * HOUR, tier_seconds=dict.fromkeys((10, 60, 3600), 5 * HOUR))
    list(prune_by_age(store.writer, keep, ms(now)))
    assert store.count("process") == 3
    assert store.count("process_sample") == 3
    assert store.count("gpu") == 1


def test_a_clock_that_was_just_set_empties_nothing(store):
    fill(store, 2)
    later = START + 400 * 24 * HOUR
    store.write(HostSample(later), clock=Clock("boot-a", 5, ms(later)))
    host_id = store.host_id()
    assert list(prune_by_age(store.writer, Retention(), ms(later + 60), host_id)) == []
    assert len(times(store)) == 121
    assert sum(prune_by_age(store.writer, Retention(), ms(later + 2 * HOUR), host_id)) > 100


def test_a_clock_set_back_makes_the_store_complete_again_from_there(store):
    future = START + 1000 * 24 * HOUR
    store.write(HostSample(future), clock=Clock("boot-a", 5, ms(future)))
    sum(roll_up(store.writer, store.host_id(), ms(future + 2 * HOUR)))
    list(prune_by_age(store.writer, Retention(), ms(future + 99 * 24 * HOUR)))
    store.write(HostSample(START, 7), clock=Clock("boot-a", 0, ms(START)))
    assert sum(roll_up(store.writer, store.host_id(), ms(START + 60))) == 1
    with store.read() as connection:
        assert choose_step(connection, ms(START), ms(START + 60)) == 0


# ---------------------------------------------------------------- size
LIMIT = 16 * 1024**2


def size(store: Store) -> tuple[int, int]:
    found = size_of(store.writer)
    assert found is not None
    return found


def _write_hours(store: Store) -> None:
    for chunk in range(100):
        store.write(
            *(
                GpuSample(START + chunk * 720 + n / 2, gpu, used_bytes=2**36 + n, free_bytes=n)
                for n in range(500)
                for gpu in range(8)
            )
        )


@pytest.fixture(scope="module")
def full_file(tmp_path_factory):
    """Hours of samples, written until SQLite says that the file is full."""
    store = Store(str(tmp_path_factory.mktemp("full") / "oomwatch.db"), max_bytes=LIMIT)
    store.write(incidents=[dataclasses.replace(INCIDENT, window_from=START, window_to=START + 60)])
    with pytest.raises(OperationalError, match="full"):
        _write_hours(store)
    store.writer.close()
    return store.url.database


@pytest.fixture
def full(full_file, tmp_path):
    path = shutil.copy(full_file, tmp_path / "oomwatch.db")
    store = Store(str(path), max_bytes=LIMIT)
    yield store
    store.writer.close()


def test_a_full_store_makes_room_and_goes_on(full):
    assert size(full)[0] <= data_limit(LIMIT)
    with full.read() as connection:
        last = connection.scalar(select(func.max(GPU.raw.c.ts_ms)))
    assert make_room(full.writer, LIMIT, last)
    assert size(full)[1] < data_limit(LIMIT) * 0.86
    full.write(*(GpuSample(last / 1000 + n, 0) for n in range(1, 1000)))
    with full.read() as connection:
        kept = read_window(connection, START, START + 60, step=0)  # the pinned window
        assert len(kept.gpus) == 121 * 8
        unpinned = GPU.raw.c.ts_ms > ms(START + 60)
        first = connection.scalar(select(func.min(GPU.raw.c.ts_ms)).where(unpinned))
        assert first > ms(START + 180)
        assert get_incident(connection, "inc-1") is not None


def test_with_room_nothing_is_pruned_by_size(sqlite_store):
    fill(sqlite_store, 2)
    assert list(prune_by_size(sqlite_store.writer, LIMIT, ms(START + 99 * HOUR))) == []
    assert not make_room(sqlite_store.writer, LIMIT, ms(START + 99 * HOUR))


def test_even_pinned_windows_go_before_the_limit_is_broken(full):
    closed = dataclasses.replace(
        INCIDENT, state="closed", closed_at=NOW, window_from=0, window_to=START + 99 * HOUR
    )
    with full.writer.begin():
        full.writer.exec_driver_sql("PRAGMA max_page_count = 100000")
    full.write(incidents=[closed])
    now = ms(START + 99 * HOUR)
    assert sum(prune_by_size(full.writer, LIMIT, now)) > 0
    assert size(full)[1] < data_limit(LIMIT) * 0.86
    with full.read() as connection:
        assert get_incident(connection, "inc-1") is not None
    assert full.count("pinned_window") == 0


def test_free_pages_go_back_to_the_filesystem_in_steps(full):
    path = Path(full.url.database)
    before = size(full)[0]
    list(prune_by_size(full.writer, LIMIT, ms(START + 99 * HOUR)))
    assert size(full)[0] == before
    steps = list(vacuum(full.writer))
    assert len(steps) >= 1
    assert size(full)[0] < before - 256 * 4096
    full.writer.close()
    assert path.stat().st_size < before - 256 * 4096


def test_all_chores_in_one_go(store):
    fill(store, 4, every=300)
    now, keep = ms(START + 4 * HOUR), Retention(raw_seconds=2 * HOUR)
    assert sum(chores(store.writer, store.host_id(), keep, now)) > 0
    assert times(store)[0] == 2 * HOUR
    assert sum(chores(store.writer, store.host_id(), keep, now)) == 0


def test_of_a_fleet_one_agent_prunes_at_a_time(postgres_store):
    first, second = Store(postgres_store), Store(postgres_store)
    fill(first, 3, every=600)
    now, keep = ms(START + 9 * HOUR), Retention(raw_seconds=HOUR)
    sum(roll_up(first.writer, first.host_id(), now))
    busy = chores(first.writer, None, keep, now)
    assert next(busy) > 0
    assert list(chores(second.writer, None, keep, now)) == []
    busy.close()
    assert sum(chores(second.writer, None, keep, now)) > 0
    assert first.count("host_sample") == 0
    for store in (first, second):
        store.writer.close()
