"""Stores for tests, each with one incident as the agent writes it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from oomwatch.engines.secrets import hide_words
from oomwatch.records import (
    EngineExit,
    EngineSample,
    Gpu,
    GpuSample,
    HostSample,
    IncidentExcerpt,
    KernelEvent,
    LogLine,
    RecordedEngine,
    StoredIncident,
    Trigger,
)
from oomwatch.sources.kernel import parse_kernel_lines
from oomwatch.sources.logfile import read_log
from oomwatch.store.writer import StoreWriter
from oomwatch.units import GIB

SECRET = "sesame-4711"  # noqa: S105 - the one that is planted
PROMPT = "tell me about violet elephants"
COMMAND = (
    "vllm", "serve", "/home/rosalind/models/m", "--max-model-len", "8192", "--api-key", SECRET,
)  # fmt: skip


def stamp(at: float) -> str:
    """A time as vLLM logs it."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(at))


def started(at: float) -> str:
    """The beginning of a log, and a request."""
    when = stamp(at)
    return f"""\
(APIServer pid=41) INFO {when} [api_server.py:1] vLLM API server version 0.11.0
(APIServer pid=41) INFO {when} [utils.py:233] non-default args: {{'model': \
'/home/rosalind/models/m', 'max_model_len': 8192, 'api_key': ['{SECRET}']}}
(EngineCore_DP0 pid=42) INFO {when} [gpu_model_runner.py:2653] Model loading took 14.9 GiB and \
9.1 seconds
(EngineCore_DP0 pid=42) INFO {when} [kv_cache_utils.py:1087] GPU KV cache size: 16,384 tokens
(EngineCore_DP0 pid=42) INFO {when} [kv_cache_utils.py:1091] Maximum concurrency for 8,192 tokens \
per request: 2.00x
(APIServer pid=41) INFO:     Application startup complete.
(APIServer pid=41) INFO {when} [logger.py:41] Received request cmpl-1: prompt: '{PROMPT}', params: x
"""


def refused(at: float) -> str:
    """A prefill that found no memory."""
    head = f"(EngineCore_DP0 pid=42) ERROR {stamp(at)} [core.py:710]"
    return f"""\
{head} EngineCore encountered a fatal error.
{head} Traceback (most recent call last):
{head}   File "/v/vllm/v1/worker/gpu_model_runner.py", line 2100, in execute_model
{head}     hidden_states = self.model(
{head}   File "/v/vllm/model_executor/layers/activation.py", line 67, in forward_native
{head}     out = torch.empty(output_shape, dtype=x.dtype, device=x.device)
{head} torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total \
capacity of 23.65 GiB of which 1.10 GiB is free. Including non-PyTorch memory, this process has \
22.50 GiB memory in use. Of the allocated memory 21.80 GiB is allocated by PyTorch, and 120.00 MiB \
is reserved by PyTorch but unallocated.
"""


def lines_of(folder: Path, text: str) -> tuple[LogLine, ...]:
    path = folder / "written.log"
    path.write_text(text)
    return tuple(read_log(str(path)))


def a_store(
    folder: Path,
    at: float,
    *,
    log: str,
    samples: Callable[[float], list[object]] = lambda _at: [],
    kernel: tuple[KernelEvent, ...] = (),
    exits: tuple[EngineExit, ...] = (),
    ended: bool = False,
    kind: str = "log_failure",
) -> str:
    """A store with the incident ``inc-abc123`` of `at`; its path."""
    path = folder / "oomwatch.db"
    writer = StoreWriter(str(path), "gpu-box", interval_seconds=0.05)
    writer.start()
    for second in range(-600, 60):
        now = at + second
        used = 20 * GIB
        writer.put(
            [
                GpuSample(now, 0, "GPU-1", "NVIDIA A10", 24 * GIB, used, 4 * GIB - 2**28, 2**28),
                HostSample(now, 256 * GIB, 100 * GIB, 0, 0),
                *samples(now),
            ]
        )
    writer.put_events(kernel, "vllm-0")
    writer.save_incident(
        StoredIncident(
            id="inc-abc123",
            fingerprint="vllm-0/failure",
            state="open",
            opened_at=at,
            engine_id="vllm-0",
            host="gpu-box",
            triggers=(Trigger(kind, at, "vllm-0", text="it failed"),),
            window_from=at - 600,
            window_to=at + 60,
        )
    )
    engine = RecordedEngine(
        id="vllm-0",
        engine="vllm",
        version="0.11.0",
        command=hide_words(COMMAND),
        pids=(41, 42),
        gpus=(0,),
        started_at=at - 3600,
        ended=ended,
    )
    writer.save_excerpt(
        IncidentExcerpt(
            "inc-abc123",
            (engine,),
            exits,
            (Gpu(0, "GPU-1", "NVIDIA A10", 24 * GIB),),
            {"vllm-0": lines_of(folder, log)},
        )
    )
    assert writer.flush(30)
    assert writer.stop(30)
    return str(path)


def saturated(at: float) -> Callable[[float], list[object]]:
    """An engine whose pool is full and that preempts all the time."""

    def samples(now: float) -> list[object]:
        seconds = now - (at - 600)
        return [
            EngineSample(
                now,
                "vllm-0",
                running=2,
                waiting=30,
                kv_usage_ratio=0.995,
                preemptions_total=10 + 2 * seconds,
                prompt_tokens_total=500 * seconds,
                generation_tokens_total=30 * seconds,
                kv_blocks_total=1024,
                block_size_tokens=16,
            )
        ]

    return samples


def killed(at: float) -> tuple[KernelEvent, ...]:
    """The kernel's word on a kill for want of host memory."""
    when = time.strftime("%Y-%m-%dT%H:%M:%S,000000+00:00", time.gmtime(at))
    return tuple(
        parse_kernel_lines(
            enumerate(
                [
                    f"{when} oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,"
                    "mems_allowed=0,global_oom,task_memcg=/system.slice/vllm.service,task=python3,"
                    "pid=42,uid=0",
                    f"{when} Out of memory: Killed process 42 (python3) total-vm:90000000kB, "
                    "anon-rss:80000000kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:100kB "
                    "oom_score_adj:0",
                ],
                start=1,
            )
        )
    )
