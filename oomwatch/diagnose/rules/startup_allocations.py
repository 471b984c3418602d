"""A bare allocator failure while the engine starts, placed by the stage it happened in.

The stage is told by the calling frames, of the failing process or of the parent that relays it,
and else by the last line the start printed (taxonomy of start-up failures, step 5).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.frames import Part, Stage, find_part, find_stage, telling_frame
from oomwatch.diagnose.rules.conversion import converts_to_fit
from oomwatch.diagnose.rules.device_limits import (
    intended_card,
    is_slice,
    refused_with_room,
    shares_host_memory,
)
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.diagnose.rules.placing import (
    CHOSEN_LINES,
    amount_of,
    gpu_failure,
    is_placed,
    is_placeless,
    is_quantized,
    most_sure,
    stage_of,
)
from oomwatch.diagnose.rules.startup_checks import oom_values
from oomwatch.diagnose.rules.tenants import foreign_bytes, hidden_bytes
from oomwatch.records import Finding
from oomwatch.units import GIB, format_bytes


class Say(Protocol):
    """States a finding on the failure at hand."""

    def __call__(
        self,
        cause: str,
        confidence: float,
        sentence: str,
        strength: int = STAGE,
        flags: Sequence[str] = (),
        **more: object,
    ) -> Finding:
        """Build the finding."""


_HOST_HALF: Final = re.compile(r"(?:cache_engine|uva|prefetch|cpu_gpu|\w*offload\w*)\.py:")
"""Files of V0's swap space and of what is kept in host memory."""
_GUESS: Final = 0.42
"""Confidence where neither frames nor lines tell the stage."""
_DRAFT_FLAGS: Final = (
    "--speculative-algorithm",
    "--speculative-config",
    "--speculative-draft-model-path",
    "--speculative-model",
)
_NAMED: Final = (
    "vllm.sampler_oom",
    "vllm.no_blocks",
    "vllm.max_len_v0",
    "vllm.max_len_v1",
    "vllm.free_below_budget",
    "vllm.profile_error",
    "vllm.mamba_blocks",
    "tgi.warmup_failed",
)


def startup_allocation(facts: Facts) -> Finding | None:
    """GPU memory ran out while the engine started."""
    failure = gpu_failure(facts)
    if failure is None or (facts.failing(*_NAMED) and not facts.served):
        return None
    stage = stage_of(facts, failure)
    if stage in ("serving", "wake"):
        return None
    guessed = not is_placed(facts, failure)
    most = most_sure(facts, failure)
    values = {**oom_values(failure), "stage": stage, "frame": telling_frame(failure.frames)}
    amount = amount_of(failure)

    def say(
        cause: str,
        confidence: float,
        sentence: str,
        strength: int = STAGE,
        flags: Sequence[str] = (),
        **more: object,
    ) -> Finding:
        unsure = guessed and strength == STAGE
        return found(
            facts,
            cause,
            min(confidence, _GUESS) if unsure else min(confidence, most),
            f"{sentence} ({amount}).",
            [*cite_failure(failure), *cite_arguments(facts.engine, flags)],
            strength=strength,
            values={**values, **more},
            order=failure.order,
            unseen=("How far the start had come: the lines before the failure.",)
            if unsure
            else ("The frames of the traceback, and every line before it.",)
            if most == CHOSEN_LINES
            else (),
        )

    return (
        _by_device(facts, failure, stage, say)
        or _by_tenant(facts, failure, stage, say)
        or (None if is_placeless(facts, failure) else _by_stage(facts, failure, stage, say))
    )


