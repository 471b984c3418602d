"""Plans for an engine that was seen: its facts replace what the model would compute.

For remedies: `plan_input` turns `EngineFacts` into a `PlanInput`, `predict` says what changed flags
would do, before anyone waits for the next start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.errors import OomwatchError
from oomwatch.memory.budget import Budget, Known
from oomwatch.memory.config_source import Found, load_model
from oomwatch.memory.devices import Device, find_device
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.model_config import ModelConfig
from oomwatch.memory.planner import Plan, PlanInput, change, plan, without_facts
from oomwatch.memory.term import Term
from oomwatch.records import EngineFacts
from oomwatch.units import GIB

INFERRED: Final = "a card whose total is inferred"
"""Name of a device that no log and no driver named; its total is what the printed shares add to."""
_INFERRED_SPREAD: Final = 0.03


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What a change does. `before` and `after` are plans; the interval is of `after`."""

    before: Plan
    after: Plan
    gained_bytes: int
    """KV memory gained on each GPU; negative when it shrinks."""
    freed_bytes: int
    """Bytes of each GPU that weights, activations, graphs or a smaller pool no longer take."""
    kv_low_bytes: int
    kv_high_bytes: int
    tokens_low: int
    tokens_high: int

    @property
    def surely_refused(self) -> bool:
        """Whether the changed server does not start even where the interval is kindest."""
        plan = self.after
        if plan.refusal == "weights_dont_fit":
            return plan.budget.weights.low > plan.budget.total_bytes
        if plan.refusal in ("kv_no_blocks", "kv_lt_max_len"):
            needed = max(1, plan.layout.request_blocks(plan.settings.max_model_len))
            return plan.layout.blocks(self.kv_high_bytes) < needed
        return plan.refusal is not None


def plan_input(
    engine: EngineFacts,
    *,
    model: ModelConfig | None = None,
    device: Device | None = None,
    gpu_name: str | None = None,
    gpu_count: int | None = None,
) -> PlanInput | None:
    """The input of a plan for this engine; None when its model or card cannot be told.

    `model` and `device` are used where they are given; else local files and the built-in table are
    asked for the model's sizes (never a network), and `gpu_name` for the card.
    """
    if engine.engine not in ("vllm", "sglang") or engine.fork is not None:
        return None
    if model is None:
        found = known_model(engine)
        model = found.model if found else None
    device = device or _device(engine, gpu_name)
    if model is None:
        return None
    arguments = dict(engine.arguments)
    length = "--max-model-len" if engine.engine == "vllm" else "--context-length"
    if engine.max_model_len and arguments.get(length) in (None, "auto", "-1"):
        arguments[length] = str(engine.max_model_len)
    env = dict(engine.env)
    if engine.generation is not None and "VLLM_USE_V1" not in env:
        env["VLLM_USE_V1"] = "0" if engine.generation == "V0" else "1"
    if device is None:
        device = _inferred(engine, model, arguments, env)
    if device is None:
        return None
    return PlanInput(
        model=model,
        device=device,
        engine=engine.engine,
        version=engine.version,
        arguments=arguments,
        env=env,
        gpu_count=gpu_count,
        known=Known(
            weights_bytes=engine.weights_bytes,
            activation_bytes=engine.activation_bytes,
            non_torch_bytes=engine.non_torch_bytes,
            graphs_bytes=engine.graph_bytes if (engine.graph_bytes or 0) > 0 else None,
            kv_available_bytes=engine.kv_bytes,
            kv_rounding_bytes=GIB // 200,  # logs print two decimals
            free_at_start_bytes=engine.free_at_start_bytes,
        ),
    )


