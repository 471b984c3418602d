"""Plans for an engine that was seen: its facts replace what the model would compute.

For remedies: `plan_input` turns `EngineFacts` into a `PlanInput`, `predict` says what changed flags
would do, before anyone waits for the next start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from oomwatch.errors import OomwatchError
from oomwatch.memory.budget import Known
from oomwatch.memory.config_source import load_model
from oomwatch.memory.devices import Device, find_device
from oomwatch.memory.hf_config import parse_config
from oomwatch.memory.model_config import ModelConfig
from oomwatch.memory.planner import Plan, PlanInput, change, plan
from oomwatch.records import EngineFacts
from oomwatch.units import GIB


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """What a change does. `before` and `after` are plans; the interval is of `after`."""

    before: Plan
    after: Plan
    freed_bytes: int
    """KV memory gained on each GPU; negative when it shrinks."""
    tokens_low: int
    tokens_high: int


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
    model = model or _model(engine)
    device = device or _device(engine, gpu_name)
    if model is None or device is None:
        return None
    arguments = dict(engine.arguments)
    length = "--max-model-len" if engine.engine == "vllm" else "--context-length"
    if engine.max_model_len and arguments.get(length) in (None, "auto", "-1"):
        arguments[length] = str(engine.max_model_len)
    env = dict(engine.env)
    if engine.generation is not None and "VLLM_USE_V1" not in env:
        env["VLLM_USE_V1"] = "0" if engine.generation == "V0" else "1"
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
    """The effect of changed flags; None where the model cannot plan them."""
    try:
        before = plan(given)
        changed = change(given, set_flags, unset, env)
        after = plan(changed)
    except OomwatchError:
        return None
    length = after.settings.max_model_len
    tokens = [
        after.layout.tokens(after.layout.blocks(size), length)
        for size in (after.kv_low_bytes, after.kv_high_bytes)
    ]
    return Prediction(
        before=before,
        after=after,
        freed_bytes=after.kv_available_bytes - before.kv_available_bytes,
        tokens_low=tokens[0],
        tokens_high=tokens[1],
    )


def _model(engine: EngineFacts) -> ModelConfig | None:
    try:
        if engine.model_config:
            return parse_config(engine.model_config)
        return load_model(None, engine.model).model if engine.model else None
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