def _by_device(facts: Facts, failure: Failure, stage: Stage, say: Say) -> Finding | None:
    """A property of the device explains the refusal."""
    oom = failure.oom
    total = oom.total_bytes if oom else None
    unified = shares_host_memory(facts, total)
    if oom is None and _is_left_by_pinning(facts, failure):
        return say(
            "host_pinned_swap",
            0.75,
            "Pinning the offload region in host memory was refused, and the next CUDA call reported that error; the GPU is"
            " not full",
        )
    asserted = failure.match("torch.mig_assert") is not None
    if asserted and unified:
        return say(
            "unified_memory",
            0.8,
            "GPU and host share one memory on this board, and together they ran out at start; PyTorch's allocator could"
            " not even list who holds it",
        )
    if asserted or is_slice(facts, failure):
        return say(
            "mig_slice",
            0.8 if is_slice(facts, failure) else 0.65,
            "The card is a MIG slice, and what the engine needs does not fit the slice",
        )
    if refused_with_room(failure) and stage != "capture" and oom is not None:
        if unified:
            return say(
                "unified_memory",
                0.75,
                "The allocation was refused although the driver counts enough free memory: GPU and host share one memory here",
                ARITHMETIC,
            )
        if facts.is_wsl:
            return say(
                "wsl_alloc_limit",
                0.8,
                "The allocation was refused although enough memory is free: the virtualised Windows driver limits what one"
                " process may take",
                ARITHMETIC,
            )
        if (oom.free_bytes or 0) > max(4 * (oom.tried_bytes or 0), 4 * GIB):
            return say(
                "wsl_alloc_limit",
                0.5,
                "The allocation was refused although far more memory is free: a limit of the driver or the virtual machine,"
                " not of the card",
                ARITHMETIC,
            )
    if unified and not (oom and total and oom.own_bytes and oom.own_bytes > 0.9 * total):
        return say(
            "unified_memory",
            0.75,
            "GPU and host share one memory on this board, and together they ran out at start",
        )
    return None


def _by_tenant(facts: Facts, failure: Failure, stage: Stage, say: Say) -> Finding | None:
    """Somebody else's memory on the card explains the refusal."""
    oom = failure.oom
    foreign, pids = foreign_bytes(facts, failure)
    hidden = hidden_bytes(failure)
    if (
        oom
        and oom.total_bytes
        and foreign + hidden > max(0.15 * oom.total_bytes, oom.tried_bytes or 0)
    ):
        return say(
            "gpu_busy_other_process",
            0.85 if foreign else 0.78,
            f"Other processes hold {format_bytes(foreign + hidden)} of the card while this engine starts",
            ARITHMETIC,
            other_process_bytes=foreign + hidden,
            other_pids=list(pids),
        )
    if stage == "init":
        return say(
            "gpu_busy_other_process",
            0.7,
            "The card had no room even for this process's context, before anything was loaded: something else holds it",
        )
    return None


