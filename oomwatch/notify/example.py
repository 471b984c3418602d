"""An incident to show messages with, and receivers of every kind that hold no secret."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.config.fields import Key, members
from oomwatch.config.notify import SinkConfig
from oomwatch.config.sinks import SINKS
from oomwatch.notify.changes import change_note, change_of
from oomwatch.notify.message import memory_line, remedy_notices
from oomwatch.notify.notes import escalated_note, grouped_note, recurrence_note, undelivered_note
from oomwatch.notify.notice import IncidentNotice, Notice, NoticeKind
from oomwatch.notify.recurrence import Recurrence
from oomwatch.notify.wording import words
from oomwatch.records import Effect, GpuLedger, MemoryPart, Remedy
from oomwatch.report.flags import typed_flags
from oomwatch.report.locale import Language
from oomwatch.report.pages import meaning, title
from oomwatch.units import GIB

KINDS: Final[tuple[NoticeKind, ...]] = (
    "opened", "updated", "escalated", "resolved", "grouped", "undelivered", "test",
)  # fmt: skip
_ID: Final = "inc-0123456789ab"
_CAUSE: Final = "prefill_activation_peak"
_HELD: Final[Mapping[str, str]] = {
    "url": "https://hooks.example.com/services/example",
    "token": "xoxb-example",
    "secret": "whsec_RXhhbXBsZSBvZiBhIHNlY3JldCwgbm90IG9uZS4=",
    "routing_key": "0" * 32,
    "urls": "json://receiver.example.com",
    "password": "example",
}
"""What stands in the place of secrets: a preview reads none and sends nothing."""


_REMEDIES: Final = (
    Remedy(
        "smaller-batch",
        "Process at most 4096 prompt tokens in one step",
        "less_kv",
        why="Activations grow with the tokens of a step.",
        cost="Long prompts take more steps: slower first token.",
        set={"--max-num-batched-tokens": 4096},
        effect=Effect(freed_bytes=int(1.5 * GIB)),
        validated=True,
    ),
    Remedy(
        "lower-memory-share",
        "Lower --gpu-memory-utilization to 0.88",
        "less_kv",
        why="What is allocated outside the KV cache finds too little room beside it.",
        cost="A smaller KV cache: fewer tokens and requests at a time.",
        set={"--gpu-memory-utilization": "0.88"},
        effect=Effect(freed_bytes=int(1.6 * GIB)),
        validated=True,
    ),
    Remedy(
        "fewer-sequences",
        "Run at most 128 requests at once",
        "less_kv",
        why="Up to 256 sequences share a step.",
        cost="Requests above the limit wait in the queue.",
        set={"--max-num-seqs": 128},
        validated=True,
    ),
)
_HELD_BY: Final = {"weights": 61.2, "kv_cache": 12.4, "activation": 4.6, "free": 1.1}
_LEDGER: Final = GpuLedger(
    0,
    int(sum(_HELD_BY.values()) * GIB),
    tuple(MemoryPart(name, int(size * GIB), "log") for name, size in _HELD_BY.items()),
)


def example_incident(lang: Language, now: float) -> IncidentNotice:
    """A server that was refused memory in the middle of a long prefill."""
    said = (
        "The activations of one step of 16,384 tokens needed 2.0 GiB; 1.1 GiB of 79.3 GiB were "
        "free beside the KV cache."
    )
    return IncidentNotice(
        id=_ID,
        fingerprint="chat-70b/failure",
        host="gpu-07",
        severity="critical",
        headline=title(_CAUSE, lang),
        opened_at=now - 95,
        engine_id="chat-70b",
        engine="vllm",
        version="0.11.0",
        model="Qwen3-32B",
        gpus=(0, 1),
        incident_class="long_context",
        cause=_CAUSE,
        confidence=0.9,
        why=said if lang == "en" else f"{meaning(_CAUSE, lang)} {said}",
        flags=tuple(typed_flags(_REMEDIES[0].set)),
        remedies=tuple(remedy_notices(_ID, _REMEDIES, lang)),
        memory=memory_line([_LEDGER], (0, 1), lang),
        evidence=(
            "chat.log:4711: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        labels={"team": "chat"},
    )


def example_notices(incident: IncidentNotice, lang: Language, now: float) -> list[Notice]:
    """One message of each kind about an incident, and one of an incident that is back."""
    over = dataclasses.replace(incident, closed_at=now)
    if incident.id == _ID:
        over = dataclasses.replace(over, resolution=words(lang)["cured"])
    before = dataclasses.replace(incident, cause="irregular_unknown", remedies=())
    other = dataclasses.replace(incident, id="inc-ba9876543210", engine_id="embed")
    again = Recurrence(count=3, span_seconds=1200.0)
    notes = {
        "updated": change_note(change_of(before), incident, lang),
        "escalated": escalated_note(incident.id, now - incident.opened_at, lang),
        "grouped": grouped_note(2, 1, lang),
        "undelivered": undelivered_note("oncall", "hooks.example.com answered 403", lang),
    }
    about: dict[str, tuple[IncidentNotice, ...]] = {
        "resolved": (over,),
        "grouped": (other, over),
        "test": (),
    }
    found = [
        Notice(f"msg-example-{kind}", kind, now, about.get(kind, (incident,)), notes.get(kind))
        for kind in KINDS
    ]
    back = Notice("msg-example-back", "opened", now, (incident,), recurrence_note(again, lang))
    return [found[0], back, *found[1:]]


def without_secrets(config: SinkConfig) -> tuple[SinkConfig, dict[str, str]]:
    """A receiver that looks the same, and the variables that stand for its secrets."""
    files = [
        key for key in _keys(type(config)) if key.name.endswith("_file") and key.name != "ca_file"
    ]
    name = "".join(char if char.isalnum() else "_" for char in config.name or "")
    held = {key.name.removesuffix("_file") for key in files} & _HELD.keys()
    if getattr(config, "url", None) is not None:
        held.discard("url")
    variables = {f"OOMWATCH_NOTIFY_{name}_{key}".upper(): _HELD[key] for key in held}
    changes: dict[str, Any] = {key.field: None for key in files}
    return dataclasses.replace(config, **changes, ca_file=None, proxy=None), variables


def example_sink(kind: str, lang: Language) -> SinkConfig:
    """A receiver of a kind as the example file shows it."""
    cls = SINKS[kind]
    given: dict[str, Any] = {}
    for key in _keys(cls):
        if key.name in {"channel", "proxy", "url"} or key.name.endswith("_file"):
            continue
        if key.example is not None and not key.default:
            value = tomllib.loads(f"value = {key.example}")["value"]
            given[key.field] = key.kind.read(value, text=False)
    given |= {"name": kind, "enabled": True}
    if any(key.field == "lang" for key in _keys(cls)):
        given["lang"] = lang
    return cls(**given)


def _keys(cls: type[SinkConfig]) -> list[Key]:
    return [member for member in members(cls) if isinstance(member, Key)]
