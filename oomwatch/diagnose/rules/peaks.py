"""GPU memory ran out while serving: which peak it was, by arithmetic first, then by frame.

Order (taxonomy of run-time failures, step 6): other processes of the listing, memory outside the
allocator, fragmentation, and only then a peak, named by the deepest telling frame. Whatever the
peak, the KV pool is not too small: every one of these wants less, not more.
"""

from __future__ import annotations

import re
from typing import Any, Final

from oomwatch.diagnose.events import Failure
from oomwatch.diagnose.facts import Facts, cite, cite_arguments, cite_failure
from oomwatch.diagnose.frames import Part, find_part, telling_frame
from oomwatch.diagnose.rules.findings import ARITHMETIC, NAMED_CHECK, STAGE, Rule, found
from oomwatch.diagnose.rules.placing import amount_of, gpu_failure, stage_of
from oomwatch.diagnose.rules.startup_checks import oom_values
from oomwatch.diagnose.rules.tenants import foreign_bytes
from oomwatch.engines.versions import release
from oomwatch.records import Evidence, Finding
from oomwatch.units import GIB, format_bytes, format_count

_OUTSIDE: Final = 3 * GIB
"""More than this outside PyTorch's allocator is not context and NCCL any more (taxonomy, 6b)."""
_WORKSPACE: Final = 8 * GIB
"""One allocation of this size follows the context length, not the batch."""
_FEW: Final = 16
_MANY: Final = 64
_SAMPLED: Final = 256
"""Requests whose sampled rows, sorted, stay under a GiB."""
_LONG_STEP: Final = 1024
"""Tokens of one step, or prompt tokens a second, that are prompts rather than decoding."""
_TELLING: Final = ("logprobs", "encoder", "workspace", "speculation", "lora")
"""Parts that are known to need memory which the profile does not measure."""
_SPREAD_RANK: Final = re.compile(r"(?:EP|DP)[1-9]")
_EXPERT_RANK: Final = re.compile(r"_EP\d")
"""A rank of expert parallelism by its own name, as vLLM calls its workers and SGLang its ranks."""
_SPREAD_FRAME: Final = re.compile(r"deepep|deep_ep|all2all|token_dispatcher")
_LIBRARY: Final = re.compile(r"CUBLAS|CUDNN|cublas|cudnn|Triton Error|NPUWorkspaceAllocator")


def sleep_wake(facts: Facts) -> Finding | None:
    """Waking up found the memory that sleep released taken."""
    failure = gpu_failure(facts)
    if failure is None or not (
        stage_of(facts, failure) == "wake"
        or (failure.match("torch.cumem") is not None and facts.said("vllm.sleep_freed"))
        or _is_resumed(facts, failure)
    ):
        return None
    return found(
        facts,
        "sleep_wake_map_fail",
        0.92,
        "Waking the engine up failed: the memory that sleep had released is in use by something else.",
        [
            *cite_failure(failure),
            *([cite(e.line)] if (e := facts.said("vllm.sleep_freed")) else []),
        ],
        strength=NAMED_CHECK,
        order=failure.order,
        values={**oom_values(failure), "stage": "wake", "frame": telling_frame(failure.frames)},
    )


def _is_resumed(facts: Facts, failure: Failure) -> bool:
    """Whether SGLang's saver of memory could not map again what it had released."""
    fields = failure.match("torch.memory_saver")
    return fields is not None and (
        facts.ready
        or fields.get("function") == "resume"
        or facts.said("sglang.resume_waits") is not None
    )


def runtime_allocation(facts: Facts) -> Finding | None:
    """A GPU allocation was refused while the engine served."""
    failure = gpu_failure(facts)
    if (
        failure is None
        or stage_of(facts, failure) != "serving"
        or failure.match("torch.memory_saver") is not None
    ):
        return None
    part = _part(facts, failure)
    load = _load_values(facts, failure)
    values: dict[str, Any] = {
        **oom_values(failure),
        **load,
        "stage": "serving",
        "frame": telling_frame(failure.frames),
        "multimodal": facts.multimodal or None,
        "speculative": facts.speculative or None,
        "lora": facts.lora or None,
        "moe": facts.moe or None,
    }
    evidence = [*cite_failure(failure), *_load_evidence(facts, failure)]
    amount = amount_of(failure)
    by_numbers = _by_arithmetic(facts, failure, part)
    if by_numbers is not None:
        cause, confidence, sentence, extra = by_numbers
        return found(
            facts,
            cause,
            confidence,
            f"{sentence} ({amount}).",
            [*evidence, *_argument_evidence(facts, cause)],
            strength=ARITHMETIC,
            order=failure.order,
            values={**values, **extra},
        )
    cause, confidence, sentence = _by_part(facts, failure, part, values)
    return found(
        facts,
        cause,
        confidence,
        f"{sentence} ({amount}).",
        [*evidence, *_argument_evidence(facts, cause)],
        strength=STAGE,
        order=failure.order,
        values=values,
        unseen=()
        if failure.frames or facts.said("vllm.dump_output")
        else ("Where in the model it happened: the traceback is not in the log.",),
    )


