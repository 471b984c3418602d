"""Tiers: exact, counted once, counted again when rows come late."""

from __future__ import annotations

import tempfile

import pytest
from fresh_store import CLOCK, NOW, Store
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.records import EngineSample, GpuProcessSample, GpuSample, HostSample
from oomwatch.store import schema
from oomwatch.store.batch import Recorder
from oomwatch.store.clock import Clock
from oomwatch.store.queries import choose_step, read_window
from oomwatch.store.rollup import GRACE_MS, roll_up

START = NOW - NOW % 3600  # a whole hour


def count_up_to(store: Store, seconds: float) -> int:
    return sum(roll_up(store.writer, store.host_id(), round(seconds * 1000) + GRACE_MS))


def tier(store: Store, table: schema.SampleTable, step: int) -> list[dict]:
    query = table.tier.select().where(table.tier.c.step == step).order_by(*table.tier.primary_key)
    with store.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def test_each_bucket_has_min_mean_max_and_last(store):
    used = [10, 30, 20, 50, 40, 60]
    store.write(
        *(
            GpuSample(START + 2 * n, 0, used_bytes=value, free_bytes=100 - value)
            for n, value in enumerate(used)
        )
    )
    assert count_up_to(store, START + 20) == 2
    first, second = tier(store, schema.GPU, 10)
    assert [first[f"used_bytes_{kind}"] for kind in ("min", "mean", "max", "last")] == [
        10,
        30,
        50,
        40,
    ]
    assert [second[f"free_bytes_{kind}"] for kind in ("min", "mean", "max", "last")] == [40] * 4
    assert (first["ts_ms"], second["ts_ms"]) == (START * 1000, START * 1000 + 10_000)
    assert first["utilization_ppm_mean"] is None


def test_the_true_extremes_between_samples_are_kept(store):
    store.write(
        GpuSample(START, 0, used_bytes=50, free_bytes=50, used_max_bytes=95, free_min_bytes=5),
        GpuSample(START + 1, 0, used_bytes=60, free_bytes=40),
    )
    count_up_to(store, START + 10)
    (row,) = tier(store, schema.GPU, 10)
    assert (row["used_bytes_max"], row["free_bytes_min"]) == (95, 5)
    assert (row["used_bytes_mean"], row["free_bytes_mean"]) == (55, 45)


def test_the_last_value_of_a_counter_is_kept_even_if_it_is_unknown(store):
    totals = [5, 9, None]
    store.write(
        *(
            EngineSample(START + n, "e", preemptions_total=total, running=3)
            for n, total in enumerate(totals)
        )
    )
    count_up_to(store, START + 10)
    (row,) = tier(store, schema.ENGINE, 10)
    assert (row["preemptions_total_last"], row["running_last"]) == (None, 3)


def test_a_bucket_is_not_counted_before_it_is_over(store):
    store.write(HostSample(START + 61, 1))
    assert count_up_to(store, START + 69.9) == 0
    assert count_up_to(store, START + 70) == 1
    assert count_up_to(store, START + 70) == 0
    assert count_up_to(store, START + 120) == 1  # the minute
    assert count_up_to(store, START + 3600) == 1  # the hour
    assert [len(tier(store, schema.HOST, step)) for step in schema.TIER_STEPS] == [1, 1, 1]


def test_samples_that_come_late_are_counted(store):
    store.write(HostSample(START, mem_available_bytes=5), HostSample(START + 99))
    count_up_to(store, START + 100)
    store.write(HostSample(START + 2, mem_available_bytes=7), recorder=Recorder("host-a"))
    count_up_to(store, START + 100)
    row = tier(store, schema.HOST, 10)[0]
    assert (row["mem_available_bytes_max"], row["mem_available_bytes_last"]) == (7, 7)


def test_each_host_counts_its_own(store):
    other = Recorder("host-b")
    store.write(HostSample(START, 1), GpuSample(START, 0, used_bytes=1))
    store.write(HostSample(START, 2), GpuSample(START, 0, used_bytes=2), recorder=other)
    assert count_up_to(store, START + 10) == 2
    assert [row["used_bytes_last"] for row in tier(store, schema.GPU, 10)] == [1]


def test_rows_written_after_the_clock_was_set_back_are_counted(store):
    store.write(
        *(HostSample(START + n, mem_available_bytes=1) for n in range(0, 7200, 10)), clock=CLOCK
    )
    count_up_to(store, START + 7200)
    back = Clock("boot-a", CLOCK.offset_ms - 3_600_000, round((START + 3600) * 1000))
    store.write(HostSample(START + 3605, mem_available_bytes=9), clock=back)
    count_up_to(store, START + 3700)
    rows = {row["ts_ms"]: row for row in tier(store, schema.HOST, 10)}
    assert rows[round((START + 3600) * 1000)]["mem_available_bytes_last"] == 9
    assert len(rows) == 720


def test_a_long_gap_is_stepped_over(store):
    store.write(HostSample(START, 1))
    store.write(HostSample(START + 40 * 86400, 2))
    steps = list(roll_up(store.writer, store.host_id(), round((START + 40 * 86400 + 7200) * 1000)))
    assert sum(steps) == 6
    assert len(steps) == 6  # and not one for each empty hour


SAMPLES = st.lists(
    st.tuples(
        st.integers(0, 4 * 60_000),  # ms within four minutes
        st.one_of(st.none(), st.integers(0, 2**45)),
        st.integers(0, 2**40),  # how far above it went in between
    ),
    min_size=1,
    max_size=40,
    unique_by=lambda sample: sample[0],
)


