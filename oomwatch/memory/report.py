"""A plan as the JSON of the contract (``oomwatch.plan/1``)."""

from __future__ import annotations

import math
from typing import Any, Final

from oomwatch.memory.goals import Answer
from oomwatch.memory.planner import Plan, PlanInput
from oomwatch.memory.what_if import WhatIf, fewest_gpus

SCHEMA: Final = "oomwatch.plan/1"


def answer_json(answer: Answer) -> dict[str, Any]:
    """A goal's answer as plain data."""
    return {
        "reached": answer.reached,
        "set": dict(answer.set),
        "tokens": answer.plan.tokens,
        "max_concurrency": _finite(answer.plan.max_concurrency),
        "max_model_len": answer.plan.settings.max_model_len,
        "gpus": answer.plan.settings.gpus,
        "caveats": [*answer.caveats, *answer.plan.warnings],
    }


def plan_json(
    given: PlanInput, plan: Plan, changes: tuple[WhatIf, ...], name: str | None
) -> dict[str, Any]:
    """The plan as plain data; unknown is None."""
    fewest = plan if plan.fits else fewest_gpus(given, plan)
    budget, layout = plan.budget, plan.layout
    return {
        "schema": SCHEMA,
        "engine": plan.settings.engine,
        "version": None if given.version_assumed else given.version,
        "model": name,
        "gpu": given.device.name,
        "gpu_count": plan.settings.gpus,
        "per_gpu": {
            "total_bytes": budget.total_bytes,
            "budget_bytes": budget.requested_bytes,
            "weights_bytes": budget.weights.bytes,
            "activation_bytes": budget.activation.bytes,
            "cuda_graph_bytes": budget.graphs.bytes,
            "non_torch_bytes": budget.non_torch.bytes,
            "state_pool_bytes": budget.state_pool_bytes,
            "kv_available_bytes": plan.kv_available_bytes,
        },
        "kv": {
            "dtype": plan.kv_format,
            "bytes_per_token_per_gpu": layout.bytes_per_token,
            "state_bytes_per_request_per_gpu": layout.state_bytes,
            "block_size_tokens": layout.block_tokens,
            "blocks": plan.blocks,
            "tokens": plan.tokens,
            "total_tokens": plan.tokens * plan.settings.replicas,
            "log_line_tokens": plan.line_tokens,
            "groups": len(layout.groups),
            "max_model_len": plan.settings.max_model_len,
            "max_concurrency_at_max_model_len": _finite(plan.max_concurrency),
            "bytes_per_request_at_max_model_len": plan.bytes_per_request,
        },
        "fits": plan.fits,
        "refusal": plan.refusal,
        "refusal_text": plan.refusal_text,
        "max_model_len_that_fits": plan.max_model_len_that_fits,
        "fewest_gpus": fewest.settings.gpus if fewest is not None else None,
        "what_if": [
            {
                "change": dict(each.set),
                "unset": list(each.unset),
                "tokens": each.plan.tokens,
                "max_concurrency": _finite(each.plan.max_concurrency),
                "fits": each.plan.fits,
                "refusal": each.plan.refusal,
                "freed_bytes": each.freed_bytes,
                "cost": each.cost,
                "validated": each.validated,
                "reason": each.reason,
            }
            for each in changes
        ],
        "uncertainty": {"kv_available_bytes": [plan.kv_low_bytes, plan.kv_high_bytes]},
        "assumptions": list(plan.assumptions),
        "warnings": list(plan.warnings),
    }


def _finite(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
