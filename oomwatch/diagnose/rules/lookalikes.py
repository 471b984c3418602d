"""Failures that sound like memory and are not: each names itself, and ends the search if it came first."""

from __future__ import annotations

import re
from typing import Any, Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_failure
from oomwatch.diagnose.frames import find_stage, telling_frame
from oomwatch.diagnose.points import points_of
from oomwatch.diagnose.rules.arguments import refused_arguments
from oomwatch.diagnose.rules.disks import refused_by_disk
from oomwatch.diagnose.rules.downloads import refused_download
from oomwatch.diagnose.rules.findings import (
    COUNTERS,
    NAMED_CHECK,
    REQUEST,
    STAGE,
    Rule,
    found,
)
from oomwatch.diagnose.rules.hangs import SAYS as SAYS_HANGS
from oomwatch.diagnose.rules.hangs import ring_evidence, waits_for_transfer
from oomwatch.engines.accelerators import ACCELERATORS, accelerator_of
from oomwatch.records import EngineFacts, Finding

_SAYS: Final[dict[str, str]] = {
    "illegal_memory_access": "{kernel} accessed memory it may not: a bug in a kernel or faulty hardware, not a lack of memory.",
    "rpc_timeout_hang": SAYS_HANGS,
    "gpu_hw_fault": "The GPU failed (launch failure or uncorrectable error): hardware, not memory size.",
    "engine_assertion": "The engine failed on one of its own checks or an index: a bug; load may have triggered it, memory did not run out.",
    "nccl_watchdog": "A collective operation between ranks timed out: one rank stopped taking part; look for the rank that died or hung first.",
    "request_too_long": "A request was longer than the model length allows and was refused (HTTP 400); the server is well.",
    "kv_transfer_fail": "A transfer of KV blocks between servers failed: the network or the connector, not memory.",
    "lora_slot_queue": "Requests wait for a LoRA slot, not for memory.",
    "self_check_assert": "The engine's own accounting check failed while it was idle: a bookkeeping bug, memory did not run out.",
    "config_error": "The engine refused its configuration before memory mattered.",
    "tokenizer_crash": "The tokenizer was used by two threads at once and refused; memory is not involved.",
    "no_kernel_image": "This build has no kernels for this GPU's architecture.",
    "kernel_image_invalid": "A kernel image does not fit this GPU or driver.",
    "kernel_unsupported_shape": "The attention kernel does not support this model's shape; the memory advice around it is generic.",
    "custom_allreduce_ipc": "The custom all-reduce could not share its buffers between the GPUs.",
    "triton_shared_memory": "A Triton kernel needs more on-chip shared memory than this GPU has (KiB, not GiB).",
    "fixed_workspace_overflow": "A library's fixed-size work buffer is too small for this batch; the card itself is not full.",
    "driver_mismatch": "The NVIDIA driver does not fit this build, or is not up.",
    "jit_build_failed": "Building a kernel at start failed; memory figures printed before it mean nothing.",
    "port_in_use": "The port or socket is in use already.",
    "gated_model": "The model hub refused access: log in, or accept the model's terms.",
    "mig_uuid_parse": "A MIG device name was read as a number by this release.",
    "nccl_unsupported": "NCCL uses an operation that these GPUs or this container do not support.",
    "fd_limit": "The process ran out of file descriptors, not of memory.",
}
_REQUEST_LEVEL: Final = frozenset({"request_too_long", "lora_slot_queue", "tokenizer_crash"})
_PASSING: Final = _REQUEST_LEVEL | {"kv_transfer_fail", "fd_limit"}
"""What a server may suffer and go on; of other failures that it outlived it had a way out."""
_ENGINE_FRAMES: Final = re.compile(
    r":(?:run_busy_loop|_process_engine_step|engine_step|run_engine_loop|worker_busy_loop|execute_model|event_loop_\w+|worker_main|run_engine_core|step|forward|schedule|run_scheduler_process|exposed_step|forward_step|forward_thread_func_?|forward_\w*batch\w*|process_batch_result\w*|get_n\w+_batch\w*|_execute_worker_rpc|generate_token)\b"
)
_STEP_LOOP: Final = re.compile(
    r":(?:run_busy_loop|_process_engine_step|engine_step|run_engine_loop|event_loop_\w+|exposed_step|forward_step)\b"
)
"""The loop of a core or scheduler that has started; a worker's loop also runs the start."""
_ASYNCHRONOUS: Final = ("cuda.illegal_access", "cuda.hw")
_LIBRARY_FAILED: Final = re.compile(
    r"CU(?:BLAS|DNN|SPARSE)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"
)
"""What a library's next call says when a kernel before it broke: the rank that names it decides."""
_PEER: Final = re.compile(
    r"(?:custom_all_reduce|quick_all_reduce|pynccl_allocator|symm_mem)\w*\.py:|:cudaIpc\w+"
)
_REFUSED: Final = re.compile(
    r"invalid (?:argument|device|resource handle)|peer access is not supported|mapping of buffer object failed"
)
_REQUEST_FRAMES: Final = re.compile(
    r"(?:serving\w*|\w*tool_parsers?|\w*reasoning\w*|protocol|httptools_impl|h11_impl|routing|responses|json/decoder|json/__init__|chat_utils)\.py:"
)
"""Frames of one request's handling: what fails there fails that request."""
_CONFIG_NAMES: Final = frozenset(
    {
        "ValueError",
        "KeyError",
        "TypeError",
        "AttributeError",
        "ImportError",
        "ModuleNotFoundError",
        "OSError",
        "NotImplementedError",
        "FileNotFoundError",
        "ValidationError",
        "PermissionError",
        "NotADirectoryError",
        "SafetensorError",
        "HFValidationError",
        "LocalEntryNotFoundError",
        "RepositoryNotFoundError",
        "EntryNotFoundError",
    }
)
_NOT_FATAL: Final = frozenset(
    {
        "KeyboardInterrupt",
        "SystemExit",
        "CancelledError",
        "asyncio.exceptions.CancelledError",
        "EngineDeadError",
        "EOFError",
        "BrokenPipeError",
        "ConnectionResetError",
        "WorkerException",
        "TimeoutError",
        "RayTaskError",
        "RayActorError",
        "ActorDiedError",
        "",
    }
)


