"""Everything a rule may judge, frozen: one engine start, its log, the samples, the kernel's word."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from oomwatch.diagnose.events import Failure, LogEvent
from oomwatch.diagnose.inputs import Orphan
from oomwatch.diagnose.kills import Tie
from oomwatch.diagnose.runs import Load, Run
from oomwatch.diagnose.series import SeriesFacts
from oomwatch.records import (
    EngineExit,
    EngineFacts,
    Evidence,
    KernelEvent,
    LogLine,
    Trigger,
)

_MULTIMODAL: Final = re.compile(
    r"(?i)(?:-vl\b|vl-|vision|llava|internvl|pixtral|omni|minicpm-v|gemma-?3-(?:4|12|27)b|phi-3\.5-v|molmo|idefics|paligemma|qvq|image|ocr|audio|ultravox)"
)
_MULTIMODAL_ARCHITECTURE: Final = re.compile(
    r"(?i)(?:VL|Vision|Llava|Pixtral|Omni|Gemma3ForConditional|Image|Audio|Multimodal|InternVL|Ovis|Molmo)"
)
_MLA: Final = re.compile(
    r"(?i)(?:deepseek[-_]?(?:v[234]|r1|coder-v2)|kimi[-_]?k[23]|glm-?5|longcat|minicpm3)"
)
_MOE: Final = re.compile(
    r"(?i)(?:moe|mixtral|deepseek|\d+b-a\d+b|glm-?[45]|kimi|minimax|gpt-oss|llama-?4|maverick|scout|-a\d+b)"
)
_UNIFIED: Final = re.compile(
    r"(?i)(?:\bGB10\b|DGX Spark|Jetson|\bOrin\b|\bThor\b|Grace Hopper iGPU|\bMI300A\b|Strix|Tegra)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class KernelCitation:
    """A kernel event and the file it stands in."""

    event: KernelEvent
    source: str
    tie: Tie = Tie.NEIGHBOUR
    """How surely a killed process was this engine's."""

    def evidence(self) -> Evidence:
        """The event as evidence of a finding."""
        return Evidence(
            source="kernel",
            where=f"{self.source}:{self.event.number}" if self.event.number else self.source,
            at=self.event.at,
            text=self.event.text[:600],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What is known of one start of one engine. Every part may be missing."""

    engine: EngineFacts
    run: Run | None = None
    failures: tuple[Failure, ...] = ()
    """Failures that may decide, in the order of the log, without mere messengers."""
    messengers: tuple[Failure | LogEvent, ...] = ()
    kernel: tuple[KernelCitation, ...] = ()
    series: SeriesFacts = dataclasses.field(default_factory=SeriesFacts)
    loads: tuple[Load, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    exits: tuple[EngineExit, ...] = ()
    noticed: tuple[Trigger, ...] = ()
    """What the agent has noticed of it, such as a forecast."""
    live: bool = False
    """Whether it was found on this host, rather than read from files."""
    ended: bool = False
    """Whether its server is known to be gone, other than from its log."""
    tree_pids: frozenset[int] = frozenset()
    """Host pids of the engine's own processes, as far as known."""
    gpu_names: tuple[str, ...] = ()
    has_log: bool = False
    has_kernel: bool = False
    kernel_is_live: bool = False
    """Whether the running kernel's own log was read, to its end."""
    is_document: bool = False

    # ------------------------------------------------------------------ what kind of model and server
    @property
    def names(self) -> str:
        """Model path, architecture and the model's own type, for the tests below."""
        config = self.engine.model_config or {}
        run = self.run
        parts = [
            self.engine.model,
            run.architecture if run else None,
            str(config.get("model_type") or ""),
            " ".join(map(str, config.get("architectures") or ())),
        ]
        return " ".join(part for part in parts if part)

    @property
    def multimodal(self) -> bool:
        """Whether the model takes images, video or sound."""
        config = self.engine.model_config or {}
        architecture = (self.run.architecture if self.run else None) or ""
        given = self.engine.arguments
        return bool(
            "vision_config" in config
            or "audio_config" in config
            or any(flag.startswith(("--limit-mm", "--mm-")) for flag in given)
            or (
                self.run is not None
                and self.run.find(
                    "vllm.encoder_cache", "vllm.mm_worst_case", "vllm.mm_profile_begin"
                )
            )
            or _MULTIMODAL_ARCHITECTURE.search(architecture)
            or _MULTIMODAL.search(self.engine.model or "")
        )

    @property
    def mla(self) -> bool:
        """Whether the model uses multi-head latent attention."""
        config = self.engine.model_config or {}
        return bool(config.get("kv_lora_rank") or _MLA.search(self.names))

    @property
    def moe(self) -> bool:
        """Whether the model is a mixture of experts, or runs with expert parallelism."""
        config = self.engine.model_config or {}
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        return bool(
            any(config.get(key) for key in keys)
            or self.argument("--enable-expert-parallel", "--ep-size", "--enable-ep-moe")
            or _MOE.search(self.names)
        )

    @property
    def speculative(self) -> bool:
        """Whether a draft model or n-gram speculation is on."""
        return bool(
            self.argument(
                "--speculative-config",
                "--speculative-model",
                "--speculative-algorithm",
                "--num-speculative-tokens",
                "--spec-method",
                "--speculative-draft-model-path",
            )
        ) or (
            self.run is not None
            and self.run.config.get("speculative_config", "None") not in ("None", "")
        )

    @property
    def lora(self) -> bool:
        """Whether LoRA adapters are on."""
        return bool(self.argument("--enable-lora", "--lora-modules", "--lora-paths", "--max-loras"))

    @property
    def unified(self) -> bool:
        """Whether GPU and host share one memory."""
        return any(_UNIFIED.search(name) for name in self.gpu_names) or (
            not self.gpu_names and self.said("device.unified", "device.nvmap") is not None
        )

    @property
    def is_v0(self) -> bool | None:
        """Whether vLLM's first engine runs; None if that cannot be told."""
        if self.engine.generation is not None:
            return self.engine.generation == "V0"
        return None

    @property
    def served(self) -> bool:
        """Whether the engine answered requests."""
        return self.run is not None and self.run.served

    @property
    def run_failed_to_start(self) -> bool:
        """Whether a parent says that the start itself failed."""
        return any(
            (m.pattern.id if isinstance(m, LogEvent) else "").endswith(
                ("init_failed", "process_failed")
            )
            or (
                isinstance(m, Failure)
                and m.match(
                    "vllm.engine_init_failed",
                    "vllm.engine_process_failed",
                    "vllm.worker_init_failed",
                )
                is not None
            )
            or (isinstance(m, LogEvent) and m.fields.get("what") == "failed to start")
            for m in self.messengers
        )

    @property
    def is_wsl(self) -> bool:
        """Whether the host is Windows' virtual machine."""
        return (
            any("microsoft" in c.event.text.lower() for c in self.kernel[:50])
            or self.said("wsl.notice") is not None
            or self.failing("device.wsl_figure") is not None
        )

    @property
    def ready(self) -> bool:
        """Whether the start was over."""
        return self.run is not None and self.run.reached("ready")

    def argument(self, *flags: str) -> Any:
        """The value of the first of these flags that was given and is not off, or None."""
        for flag in flags:
            value = self.engine.arguments.get(flag)
            if value not in (None, False, "", "None", "False", [], {}):
                return value
        return None

    def number(self, *flags: str) -> float | None:
        """A flag's number in force, or None."""
        for flag in flags:
            value = self.engine.in_force.get(flag)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return None

    # ------------------------------------------------------------------ failures
    def failing(self, *ids: str) -> tuple[Failure, Mapping[str, Any]] | None:
        """The first failure that matched one of these patterns, with the fields."""
        for failure in self.failures:
            fields = failure.match(*ids)
            if fields is not None:
                return failure, fields
        return None

    def said(self, *ids: str) -> LogEvent | None:
        """The first logged line of one of these patterns, or None."""
        return self.run.find(*ids) if self.run else None

    def outlived(self, failure: Failure) -> bool:
        """Whether the engine went on answering after this failure, and nothing called it dead."""
        later = [m.order for m in self.messengers if m.order > failure.order]
        return (
            self.run is not None
            and self.served
            and self.run.lives_between(failure.order, min(later, default=float("inf")))
        )

    @property
    def last_load(self) -> Load | None:
        """The last load line before the end."""
        return self.loads[-1] if self.loads else None

    def load_before(self, order_line: LogLine | None) -> Load | None:
        """The last load line before this line of the same file."""
        if order_line is None:
            return self.last_load
        before = [
            load
            for load in self.loads
            if load.line.source == order_line.source and load.line.number <= order_line.number
        ]
        return before[-1] if before else None


def cite(line: LogLine, *, value: float | str | None = None, unit: str | None = None) -> Evidence:
    """A log line as evidence."""
    return Evidence(
        source="log",
        where=f"{line.source}:{line.number}",
        at=line.at,
        text=line.text.strip()[:600] or None,
        value=value,
        unit=unit,
    )


def cite_failure(failure: Failure) -> tuple[Evidence, ...]:
    """The exception line, and the detail lines that carry numbers."""
    found = [cite(failure.line)]
    found += [
        cite(line)
        for line in failure.details[:3]
        if line.text.strip() and any(c.isdigit() for c in line.text)
    ]
    return tuple(found)


def cite_arguments(engine: EngineFacts, flags: Iterable[str]) -> tuple[Evidence, ...]:
    """Flags that were given, as evidence."""
    return tuple(
        Evidence(source="arguments", where=flag, value=_plain(engine.arguments[flag]))
        for flag in flags
        if flag in engine.arguments
    )


def _plain(value: object) -> float | int | str | bool | None:
    return value if isinstance(value, bool | int | float | str) or value is None else str(value)
