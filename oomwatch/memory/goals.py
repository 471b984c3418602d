"""The cheapest combination of flags that reaches a goal, every candidate planned in full.

A goal is a number of requests at a length (``concurrency=64``), or as much as possible of one of
both (``context=max``, ``concurrency=max``). Candidates are tried in the order of what they cost a
user: budget first, then batch sizes, then cache precision, then more GPUs. Where none of them
starts, they are tried again with FP8 weights, which a 16-bit checkpoint can be loaded as.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomwatch.engines import versions
from oomwatch.engines.flags import check_flag
from oomwatch.errors import NoStartError, UsageError
from oomwatch.memory.planner import Plan, PlanInput, change, plan
from oomwatch.memory.what_if import kv_table

CHOSEN_FORMATS: Final = {"fp8": 2, "fp8_e4m3": 2, "fp8_ds_mla": 1, "int8_per_token_head": 3}
"""Formats that keep quality close enough to be chosen for a user; others are shown, not chosen."""
_MOST_CANDIDATES: Final = 240
_LENGTHS: Final = ("--max-model-len", "--context-length")
_IDLE: Final = 0.01
"""A flag that brings less than this part of the goal is left out of an answer."""
_MOST_UTILIZATION: Final = 0.93
"""Beyond it what the profile run does not see (NCCL, late allocations) has no room left."""

_FP8: Final = {"--quantization": "fp8"}
_FP8_CARD: Final = (8, 9)
"""The first NVIDIA cards that compute in FP8."""
_FP8_BY_LAYER: Final = "0.15.0"
"""vLLM from here on converts each layer as it is read (its pull request 31914); before that the
whole model has to fit in 16 bits first, as with SGLang, which converts after loading."""

Option = tuple[Mapping[str, Any], int]


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """What to reach; None means as much as possible."""

    concurrency: float | None
    context: int | None

    @property
    def wants_most(self) -> bool:
        """Whether one side is to be as large as possible."""
        return self.concurrency is None or self.context is None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The flags to set and the plan with them; `reached` is False when the goal is out of reach."""

    set: Mapping[str, Any]
    plan: Plan
    reached: bool
    caveats: tuple[str, ...] = ()
    """What the flags cost in quality, or ask for beyond the card."""


def parse_goal(text: str, context: int | None, default_context: int) -> Goal:
    """A ``--goal``: ``concurrency=N|max`` or ``context=N|max``.

    Raises UsageError for anything else.
    """
    name, _, value = text.partition("=")
    most = value == "max"
    number = int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None
    if name == "concurrency" and (most or number):
        return Goal(None if most else float(number or 0), context or default_context)
    if name == "context" and (most or number):
        return Goal(1.0, None if most else number)
    raise UsageError(
        f"--goal {text} is not understood; write concurrency=64, concurrency=max or context=max"
    )


def reach(given: PlanInput, now: Plan, goal: Goal) -> Answer:
    """The best configuration for `goal`; without a solution, the one that comes nearest.

    Raises NoStartError where no combination of flags starts.
    """
    answer = _reach(given, now, goal)
    if answer is None and _can_convert(given, now):
        converted = change(given, _FP8)
        answer = _reach(converted, plan(converted), goal)
        if answer is not None:
            said = "--quantization fp8: small quality loss; check on your data"
            answer = dataclasses.replace(
                answer, set={**_FP8, **answer.set}, caveats=(said, *answer.caveats)
            )
    if answer is None:
        raise NoStartError(
            "no combination of flags makes this start on this card; "
            "use more GPUs, a smaller or quantized model, or a shorter context"
        )
    return answer


def goal_that_starts(given: PlanInput, now: Plan) -> str | None:
    """The ``--goal`` whose flags make a command start that does not; None where no flags do."""
    for text in ("concurrency=1", "context=max"):
        try:
            if reach(given, now, parse_goal(text, None, now.settings.max_model_len)).reached:
                return text
        except NoStartError:
            continue
    return None


def _can_convert(given: PlanInput, now: Plan) -> bool:
    """Whether the weights are of 16 bits, and the release makes them FP8 on this card."""
    card, engine = given.device.compute_capability, now.settings.engine
    if given.model.quantization or now.settings.quantization or given.device.vendor != "nvidia":
        return False
    if card is None or card < _FP8_CARD:
        return False
    by_layer = engine == "vllm" and versions.at_least(given.version, _FP8_BY_LAYER)
    if now.refusal == "weights_dont_fit" and not by_layer:
        return False
    return given.version is None or not check_flag(engine, given.version, *next(iter(_FP8.items())))


def _reach(given: PlanInput, now: Plan, goal: Goal) -> Answer | None:
    """The answer for `goal` without another format of the weights; None where nothing starts."""
    best: tuple[float, Answer] | None = None
    for flags, _ in itertools.islice(_candidates(given, now, goal), _MOST_CANDIDATES):
        found = _tried(given, now, goal, flags)
        if found is None:
            continue
        value, answer = found
        if answer.reached:
            return _with_caveats(given, now, answer)  # candidates come cheapest first
        if best is None or value > best[0] * 1.001:
            best = (value, answer)
    if best is None:
        return None
    answer = _without_idle_flags(given, now, goal, best)
    return _with_caveats(given, now, dataclasses.replace(answer, reached=goal.wants_most))


