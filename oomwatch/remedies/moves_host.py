"""Steps on the host's side: swap space, caches in RAM, loaders, limits; and who else is there."""

from __future__ import annotations

import re
from typing import Final

from oomwatch.remedies.context import Context, Draft
from oomwatch.units import GIB, format_bytes

_MAX_SWAP_GIB: Final = 64
_HICACHE_RESERVE: Final = 10e9
"""What SGLang leaves to the host; up to 0.4.9 the free amount that it prints still holds it."""


# ---------------------------------------------------------------- swap space of V0
def no_swap_space(context: Context) -> Draft | None:
    """No pinned swap space (V0; on V1 it only has to pass a check at start)."""
    flag = "--swap-space"
    old = context.now(flag)
    if context.name != "vllm" or old == 0 or not _has_swap(context):
        return None
    if context.generation == "V1" and context.finding.cause != "host_pinned_swap":
        return None
    used = "" if context.generation == "V0" else ", though this engine never swaps"
    return Draft(
        id="no-swap-space",
        title="Set the CPU swap space to 0",
        why=f"{old or 4:g} GiB of host memory for each GPU are pinned or checked for at "
        f"start{used}.",
        cost="Preempted requests are computed again instead of swapped in."
        if context.generation == "V0"
        else "None.",
        set={flag: 0},
    )


def more_swap_space(context: Context) -> Draft | None:
    """Room for swapped-out sequences (V0 only)."""
    flag = "--swap-space"
    if context.name != "vllm" or context.generation == "V1" or not _has_swap(context):
        return None
    old = context.now(flag) or 4
    ranks = context.now_or_assumed("--tensor-parallel-size") or 1
    free = context.number("host_free_bytes")
    limit = free * 0.5 / GIB / ranks if free else _MAX_SWAP_GIB
    new = int(min(max(old * 2, 32), limit, _MAX_SWAP_GIB))
    if new <= old:
        return None
    return Draft(
        id="more-swap-space",
        title=f"Raise --swap-space to {new} GiB",
        why="Sequences that run together (n, best_of, beams) are swapped out as a group, and the "
        f"CPU side of the KV cache, {old:g} GiB for each GPU, was full.",
        cost=f"{new} GiB of pinned host memory for each GPU.",
        set={flag: new},
    )


def _has_swap(context: Context) -> bool:
    return not context.at_least("0.18.0") or (
        context.engine.version is None and context.generation == "V0"
    )


