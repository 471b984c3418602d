"""The cheapest combination of flags that reaches a goal, every candidate planned in full.

A goal is a number of requests at a length (``concurrency=64``), or as much as possible of one of
both (``context=max``, ``concurrency=max``). Candidates are tried in the order of what they cost a
user: budget first, then batch sizes, then cache precision, then more GPUs.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomwatch.engines.flags import check_flag
from oomwatch.errors import UsageError
from oomwatch.memory.planner import Plan, PlanInput, change, plan
from oomwatch.memory.what_if import kv_table

CHOSEN_FORMATS: Final = {"fp8": 2, "fp8_e4m3": 2, "fp8_ds_mla": 1, "int8_per_token_head": 3}
"""Formats that keep quality close enough to be chosen for a user; others are shown, not chosen."""
_MOST_CANDIDATES: Final = 240
_MOST_UTILIZATION: Final = 0.93
"""Beyond it what the profile run does not see (NCCL, late allocations) has no room left."""

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
    """The best configuration for `goal`; without a solution, the one that comes nearest."""
    length_flag = "--max-model-len" if now.settings.engine == "vllm" else "--context-length"
    best: tuple[float, int, Answer] | None = None
    for flags, cost in itertools.islice(_candidates(given, now, goal), _MOST_CANDIDATES):
        length = goal.context or given.model.max_model_len
        try:
            after = plan(change(given, {**flags, length_flag: str(length)}))
        except UsageError:
            continue
        if goal.context is None:
            length = _typed(min(after.max_model_len_that_fits, given.model.max_model_len))
            if length < 1:
                continue
            after = plan(change(given, {**flags, length_flag: str(length)}))
        if after.refusal is not None:
            continue
        value = float(length) if goal.context is None else after.max_concurrency
        answer = Answer({**flags, length_flag: str(length)}, after, reached=True)
        if not goal.wants_most and after.max_concurrency >= (goal.concurrency or 0):
            return answer  # candidates come cheapest first
        if best is None or value > best[0] * 1.001:
            best = (value, cost, answer)
    if best is None:
        raise UsageError(
            "no combination of flags makes this start on this card; "
            "use more GPUs, a smaller or quantized model, or a shorter context"
        )
    return best[2] if goal.wants_most else dataclasses.replace(best[2], reached=False)


def _candidates(given: PlanInput, now: Plan, goal: Goal) -> Iterator[Option]:
    """Combinations of flags that the version accepts, cheapest first."""
    engine, version = now.settings.engine, given.version
    axes = _vllm_axes(given, now, goal) if engine == "vllm" else _sglang_axes(given, now)
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
    seqs: list[Option] = [
        ({"--max-num-seqs": str(number)}, 1)
        for number in fewer
        if number < settings.max_num_seqs and goal.concurrency is not None
    ]
    tokens: list[Option] = [
        ({"--max-num-batched-tokens": str(number)}, 2)
        for number in (4096, 2048)
        if wanted <= number < settings.max_num_batched_tokens
    ]
    ranks = _ranks(given, now, "--tensor-parallel-size")
    return [share, [({}, 0), *seqs[:2]], [({}, 0), *tokens], _formats(given, now), ranks]


def _sglang_axes(given: PlanInput, now: Plan) -> list[list[Option]]:
    share: list[Option] = [({}, 0)]
    if now.settings.utilization < 0.9:
        share.append(({"--mem-fraction-static": f"{now.settings.utilization + 0.02:.3g}"}, 1))
    return [share, _formats(given, now), _ranks(given, now, "--tp-size")]


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
