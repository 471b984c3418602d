#!/usr/bin/env python3
"""Replay a day of an eight-GPU host through the agent's detector and store; does it grow?

The recording is made up: eight GPUs at 1 Hz, four processes on each every ten seconds, two engines
and the host at 1 Hz, with waves of load, a pool that fills now and then, and a log that fails every
few hours. After a warm-up the resident memory must grow by less than 1 MiB, no thread and no open
file must be left over, and the store must keep its size limit.

    python benchmarks/soak.py [--hours 24] [--store-limit 32MiB]
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from oomwatch.agent.allocator import give_memory_back
from oomwatch.agent.replay import Replay
from oomwatch.config import load_config
from oomwatch.records import Gpu, RecordedEngine, Series
from oomwatch.sources.recording import SCHEMA, Recording
from oomwatch.units import GIB, MIB, format_bytes, parse_size

BEGIN = 1_764_400_000.0
GPUS, PROCESSES = 8, 4
WARM_UP_HOURS = 4.0
"""By then the windows of the forecasts, the caches of the store and the beginnings of the logs
(3000 lines, a line each two seconds) are full, and a failure was explained once."""
LIMIT_BYTES = MIB
_FAILS_EVERY = 3 * 3600


def main() -> int:
    """Make the recording, replay it, print the figures; 1 if a limit was not held."""
    give_memory_back()  # as the agent does
    options = _options()
    with tempfile.TemporaryDirectory(prefix="oomwatch-soak-") as folder:
        began = time.monotonic()
        recording = make_recording(Path(folder) / "recording", options.hours)
        made = time.monotonic() - began
        print(
            f"recording: {options.hours:g} h, {_size(Path(folder)):,} bytes, made in {made:.0f} s"
        )
        return _replay(recording, Path(folder) / "store.db", options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--warm-up", type=float, default=WARM_UP_HOURS)
    parser.add_argument("--store-limit", default="32MiB")
    return parser.parse_args()


@dataclasses.dataclass
class Watch:
    """Looks at this process every half hour of the recording."""

    begin: float
    due: float = 0.0
    seen: list[tuple[float, int, int, int]] = dataclasses.field(default_factory=list)

    def step(self, at: float) -> None:
        """Look, if it is time."""
        if at < self.due:
            return
        self.due = at + 1800
        gc.collect()
        found = ((at - self.begin) / 3600, resident(), threading.active_count(), open_files())
        self.seen.append(found)
        if len(self.seen) % 4 == 1:
            print(
                f"  {found[0]:5.1f} h  {found[1] / MIB:7.2f} MiB  {found[2]} threads, "
                f"{found[3]} files",
                flush=True,
            )


def _replay(recording: Recording, store: Path, options: argparse.Namespace) -> int:
    logging.getLogger("oomwatch").addHandler(logging.NullHandler())
    limit = parse_size(options.store_limit)
    assert limit is not None
    config = load_config(
        str(_empty(store.parent)),
        overrides={"store.path": str(store), "store.max_size": options.store_limit},
    ).config
    watch, largest = Watch(BEGIN), 0
    incidents: set[str] = set()  # what they hold is the agent's to keep

    def step(at: float) -> None:
        nonlocal largest
        watch.step(at)
        largest = max(largest, store.stat().st_size if store.exists() else 0)

    threads, files = threading.active_count(), open_files()
    replay = Replay(
        recording,
        config,
        str(store),
        on_incident=lambda incident, _at: incidents.add(incident.id),
        on_step=step,
    )
    began, cpu = time.monotonic(), time.process_time()
    replay.run()
    took, used = time.monotonic() - began, time.process_time() - cpu
    warm = [size for hours, size, _, _ in watch.seen if hours >= options.warm_up]
    growth = warm[-1] - warm[0] if len(warm) > 1 else 0
    during = {(count, opened) for hours, _, count, opened in watch.seen if hours >= 1}
    left = (threading.active_count() - threads, open_files() - files)
    status = replay.writer.status
    print(
        f"replayed in {took:.0f} s ({options.hours * 3600 / took:.0f} times as fast), "
        f"CPU {used:.0f} s"
    )
    print(
        f"records written {status.written_total:,}, dropped {status.dropped_samples_total}, "
        f"incidents {len(incidents)}, diagnoses {replay.detector.explained_total}"
    )
    print(
        f"resident memory {warm[0] / MIB:.2f} MiB after {options.warm_up:g} h, "
        f"{warm[-1] / MIB:.2f} MiB at the end: {growth / MIB:+.2f} MiB (limit +1 MiB)"
    )
    print(f"threads and open files meanwhile {sorted(during)}, left over {left}")
    print(f"store at most {format_bytes(largest)}, limit {format_bytes(limit)}")
    failed = [
        name
        for name, bad in (
            ("memory", growth >= LIMIT_BYTES),
            ("threads or files", left != (0, 0)),
            ("store", largest > limit),
            ("dropped records", status.dropped_samples_total > 0),
            ("incidents", not incidents),
        )
        if bad
    ]
    print("ok" if not failed else f"NOT HELD: {', '.join(failed)}")
    return 1 if failed else 0


def _empty(folder: Path) -> Path:
    path = folder / "empty.toml"
    path.write_text("schema_version = 1\n")
    return path


def resident() -> int:
    """Bytes of this process in memory."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files() -> int:
    """Open descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


# ---------------------------------------------------------------- the recording
def make_recording(root: Path, hours: float) -> Recording:
    """Write the files of a recording, and describe it without reading its samples."""
    (root / "logs").mkdir(parents=True)
    seconds = int(hours * 3600)
    _write(root / "gpu.jsonl", _gpu_rows(seconds))
    _write(root / "gpu_process.jsonl", _holder_rows(seconds))
    _write(root / "host.jsonl", _host_rows(seconds))
    _write(root / "engine.jsonl", _engine_rows(seconds))
    engines = tuple(
        RecordedEngine(
            id=f"vllm-{n}",
            engine="vllm",
            version="0.11.0",
            command=("vllm", "serve", "/models/m"),
            pids=(100 + 10 * n, 101 + 10 * n),
            gpus=tuple(range(4 * n, 4 * n + 4)),
            metrics_url=f"http://127.0.0.1:{8000 + n}/metrics",
            started_at=BEGIN - 3600,
        )
        for n in range(2)
    )
    logs = {engine.id: str(root / "logs" / f"{engine.id}.log") for engine in engines}
    for engine in engines:
        Path(logs[engine.id]).write_text("".join(_log(seconds)), encoding="utf-8")
    return Recording(
        path=str(root),
        root=str(root),
        schema=SCHEMA,
        host="soak",
        started_at=BEGIN,
        ended_at=BEGIN + seconds,
        redacted=True,
        engines=engines,
        gpus=tuple(Gpu(n, f"GPU-{n}", "NVIDIA H100", 80 * GIB) for n in range(GPUS)),
        series=Series(),
        logs=logs,
        kernel_log=None,
        pages=(),
        problems=(),
    )


def _write(path: Path, rows: Iterator[dict[str, object]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _gpu_rows(seconds: int) -> Iterator[dict[str, object]]:
    for second in range(seconds):
        for gpu in range(GPUS):
            used = int(70 * GIB + 2 * GIB * math.sin(second / 300 + gpu)) // 4096 * 4096
            yield {
                "t": BEGIN + second,
                "gpu": gpu,
                "used_bytes": used,
                "free_bytes": 79 * GIB - used,
                "reserved_bytes": GIB,
                "utilization_ratio": 0.5,
            }


def _holder_rows(seconds: int) -> Iterator[dict[str, object]]:
    for second in range(0, seconds, 10):
        for gpu in range(GPUS):
            for n in range(PROCESSES):
                yield {
                    "t": BEGIN + second,
                    "gpu": gpu,
                    "pid": 1000 + 10 * gpu + n,
                    "name": "python",
                    "used_bytes": 17 * GIB + (second // 60 % 7) * MIB,
                }


def _host_rows(seconds: int) -> Iterator[dict[str, object]]:
    for second in range(seconds):
        free = int(200 * GIB + 10 * GIB * math.sin(second / 900))
        yield {"t": BEGIN + second, "mem_total_bytes": 512 * GIB, "mem_available_bytes": free}


def _engine_rows(seconds: int) -> Iterator[dict[str, object]]:
    preempted = 0
    for second in range(seconds):
        full = second % 7200 > 6900  # five minutes of every two hours
        preempted += 2 if full else 0
        for n in range(2):
            yield {
                "t": BEGIN + second,
                "engine": f"vllm-{n}",
                "running": 8,
                "waiting": 20 if full else 0,
                "kv_usage_ratio": 0.99 if full else 0.4 + 0.2 * math.sin(second / 200),
                "preemptions_total": preempted,
                "prompt_tokens_total": 900 * second,
                "generation_tokens_total": 300 * second,
                "kv_blocks_total": 10_000,
                "block_size_tokens": 16,
            }


def _log(seconds: int) -> Iterator[str]:
    def line(second: float, level: str, text: str) -> str:
        at = time.gmtime(BEGIN + second)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", at)
        return (
            f"{stamp} stdout F {level} {time.strftime('%m-%d %H:%M:%S', at)} [core.py:1] {text}\n"
        )

    yield line(-3600, "INFO", "vLLM API server version 0.11.0")
    yield line(-3590, "INFO", "GPU KV cache size: 160,000 tokens")
    for second in range(0, seconds, 2):
        yield line(second, "INFO", "Avg prompt throughput: 900.0 tokens/s, GPU KV cache usage: 40%")
        if second % _FAILS_EVERY == 3600:
            yield line(second, "ERROR", "Traceback (most recent call last):")
            yield line(
                second,
                "ERROR",
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has "
                "a total capacity of 79.20 GiB of which 640.00 MiB is free.",
            )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