def named(facts: Facts) -> Finding | None:
    """The earliest failure is one that names itself and is not about memory."""
    hits = [
        (f, p, fields)
        for f in facts.failures
        for p, fields in f.matches
        if p.kind == "failure"
        and p.cause
        and p.id != "sglang.health"  # one alone says little, see hangs.missed_checks
        # A server that goes on has refused a request's value, not its own configuration.
        and not (p.cause == "config_error" and facts.served and not facts.messengers)
        and not (not f.frames and _went_on(facts, f))
        and not (p.cause not in _PASSING and facts.outlived(f))
    ]
    if not hits:
        return None
    fatal = [h for h in hits if h[1].cause not in _REQUEST_LEVEL and not facts.outlived(h[0])]
    sure = [h for h in fatal if h[1].cause != "config_error"]
    failure, pattern, fields = min(sure or fatal or hits, key=lambda h: h[0].order)
    cause = str(pattern.cause)
    if cause == "rpc_timeout_hang" and waits_for_transfer(facts):
        cause = "kv_transfer_fail"
    request = not fatal
    disk = refused_by_disk(failure) or ("", {})
    card = accelerator_of(pattern.id, failure.message)
    return found(
        facts,
        cause,
        0.9 if cause not in ("config_error", "rpc_timeout_hang") else 0.82,
        disk[0]
        or _sentence(cause, failure, facts.engine).replace("{kernel}", ACCELERATORS[card].kernel),
        [*cite_failure(failure), *(ring_evidence(facts) if cause == "rpc_timeout_hang" else ())],
        strength=REQUEST if request else NAMED_CHECK,
        order=None if request else failure.order,
        values={
            **_values(fields),
            **disk[1],
            "accelerator": card if cause == "illegal_memory_access" else None,
            "no_repository": refused_download(failure, None) is not None,
            "frame": telling_frame(failure.frames),
            "stage": find_stage(failure.frames),
        },
        unseen=(
            "What the hung worker was doing: `py-spy dump --pid PID`, and the kernel log for Xid lines.",
        )
        if cause in ("rpc_timeout_hang", "nccl_watchdog") and not facts.has_kernel
        else (),
    )


def _values(fields: Any) -> dict[str, Any]:
    return {
        "max_model_len": fields.get("max_model_tokens"),
        "prompt_tokens": fields.get("prompt_tokens"),
        "unknown_arguments": fields.get("unknown"),
        "flag": fields.get("flag"),
        "refused_type": fields.get("refused_type"),
        "only_types": fields.get("only_types"),
        "reason": fields.get("why"),
    }


def _sentence(cause: str, failure: Failure, engine: EngineFacts) -> str:
    if cause == "bad_arguments":
        return refused_arguments(failure.message, engine.engine)
    text = _SAYS.get(cause, "The engine failed for another reason than memory.")
    if failure.match("kernel.dtype") is not None:
        return "A kernel does not support this data type on this card; the memory advice around it is generic."
    if cause == "gated_model":
        return refused_download(failure, engine.model) or text
    if cause == "config_error":
        first = next((part.strip() for part in failure.message.split("\n") if part.strip()), "")
        if first:
            return f"{text.removesuffix('.')}: {first[:220]}"
    return text


def peer_access(facts: Facts) -> Finding | None:
    """CUDA refused to share a buffer between processes; only the frames say whose it was."""
    for failure in facts.failures:
        if _PEER.search("\n".join(failure.frames)) and _REFUSED.search(failure.message):
            return found(
                facts,
                "custom_allreduce_ipc",
                0.85,
                _SAYS["custom_allreduce_ipc"],
                cite_failure(failure),
                strength=NAMED_CHECK,
                order=failure.order,
                values={"frame": telling_frame(failure.frames)},
            )
    return None


