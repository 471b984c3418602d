"""The store against its budgets: a day of samples and a month of tiers of one large host.

``python benchmarks/store.py`` builds the history (8 GPUs with 4 processes each, half of them
changing every second, two engines), then prints bytes for each GPU, the time that reading a window
of every length takes anywhere in it, that of a whole ``oomwatch diagnose --store``, and what a
second of writing costs. It fails where a budget is broken: 1 s for the diagnosis of any window,
50 MB for each GPU.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, insert

from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    ProcessSample,
)
from oomwatch.store import schema
from oomwatch.store.batch import Recorder
from oomwatch.store.clock import Clock
from oomwatch.store.database import open_reader, open_writer, raw_connection
from oomwatch.store.lanes import Batch
from oomwatch.store.location import parse_store
from oomwatch.store.queries import list_incidents, read_last, read_window
from oomwatch.store.retention import Retention, prune_by_age
from oomwatch.store.writer import StoreWriter

GPUS, PROCESSES, ENGINES = 8, 4, 2
DAY = 86_400
WINDOW_BUDGET_SECONDS = 1.0
GPU_BUDGET_BYTES = 50_000_000
GIB = 1024**3
SPANS = {"1 min": 60, "10 min": 600, "30 min": 1800, "2 h": 7200, "6 h": 6 * 3600,
         "24 h": 24 * 3600, "7 d": 7 * DAY, "30 d": 30 * DAY}  # fmt: skip


def samples(at: float, n: int) -> list[Any]:
    """What one second brings."""
    found: list[Any] = [HostSample(at, 512 * GIB, 300 * GIB - n * 4096, 0, 0)]
    for gpu in range(GPUS):
        used = 70 * GIB + (n * 37 + gpu) % GIB
        found.append(
            GpuSample(at, gpu, f"GPU-{gpu}", "H100", 80 * GIB, used, 79 * GIB - used, GIB,
                      (n % 100) / 100, 60 + n % 9, 400.0 + n % 200)
        )  # fmt: skip
        for process in range(PROCESSES):
            pid, change = 1000 + gpu * PROCESSES + process, n if process % 2 else 0
            found.append(GpuProcessSample(at, gpu, pid, "VLLM::Worker", 17 * GIB + change * 4096))
            found.append(
                ProcessSample(at, pid, 1, "VLLM::Worker", ("vllm", "serve"),
                              4 * GIB + change * 4096, GIB, 0, "/vllm.service", state="S")
            )  # fmt: skip
    found += [
        EngineSample(at, f"vllm-{engine}", n % 50, n % 7, 0, (n % 1000) / 1000, n // 9, n * 900,
                     n * 70, n * 3, n * 2, n // 2, 9000, 16, {"num_grammar_total": n // 60})
        for engine in range(ENGINES)
    ]  # fmt: skip
    return found


def build(connection: Connection, now: int) -> None:
    """A day of raw samples and a month of tiers; what is older than a minute is made by SQL."""
    recorder, clock = Recorder("bench"), Clock("boot", 0, (now - 30 * DAY) * 1000)
    with connection.begin():  # the dictionaries, and the newest minute as the agent writes it
        batch = Batch(
            samples=[(s, clock) for n in range(60) for s in samples(now - 60 + n, DAY + n)]
        )
        recorder.write(connection, batch)
    raw = raw_connection(connection)
    raw.execute("BEGIN IMMEDIATE")
    for table in schema.SAMPLES:
        _fill_raw(raw, table, now - 60)
        for step in table.tier_steps:
            days = {10: 3, 60: 30, 3600: 30}[step]
            _fill_tier(raw, table, step, now - days * DAY, now)
    raw.execute("COMMIT")
    with connection.begin():
        connection.execute(
            insert(schema.rollup_mark),
            [
                {"host_id": 1, "step": step, "until_ms": now // step * step * 1000}
                for step in schema.TIER_STEPS
            ],
        )
    sum(prune_by_age(connection, Retention(), now * 1000))


def _fill_raw(raw: Any, table: schema.SampleTable, until: int) -> None:
    """The day before, each row like one of the newest minute with other low bits."""
    names = [column.name for column in table.raw.columns]
    moved = [
        {"ts_ms": "ts_ms - (minute + 1) * 60000", "extra": "NULL"}.get(
            name, f"{name} + minute" if name.endswith("_bytes") else name
        )
        for name in names
    ]
    raw.execute(
        f"INSERT INTO {table.raw.name} WITH RECURSIVE minutes(minute) AS (SELECT 0 UNION ALL "  # noqa: S608 - names of the schema
        f"SELECT minute + 1 FROM minutes WHERE minute < 1439) SELECT {', '.join(moved)} "
        f"FROM minutes CROSS JOIN (SELECT * FROM {table.raw.name} WHERE ts_ms >= ?) "
        "ORDER BY 1, 2",
        (until * 1000,),
    )


def _fill_tier(raw: Any, table: schema.SampleTable, step: int, start: int, now: int) -> None:
    values = []
    for metric in table.metrics:
        for n, _column in enumerate(metric.tier_columns):
            moved = f" + bucket * 4096 + {n}" if metric.column.endswith("_bytes") else ""
            values.append(metric.column + moved)
    first = start // step * step
    raw.execute(
        f"INSERT INTO {table.tier.name} WITH RECURSIVE buckets(bucket) AS (SELECT 0 UNION ALL "  # noqa: S608 - as above
        "SELECT bucket + 1 FROM buckets WHERE bucket < ?) "
        f"SELECT {step}, (? + bucket * {step}) * 1000, {table.key}, {', '.join(values)} "
        f"FROM buckets CROSS JOIN (SELECT * FROM {table.raw.name} WHERE ts_ms >= ? "
        f"GROUP BY {table.key}) ORDER BY 2, 3",
        ((now - first) // step - 1, first, (now - 60) * 1000),
    )


def time_windows(url: Any, now: int) -> Iterator[tuple[str, int, float]]:
    """Name, rows and best of three of each window: the machine has other work."""
    for name, span in SPANS.items():
        for where, end in (("now", now), ("long ago", now - 30 * DAY + span)):
            yield (
                f"{name}, {where}",
                *_best(url, lambda c, e=end, s=span: read_window(c, e - s, e)),
            )
    yield ("last samples", *_best(url, lambda c: read_last(c, now)))
    yield ("incidents", *_best(url, list_incidents))


def time_diagnoses(url: Any, now: int) -> Iterator[tuple[str, float]]:
    """Name of each window, and the best of three of the command, from its start to its end."""
    words = [sys.executable, "-m", "oomwatch", "diagnose", "--json", "--store", url.database]
    for name, span in SPANS.items():
        for where, end in (("now", now), ("long ago", now - 30 * DAY + span)):
            window = ["--since", _iso(end - span), "--until", _iso(end)]
            took = []
            for _ in range(3):
                began = time.perf_counter()
                ran = subprocess.run([*words, *window], capture_output=True, check=False)
                took.append(time.perf_counter() - began)
                assert ran.returncode in {0, 1}, ran.stderr.decode()
            yield f"{name}, {where}", min(took)


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _best(url: Any, query: Any) -> tuple[int, float]:
    took, rows = [], 0
    for _ in range(3):
        with open_reader(url) as connection:
            began = time.perf_counter()
            found = query(connection)
            took.append(time.perf_counter() - began)
        if not isinstance(found, tuple):
            parts = (found.gpus, found.gpu_processes, found.processes, found.hosts, found.engines)
            rows = sum(map(len, parts))
    return rows, min(took)


def time_writing(folder: Path, seconds: int) -> None:
    """What the agent's every second costs, written by the thread, then read by nobody."""
    writer = StoreWriter(str(folder / "writing.db"), "bench", interval_seconds=3600)
    writer.start()
    start, commits = int(time.time()), []
    used = time.process_time()
    for n in range(seconds):
        writer.put(samples(start + n, n))
        began = time.perf_counter()
        assert writer.flush(60)
        commits.append(time.perf_counter() - began)
    used = time.process_time() - used
    made = time.process_time()
    for n in range(seconds):
        samples(start + n, n)
    made = time.process_time() - made
    writer.keep_house()
    began = time.process_time()
    assert writer.flush(60)
    while writer._chores is not None:  # noqa: SLF001 - only here
        time.sleep(0.01)
    chores = time.process_time() - began
    writer.stop(10)
    quantiles = statistics.quantiles(commits, n=100)
    print(f"one second written      {(used - made) / seconds * 1000:.2f} ms of CPU, "
          f"{quantiles[49] * 1000:.1f} ms p50, {quantiles[98] * 1000:.1f} ms p99")  # fmt: skip
    print(f"housekeeping            {chores * 1000:.0f} ms of CPU for {seconds} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", metavar="PATH", help="build there and keep the file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        url = parse_store(given.keep or str(folder / "oomwatch.db"))
        now = int(time.time()) // 60 * 60
        connection = open_writer(url)
        began = time.perf_counter()
        build(connection, now)
        print(f"history built in        {time.perf_counter() - began:.0f} s")
        connection.close()
        size = Path(url.database or "").stat().st_size
        print(
            f"size                    {size / 1e6:.0f} MB, {size / GPUS / 1e6:.1f} MB for each GPU"
        )
        slow = []
        for name, rows, seconds in time_windows(url, now):
            print(f"{name:<24}{seconds * 1000:7.0f} ms {rows:>9,} rows")
        for name, seconds in time_diagnoses(url, now):
            print(f"diagnose {name:<15}{seconds * 1000:7.0f} ms")
            if seconds > WINDOW_BUDGET_SECONDS:
                slow.append(name)
        time_writing(folder, 300)
        print(f"threads left            {threading.active_count() - 1}")
    if slow or size / GPUS > GPU_BUDGET_BYTES:
        raise SystemExit(f"over budget: {', '.join(slow) or 'size'}")


if __name__ == "__main__":
    main()