def predict(
    given: PlanInput,
    set_flags: Mapping[str, Any],
    unset: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Prediction | None:
    """The effect of changed flags; None where the model cannot plan them.

    From a pool whose size was read, only the difference is predicted, and only its uncertainty
    counts: a change of the share moves the pool by a known amount.
    """
    try:
        before = plan(given)
        after = plan(change(given, set_flags, unset, env))
        base = plan(without_facts(given, {*set_flags, *unset}))
    except OomwatchError:
        return None
    low, high = after.kv_low_bytes, after.kv_high_bytes
    if given.known.kv_available_bytes is not None:
        spread = given.known.kv_rounding_bytes + sum(
            abs((new.high - new.low) - (old.high - old.low)) // 2
            for old, new in _terms(base.budget, after.budget)
            if after.budget.counts_graphs or new is not after.budget.graphs
        )
        if given.device.name == INFERRED:
            moved = abs(after.budget.requested_bytes - before.budget.requested_bytes)
            spread += round(_INFERRED_SPREAD * moved)
        low, high = after.kv_available_bytes - spread, after.kv_available_bytes + spread
    length = after.settings.max_model_len
    tokens = [after.layout.tokens(after.layout.blocks(size), length) for size in (low, high)]
    if after.settings.blocks_override is not None:
        tokens = [after.tokens, after.tokens]
    return Prediction(
        before=before,
        after=after,
        gained_bytes=after.kv_available_bytes - before.kv_available_bytes,
        freed_bytes=_freed(given, before, base, after),
        kv_low_bytes=low,
        kv_high_bytes=high,
        tokens_low=tokens[0],
        tokens_high=tokens[1],
    )


def _terms(before: Budget, after: Budget) -> tuple[tuple[Term, Term], ...]:
    """Each share before and after."""
    return (
        (before.weights, after.weights),
        (before.activation, after.activation),
        (before.graphs, after.graphs),
        (before.non_torch, after.non_torch),
    )


def _freed(given: PlanInput, before: Plan, base: Plan, after: Plan) -> int:
    """Decreases of all shares together; `base` is the old command by the model alone.

    Never more than there is: the card, less what is held then, and, where the pool takes it at an
    unchanged share, what the pool grows by.
    """
    total = after.budget.total_bytes
    changes = [old.bytes - new.bytes for old, new in _terms(base.budget, after.budget)]
    printed = given.known.weights_bytes
    if printed is not None and base.budget.weights.bytes:
        changes[0] = round(changes[0] * printed / base.budget.weights.bytes)
    if after.settings.engine == "sglang":
        changes[1:3] = 0, 0  # a step of work is no part of what is divided
    moved = before.budget.requested_bytes - after.budget.requested_bytes
    if after.settings.kv_cache_memory_bytes is not None:
        moved = before.kv_available_bytes - after.kv_available_bytes
    changes.append(moved)
    held = sum(min(new.bytes, total) for _, new in _terms(base.budget, after.budget))
    freed = min(sum(max(0, size) for size in changes), max(0, total - held))
    gained = max(0, after.kv_available_bytes) - max(0, before.kv_available_bytes)
    return min(freed, gained) if moved == 0 and gained > 0 else freed


def known_model(engine: EngineFacts) -> Found | None:
    """The sizes of an engine's model and where they are from; None where nothing here knows them.

    Asks the given configuration, a folder or cached copy that the command names, then the built-in
    table; never a network.
    """
    try:
        if engine.model_config:
            return Found(parse_config(engine.model_config), "the given model configuration")
        return load_model(None, engine.model) if engine.model else None
    except OomwatchError:
        return None


def _device(engine: EngineFacts, gpu_name: str | None) -> Device | None:
    device = None
    if gpu_name is not None:
        try:
            device = find_device(gpu_name)
        except OomwatchError:
            device = None
    if engine.total_bytes is None:
        return device
    if device is None:
        return Device("unknown", engine.total_bytes, None, measured=True)
    return dataclasses.replace(device, total_bytes=engine.total_bytes, measured=True)


def _inferred(
    engine: EngineFacts, model: ModelConfig, arguments: Mapping[str, Any], env: Mapping[str, str]
) -> Device | None:
    """The card by what the log says of its shares: (weights + peak + KV memory) / utilization.

    None where the log lacks them, or where the pool was sized by hand.
    """
    weights, pool = engine.weights_bytes, engine.kv_bytes
    if engine.engine != "vllm" or not weights or not pool or pool < 0:
        return None
    if {"--kv-cache-memory-bytes", "--num-gpu-blocks-override"} & arguments.keys():
        return None
    total = float(weights + pool)
    for _ in range(2):  # the size class of the card decides its batch, and so its peak
        device = Device(INFERRED, int(total), None)
        given = PlanInput(model, device, "vllm", engine.version, arguments, env)
        try:
            budget = plan(given).budget
        except OomwatchError:
            return None
        share = budget.requested_bytes / total
        beside = budget.activation.bytes + budget.non_torch.bytes
        beside += budget.graphs.bytes if budget.counts_graphs else 0
        total = (weights + pool + beside) / share
    return dataclasses.replace(device, total_bytes=int(total))