def stuck_collective(facts: Facts) -> Finding | None:
    """The watchdog saw a collective fail or hang, and printed no reason of its own."""
    event = facts.said("nccl.watchdog_noticed", "nccl.heartbeat")
    if event is None or facts.failures:
        return None
    return found(
        facts,
        "nccl_watchdog",
        0.6,
        _SAYS["nccl_watchdog"],
        [cite(event.line)],
        strength=STAGE,
        order=event.order,
        values={"stage": "serving" if facts.served else "init"},
        unseen=(
            "What the other ranks printed before that line, and the kernel log for Xid lines.",
        ),
    )


def adapter_queue(facts: Facts) -> Finding | None:
    """Requests wait at an empty KV cache because every adapter slot is taken."""
    if not facts.lora:
        return None
    points = [p for p in points_of(facts) if p.kv is not None]
    tail = points[-3:]
    waiting = [
        p for p in tail if (p.waiting or 0) > 0 and (p.kv or 0) < 0.3 and (p.running or 0) > 0
    ]
    if not waiting or points[-1] not in waiting:
        return None
    slots = facts.number("--max-loras") or 1
    seqs = facts.number("--max-num-seqs")
    last = waiting[-1]
    if seqs is not None and (last.running or 0) >= seqs:
        return None
    return found(
        facts,
        "lora_slot_queue",
        0.75,
        f"{last.waiting:.0f} requests wait although the KV cache is at {last.kv:.0%}: each adapter needs one of {slots:.0f} LoRA slots.",
        [last.evidence],
        strength=COUNTERS,
        values={
            "waiting": last.waiting,
            "running": last.running,
            "kv_usage_ratio": last.kv,
            "max_loras": slots,
        },
    )


def _went_on(facts: Facts, failure: Failure) -> bool:
    """Whether the process that logged this, without an exception, got further in its start."""
    who = (failure.line.process, failure.line.pid)
    return facts.run is not None and any(
        event.order > failure.order
        and event.pattern.kind in ("stage", "capacity")
        and who[1] is not None
        and (event.line.process, event.line.pid) == who
        for event in facts.run.events
    )


def unnamed(facts: Facts) -> Finding | None:
    """An exception that no pattern knows ended the engine."""
    own = [
        f
        for f in facts.failures
        if not f.kinds - {"hint", "detail", "messenger", "lifecycle"}
        and f.oom is None
        and _base(f.name) not in _NOT_FATAL
        and not f.relayed
        and not _base(f.name).startswith("nccl")
        and f.match("nccl.cuda_error") is None  # NCCL's own line decides, see nccl.full_card
        and not (_LIBRARY_FAILED.search(f.message) and facts.failing(*_ASYNCHRONOUS))
    ]
    if not own:
        own = [m for m in facts.messengers if isinstance(m, Failure) and m.relayed and not m.oom]
    if not own:
        return None
    engine = [
        f
        for f in own
        if _ENGINE_FRAMES.search("\n".join(f.frames))
        or "fatal error" in f.header
        or "hit an exception" in f.header
    ]
    chosen = min(engine or own, key=lambda f: f.order)
    name = _base(chosen.name)
    first = next((part.strip() for part in chosen.message.split("\n") if part.strip()), "")
    detail = f"{chosen.name}: {first}"[:220]
    values = {"frame": telling_frame(chosen.frames), "stage": find_stage(chosen.frames)}
    stepping = _STEP_LOOP.search("\n".join(chosen.frames)) is not None
    if facts.served or stepping or (facts.ready and not facts.run_failed_to_start):
        if not engine:
            own = [f for f in own if not _REQUEST_FRAMES.search("\n".join(f.frames))]
        if not engine and (not own or not facts.messengers):
            return None
        chosen = min(engine or own, key=lambda f: f.order)
        return found(
            facts,
            "engine_assertion",
            0.75,
            f"The engine failed on an error of its own while serving, memory did not run out: {detail}",
            cite_failure(chosen),
            strength=STAGE,
            order=chosen.order,
            values=values,
        )
    if chosen.name and name in _CONFIG_NAMES:
        return found(
            facts,
            "config_error",
            0.65,
            f"The start was refused for another reason than memory: {detail}",
            cite_failure(chosen),
            strength=STAGE,
            order=chosen.order,
            values=values,
        )
    return found(
        facts,
        "not_oom_other",
        0.55,
        f"The start failed with an error that is not about memory: {detail}",
        cite_failure(chosen),
        strength=STAGE,
        order=chosen.order,
        values=values,
    )


def _base(name: str) -> str:
    return name.rpartition(".")[2]


RULES: Final[tuple[Rule, ...]] = (
    named,
    peer_access,
    stuck_collective,
    adapter_queue,
    unnamed,
)
