"""Stored incidents as the detector keeps them."""

from __future__ import annotations

from typing import Any

from oomwatch.records import (
    Diagnosis,
    Effect,
    EngineFacts,
    Evidence,
    Finding,
    GpuLedger,
    Incident,
    MemoryPart,
    Remedy,
    Risk,
    StoredIncident,
    Trigger,
    TriggerKind,
)
from oomwatch.report.json_report import to_json
from oomwatch.units import GIB, MIB

AT = 1_790_000_000.0
PROMPT = "my grandmother's secret recipe"


def failure(**changes: Any) -> Diagnosis:
    """A failed engine; `changes` are of its finding."""
    finding = {
        "cls": "long_context",
        "cause": "prefill_activation_peak",
        "confidence": 0.83,
        "summary": "One step needed more memory than was left (3.1 GiB asked, 640 MiB free).",
        "evidence": (
            Evidence("log", "server.log:106", AT, "torch.OutOfMemoryError: CUDA out of memory."),
            Evidence("nvml", "free", AT, value=640 * MIB, unit="bytes"),
            Evidence("arguments", "--max-num-batched-tokens", value=32768),
        ),
        "engine_id": "chat-70b",
        "at": AT,
        **changes,
    }
    parts = (
        MemoryPart("weights", 32 * GIB, "log"),
        MemoryPart("kv_cache", 36 * GIB, "log"),
        MemoryPart("free", 640 * MIB, "nvml"),
    )
    full = (MemoryPart("weights", 32 * GIB, "log"), MemoryPart("free", 40 * GIB, "nvml"))
    remedies = (
        Remedy(
            "smaller-step", "Process at most 4096 prompt tokens in one step", "other", "why", "cost",
            set={"--max-num-batched-tokens": "4096"}, validated=True,
            effect=Effect(kv_tokens_before=148_928, kv_tokens_after=150_048, freed_bytes=280 * MIB),
        ),
        Remedy(
            "segments", "Use expandable segments", "other", "why", "cost",
            env={"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, unset=("--swap-space",),
        ),
        Remedy("gateway", "Cap long prompts", "other", "why", "cost", action="limit them"),
        Remedy("fourth", "One more", "other", "why", "cost", action="do more"),
    )  # fmt: skip
    return Diagnosis(
        verdict="oom",
        generated_at=AT,
        host="gpu-07",
        engines=(
            EngineFacts("chat-70b", "vllm", version="0.11.0", model="/m/Qwen3-32B", gpus=(0, 1)),
        ),
        incidents=(
            Incident(
                "1",
                Finding(**finding),
                memory=(GpuLedger(0, 80 * GIB, full), GpuLedger(1, 80 * GIB, parts)),
                remedies=remedies,
            ),
        ),
    )


def pressure(cause: str = "kv_saturation") -> Diagnosis:
    finding = Finding("long_context", cause, 0.9, "The pool is full.", engine_id="chat-70b")
    return Diagnosis("at_risk", AT, risks=(Risk(finding, gpu=3, eta_seconds=600.0),))


def stored(
    kind: TriggerKind = "log_failure",
    family: str = "failure",
    diagnosis: Diagnosis | None = None,
    **changes: Any,
) -> StoredIncident:
    values = changes.pop("values", {})
    trigger = Trigger(
        kind, AT, "chat-70b", changes.pop("gpu", None), text=changes.pop("text", "it failed"), values=values
    )  # fmt: skip
    known = {
        "id": "inc-0123456789ab",
        "fingerprint": f"chat-70b/{family}",
        "state": "open",
        "opened_at": AT,
        "engine_id": "chat-70b",
        "host": "gpu-07",
        "diagnosis": None if diagnosis is None else to_json(diagnosis),
        "triggers": (trigger,),
        **changes,
    }
    return StoredIncident(**known)
