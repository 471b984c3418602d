"""Realistic diagnoses that the tests of the renderers share."""

from __future__ import annotations

from oomwatch.records import (
    Alternative,
    Diagnosis,
    Effect,
    EngineFacts,
    Evidence,
    Finding,
    Gpu,
    GpuLedger,
    Incident,
    MemoryPart,
    Remedy,
    Risk,
    SourceStatus,
)
from oomwatch.units import GIB, MIB

NOW = 1796001164.0  # 2026-11-30 01:12:44 UTC


def gib(value: float) -> int:
    return round(value * GIB)


VLLM = EngineFacts(
    id="vllm-1",
    engine="vllm",
    version="0.11.0",
    model="example/Chat-32B",
    command=("vllm", "serve", "example/Chat-32B", "--max-model-len", "131072"),
    arguments={"--max-model-len": 131072, "--gpu-memory-utilization": 0.9},
    pids=(4121, 4177),
    gpus=(0,),
    phase="exited",
    kv_tokens=76_960,
)
SGLANG = EngineFacts(
    id="sglang-1",
    engine="sglang",
    version="0.5.6",
    model="example/MoE-235B",
    gpus=(0, 1, 2, 3),
    phase="serving",
    kv_tokens=412_000,
)


def kv_lt_max_len(count: int = 1) -> Diagnosis:
    finding = Finding(
        cls="startup",
        cause="kv_lt_max_len",
        confidence=0.97,
        summary="One request of 131,072 tokens needs 16.0 GiB of KV cache; 9.4 GiB are there.",
        evidence=(
            Evidence(
                source="log",
                where="server.log:128",
                at=NOW - 60,
                text="ValueError: To serve at least one request with the models's max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.40 GiB).",
            ),
            Evidence(source="arguments", where="--max-model-len", value=131072, unit="tokens"),
            Evidence(source="computed", where="estimated length", value=77_056, unit="tokens"),
        ),
        engine_id="vllm-1",
        at=NOW - 60,
        strength=4,
    )
    remedies = (
        Remedy(
            id="max_model_len",
            title="Shorten the context window to what fits",
            direction="less_kv",
            set={"--max-model-len": "77056"},
            effect=Effect(max_concurrency_before=0.59, max_concurrency_after=1.0),
            cost="Requests over 77,056 tokens are refused.",
            why="The engine itself estimates this length for the memory it has.",
            valid_for="vllm 0.11.0",
            validated=True,
        ),
        Remedy(
            id="kv_fp8",
            title="Store the KV cache in 8 bits",
            direction="more_kv",
            set={"--kv-cache-dtype": "fp8"},
            effect=Effect(kv_tokens_before=76_960, kv_tokens_after=153_920),
            cost="Slightly lower accuracy; check it on your own prompts.",
            why="Half the bytes per token let the whole window fit.",
            valid_for="vllm 0.11.0",
            validated=True,
        ),
        Remedy(
            id="more_ranks",
            title="Spread the model over two GPUs",
            direction="more_kv",
            set={
                "--tensor-parallel-size": "2",
                "--compilation-config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
                "--enforce-eager": True,
            },
            unset=("--swap-space",),
            env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
            action="Needs a second card of the same kind.",
            effect=Effect(freed_bytes=gib(30.5)),
            cost="A second card.",
            why="Half the weights per card leave room for the cache.",
            validated=False,
        ),
    )
    return Diagnosis(
        verdict="oom",
        generated_at=NOW,
        host="gpu-host-3",
        engines=(VLLM,),
        gpus=(Gpu(index=0, name="NVIDIA H100 80GB HBM3", total_bytes=gib(79.6)),),
        incidents=(
            Incident(
                id="inc-1",
                finding=finding,
                count=count,
                remedies=remedies,
                alternatives=(
                    Alternative(
                        cls="startup",
                        cause="kv_no_blocks",
                        confidence=0.1,
                        why_less_likely="Blocks were there, too few of them.",
                    ),
                ),
                memory=(
                    GpuLedger(
                        gpu=0,
                        total_bytes=gib(79.2),
                        parts=(
                            MemoryPart("weights", gib(58.6), "log"),
                            MemoryPart("kv_cache", gib(9.4), "log"),
                            MemoryPart("activation", gib(2.6), "log"),
                            MemoryPart("non_torch", gib(0.7), "log"),
                            MemoryPart(
                                "free",
                                gib(79.2) - gib(58.6) - gib(9.4) - gib(2.6) - gib(0.7),
                                "computed",
                            ),
                        ),
                    ),
                ),
            ),
        ),
        sources=(SourceStatus("server.log", "ok", "1,204 lines"),),
        advice=("--swap-space does nothing on the V1 engine; remove it.",),
    )