@settings(max_examples=25, deadline=None)
@given(samples=SAMPLES, cut=st.integers(0, 40))
def test_tiers_agree_with_the_samples(samples, cut):
    """min ≤ mean ≤ max, last is last, whatever the samples and in whatever batches they come."""
    records = [
        GpuSample(
            START + ms / 1000,
            0,
            used_bytes=used,
            used_max_bytes=None if used is None else used + above,
        )
        for ms, used, above in samples
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"{folder}/oomwatch.db")
        store.write(*records[:cut])
        count_up_to(store, START + 120)
        store.write(*records[cut:])
        count_up_to(store, START + 300)
        found = {step: tier(store, schema.GPU, step) for step in (10, 60)}
        store.writer.close()
    for step, rows in found.items():
        expected: dict[int, list[tuple[int, int | None, int]]] = {}
        for sample in sorted(samples):
            bucket = (round(START * 1000) + sample[0]) // (step * 1000) * (step * 1000)
            expected.setdefault(bucket, []).append(sample)
        assert [row["ts_ms"] for row in rows] == sorted(expected)
        for row in rows:
            inside = expected[row["ts_ms"]]
            known = [used for _, used, _ in inside if used is not None]
            assert row["used_bytes_last"] == inside[-1][1]
            if not known:
                assert row["used_bytes_mean"] is None
                continue
            assert row["used_bytes_min"] == min(known)
            assert row["used_bytes_max"] == max(
                used + above for _, used, above in inside if used is not None
            )
            assert row["used_bytes_min"] <= row["used_bytes_mean"] <= row["used_bytes_max"]
            assert abs(row["used_bytes_mean"] - sum(known) / len(known)) <= 0.5 + 2**-5


# ---------------------------------------------------------------- long windows
@pytest.fixture
def day(sqlite_store):
    """Three hours at 5 s, counted."""
    for hour in range(3):
        sqlite_store.write(
            *(
                sample
                for n in range(hour * 3600, hour * 3600 + 3600, 5)
                for sample in (
                    GpuSample(START + n, 0, used_bytes=n, free_bytes=9, used_max_bytes=n + 3),
                    GpuProcessSample(START + n, 0, 77, used_bytes=n),
                    EngineSample(START + n, "e", preemptions_total=n, extra={"x": n}),
                )
            )
        )
    count_up_to(sqlite_store, START + 3 * 3600)
    return sqlite_store


def test_a_short_window_is_raw_and_a_long_one_is_not(day):
    with day.read() as connection:
        raw = read_window(connection, START + 60, START + 120)
        long = read_window(connection, START, START + 2 * 3600)
    assert [gpu.used_bytes for gpu in raw.gpus] == list(range(60, 121, 5))
    assert len(long.gpus) == 721  # and the sample at the very end
    assert long.gpus[0] == GpuSample(
        START + 9.999, 0, used_bytes=5, free_bytes=9, used_max_bytes=8, free_min_bytes=9
    )
    assert len(long.gpu_processes) == 121
    assert long.engines[0] == EngineSample(START + 9.999, "e", preemptions_total=5)


def test_processes_of_a_long_window_are_thinned_and_none_is_left_out(store):
    count, step = 24 * 60, 60
    store.write(
        *(
            GpuProcessSample(START + n * step, 0, pid, "w", used_bytes=n)
            for n in range(count)
            for pid in (7, *((8,) if n in (500, 501) else ()))
        )
    )
    count_up_to(store, START + count * step)
    with store.read() as connection:
        day = read_window(connection, START, START + count * step - 1).gpu_processes
    of = {pid: [sample.used_bytes for sample in day if sample.pid == pid] for pid in (7, 8)}
    assert of[7][-1] == count - 1
    assert count // 8 <= len(of[7]) <= count // 8 + 2  # what is not counted yet stands behind
    assert of[7] == sorted(of[7])
    assert of[8] == [501]


def test_a_long_window_ends_with_what_is_not_counted_yet(day):
    later = [GpuSample(START + 3 * 3600 + n, 0, used_bytes=1) for n in range(0, 25, 5)]
    day.write(*later)
    count_up_to(day, START + 3 * 3600 + 12)
    with day.read() as connection:
        gpus = read_window(connection, START, START + 4 * 3600).gpus
        hours = read_window(connection, START, START + 4 * 3600, step=3600).gpus
    at = [gpu.at for gpu in gpus]
    assert at == sorted(set(at))
    assert [round(moment - START - 3 * 3600, 3) for moment in at[-4:]] == [9.999, 10, 15, 20]
    # Three hours, then the finest tiers, then samples.
    assert [round(gpu.at - START) for gpu in hours][:3] == [3600, 7200, 10800]
    assert hours[-1] == later[-1]


def test_the_step_reaches_back_to_where_a_window_begins(day):
    ms = round(START * 1000)
    with day.writer.begin():
        assert choose_step(day.writer, ms, ms + 1000) == 0
        day.writer.execute(
            schema.retention_mark.insert(),
            [{"step": 0, "from_ms": ms + 7_200_000}, {"step": 10, "from_ms": ms + 3_600_000}],
        )
        assert choose_step(day.writer, ms + 7_200_000, ms + 7_201_000) == 0
        assert choose_step(day.writer, ms + 3_600_000, ms + 3_601_000) == 10
        assert choose_step(day.writer, ms, ms + 1000) == 60
        assert choose_step(day.writer, ms, ms + 50 * 3_600_000) == 3600
        day.writer.rollback()


def test_each_sample_has_further_numbers_of_its_own(day):
    with day.read() as connection:
        engines = read_window(connection, START, START + 20).engines
    assert [dict(engine.extra) for engine in engines] == [{"x": n} for n in range(0, 21, 5)]