def _tried(
    given: PlanInput, now: Plan, goal: Goal, flags: Mapping[str, Any]
) -> tuple[float, Answer] | None:
    """What flags come to, and the answer they are; None where the server does not start."""
    length_flag = "--max-model-len" if now.settings.engine == "vllm" else "--context-length"
    length = goal.context or given.model.max_model_len
    try:
        after = plan(change(given, {**flags, length_flag: str(length)}))
        if goal.context is None:
            length = _typed(min(after.max_model_len_that_fits, given.model.max_model_len))
            if length < 1:
                return None
            after = plan(change(given, {**flags, length_flag: str(length)}))
    except UsageError:
        return None
    if after.refusal is not None:
        return None
    at_once = min(after.max_concurrency, after.settings.max_num_seqs)
    wanted = None if goal.wants_most else goal.concurrency
    reached = wanted is not None and at_once >= wanted
    value = float(length) if goal.context is None else at_once
    return value, Answer({**flags, length_flag: str(length)}, after, reached=reached)


def _without_idle_flags(
    given: PlanInput, now: Plan, goal: Goal, best: tuple[float, Answer]
) -> Answer:
    """The best answer without the flags that bring it no nearer."""
    value, answer = best
    kept = {flag: text for flag, text in answer.set.items() if flag not in _LENGTHS}
    for flag in tuple(kept):
        fewer = {other: text for other, text in kept.items() if other != flag}
        found = _tried(given, now, goal, fewer)
        if found is not None and found[0] >= value * (1 - _IDLE):
            kept, (value, answer) = fewer, found
    return answer


def _with_caveats(given: PlanInput, now: Plan, answer: Answer) -> Answer:
    name = answer.set.get("--kv-cache-dtype")
    said = tuple(
        f"--kv-cache-dtype {row.name}: {row.quality}"
        for row in kv_table(given, now)
        if row.name == name
    )
    return dataclasses.replace(answer, caveats=said)


def _candidates(given: PlanInput, now: Plan, goal: Goal) -> Iterator[Option]:
    """Combinations of flags that the version accepts, cheapest first."""
    engine, version = now.settings.engine, given.version
    axes = (_vllm_axes if engine == "vllm" else _sglang_axes)(given, now, goal)
    combined: list[Option] = []
    for choice in itertools.product(*axes):
        merged: dict[str, Any] = {}
        for part, _ in choice:
            merged.update(part)
        combined.append((merged, sum(cost for _, cost in choice)))
    for flags, cost in sorted(combined, key=lambda each: each[1]):
        if version is None or not any(check_flag(engine, version, f, v) for f, v in flags.items()):
            yield flags, cost


def _formats(given: PlanInput, now: Plan) -> list[Option]:
    usable: list[Option] = [
        ({"--kv-cache-dtype": row.name}, CHOSEN_FORMATS[row.name])
        for row in kv_table(given, now)
        if not row.in_force and row.name in CHOSEN_FORMATS
    ]
    return [({}, 0), *sorted(usable, key=lambda each: each[1])[:2]]


def _vllm_axes(given: PlanInput, now: Plan, goal: Goal) -> list[list[Option]]:
    settings = now.settings
    share: list[Option] = [({}, 0)]
    if settings.utilization < _MOST_UTILIZATION and settings.kv_cache_memory_bytes is None:
        share.append(({"--gpu-memory-utilization": f"{_MOST_UTILIZATION:g}"}, 1))
    wanted = 32 if goal.concurrency is None else max(1, round(goal.concurrency))
    fewer = dict.fromkeys((max(256, wanted), max(64, wanted), wanted))
    seqs: list[Option] = [({}, 0)]
    if goal.concurrency is not None:
        allowed = [n for n in fewer if n < settings.max_num_seqs]
        if wanted > settings.max_num_seqs:
            allowed = [wanted]
        seqs += [({"--max-num-seqs": str(number)}, 1) for number in allowed[:2]]
    tokens: list[Option] = [
        ({"--max-num-batched-tokens": str(number)}, 2)
        for number in (4096, 2048)
        if wanted <= number < settings.max_num_batched_tokens
    ]
    ranks = _ranks(given, now, "--tensor-parallel-size")
    return [share, seqs, [({}, 0), *tokens], _formats(given, now), ranks]


def _sglang_axes(given: PlanInput, now: Plan, goal: Goal) -> list[list[Option]]:
    settings = now.settings
    share: list[Option] = [({}, 0)]
    if settings.utilization < 0.9:
        share.append(({"--mem-fraction-static": f"{settings.utilization + 0.02:.3g}"}, 1))
    requests: list[Option] = [({}, 0)]
    if goal.concurrency is not None and goal.concurrency > settings.max_num_seqs:
        requests = [({"--max-running-requests": str(math.ceil(goal.concurrency))}, 1)]
    return [share, requests, _formats(given, now), _ranks(given, now, "--tp-size")]


def _ranks(given: PlanInput, now: Plan, flag: str) -> list[Option]:
    """Wider tensor parallelism, as far as the GPUs that were named go."""
    settings = now.settings
    heads = max((getattr(x.mixer, "heads", 1) for x in given.model.layers), default=1)
    others = max(1, settings.gpus // settings.tensor_parallel)
    found: list[Option] = [({}, 0)]
    wider = settings.tensor_parallel * 2
    while given.gpu_count is not None and wider * others <= given.gpu_count and heads % wider == 0:
        found.append(({flag: str(wider)}, 4 * len(found)))
        wider *= 2
    return found


def _typed(length: int) -> int:
    """A length as a person would type it, not above the one given."""
    step = 1024 if length >= 8192 else 256 if length >= 1024 else 16
    return length // step * step if length >= step else length