_Named = tuple[str, float, str]


def _by_arithmetic(
    facts: Facts, failure: Failure, part: Part | None
) -> tuple[str, float, str, dict[str, Any]] | None:
    oom = failure.oom
    if oom is None:
        return None
    foreign, pids = foreign_bytes(facts, failure)
    if (
        foreign
        and oom.total_bytes
        and foreign > max(0.1 * oom.total_bytes, (oom.own_bytes or 0) * 0.25)
    ):
        return (
            "colocated_tenant",
            0.88,
            f"Other processes hold {format_bytes(foreign)} of the card, this one {format_bytes(oom.own_bytes)}: the card is shared",
            {"other_process_bytes": foreign, "other_pids": list(pids)},
        )
    outside = oom.outside_bytes
    # Dispatch buffers of expert parallelism take 18 GiB where nothing is wrong. A frame that names a
    # part outweighs the rest, unless what it asked for is small beside what lies outside.
    told = part in _TELLING and (oom.tried_bytes or 0) > 0.1 * (outside or 0)
    if (
        outside is not None
        and outside > _OUTSIDE
        and not _spreads_experts(facts, failure)
        and not told
    ):
        if facts.lora:
            return (
                "lora_activation_peak",
                0.72,
                f"{format_bytes(outside)} of the process lie outside PyTorch's allocator and adapters are on: a request with an"
                " adapter needs more than the profile measured",
                {"outside_bytes": outside},
            )
        return (
            "engine_buffers_unprofiled",
            _buffers_sureness(outside, part),
            f"{format_bytes(outside)} of the process lie outside PyTorch's allocator: buffers that the start-up profile did not"
            " see took the headroom",
            {"outside_bytes": outside},
        )
    reserved = oom.reserved_bytes or 0
    expandable = "expandable_segments:True" in " ".join(facts.engine.env.values())
    if (
        part in (None, "layer", "sampler", "logits")
        and not expandable
        and oom.tried_bytes
        and reserved >= 2 * oom.tried_bytes
        and reserved >= max(1.5 * GIB, 0.06 * (oom.total_bytes or 0))
        and oom.free_bytes is not None
        and oom.free_bytes < oom.tried_bytes
    ):
        return (
            "fragmentation",
            0.7,
            f"{format_bytes(reserved)} are reserved by PyTorch but unallocated, far more than was asked: the free memory is in"
            " pieces too small to use",
            {},
        )
    return None


def _buffers_sureness(outside: int, part: Part | None) -> float:
    """NCCL over many ranks and graphs lie outside too, so a little over the usual proves little."""
    if part in _TELLING:
        return 0.6  # the frame says otherwise
    return 0.76 if outside >= 2 * _OUTSIDE else 0.64


def _part(facts: Facts, failure: Failure) -> Part | None:
    part = find_part(failure.frames, failure.paths)
    if part in (None, "layer"):
        # The failing process may be silent while a sibling of the same moment tells the place.
        for other in facts.failures:
            if other.oom is not None and not other.relayed and other is not failure:
                told = find_part(other.frames, other.paths)
                if told not in (None, "layer"):
                    return told
    return part


