"""Notices of every kind, and hostile ones."""

from __future__ import annotations

import dataclasses
from typing import Any

from oomwatch.notify.notice import IncidentNotice, Notice, NoticeKind, RemedyNotice

KINDS: tuple[NoticeKind, ...] = (
    "opened", "updated", "resolved", "escalated", "grouped", "test", "undelivered",
)  # fmt: skip
FLAGS = "--max-num-batched-tokens 4096"

INCIDENT = IncidentNotice(
    id="inc-0123456789ab",
    fingerprint="chat-70b/failure",
    host="gpu-07.example.com",
    severity="critical",
    headline="A long prefill needed more activation memory than was left",
    opened_at=1_790_000_000.0,
    engine_id="chat-70b",
    engine="vllm",
    version="0.11.0",
    model="/models/Qwen3-32B",
    gpus=(0, 1),
    incident_class="long_context",
    cause="prefill_activation_peak",
    confidence=0.83,
    why="The activations of one step needed more memory than was left (3.1 GiB asked, 640 MiB free).",
    flags=(FLAGS,),
    remedies=(
        RemedyNotice("Process fewer tokens in one step", (FLAGS,), None, "frees 2.1 GiB", True),
        RemedyNotice("Lower the share", ("--gpu-memory-utilization 0.90",), None, None, True),
        RemedyNotice("Use a smaller model", (), "choose one with fewer weights", None, False),
    ),
    memory="GPU 0 (79.2 GiB): KV cache 36.4 GiB, weights 32.1 GiB, free 640 MiB",
    evidence=("free: 640 MiB", "server.log:106: torch.OutOfMemoryError: CUDA out of memory."),
    runbook_url="https://runbooks.internal/prefill_activation_peak",
    labels={"team": "chat"},
)
SECOND = dataclasses.replace(INCIDENT, id="inc-ba9876543210", engine_id="embed", severity="warning")


def notice(kind: NoticeKind, *incidents: IncidentNotice, **changes: Any) -> Notice:
    """A message; grouped ones tell of two incidents, resolved ones of one that is over."""
    shown = incidents or {"grouped": (INCIDENT, SECOND), "test": ()}.get(kind, (INCIDENT,))
    if kind == "resolved":
        shown = tuple(
            dataclasses.replace(
                one,
                closed_at=one.opened_at + 700,
                resolution="It serves again, with other flags.",
            )
            for one in shown
        )
    note = {"test": "This is a test.", "undelivered": "3 messages to oncall were given up."}
    values = {"id": f"msg_{kind}", "at": 1_790_000_001.0, "note": note.get(kind), **changes}
    return Notice(kind=kind, incidents=tuple(shown), **values)