def restart_loop() -> Diagnosis:
    return kv_lt_max_len(count=14)


def prefill_peak() -> Diagnosis:
    def ledger(gpu: int, free: float) -> GpuLedger:
        sizes = {
            "weights": 58.6,
            "kv_cache": 9.4,
            "activation": 4.8,
            "cuda_graphs": 1.1,
            "non_torch": 2.4,
            "fragmentation": 0.9,
            "other_processes": 0.5,
            "driver_reserved": 0.6,
            "unattributed": 0.7,
            "free": free,
        }
        parts = tuple(MemoryPart(name, gib(size), "log") for name, size in sizes.items())
        return GpuLedger(gpu, sum(part.bytes for part in parts), parts)

    finding = Finding(
        cls="long_context",
        cause="prefill_activation_peak",
        confidence=0.88,
        summary="A prefill step of 8,192 tokens needed 1.50 GiB in the MLP; 0.42 GiB were free.",
        evidence=(
            Evidence(
                "log",
                "/var/log/vllm/production/server-0.log:18233",
                NOW - 3600,
                "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.19 GiB of which 432.00 MiB is free.",
            ),
            Evidence("metrics", "vllm:kv_cache_usage_perc", NOW - 3605, None, 0.118, "ratio"),
            Evidence("nvml", "4177", NOW - 3605, "VLLM::EngineCore", 77 * GIB, "bytes"),
            Evidence("process", "2210", None, "/usr/lib/xorg/Xorg (desktop)", 412 * MIB, "bytes"),
        ),
        engine_id="vllm-1",
        at=NOW - 3600,
        unseen=("The start-up log: it would show how much the profile run measured.",),
        strength=5,
    )
    older = Finding(
        cls="irregular",
        cause="fragmentation",
        confidence=0.6,
        summary="2.1 GiB were reserved and unallocated while 1.8 GiB were refused.",
        evidence=(Evidence("log", "server-0.log:902", NOW - 90_000, "CUDA out of memory."),),
        engine_id="vllm-1",
        at=NOW - 90_000,
    )
    return Diagnosis(
        verdict="oom",
        generated_at=NOW,
        host="gpu-host-3",
        engines=(VLLM,),
        incidents=(
            Incident(
                id="inc-2",
                finding=finding,
                memory=(ledger(0, 0.4), ledger(1, 0.4), ledger(2, 3.9)),
                remedies=(
                    Remedy(
                        id="batched_tokens",
                        title="Prefill fewer tokens in one step",
                        direction="less_kv",
                        set={"--max-num-batched-tokens": "4096"},
                        effect=Effect(freed_bytes=gib(1.2)),
                        cost="Long prompts take a few more steps to their first token.",
                        why="The activation peak grows with the tokens of one step.",
                        valid_for="vllm 0.11.0",
                        validated=True,
                    ),
                ),
            ),
            Incident(id="inc-1", finding=older, count=3),
        ),
        sources=(
            SourceStatus("server-0.log", "ok", None),
            SourceStatus("http://127.0.0.1:8000/metrics", "error", "connection refused"),
            SourceStatus("kernel log", "not_available", "needs the systemd-journal group"),
        ),
    )


def host_oom_kill() -> Diagnosis:
    finding = Finding(
        cls="irregular",
        cause="host_oom_kill",
        confidence=0.95,
        summary="The kernel killed VLLM::EngineCor (PID 4177) because its cgroup reached 64 GiB.",
        evidence=(
            Evidence(
                "kernel",
                "kernel.log:77",
                NOW - 120,
                "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=cri,task=VLLM::EngineCor,pid=4177,uid=0",
            ),
        ),
        engine_id="vllm-1",
        at=NOW - 120,
        strength=5,
    )
    return Diagnosis(
        verdict="oom",
        generated_at=NOW,
        incidents=(
            Incident(
                id="inc-3",
                finding=finding,
                remedies=(
                    Remedy(
                        id="container_memory",
                        title="Give the container more host memory",
                        direction="less_host",
                        action="Raise resources.limits.memory above 96Gi.",
                        cost="Host memory that others cannot use.",
                        why="The limit is the container's own; the host had 300 GiB left.",
                    ),
                ),
            ),
        ),
        sources=(SourceStatus("kernel.log", "ok"),),
    )