def _by_part(facts: Facts, failure: Failure, part: Part | None, values: dict[str, Any]) -> _Named:
    oom = failure.oom
    tried = (oom.tried_bytes if oom else None) or 0
    named: dict[Part, _Named] = {
        "logprobs": (
            "prompt_logprobs_peak",
            0.9,
            "A request asked for log-probabilities of its prompt: one row of the vocabulary for every prompt token did not fit",
        ),
        "encoder": (
            "mm_encoder_peak",
            0.88,
            "Encoding images or video of one step needed more memory than the profile measured",
        ),
        "lora": (
            "lora_activation_peak",
            0.82,
            "A request that uses an adapter needed more activation memory than was left",
        ),
        "speculation": (
            "spec_decode_underprofiled",
            0.85,
            "Scoring the draft tokens of many requests needed more memory than the profile, made with one draft token, had left",
        ),
        "workspace": (
            "attn_workspace_peak",
            0.85,
            "An attention workspace that grows with the context did not fit",
        ),
        "moe": (
            "moe_dispatch_peak",
            0.8,
            "The tokens sent to one rank's experts in one step needed more memory than was left",
        ),
    }
    if part in named and not (part == "moe" and not _spreads_experts(facts, failure)):
        cause, confidence, sentence = named[part]
        small = oom is not None and tried < 0.1 * (oom.outside_bytes or 0)
        return cause, min(confidence, 0.65) if small and part != "moe" else confidence, sentence
    if part in ("logits", "sampler") and tried >= GIB and (values.get("running") or 0) <= _SAMPLED:
        # Sampled rows alone, a few hundred, stay under that at any vocabulary.
        return (*named["logprobs"][:1], 0.72, named["logprobs"][2])
    if oom is None and _LIBRARY.search(failure.message):
        return (
            "engine_buffers_unprofiled",
            0.65,
            "A library outside PyTorch's allocator (cuBLAS, cuDNN, Triton, an NPU workspace) found no memory while serving: the start-up profile left too little beside the KV cache",
        )
    if facts.engine.engine == "lmdeploy" or (facts.engine.engine is None and not failure.frames):
        return (
            "concurrency_burst_peak",
            0.65,
            "A burst of concurrent requests needed more memory than the KV share left",
        )
    event = facts.said("vllm.request_params")
    if (
        part in (None, "layer", "sampler")
        and event
        and event.fields.get("prompt_logprobs_count") is not None
        and tried >= GIB
    ):
        return (
            "prompt_logprobs_peak",
            0.75,
            "Requests asked for log-probabilities of their prompts; one large allocation for all prompt tokens did not fit",
        )
    if facts.said("vllm.dump_encoder") and facts.multimodal:
        return (
            "mm_encoder_peak",
            0.75,
            "A step with many images or videos needed more memory than the profile measured",
        )
    if tried >= _WORKSPACE and part != "moe":
        return (
            "attn_workspace_peak",
            0.7,
            f"One allocation of {format_bytes(tried)} follows the length of the context, not the batch",
        )
    running = values.get("running")
    if (
        facts.moe
        and facts.argument("--enable-expert-parallel", "--ep-size", "--enable-ep-moe")
        and (running or 0) > 128
    ):
        return (
            "moe_dispatch_peak",
            0.7,
            f"With {format_count(running)} requests running, the tokens that fall to one rank's experts vary; this rank's share did not fit",
        )
    if facts.speculative and _profiles_one_draft_token(facts):
        return (
            "spec_decode_underprofiled",
            0.65,
            "Speculative decoding is on; this release profiles with one draft token and leaves too little for scoring several",
        )
    if (
        facts.multimodal
        and (values.get("kv_usage_ratio") or 0) < 0.2
        and (running or 0) <= _FEW
        and _ascend_or_blind(failure)
    ):
        return (
            "mm_encoder_peak",
            0.6,
            "A multimodal request at a nearly empty KV cache needed more memory than the profile measured",
        )
    if facts.mla and _mla_workspace_unbounded(facts) and tried >= GIB and (running or 0) <= _FEW:
        return (
            "attn_workspace_peak",
            0.7,
            "The prefill workspace of latent attention grows with the context in this release",
        )
    if _many_rows(facts, failure, part, values):
        return (
            "concurrency_burst_peak",
            0.7,
            f"A decode step of {format_count(running)} requests needed more memory than was left: it follows the number of requests, not the length of a prompt",
        )
    return _activation(facts, failure, values)


