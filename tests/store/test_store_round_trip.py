"""What goes in comes out: samples, events, incidents, positions, on both databases."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

import pytest
from fresh_store import CLOCK, NOW

from oomwatch.records import (
    EngineSample,
    Evidence,
    GpuProcessSample,
    GpuSample,
    HostSample,
    KernelEvent,
    LogLine,
    ProcessSample,
    Series,
    StoredIncident,
    Trigger,
)
from oomwatch.store.batch import Recorder
from oomwatch.store.lanes import Batch, PendingEvent, Position
from oomwatch.store.queries import (
    get_incident,
    list_incidents,
    read_engines,
    read_events,
    read_last,
    read_positions,
    read_window,
)
from oomwatch.store.rows import scaled, to_json, to_ms

GIB = 1024**3
GPU = GpuSample(
    NOW + 0.123,
    3,
    "GPU-1",
    "H100",
    80 * GIB,
    70 * GIB,
    9 * GIB,
    GIB,
    0.975,
    64,
    612.5,
    75 * GIB,
    4 * GIB,
)
UNKNOWN_GPU = GpuSample(NOW, 4)
HOLDER = GpuProcessSample(NOW, 3, 4242, "VLLM::EngineCore", 60 * GIB, "compute", "MIG-1")
PROCESS = ProcessSample(
    NOW,
    4242,
    1,
    "python3",
    ("vllm", "serve", "a b"),
    5 * GIB,
    GIB,
    0,
    "/x",
    "vllm.service",
    "c0",
    "D",
)
HOST = HostSample(NOW, 512 * GIB, 100 * GIB, 7, 2)
ENGINE = EngineSample(
    NOW, "vllm-8000", 12, 3, 0, 0.875, 17, 1e6, 2e6, 100, 50, 40, 9000, 16, {"queue_time_sum": 0.5}
)


def test_samples_come_back_as_they_were(store):
    store.write(UNKNOWN_GPU, HOLDER, PROCESS, HOST, ENGINE, GPU)
    with store.read() as connection:
        series = read_window(connection, NOW - 1, NOW + 1)
    assert series == Series((UNKNOWN_GPU, GPU), (HOLDER,), (PROCESS,), (HOST,), (ENGINE,))


def test_no_secret_is_kept(store):
    process = dataclasses.replace(PROCESS, cmdline=("vllm", "serve", "m", "--api-key", "a1", "b2"))
    line = LogLine("server.log", 8, "non-default args: {'api_key': ['a1', 'b2'], 'port': 8}")
    store.write(process, events=[PendingEvent(line, "vllm-8000", CLOCK, to_ms(NOW))])
    with store.read() as connection:
        (kept,) = read_window(connection, NOW - 1, NOW + 1).processes
        ((_, event),) = read_events(connection, NOW - 1, NOW + 2)
    assert kept.cmdline == ("vllm", "serve", "m", "--api-key", "***")
    assert event.text == "non-default args: {'api_key': ['***'], 'port': 8}"


def test_writing_twice_is_writing_once(store):
    store.write(GPU, HOLDER, PROCESS, HOST, ENGINE)
    store.write(GPU, HOLDER, PROCESS, HOST, ENGINE, recorder=Recorder("host-a"))
    with store.read() as connection:
        series = read_window(connection, NOW - 1, NOW + 1)
    assert series == Series((GPU,), (HOLDER,), (PROCESS,), (HOST,), (ENGINE,))


def test_unknown_is_not_zero_and_nonsense_is_unknown(store):
    store.write(
        dataclasses.replace(HOST, mem_total_bytes=None, swap_used_bytes=0),
        dataclasses.replace(ENGINE, running=math.nan, kv_usage_ratio=math.inf, extra={}),
        dataclasses.replace(GPU, used_bytes=2**70, used_max_bytes=None),
    )
    with store.read() as connection:
        series = read_window(connection, NOW - 1, NOW + 1)
    assert (series.hosts[0].mem_total_bytes, series.hosts[0].swap_used_bytes) == (None, 0)
    assert (series.engines[0].running, series.engines[0].kv_usage_ratio) == (None, None)
    assert series.gpus[0].used_bytes is None


def test_a_maximum_below_the_sample_is_not_kept(store):
    store.write(dataclasses.replace(GPU, used_max_bytes=GIB, free_min_bytes=70 * GIB))
    with store.read() as connection:
        gpu = read_window(connection, NOW - 1, NOW + 1).gpus[0]
    assert (gpu.used_max_bytes, gpu.free_min_bytes) == (None, None)


@pytest.mark.parametrize("at", [math.nan, math.inf, -1.0, 1e30])
def test_a_time_that_is_none_is_refused(at):
    with pytest.raises(ValueError, match="not a time"):
        to_ms(at)


def test_scaled_numbers_keep_their_size():
    assert scaled(2**62) == 2**62
    assert scaled(0.1, 1_000_000) == 100_000
    assert scaled(True) is None
    assert scaled(-(2**63) - 1) is None
    assert scaled(10**400) is None
    assert scaled(1e305, 1_000_000) is None


def test_what_json_has_no_word_for():
    assert to_json({"a": [math.nan, 1.5], "b": MappingProxyType({"c": (1, True)})}) == (
        '{"a":[null,1.5],"b":{"c":[1,true]}}'
    )
    assert to_json(MappingProxyType({"a\0": 1 + 2j, "é": None})) == '{"a\\u0000":"(1+2j)","é":null}'


def test_unchanged_processes_are_kept_once_in_ten_seconds(sqlite_store):
    sqlite_store.write(*(dataclasses.replace(HOLDER, at=NOW + n) for n in range(25)))
    sqlite_store.write(
        *(dataclasses.replace(PROCESS, at=NOW + n, state="RS"[n % 2]) for n in range(25))
    )
    with sqlite_store.read() as connection:
        series = read_window(connection, NOW, NOW + 60)
    assert [sample.at - NOW for sample in series.gpu_processes] == [0, 10, 20]
    assert [sample.at - NOW for sample in series.processes] == [0, 10, 20]


def test_every_change_of_a_process_is_kept(sqlite_store):
    changes = [
        dataclasses.replace(PROCESS, at=NOW + n, rss_bytes=rss, state=state)
        for n, (rss, state) in enumerate([(1, "S"), (2, "S"), (2, "D"), (1, "D"), (1, None)])
    ]
    sqlite_store.write(*changes)
    with sqlite_store.read() as connection:
        assert read_window(connection, NOW, NOW + 60).processes == tuple(changes)


def test_a_process_that_is_another_has_its_own_row(sqlite_store):
    other = dataclasses.replace(PROCESS, at=NOW + 1, name="renamed", ppid=77)
    sqlite_store.write(PROCESS, other)
    with sqlite_store.read() as connection:
        assert read_window(connection, NOW, NOW + 1).processes == (PROCESS, other)


def test_further_numbers_of_an_engine_survive_being_kept_as_changes(sqlite_store):
    extras = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 3}, {"b": 4}, {}, {"c": 0.5}]
    samples = [
        dataclasses.replace(ENGINE, at=NOW + 20 * n, extra=extra)
        for n, extra in enumerate(extras * 2)
    ]
    sqlite_store.write(*samples)
    with sqlite_store.read() as connection:
        assert read_window(connection, NOW, NOW + 400).engines == tuple(samples)
        # A window that begins between two whole rows.
        assert read_window(connection, NOW + 130, NOW + 400).engines == tuple(samples[7:])


def test_the_newest_sample_of_each(sqlite_store):
    older = [
        dataclasses.replace(sample, at=NOW - 30) for sample in (GPU, HOLDER, PROCESS, HOST, ENGINE)
    ]
    sqlite_store.write(*older, GPU, UNKNOWN_GPU, HOST)
    with sqlite_store.read() as connection:
        last = read_last(connection, NOW + 1)
        assert last == Series((GPU, UNKNOWN_GPU), (older[1],), (older[2],), (HOST,), (older[4],))
        assert read_last(connection, NOW + 1000) == Series()


def test_hosts_are_kept_apart(store):
    other = Recorder("host-b")
    store.write(GPU, HOLDER, PROCESS, HOST, ENGINE)
    theirs = dataclasses.replace(GPU, used_bytes=1, used_max_bytes=None)
    store.write(theirs, dataclasses.replace(HOST, mem_total_bytes=1), recorder=other)
    with store.read() as connection:
        assert read_window(connection, NOW, NOW + 1, host="host-b").gpus == (theirs,)
        assert read_window(connection, NOW, NOW + 1, host="host-b").hosts[0].mem_total_bytes == 1
        assert read_window(connection, NOW, NOW + 1, host="host-a").gpus == (GPU,)
        assert len(read_window(connection, NOW, NOW + 1).gpus) == 2
        assert read_window(connection, NOW, NOW + 1, host="nobody") == Series()
        assert [(seen.host, seen.engine, seen.seen_at) for seen in read_engines(connection)] == [
            ("host-a", "vllm-8000", NOW)
        ]
        assert read_engines(connection, since=NOW + 1) == ()


LINE = LogLine(
    "server.log",
    7,
    "CUDA out of memory \x1b \udcff 世",
    NOW,
    "ERROR",
    "EngineCore",
    9,
    "TP0",
    "core.py:515",
    "stderr",
    True,
)
KILL = KernelEvent("oom_kill", "Killed process 9", 3, NOW + 1, 55.5, {"pid": 9, "comm": "vllm"})


def test_events_come_back_in_order_with_their_engine(store):
    unstamped = LogLine("server.log", 8, "next")
    events = [
        PendingEvent(KILL, None, CLOCK, 0),
        PendingEvent(LINE, "vllm-8000", CLOCK, 0),
        PendingEvent(unstamped, "vllm-8000", CLOCK, to_ms(NOW)),
    ]
    store.write(events=events)
    store.write(events=events)
    with store.read() as connection:
        found = list(read_events(connection, NOW - 1, NOW + 2))
        of_engine = list(read_events(connection, NOW - 1, NOW + 2, engine_id="vllm-8000"))
        assert list(read_events(connection, NOW - 1, NOW + 2, host="host-b")) == []
    assert found == [
        ("vllm-8000", dataclasses.replace(LINE, text="CUDA out of memory \x1b ? 世")),
        ("vllm-8000", dataclasses.replace(unstamped, at=NOW)),
        (None, KILL),
    ]
    assert [event.number for _engine, event in of_engine] == [7, 8]


def test_the_same_line_twice_in_a_log_is_two_rows(sqlite_store):
    lines = [LogLine("server.log", number, "OOM", NOW) for number in (1, 2)]
    sqlite_store.write(events=[PendingEvent(line, None, CLOCK, 0) for line in lines])
    assert sqlite_store.count("log_event") == 2


INCIDENT = StoredIncident(
    id="inc-1",
    fingerprint="vllm/kv_saturation",
    state="open",
    opened_at=NOW,
    engine_id="vllm-8000",
    host="host-a",
    diagnosis={"verdict": "oom", "incidents": [{"bytes": 2**40, "text": "世"}]},
    triggers=(
        Trigger(
            "kv_saturation",
            NOW,
            "vllm-8000",
            3,
            9,
            "full",
            {"usage": 0.99},
            (Evidence("metrics", "kv", NOW, None, 0.99, "ratio"),),
        ),
        Trigger("process_exit", NOW + 0.5),
    ),
    window_from=NOW - 600,
    window_to=NOW + 60,
)


def test_incidents_come_back_whole_and_are_replaced(store):
    store.write(incidents=[INCIDENT])
    with store.read() as connection:
        assert get_incident(connection, "inc-1") == INCIDENT
        assert get_incident(connection, "inc-2") is None
    closed = dataclasses.replace(
        INCIDENT,
        state="closed",
        closed_at=NOW + 99,
        triggers=INCIDENT.triggers[:1],
        window_to=NOW + 99,
    )
    store.write(incidents=[closed])
    with store.read() as connection:
        assert list_incidents(connection) == (closed,)


def test_an_incident_without_its_diagnosis_leaves_the_stored_one(store):
    store.write(incidents=[INCIDENT])
    store.write(incidents=[dataclasses.replace(INCIDENT, diagnosis=None, state="closed")])
    with store.read() as connection:
        stored = get_incident(connection, "inc-1")
    assert stored.diagnosis == INCIDENT.diagnosis
    assert stored.state == "closed"


def test_incidents_are_listed_newest_first_and_filtered(store):
    many = [
        dataclasses.replace(
            INCIDENT,
            id=f"inc-{n}",
            opened_at=NOW + n,
            state="closed" if n % 2 else "open",
            engine_id=f"engine-{n % 3}",
        )
        for n in range(10)
    ]
    store.write(incidents=many)
    with store.read() as connection:

        def ids(**filters):
            return [incident.id for incident in list_incidents(connection, **filters)]

        assert ids(limit=3) == ["inc-9", "inc-8", "inc-7"]
        assert ids(state="open", limit=2) == ["inc-8", "inc-6"]
        assert ids(engine_id="engine-0") == ["inc-9", "inc-6", "inc-3", "inc-0"]
        assert ids(since=NOW + 3, until=NOW + 5) == ["inc-5", "inc-4", "inc-3"]


def test_positions_are_the_last_that_were_written(store):
    for offset in (10, 20):
        with store.writer.begin():
            batch = Batch(positions=[Position("/var/log/a.log", {"inode": 5, "offset": offset}, 1)])
            store.recorder.write(store.writer, batch)
    with store.read() as connection:
        assert read_positions(connection, "host-a") == {
            "/var/log/a.log": {"inode": 5, "offset": 20}
        }
        assert read_positions(connection, "host-b") == {}


def test_names_of_a_gpu_are_filled_in_later(sqlite_store):
    bare = dataclasses.replace(GPU, name=None, total_bytes=None)
    sqlite_store.write(bare)
    sqlite_store.write(dataclasses.replace(GPU, at=NOW + 1))
    sqlite_store.write(dataclasses.replace(bare, at=NOW + 2))
    with sqlite_store.read() as connection:
        gpus = read_window(connection, NOW, NOW + 3).gpus
    assert {(gpu.name, gpu.total_bytes) for gpu in gpus} == {("H100", 80 * GIB)}
    assert sqlite_store.count("gpu") == 1