def _by_stage(facts: Facts, failure: Failure, stage: Stage, say: Say) -> Finding:
    """The engine itself needs more than there is, at this stage."""
    part = find_part(failure.frames, failure.paths)
    if stage == "nccl":
        return say(
            "nccl_init",
            0.85,
            "NCCL could not get GPU memory for its communicators: the cards are nearly full before the model loads",
            NAMED_CHECK,
        )
    if stage == "draft":
        return say(
            "spec_draft",
            0.8,
            "The draft model did not fit beside the target",
            flags=_DRAFT_FLAGS,
        )
    if stage == "pinned" or _is_pinned_pool(facts, failure, stage):
        return say(
            "host_pinned_swap",
            0.75,
            "Host memory for the swap space or the host's part of the cache could not be pinned; CUDA calls that out of"
            " memory, the GPU is not the problem",
            flags=(
                "--swap-space",
                "--cpu-offload-gb",
                "--hicache-ratio",
                "--hicache-size",
                "--kv-offloading-size",
            ),
        )
    if stage in ("quantize", "load") and (stage == "quantize" or converts_to_fit(facts, failure)):
        return say(
            "quant_load_peak",
            0.78 if stage == "quantize" else 0.66,
            "Converting the weights while they load needs more than the card has; the converted model would be smaller",
            flags=("--quantization", "--load-format"),
        )
    if stage == "repack":
        return say(
            "quant_repack",
            0.85 if is_quantized(facts) or find_stage(failure.frames) == "repack" else 0.6,
            "All weights were loaded; repacking them for the kernels needed one more copy than fits",
        )
    if stage == "slots" or (stage == "load" and facts.lora and part == "lora"):
        return say(
            "lora_slots",
            0.8,
            "The adapter slots that are reserved at load do not fit beside the weights",
            flags=("--max-loras", "--max-lora-rank", "--lora-extra-vocab-size"),
        )
    if stage == "load":
        wrong = intended_card(facts, failure)
        if wrong is not None:
            return say(
                "wrong_device",
                0.72,
                f"The model was loaded on another card than the one that was chosen: {wrong}",
                ARITHMETIC,
                flags=(),
            )
        return say(
            "weights_dont_fit",
            0.88 if facts.engine.arguments_seen else 0.8,  # it may convert, or be the draft
            "The model's weights do not fit the card: memory ran out while they were loaded",
        )
    if stage == "kv" and "init_attention_backend" in "\n".join(failure.frames):
        return say(
            "kv_alloc_overcommit",
            0.75,
            "The KV cache was allocated first and left no room for the attention backend's own buffers",
            flags=("--mem-fraction-static",),
        )
    if stage == "kv":
        pinned = facts.argument("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
        why = (
            "the size was pinned by hand"
            if pinned
            else "less memory was free than the profile assumed"
        )
        return say(
            "kv_alloc_overcommit",
            0.85 if pinned else 0.7,
            f"The KV cache could not be allocated: {why}",
            flags=(
                "--kv-cache-memory-bytes",
                "--num-gpu-blocks-override",
                "--gpu-memory-utilization",
            ),
        )
    if stage == "compile":
        return say(
            "torch_compile",
            0.75,
            "Compiling or tuning kernels before serving ran out of GPU memory",
        )
    if stage == "sampler":
        return say(
            "sampler_warmup",
            0.8,
            "The sampler's warm-up with all sequences ran out of GPU memory",
            seqs=facts.number("--max-num-seqs"),
        )
    if stage == "capture":
        return say(
            "cuda_graph_capture",
            0.88,
            "Capturing CUDA graphs ran out of GPU memory: graphs come on top of the KV cache",
        )
    return _profiling(facts, failure, say, part)


def _is_pinned_pool(facts: Facts, failure: Failure, stage: Stage) -> bool:
    """Whether pinning failed: in code that keeps a part on the host, by a bare CUDA error.

    The caching allocator of the GPU would give sizes. V0 makes the swap space right after the cache.
    """
    old = facts.engine.engine == "vllm" and facts.is_v0 is True
    return (
        stage in ("kv", "load", "repack")
        and failure.oom is None
        and failure.match("cuda.oom_raw") is not None
        and (any(_HOST_HALF.match(frame) for frame in failure.frames) or (old and stage == "kv"))
    )


def _is_left_by_pinning(facts: Facts, failure: Failure) -> bool:
    """Whether a registration of host memory failed before, whose error CUDA keeps for the next call."""
    refused = facts.said("vllm.pin_refused")
    return (
        refused is not None
        and refused.order < failure.order
        and failure.match("cuda.oom_raw") is not None
    )


def _profiling(facts: Facts, failure: Failure, say: Say, part: Part | None) -> Finding:
    if facts.lora and part == "lora":
        return say(
            "lora_slots",
            0.75,
            "The profiling run with all adapter slots in use ran out of GPU memory",
        )
    if part == "encoder" or facts.multimodal:
        return say(
            "profile_mm_dummy",
            0.8 if part == "encoder" else 0.7,
            "The profiling run with the largest images or videos the limits allow ran out of GPU memory",
            multimodal=True,
        )
    if facts.lora and failure.oom and (failure.oom.outside_bytes or 0) > 2 * GIB:
        return say(
            "lora_slots",
            0.6,
            "Adapter slots and the profiling run together do not fit",
        )
    return say(
        "profile_activation_peak",
        0.85,
        "The profiling run with the largest batch the limits allow ran out of GPU memory",
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


RULES: Final[tuple[Rule, ...]] = (startup_allocation, capture_failed, cpu_cache)
