"""Where in a start, or in serving, a refused GPU allocation belongs.

Frames of the failing process or of the parent that relays it tell first. Where they are generic or
missing, the lines printed before it do, read as the release prints them:

vLLM: ``Loading weights took`` (all shards are in; repacking, adapter slots and the draft model
follow), ``Model loading took`` (the profiling run follows), ``Available KV cache memory`` and
``KV cache size`` (the cache is allocated next), the capture bar, ``Graph capturing finished`` (V1
then warms the sampler up). SGLang: ``Load weight end`` (the pools follow), ``Memory pool end``
(capture follows, or ``Load weight begin`` of the draft model).
"""

from __future__ import annotations

import re
from typing import Final

from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.frames import Stage, find_stage
from oomwatch.units import GIB, format_bytes

GPU_OOM: Final = (
    "torch.oom",
    "cuda.oom_raw",
    "cuda.oom_code",
    "torch.allocator_warning",
    "torch.stable_abi",
    "torch.mig_assert",
    "tvm.oom",
    "torch.cumem",
    "torch.memory_saver",
    "npu.oom",
    "xla.oom",
    "vllm.weights_oom",
    "llama.weights_failed",
    "llama.kv_failed",
    "llama.compute_failed",
)
"""Patterns of a GPU allocation that was refused."""
_STEP_DUMPS: Final = ("vllm.dump_stats", "vllm.dump_output", "vllm.dump_encoder")
"""What the core prints of the step that failed; warm-up and profiling have no scheduler."""
_ENGINE_LOOP: Final = re.compile(r"engine\.py:\d+ \w+Error\(['\"]")
"""V0's engine process prints what ended its loop as `repr`, what ended its start as text."""
_LOOP_DEATH: Final = re.compile(
    r"output_handler failed|Engine(?:Dead|Generate)Error\b|EngineCore encountered a fatal error"
)
_EXPLAINED: Final[dict[str, Stage]] = {
    "llama.weights_failed": "load",
    "llama.kv_failed": "kv",
    "llama.compute_failed": "profile",
    "vllm.weights_oom": "load",
}
"""Lines that name the stage after the refusal."""
CHOSEN_LINES: Final = 0.62
"""Most confidence where only lines tell the stage, and the failure came without a frame: somebody chose
the lines (``grep -i error``), and those that say that the server was ready may be among the rest."""
_FRAMES_SILENT: Final = 0.78
"""Most where the frames that came name no stage."""
_WHOLE_POOL: Final = 0.97
"""The allocator holds this share of weights and KV cache: the cache is allocated already."""
_QUANTIZED: Final = re.compile(
    r"(?i)(?:awq|gptq|nvfp4|mxfp[48]|fp8|int[48](?![0-9])|w[48]a(?:8|16)|gpt-oss|marlin|quantized|[-_][48]bit|bnb)"
)
"""Names of checkpoints that are stored quantized."""
_STORED: Final = re.compile(r"awq|gptq|marlin|compressed|modelopt|mxfp4|gguf|round|hqq|quark")
"""Methods that read a quantized checkpoint; fp8 and bitsandbytes may also convert on loading."""


def gpu_failure(facts: Facts) -> Failure | None:
    """The first refused GPU allocation, told by the failing process rather than by a relay."""
    hits = [f for f in facts.failures if f.match(*GPU_OOM) is not None]
    own = [f for f in hits if not f.relayed]
    return min(own or hits, key=lambda f: f.order, default=None)


def stage_of(facts: Facts, failure: Failure) -> Stage:
    """The stage a failure happened in: frames of it or of its relays, else the lines before it."""
    stage = find_stage(failure.frames, failure.paths)
    named = any(not frame.startswith("method:") for frame in failure.frames)
    if stage not in (None, "serving") and named:
        return _refined(facts, failure, stage)
    for identity, told in _EXPLAINED.items():
        if facts.said(identity) is not None:
            return told
    warmed = facts.said("tgi.method_failed")
    if warmed is not None and warmed.fields.get("method") == "Warmup":
        return "profile"
    # A relay or a sibling whose own frames end in the busy loop says nothing new; one in start-up
    # code does.
    for other in facts.failures:
        if other is failure or not (other.relayed or other.match(*GPU_OOM) is not None):
            continue
        by_other = find_stage(other.frames, other.paths)
        if by_other not in (None, "serving") and any(
            not f.startswith("method:") for f in other.frames
        ):
            return _refined(facts, failure, by_other)
    for other in facts.failures:
        # V0's worker says which of its methods failed, in a record of its own.
        told_by = find_stage(other.frames) if other.name == "WorkerException" else None
        if told_by not in (None, "serving"):
            return _refined(facts, failure, told_by)
    if stage not in (None, "serving"):
        return _refined(facts, failure, stage)
    if stage == "serving" or facts.served or (facts.ready and not facts.run_failed_to_start):
        return "serving"
    if not is_placed_by_lines(facts, failure) and shows_serving(facts):
        return "serving"
    return _by_log(facts, failure)