# ---------------------------------------------------------------- caches and offload in host memory
def smaller_host_caches(context: Context) -> Draft | None:
    """Caches the user has enlarged, and the one that is on by default, shrunk."""
    smaller: dict[str, int | float] = {}
    if context.name == "vllm":
        for flag in ("--kv-offloading-size", "--mm-processor-cache-gb"):
            old = context.now(flag)
            wanted = context.given(flag) is not None or context.says("multimodal")
            if old and wanted:
                smaller[flag] = int(old // 2)
    elif context.name == "sglang" and context.force.get("--enable-hierarchical-cache"):
        size = context.now("--hicache-size")
        if size:
            smaller["--hicache-size"] = int(size // 2)
        else:
            smaller["--hicache-ratio"] = max(
                round((context.now("--hicache-ratio") or 2.0) / 2, 1), 1.1
            )
    elif context.name == "llama.cpp":
        smaller["--cache-ram"] = 0
    if not smaller:
        return None
    return Draft(
        id="smaller-host-cache",
        title="Shrink the caches in host memory",
        why="They grow up to their limit for each process, and stay.",
        cost="Fewer cache hits.",
        set=smaller,
    )


def smaller_host_pool(context: Context) -> Draft | None:
    """SGLang's part of the prefix cache in pinned host memory, cut to what the host has."""
    asked, free = context.number("swap_space_bytes"), context.number("host_free_bytes")
    if context.name != "sglang" or not asked or free is None:
        return None
    room = free - _HICACHE_RESERVE if asked <= free else free
    share = max(room, 0) * 0.9 / asked
    size = int((context.now("--hicache-size") or 0) * share)
    ratio = int((context.now("--hicache-ratio") or 2.0) * share * 10) / 10
    why = (
        f"Each rank asks for {format_bytes(asked)} of pinned host memory; "
        f"{format_bytes(free)} are free."
    )
    if size >= 1 or (not context.now("--hicache-size") and ratio > 1):
        return Draft(
            id="smaller-host-cache",
            title="Shrink the caches in host memory",
            why=why,
            cost="Fewer cache hits.",
            set={"--hicache-size": size} if size else {"--hicache-ratio": ratio},
        )
    return Draft(
        id="no-host-cache",
        title="Switch the hierarchical cache off",
        why=f"{why} Most releases refuse a pool smaller than the one on the GPU.",
        cost="Evicted prefixes are computed again.",
        unset=("--enable-hierarchical-cache",),
    )


def less_cpu_offload(context: Context) -> Draft | None:
    """Fewer weights in host memory."""
    old = context.now("--cpu-offload-gb")
    if not old:
        return None
    return Draft(
        id="less-cpu-offload",
        title=f"Lower --cpu-offload-gb to {int(old // 2)}",
        why=f"{old:g} GiB of weights for each GPU are kept in pinned host memory.",
        cost="The GPU has to hold the rest.",
        set={"--cpu-offload-gb": int(old // 2)},
    )


def one_loader(context: Context) -> Draft | None:
    """Ranks that load one after another (V0)."""
    if (
        context.name != "vllm"
        or context.generation != "V0"
        or context.now("--max-parallel-loading-workers") == 1
    ):
        return None
    ranks = context.now_or_assumed("--tensor-parallel-size") or 1
    if ranks <= 1:
        return None
    return Draft(
        id="one-loader",
        title="Load the ranks one after another",
        why=f"{ranks:.0f} ranks hold shards in host memory at the same time.",
        cost="A slower start.",
        set={"--max-parallel-loading-workers": 1},
    )


def more_host_memory(context: Context) -> Draft | None:
    """A larger limit, or more memory."""
    limit = context.number("limit_bytes")
    own = str(context.finding.values.get("constraint") or "").upper()
    if "MEMCG" in own or limit is not None:
        now = f" (now {format_bytes(limit)})" if limit else ""
        action = (
            f"Raise the memory limit of the unit, container or pod{now}: MemoryMax=, --memory or "
            "resources.limits.memory."
        )
        title = "Raise the memory limit"
        why = "The memory limit of the unit, container or pod was reached, not that of the GPU."
    elif not own and not (context.number("host_total_bytes") or context.number("host_free_bytes")):
        action = (
            "Raise the memory limit of the unit, container or pod if it has one (MemoryMax=, "
            "--memory or resources.limits.memory); else give the host more RAM or swap, or run "
            "less beside the server."
        )
        title = "Raise the container's memory limit, or give the host more"
        why = "The container's limit or the host's memory ran out, not the GPU's."
    else:
        action = (
            "Give the host more RAM or swap, or run less beside the server; protect the engine "
            "with OOMScoreAdjust= (oom_score_adj) so that something else is killed first."
        )
        title = "Give the host more memory"
        why = "The host's memory ran out, not the GPU's."
    return Draft(
        id="more-host-memory",
        title=title,
        why=why,
        cost="Host memory.",
        action=action,
    )


def planned_restart(context: Context) -> Draft | None:
    """A limit and a restart before the host is full."""
    grown = context.number("slope_bytes_per_second")
    pace = f" It grew by {format_bytes(grown * 3600)} an hour." if grown and grown > 0 else ""
    return Draft(
        id="planned-restart",
        title="Restart on a schedule, under a memory limit",
        why=f"The growth does not end by itself.{pace}",
        cost="A short outage at each restart.",
        action="Restart the server before the host is full: set MemoryMax= (or the container's "
        "memory limit) and restart it on a schedule until a fixed version runs.",
    )


def other_model_runner(context: Context) -> Draft | None:
    """The older model runner of vLLM, where the new one is in use."""
    variable = "VLLM_USE_V2_MODEL_RUNNER"
    if context.name != "vllm" or context.version is None or not context.at_least("0.22.0"):
        return None
    if context.engine.env.get(variable) == "0":
        return None
    return Draft(
        id="v1-model-runner",
        title="Use the V1 model runner",
        why="The V2 runner is newer; some growth of host memory occurs only with it.",
        cost="Its optimizations are lost.",
        env={variable: "0"},
    )


def two_build_jobs(context: Context) -> Draft | None:
    """Fewer compilers at once."""
    if context.engine.env.get("MAX_JOBS") in ("1", "2"):
        return None
    return Draft(
        id="fewer-build-jobs",
        title="Build kernels with two jobs",
        why="Each compiler process takes gigabytes of host memory; by default one runs per core.",
        cost="The first start takes longer.",
        env={"MAX_JOBS": "2"},
    )


def nccl_without_cumem(context: Context) -> Draft | None:
    """NCCL's older allocation."""
    if context.engine.env.get("NCCL_CUMEM_ENABLE") == "0":
        return None
    return Draft(
        id="nccl-cumem-off",
        title="Turn NCCL's cuMem allocation off",
        why="NCCL found no room for its buffers; without cuMem it allocates less at start.",
        cost="Some features of NCCL.",
        env={"NCCL_CUMEM_ENABLE": "0"},
    )


# ---------------------------------------------------------------- other processes
def stop_others(context: Context) -> Draft | None:
    """Name who holds the card, and stop or move it."""
    pids = [str(pid) for pid in _pids(context)]
    name = re.sub(r"[^\w.:+/ -]", "", str(context.finding.values.get("process_name") or ""))[:40]
    held = context.number("other_process_bytes")
    if pids and context.finding.values.get("orphan"):
        return Draft(
            id="end-orphans",
            title="End what is left of the server",
            why="Their server is gone, nothing will end them, and the next start misses the "
            "memory that they hold.",
            cost="None: without their server they serve nobody.",
            action=f"kill {' '.join(pids)} (kill -9 for those that stay).",
            direction="free_gpu",
        )
    who = f"PID {', '.join(pids[:6])}" if pids else "that nvidia-smi lists"
    named = f" ({name})" if name else ""
    holding = f", {format_bytes(held)}" if held else ""
    return Draft(
        id="stop-other-process",
        title="Stop the other process on the GPU",
        why="The memory that is missing is held by a process outside this server; a left-over "
        "engine process of an earlier crash is the usual one.",
        cost="That process ends or moves.",
        action=f"Stop the other process {who}{named}{holding}, or move one of the two to "
        "another GPU.",
        direction="free_gpu",
    )


def _pids(context: Context) -> tuple[int, ...]:
    found = context.finding.values.get("other_pids")
    return (
        tuple(pid for pid in found if isinstance(pid, int))
        if isinstance(found, list | tuple)
        else ()
    )
