"""Snapshots of hosts of any size, for tests and for the benchmark."""

from __future__ import annotations

from oomwatch.export.snapshot import (
    AgentFigures,
    EngineFigures,
    ForecastFigures,
    GpuFigures,
    HolderFigures,
    IncidentFigures,
    PoolFigures,
    ReceiverFigures,
    Snapshot,
)
from oomwatch.records import EngineSample, GpuSample

AT = 1_800_000_000.5
GIB = 1 << 30


def gpu(index: int = 0, **more) -> GpuFigures:
    sample = GpuSample(
        at=AT,
        gpu=index,
        uuid=f"GPU-{index}",
        name="NVIDIA H100",
        total_bytes=80 * GIB,
        used_bytes=70 * GIB,
        free_bytes=9 * GIB,
        reserved_bytes=GIB,
        utilization_ratio=0.6,
    )
    return GpuFigures(sample, pci=f"0000:{index:02x}:00.0", unattributed_bytes=GIB, **more)


def engine(number: int = 0, **more) -> EngineFigures:
    name = f"vllm-{8000 + number}"
    sample = EngineSample(
        at=AT,
        engine=name,
        running=3.0,
        waiting=1.0,
        kv_usage_ratio=0.5,
        preemptions_total=7.0,
        kv_blocks_total=129.0,
        block_size_tokens=16.0,
    )
    given = {
        "id": name,
        "state": "serving",
        "kind": "vllm",
        "version": "0.11.0",
        "model": "Qwen/Qwen3-8B",
        "unit": f"{name}.service",
        "started_at": AT - 100,
        "scraped": True,
        "answer_seconds": 0.01,
        "pools": (PoolFigures("0", sample, preemptions_per_minute=2.5),),
        "components": {"weights": 15 * GIB, "kv": 40 * GIB},
    }
    return EngineFigures(**given | more)


def incident(number: int = 0, **more) -> IncidentFigures:
    given = {
        "id": f"inc-{number:012x}",
        "kind": "failure",
        "severity": "critical",
        "opened_at": AT - 10,
        "cls": "startup",
        "cause": "kv_lt_max_len",
        "engine_id": "vllm-8000",
        "summary": "One request does not fit.",
    }
    return IncidentFigures(**given | more)


def host(gpus: int = 1, holders: int = 1, engines: int = 1, **more) -> Snapshot:
    given = {
        "at": AT,
        "host": "gpu-1",
        "version": "0.1.0",
        "agent": AgentFigures(
            started_at=AT - 1000,
            cpu_seconds=1.25,
            resident_bytes=50 << 20,
            threads=12,
            open_files=20,
            store_bytes=1 << 20,
            page_seconds=0.001,
            queues={"detector": 0, "store": 3},
            dropped={"detector": 0},
            sources={"nvml": True, "host": True, "store": True},
            receivers=(ReceiverFigures("oncall", 2, 3, 40, 1, 5, ok=False),),
        ),
        "driver_version": "580.65.06",
        "driver_silent_seconds": 0.0,
        "gpus": tuple(gpu(n) for n in range(gpus)),
        "gpus_expected": gpus,
        "holders": tuple(
            HolderFigures(
                gpu=n,
                uuid=f"GPU-{n}",
                used_bytes=(m + 1) * GIB,
                engine_id=f"vllm-{8000 + m}",
                role="worker",
                unit=f"vllm-{8000 + m}.service",
            )
            for n in range(gpus)
            for m in range(holders)
        ),
        "engines": tuple(engine(n) for n in range(engines)),
        "host_total_bytes": 512 * GIB,
        "host_available_bytes": 300 * GIB,
        "host_swap_bytes": 0,
        "forecasts": (
            ForecastFigures("gpu", 600.0, gpu=0),
            ForecastFigures("kv", 30.5, engine_id="vllm-8000"),
            ForecastFigures("host", 7200.0),
        ),
        "incidents": (incident(),),
        "incidents_total": {("startup", "kv_lt_max_len"): 1},
        "last_incidents": {("startup", "kv_lt_max_len"): AT - 10},
        "titles": {"kv_lt_max_len": "The KV cache is too small for one request"},
        "triggers_total": {"log_failure": 2},
    }
    return Snapshot(**given | more)