def shows_serving(facts: Facts) -> bool:
    """Whether the engine served: by what it printed, by the frames of what failed, or by who says so."""
    return (
        facts.served
        or facts.said(*_STEP_DUMPS) is not None
        or any(
            find_stage(failure.frames, failure.paths) == "serving"
            or "run_busy_loop(" in failure.code
            or _ENGINE_LOOP.match(f"{failure.line.origin} {failure.line.text}") is not None
            for failure in facts.failures
        )
        or any(_is_loop_death(messenger) for messenger in facts.messengers)
    )


def _is_loop_death(messenger: Failure | LogEvent) -> bool:
    """Whether a server says that an engine died which had started: while it starts, words differ."""
    return _LOOP_DEATH.search(messenger.line.text) is not None


def amount_of(failure: Failure) -> str:
    """The sizes of the message, for a sentence."""
    oom = failure.oom
    if oom is None:
        return "the message gives no sizes"
    parts = [f"{format_bytes(oom.tried_bytes)} asked"]
    if oom.free_bytes is not None:
        parts.append(f"{format_bytes(oom.free_bytes)} of {format_bytes(oom.total_bytes)} free")
    return ", ".join(parts)


def is_placeless(facts: Facts, failure: Failure) -> bool:
    """Whether nothing says if the engine started or served: no telling frame, and no line of a start."""
    if shows_serving(facts) or facts.ready or facts.run_failed_to_start:
        return False
    if any("EngineCoreProc(" in f.code for f in facts.failures):
        return False  # cut in the core's constructor
    if any(find_stage(f.frames, f.paths) is not None for f in (failure, *facts.failures)):
        return False
    if facts.engine.command and _by_size(failure) != "load":
        return False  # a size that no weight has
    return not is_placed_by_lines(facts, failure)


def is_placed(facts: Facts, failure: Failure) -> bool:
    """Whether a frame or a line of the start tells the stage, so that it is no guess."""
    if any(find_stage(f.frames, f.paths) is not None for f in (failure, *facts.failures)):
        return True
    return is_placed_by_lines(facts, failure)


def is_placed_by_lines(facts: Facts, failure: Failure) -> bool:
    """Whether the input holds lines of the start. LMDeploy's name in the failing line is none."""
    events = facts.run.events if facts.run else ()
    return any(
        event.pattern.kind in ("stage", "capacity")
        or (event.pattern.kind == "identity" and _precedes(event, failure))
        for event in events
    )


def _refined(facts: Facts, failure: Failure, stage: Stage | None) -> Stage:
    """What the caller's frame leaves open, by the lines before: it spans more than one step.

    ``load_model`` also repacks, makes adapter slots and loads the draft model;
    ``initialize_from_config`` allocates the cache, captures and warms up.
    """
    if not failure.frames or not _is_bare(failure.frames[-1]):
        return stage or "load"
    if any(frame.endswith(":init_attention_backend") for frame in failure.frames):
        return stage or "kv"  # a step of its own, between the pool and the capture
    told = _by_log(facts, failure)
    finer = {"load": ("repack", "draft", "slots"), "kv": ("capture", "sampler", "draft")}
    if told == "load" and any(f.startswith("spec_decode_worker.py") for f in failure.frames):
        return told  # V0's worker of both models, and the first is not in yet
    return told if told in finer.get(stage or "", ()) else stage or "load"


def _is_bare(frame: str) -> bool:
    """Whether the deepest frame is a generic call, so that the traceback's bottom is missing."""
    return frame.startswith("method:") or frame.rpartition(":")[2] in (
        "_call_impl",
        "_wrapped_call_impl",
        "forward",
        "collective_rpc",
        "run_method",
        "_init_executor",
        "__init__",
    )