def _many_rows(facts: Facts, failure: Failure, part: Part | None, values: dict[str, Any]) -> bool:
    """Whether the failing step decoded many requests, rather than a long prompt."""
    running = values.get("running") or 0
    if running <= _MANY:
        return False
    scheduled = values.get("scheduled_tokens")
    if scheduled is not None:
        return bool(scheduled <= 2 * running)
    load = facts.load_before(failure.line)
    if load is not None and load.line.text.startswith("Decode batch"):
        return True
    return part in ("sampler", "logits")


def _spreads_experts(facts: Facts, failure: Failure) -> bool:
    """Whether tokens travel to the experts of other ranks, so that one rank may get many."""
    who = f"{failure.line.process or ''} {failure.line.rank or ''}"
    if "EP" in who and _EXPERT_RANK.search(who):
        return True
    return (facts.moe or find_part(failure.frames, failure.paths) == "moe") and bool(
        facts.argument(
            "--enable-expert-parallel", "--ep-size", "--enable-ep-moe", "--all2all-backend"
        )
        or _SPREAD_RANK.search(who)
        or _SPREAD_FRAME.search("\n".join((*failure.frames, *failure.paths)))
    )


def _activation(facts: Facts, failure: Failure, values: dict[str, Any]) -> _Named:
    confidence = 0.7 if failure.frames else 0.6
    if _is_long_prefill(facts, failure, values):
        confidence += 0.1
    if failure.oom is None or failure.oom.free_bytes is None:
        confidence -= 0.1  # a tenant or fragmentation would show in the figures
    return (
        "prefill_activation_peak",
        confidence,
        "The activations of one step, a long prefill, needed more memory than the start-up profile had left beside the KV cache",
    )


def _is_long_prefill(facts: Facts, failure: Failure, values: dict[str, Any]) -> bool:
    """Whether the lines just before show that a long prompt was being worked on."""
    scheduled = values.get("scheduled_tokens")
    if scheduled is not None:
        return bool(scheduled >= _LONG_STEP)
    load = facts.load_before(failure.line)
    return load is not None and (
        load.line.text.startswith("Prefill batch") or (load.prompt_rate or 0) >= _LONG_STEP
    )


def _profiles_one_draft_token(facts: Facts) -> bool:
    version = release(facts.engine.version)
    return facts.engine.engine == "vllm" and (
        facts.is_v0 is True or (facts.is_v0 is None and version is not None and version < (0, 9, 0))
    )


def _mla_workspace_unbounded(facts: Facts) -> bool:
    version = release(facts.engine.version)
    return facts.engine.engine == "vllm" and version is not None and version < (0, 11, 0)


def _ascend_or_blind(failure: Failure) -> bool:
    return failure.relayed or find_part(failure.frames, failure.paths) is None


def _load_values(facts: Facts, failure: Failure) -> dict[str, Any]:
    dump = facts.said("vllm.dump_stats")
    load = facts.load_before(failure.line)
    running = dump.fields.get("running_count") if dump else load.running if load else None
    usage = dump.fields.get("kv_ratio") if dump else load.kv_usage_ratio if load else None
    output = facts.said("vllm.dump_output")
    return {
        "running": running,
        "waiting": dump.fields.get("waiting_count") if dump else load.waiting if load else None,
        "kv_usage_ratio": usage,
        "scheduled_tokens": output.fields.get("scheduled_tokens") if output else None,
    }


def _load_evidence(facts: Facts, failure: Failure) -> list[Evidence]:
    found_lines = [
        cite(event.line)
        for event in (facts.said("vllm.dump_output"), facts.said("vllm.dump_stats"))
        if event
    ]
    load = facts.load_before(failure.line)
    if load is not None:
        found_lines.append(cite(load.line))
    return found_lines


def _argument_evidence(facts: Facts, cause: str) -> tuple[Evidence, ...]:
    flags = {
        "spec_decode_underprofiled": (
            "--speculative-config",
            "--speculative-model",
            "--num-speculative-tokens",
        ),
        "lora_activation_peak": ("--enable-lora", "--max-lora-rank"),
        "engine_buffers_unprofiled": ("--num-scheduler-steps", "--gpu-memory-utilization"),
        "moe_dispatch_peak": ("--enable-expert-parallel", "--data-parallel-size"),
    }
    return cite_arguments(
        facts.engine,
        flags.get(
            cause, ("--max-num-batched-tokens", "--gpu-memory-utilization", "--mem-fraction-static")
        ),
    )


RULES: Final[tuple[Rule, ...]] = (sleep_wake, runtime_allocation)
