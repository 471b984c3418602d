"""A bare allocator failure while the engine starts, placed by the stage it happened in.

The stage is told by the calling frames, of the failing process or of the parent that relays it,
and else by the last line the start printed (taxonomy of start-up failures, step 5).
"""

from __future__ import annotations

from typing import Final, Protocol

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.frames import Part, Stage, find_part, find_stage, telling_frame
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.diagnose.rules.startup_checks import oom_values
from oomwatch.records import Finding
from oomwatch.units import GIB, MIB, format_bytes


class Say(Protocol):
    """States a finding on the failure at hand."""

    def __call__(
        self, cause: str, confidence: float, sentence: str, strength: int = STAGE, **more: object
    ) -> Finding:
        """Build the finding."""


GPU_OOM: Final = (
    "torch.oom",
    "cuda.oom_raw",
    "cuda.oom_code",
    "torch.allocator_warning",
    "torch.stable_abi",
    "tvm.oom",
    "torch.cumem",
    "torch.memory_saver",
)
"""Patterns of a GPU allocation that was refused."""
_SIBLING: Final = 1 * GIB
"""Contexts of sibling ranks take 250 to 500 MiB each and are no tenants (taxonomy)."""
_LAST_STAGE: Final[dict[str, Stage]] = {
    "init": "load",
    "load": "load",
    "loaded": "profile",
    "profile": "profile",
    "kv": "kv",
    "capture": "capture",
    "captured": "sampler",
}
_NAMED: Final = (
    "vllm.sampler_oom",
    "vllm.no_blocks",
    "vllm.max_len_v0",
    "vllm.max_len_v1",
    "vllm.free_below_budget",
    "vllm.profile_error",
    "vllm.mamba_blocks",
)


def gpu_failure(facts: Facts) -> Failure | None:
    """The first refused GPU allocation, told by the failing process rather than by a relay."""
    hits = [f for f in facts.failures if f.match(*GPU_OOM) is not None]
    own = [f for f in hits if not f.relayed]
    return min(own or hits, key=lambda f: f.order, default=None)


def stage_of(facts: Facts, failure: Failure) -> Stage:
    """The stage a failure happened in: frames of it or of its relays, else the last stage reached."""
    stage = find_stage(failure.frames, failure.paths)
    named = any(not frame.startswith("method:") for frame in failure.frames)
    if stage not in (None, "serving") and named:
        return stage
    # A relay or a sibling whose own frames end in the busy loop says nothing new; one in start-up
    # code does.
    for other in facts.failures:
        if other is failure or (other.oom is None and not other.relayed):
            continue
        told = find_stage(other.frames, other.paths)
        if told not in (None, "serving") and any(not f.startswith("method:") for f in other.frames):
            return told
    if stage not in (None, "serving"):
        return stage
    if stage == "serving" or facts.served or (facts.ready and not facts.run_failed_to_start):
        return "serving"
    return _LAST_STAGE.get(facts.run.stage if facts.run else "init", "load")


def foreign_bytes(facts: Facts, failure: Failure) -> tuple[int, tuple[int, ...]]:
    """Memory and pids of the listed processes that are no part of this engine."""
    oom = failure.oom
    if oom is None:
        return 0, ()
    own_tree = facts.tree_pids | (facts.run.pids if facts.run else set())
    ranks = int(facts.number("--tensor-parallel-size", "--tp-size") or 1)
    others = [
        (pid, size)
        for pid, size in oom.others
        if pid not in own_tree and (size >= _SIBLING or (ranks == 1 and size >= 64 * MIB))
    ]
    return sum(size for _, size in others), tuple(pid for pid, _ in others)