def _by_log(facts: Facts, failure: Failure) -> Stage:
    """The stage by the lines before the failure."""
    run = facts.run
    if run is None or not is_placed(facts, failure):
        return _by_size(failure)
    if run.stage == "init" and failure.oom is None and failure.match("cuda.oom_raw") is not None:
        return "init"  # the context itself: the allocator would give sizes
    if run.stage in ("init", "load"):
        return "load"
    before = [e for e in run.events if _precedes(e, failure)]
    if facts.engine.engine == "sglang":
        return _sglang_stage(before, run.stage, lora=facts.lora)
    if run.stage == "loaded":
        return _after_shards(facts, failure, before)
    if run.stage == "profile":
        return "profile"
    if run.stage == "kv":
        if _holds_whole_pool(facts, failure):
            # Capture says so first; what follows without it is V1's warm-up.
            graphs = failure.oom is not None and failure.oom.private_bytes
            return "capture" if graphs or facts.is_v0 else "sampler"
        return "kv"
    return "capture" if run.stage == "capture" else "sampler"


def _by_size(failure: Failure) -> Stage:
    """The likeliest stage where nothing tells it: graphs have private pools, activations come in GiB."""
    oom = failure.oom
    if oom is not None and oom.private_bytes:
        return "capture"
    if oom is not None and (oom.tried_bytes or 0) >= 1.5 * GIB:
        return "profile"
    return "load"


def most_sure(facts: Facts, failure: Failure) -> float:
    """The most confidence that what tells the stage allows."""
    items = (failure, *facts.failures)
    if any(find_stage(item.frames, item.paths) is not None for item in items):
        return 1.0
    if facts.said(*_EXPLAINED) is not None or facts.engine.engine not in ("vllm", "sglang"):
        return 1.0  # the line says it; others write no tracebacks
    return _FRAMES_SILENT if any(item.frames for item in items) else CHOSEN_LINES


def _precedes(event: LogEvent, failure: Failure) -> bool:
    return event.line.source != failure.line.source or event.order < failure.order


def _after_shards(facts: Facts, failure: Failure, before: list[LogEvent]) -> Stage:
    ids = [event.pattern.id for event in before]
    weighed = {
        e.line.process for e in before if e.pattern.id in ("vllm.weights_v0", "vllm.weights_v1")
    }
    who = failure.line.process
    if weighed and (who in weighed or who is None or None in weighed):
        return "profile"
    if weighed:
        return "load"  # the others are done, this rank is not
    if "vllm.drafter" in ids:
        return "draft"
    if "vllm.shards_loaded" not in ids:
        return "load"
    if facts.lora and "vllm.lora_slots_begin" in ids:
        return "slots"
    if is_quantized(facts) or not (facts.lora or facts.speculative):
        return "repack"
    return "slots" if facts.lora else "draft"


def is_quantized(facts: Facts) -> bool:
    """Whether the checkpoint's weights are stored quantized."""
    config = facts.engine.model_config or {}
    banner = facts.run.config.get("quantization", "") if facts.run else ""
    method = f"{facts.argument('--quantization') or ''} {banner}"
    return bool(
        config.get("quantization_config")
        or _QUANTIZED.search(facts.names)
        or _STORED.search(method)
    )


def _sglang_stage(before: list[LogEvent], reached: str, *, lora: bool) -> Stage:
    place: dict[str, int] = {event.pattern.id: event.order for event in before}
    pool = max(place.get("sglang.kv_allocated", 0), place.get("sglang.pool_end", 0))
    if pool and place.get("sglang.load_begin", 0) > pool:
        return "draft"
    if reached == "captured":
        return "serving"
    if reached == "loaded" and lora:
        return "slots"
    if reached == "capture" or "sglang.pool_end" in place:
        return "capture"
    return "kv"


def _holds_whole_pool(facts: Facts, failure: Failure) -> bool:
    """Whether the allocator already holds weights and the whole KV cache, by its own figures."""
    oom, engine = failure.oom, facts.engine
    if oom is None or oom.allocated_bytes is None:
        return False
    if oom.private_bytes:
        return True  # only graph capture has private pools
    weights, pool = engine.weights_bytes, engine.kv_bytes
    if not weights or not pool or pool < GIB / 4:
        return False
    return oom.allocated_bytes >= _WHOLE_POOL * (weights + pool)