def unknown() -> Diagnosis:
    finding = Finding(
        cls="startup",
        cause="startup_unknown",
        confidence=0.3,
        summary="The engine core failed to start; only the wrapper's message is in the log.",
        evidence=(
            Evidence(
                "log",
                "api.log:41",
                None,
                "RuntimeError: Engine core initialization failed. See root cause above.",
            ),
        ),
        unseen=(
            "The engine core's own lines: rerun with VLLM_LOGGING_LEVEL=INFO and keep stderr.",
            "The kernel log: `journalctl -k` shows whether a process was killed.",
        ),
        at=None,
    )
    return Diagnosis(
        verdict="unknown",
        generated_at=NOW,
        incidents=(Incident(id="inc-4", finding=finding),),
        sources=(SourceStatus("api.log", "warning", "41 lines, all from the API server"),),
    )


def undecided() -> Diagnosis:
    return Diagnosis(
        verdict="unknown",
        generated_at=NOW,
        sources=(
            SourceStatus("app.log", "ok", "no line of an engine"),
            SourceStatus("nvml", "not_available", "no NVIDIA driver on this host"),
        ),
    )


def healthy() -> Diagnosis:
    return Diagnosis(
        verdict="healthy",
        generated_at=NOW,
        host="gpu-host-3",
        engines=(SGLANG,),
        gpus=(
            Gpu(0, None, "NVIDIA H200", gib(140.4), gib(121.3), gib(18.2), gib(0.9)),
            Gpu(1, None, "NVIDIA H200", gib(140.4), None, None, None),
        ),
        sources=(SourceStatus("nvml", "ok"), SourceStatus("metrics", "ok")),
    )


def at_risk() -> Diagnosis:
    finding = Finding(
        cls="irregular",
        cause="host_ram_leak",
        confidence=0.8,
        summary="VLLM::EngineCore grows by 1.2 GiB of host memory an hour and does not level off.",
        evidence=(
            Evidence("process", "4177", NOW, "resident set, 6 h", 0.34 * MIB, "bytes/s"),
            Evidence("metrics", "vllm:num_requests_running", NOW, None, 12),
        ),
        engine_id="sglang-1",
        at=NOW,
        risk=True,
    )
    second = Finding(
        cls="long_context",
        cause="kv_saturation",
        confidence=0.7,
        summary="The KV cache is 99 % full and 41 requests wait.",
        evidence=(Evidence("metrics", "sglang:token_usage", NOW, None, 0.99, "ratio"),),
        engine_id="sglang-1",
        at=NOW,
        risk=True,
    )
    remedy = Remedy(
        id="upgrade",
        title="Upgrade to a version with the fix",
        direction="less_host",
        action="Plan a restart before the memory is gone.",
        cost="A restart.",
        why="Only the engine core grows.",
    )
    return Diagnosis(
        verdict="at_risk",
        generated_at=NOW,
        engines=(SGLANG,),
        risks=(Risk(finding, None, 3.5 * 3600, (remedy,)), Risk(second, 2)),
        sources=(SourceStatus("recording", "ok"),),
    )


def not_oom() -> Diagnosis:
    finding = Finding(
        cls="not_oom",
        cause="illegal_memory_access",
        confidence=0.9,
        summary="A kernel read outside its buffers; memory was not short.",
        evidence=(
            Evidence(
                "log", "server.log:9", NOW, "CUDA error: an illegal memory access was encountered"
            ),
        ),
        engine_id="vllm-1",
        at=NOW,
    )
    remedy = Remedy(
        id="report",
        title="Find the kernel, then report or upgrade",
        direction="other",
        env={"CUDA_LAUNCH_BLOCKING": "1"},
        action="Repeat once with synchronous launches to see the failing kernel.",
        cost="Slow while it is set.",
        why="Asynchronous launches blame a later call.",
    )
    return Diagnosis(
        verdict="not_oom",
        generated_at=NOW,
        engines=(VLLM,),
        incidents=(Incident(id="inc-5", finding=finding, remedies=(remedy,)),),
    )


SAMPLES = {
    "kv_lt_max_len": kv_lt_max_len,
    "restart_loop": restart_loop,
    "prefill_peak": prefill_peak,
    "host_oom_kill": host_oom_kill,
    "unknown": unknown,
    "undecided": undecided,
    "healthy": healthy,
    "at_risk": at_risk,
    "not_oom": not_oom,
}