def startup_allocation(facts: Facts) -> Finding | None:
    """GPU memory ran out while the engine started."""
    failure = gpu_failure(facts)
    if failure is None or (facts.failing(*_NAMED) and not facts.served):
        return None
    stage = stage_of(facts, failure)
    if stage in ("serving", "wake"):
        return None
    values = {**oom_values(failure), "stage": stage, "frame": telling_frame(failure.frames)}
    evidence = list(cite_failure(failure))
    unified = facts.unified
    oom = failure.oom
    amount = (
        f"{format_bytes(oom.tried_bytes)} asked, {format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} free"
        if oom
        else "no sizes given"
    )
    order = failure.order

    def say(
        cause: str, confidence: float, sentence: str, strength: int = STAGE, **more: object
    ) -> Finding:
        return found(
            facts,
            cause,
            confidence,
            sentence,
            evidence,
            strength=strength,
            values={**values, **more},
            order=order,
        )

    if failure.match("torch.mig_assert") or _is_slice(facts, failure):
        return say(
            "mig_slice",
            0.8,
            f"The card is a MIG slice, and the model does not fit the slice ({amount}).",
        )
    if (
        oom
        and oom.tried_bytes
        and oom.free_bytes
        and oom.free_bytes > oom.tried_bytes + 512 * MIB
        and stage != "capture"
    ):
        if unified:
            return say(
                "unified_memory",
                0.75,
                f"The allocation was refused although the driver counts enough free memory ({amount}): GPU and host share one memory here.",
                ARITHMETIC,
            )
        if facts.is_wsl or (oom.own_bytes or 0) > 2**50:
            return say(
                "wsl_alloc_limit",
                0.8,
                f"The allocation was refused although enough memory is free ({amount}): the virtualised Windows driver limits what one process may take.",
                ARITHMETIC,
            )
        if oom.free_bytes > 4 * oom.tried_bytes and oom.free_bytes > 4 * GIB:
            return say(
                "wsl_alloc_limit",
                0.5,
                f"The allocation was refused although far more memory is free ({amount}): a limit of the driver or the virtual machine, not of the card.",
                ARITHMETIC,
            )
    foreign, pids = foreign_bytes(facts, failure)
    if (
        foreign
        and oom
        and oom.total_bytes
        and foreign > max(0.15 * oom.total_bytes, oom.tried_bytes or 0)
    ):
        return say(
            "gpu_busy_other_process",
            0.85,
            f"Other processes hold {format_bytes(foreign)} of the card while this engine loads ({amount}).",
            ARITHMETIC,
            other_process_bytes=foreign,
            other_pids=list(pids),
        )
    if unified and not (
        oom and oom.total_bytes and oom.own_bytes and oom.own_bytes > 0.9 * oom.total_bytes
    ):
        return say(
            "unified_memory",
            0.75,
            f"GPU and host share one memory on this board, and together they ran out at start ({amount}).",
        )
    part = find_part(failure.frames, failure.paths)
    if stage == "nccl":
        return say(
            "nccl_init",
            0.85,
            "NCCL could not get GPU memory for its communicators: the cards are nearly full before the model loads.",
            NAMED_CHECK,
        )
    if stage == "draft" or (stage in ("load", "init") and _second_load(facts)):
        evidence += cite_arguments(
            facts.engine,
            ("--speculative-algorithm", "--speculative-config", "--speculative-draft-model-path"),
        )
        return say(
            "spec_draft",
            0.8,
            f"The draft model did not fit beside the target and its KV pool ({amount}).",
        )
    if stage == "quantize":
        return say(
            "quant_load_peak",
            0.78,
            f"Converting the weights while they load needs more than the card has ({amount}); the converted model would be smaller.",
        )
    if stage == "repack":
        return say(
            "quant_repack",
            0.85,
            f"All weights were loaded; repacking them for the kernels needed one more copy than fits ({amount}).",
        )
    if stage in ("load", "init"):
        if facts.lora and part == "lora":
            return say(
                "lora_slots",
                0.8,
                f"The adapter slots that are reserved at load do not fit beside the weights ({amount}).",
            )
        return say(
            "weights_dont_fit",
            0.88,
            f"The model's weights do not fit the card: memory ran out while they were loaded ({amount}).",
        )
    if stage == "kv":
        pinned = facts.argument("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
        evidence += cite_arguments(
            facts.engine,
            ("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--gpu-memory-utilization"),
        )
        why = (
            "the size was pinned by hand"
            if pinned
            else "less memory was free than the profile assumed"
        )
        return say(
            "kv_alloc_overcommit",
            0.85 if pinned else 0.7,
            f"The KV cache could not be allocated: {why} ({amount}).",
        )
    if stage == "compile":
        return say(
            "torch_compile",
            0.75,
            f"Compiling or tuning kernels for the profiling run ran out of GPU memory ({amount}).",
        )
    if stage == "sampler":
        return say(
            "sampler_warmup",
            0.8,
            f"The sampler's warm-up with all sequences ran out of GPU memory ({amount}).",
            seqs=facts.number("--max-num-seqs"),
        )
    if stage == "capture":
        return say(
            "cuda_graph_capture",
            0.88,
            f"Capturing CUDA graphs ran out of GPU memory: graphs come on top of the KV cache ({amount}).",
        )
    return _profiling(facts, failure, say, part, amount)


def _profiling(facts: Facts, failure: Failure, say: Say, part: Part | None, amount: str) -> Finding:
    if facts.lora and part == "lora":
        return say(
            "lora_slots",
            0.75,
            f"The profiling run with all adapter slots in use ran out of GPU memory ({amount}).",
        )
    if part == "encoder" or facts.multimodal:
        return say(
            "profile_mm_dummy",
            0.8 if part == "encoder" else 0.7,
            f"The profiling run with the largest images or videos the limits allow ran out of GPU memory ({amount}).",
            multimodal=True,
        )
    if facts.lora and failure.oom and (failure.oom.outside_bytes or 0) > 2 * GIB:
        return say(
            "lora_slots",
            0.6,
            f"Adapter slots and the profiling run together do not fit ({amount}).",
        )
    return say(
        "profile_activation_peak",
        0.85,
        f"The profiling run with the largest batch the limits allow ran out of GPU memory ({amount}).",
    )


def _is_slice(facts: Facts, failure: Failure) -> bool:
    if any("MIG" in name for name in facts.gpu_names):
        return True
    total = failure.oom.total_bytes if failure.oom else None
    # CUDA totals of 1g.5gb to 3g.40gb slices of A100 and H100, which no whole card has.
    slices = (4.75, 9.50, 9.75, 19.50, 19.62, 39.38, 39.50)
    return total is not None and any(abs(total / GIB - s) < 0.02 for s in slices)


def _second_load(facts: Facts) -> bool:
    return (
        facts.speculative
        and facts.run is not None
        and len(facts.run.all("sglang.load_begin")) > 1
        and facts.run.reached("kv")
    )


def capture_failed(facts: Facts) -> Finding | None:
    """SGLang's capture failed; what follows the colon decides."""
    hit = facts.failing("sglang.capture_failed")
    if hit is None:
        return None
    failure, fields = hit
    inner = str(fields.get("inner", ""))
    if "out of memory" not in inner and failure.oom is None and "OutOfMemory" not in inner:
        return None
    return found(
        facts,
        "cuda_graph_capture",
        0.92,
        "Capturing CUDA graphs ran out of GPU memory: graphs need room outside the static share.",
        [*cite_failure(failure), *([cite(e.line)] if (e := facts.said("sglang.pool_end")) else [])],
        strength=NAMED_CHECK,
        order=failure.order,
        values={**oom_values(failure), "stage": "capture"},
    )


def nccl_memory(facts: Facts) -> Finding | None:
    """NCCL could not get memory: on the card, or in the container's shared memory."""
    hit = facts.failing("nccl.oom")
    if hit is not None and not facts.served:
        failure, _ = hit
        return found(
            facts,
            "nccl_init",
            0.9,
            "NCCL could not get GPU memory for its communicators (CUDA failure 2): the cards are nearly full before the model loads.",
            cite_failure(failure),
            strength=NAMED_CHECK,
            order=failure.order,
            values={"stage": "nccl"},
            unseen=("Which process holds the cards: NVML's process list.",),
        )
    shm = facts.failing("nccl.shm") or facts.failing("nccl.system_error")
    said = facts.said("nccl.shm")
    bus = facts.said("crash.bus_error")
    if shm is None and said is None and not (bus and _ranks(facts) > 1 and not facts.served):
        return None
    if facts.served and said is None:
        return None
    named = said is not None or facts.failing("nccl.shm") is not None
    raised: Failure | None = shm[0] if shm else None
    line = said.line if said else raised.line if raised is not None else bus.line if bus else None
    if line is None:
        return None
    return found(
        facts,
        "shm_too_small",
        0.92 if named else 0.6,
        "The ranks could not get shared memory (/dev/shm) for NCCL: the container's share is too small."
        if named
        else "NCCL failed with a system error while the ranks connected; in a container this is nearly always a /dev/shm that is too small.",
        [
            cite(line),
            *(cite_failure(raised) if raised is not None and raised.line is not line else ()),
        ],
        strength=NAMED_CHECK if named else STAGE,
        order=min((x.order for x in (raised, said, bus) if x is not None), default=None),
        values={"stage": "nccl"},
        unseen=() if named else ("NCCL's own reason: start once with NCCL_DEBUG=INFO.",),
    )


def _ranks(facts: Facts) -> float:
    return facts.number("--tensor-parallel-size", "--tp-size") or 1


def cpu_cache(facts: Facts) -> Finding | None:
    """The KV cache in host memory (CPU back-end) could not be allocated."""
    hit = facts.failing("torch.cpu_alloc", "host.alloc", "host.bad_alloc")
    if hit is None or facts.served:
        return None
    failure, fields = hit
    stage = find_stage(failure.frames, failure.paths)
    if stage == "kv" or (stage is None and facts.run is not None and facts.run.stage == "kv"):
        return found(
            facts,
            "kv_alloc_overcommit",
            0.85,
            "The KV cache could not be allocated in host memory: it was sized larger than this process may take.",
            [*cite_failure(failure), *cite_arguments(facts.engine, ("--kv-cache-memory-bytes",))],
            strength=STAGE,
            order=failure.order,
            values={"stage": "kv", "tried_bytes": _number(fields.get("tried"))},
        )
    cause = "host_oom_load"
    return found(
        facts,
        cause,
        0.75,
        "The host refused memory while the model was loaded (no GPU allocation failed).",
        cite_failure(failure),
        strength=STAGE,
        order=failure.order,
        values={"stage": stage or "load"},
    )


def _number(text: object) -> int | None:
    return int(text) if isinstance(text, str) and text.isdigit() and len(text) < 20 else None


RULES: Final[tuple[Rule, ...]] = (startup_allocation, capture_failed, nccl_memory, cpu_cache)
