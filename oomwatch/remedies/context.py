"""What a step looks at: the finding's numbers, and the flags in force on the engine it hit."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from oomwatch.engines import flags, versions
from oomwatch.engines.vllm.flags import generation
from oomwatch.records import Direction, EngineFacts, Finding
from oomwatch.remedies.forecast import Forecast, forecast_of

Knob = Literal["share", "batch_tokens", "sequences", "length", "ranks", "stages"]

KNOBS: Final[Mapping[Knob, Mapping[str, str]]] = {
    "share": {
        "vllm": "--gpu-memory-utilization",
        "sglang": "--mem-fraction-static",
        "tgi": "--cuda-memory-fraction",
        "lmdeploy": "--cache-max-entry-count",
    },
    "batch_tokens": {
        "vllm": "--max-num-batched-tokens",
        "sglang": "--chunked-prefill-size",
        "tgi": "--max-batch-prefill-tokens",
        "lmdeploy": "--max-prefill-token-num",
        "llama.cpp": "--batch-size",
    },
    "sequences": {
        "vllm": "--max-num-seqs",
        "sglang": "--max-running-requests",
        "tgi": "--max-concurrent-requests",
        "lmdeploy": "--max-batch-size",
        "llama.cpp": "--parallel",
    },
    "length": {
        "vllm": "--max-model-len",
        "sglang": "--context-length",
        "tgi": "--max-total-tokens",
        "lmdeploy": "--session-len",
        "llama.cpp": "--ctx-size",
    },
    "ranks": {
        "vllm": "--tensor-parallel-size",
        "sglang": "--tp-size",
        "tgi": "--num-shard",
        "lmdeploy": "--tp",
    },
    "stages": {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"},
}
"""One setting in the words of each engine."""

ASSUMED: Final[Mapping[str, float]] = {
    "--gpu-memory-utilization": 0.9,
    "--mem-fraction-static": 0.8,
    "--cuda-memory-fraction": 1.0,
    "--cache-max-entry-count": 0.8,
    "--max-num-batched-tokens": 2048,
    "--chunked-prefill-size": 2048,
    "--max-batch-prefill-tokens": 4096,
    "--max-prefill-token-num": 8192,
    "--batch-size": 2048,
    "--max-num-seqs": 256,
    "--max-running-requests": 2048,
    "--max-concurrent-requests": 128,
    "--max-batch-size": 128,
    "--tensor-parallel-size": 1,
    "--tp-size": 1,
    "--num-shard": 1,
    "--tp": 1,
    "--pipeline-parallel-size": 1,
    "--pp-size": 1,
}
"""The smallest default of any card, for settings whose value in force cannot be known: a number
below it is lower whatever the card is. SGLang's limit of requests is the exception: with a hybrid
model or attention data parallelism it may follow from the other settings as a handful."""

_LABELS: Final = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "tgi": "TGI",
    "lmdeploy": "LMDeploy",
    "llama.cpp": "llama.cpp",
    "ollama": "Ollama",
    "pytorch": "PyTorch",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Draft:
    """A remedy before its flags are spelled and checked. `direction` None: the cause's own.

    `set` goes by canonical long flag; numbers and dicts are written out by the version's spelling.
    """

    id: str
    title: str
    why: str
    cost: str
    set: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unset: tuple[str, ...] = ()
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    action: str | None = None
    direction: Direction | None = None
    reason: str = ""
    """What of `why` holds whatever the value in force is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """A finding on an engine, with its numbers at hand. Unknown is None throughout."""

    finding: Finding
    engine: EngineFacts
    name: str | None
    """`vllm`, `sglang` and so on, also for their forks."""
    generation: str | None
    force: Mapping[str, Any]
    forecast: Forecast | None = None
    """The memory model of this engine, where its model's sizes are known."""

    @property
    def label(self) -> str:
        """The engine's name for people."""
        return _LABELS.get(self.name or "", self.name or "the engine")

    def words(self, text: str) -> str:
        """A text with those of its asides, ``[[vllm,sglang: ...]]``, that are of this engine."""
        return _ASIDE.sub(lambda aside: aside[2] if self.name in aside[1].split(",") else "", text)

    @property
    def version(self) -> str | None:
        """The version by which flags are spelled; None for forks, which follow none of ours."""
        return None if self.is_fork else self.engine.version

    @property
    def is_fork(self) -> bool:
        """Whether this is a fork of the engine whose flags it shares."""
        return self.engine.fork is not None or self.name != self.engine.engine

    def at_least(self, version: str) -> bool:
        """Whether the engine may be this version or newer; an unknown version may be any."""
        newest = self.version or (None if self.is_fork else self.engine.version_until)
        return versions.at_least(newest, version) is not False

    def number(self, name: str) -> float | None:
        """A number of the finding, by the names of `docs/design.md`; None if it cannot be one.

        Sizes and counts are 0 or at least 1, fractions between 0 and 1.
        """
        value = _number(self.finding.values.get(name))
        if value is None or name.startswith("slope"):
            return value
        if name in ("suggested_fraction", "utilization"):
            return value if 0 < value <= 1 else None
        return value if value == 0 or value >= 1 else None

    def says(self, name: str) -> bool:
        """Whether a yes-or-no value of the finding is set."""
        return bool(self.finding.values.get(name))

    def flag(self, knob: Knob) -> str | None:
        """What a setting is called on this engine."""
        return KNOBS[knob].get(self.name or "")

    def now(self, flag: str | None) -> float | None:
        """A flag's value in force as a number; a share of the card is one between 0 and 1.

        Below 0 only SGLang's -1 for an unbounded chunk has a meaning.
        """
        value = _number(self.force.get(flag)) if flag else None
        if value is None or (value < 0 and flag != "--chunked-prefill-size"):
            return None
        if flag in KNOBS["share"].values() and not 0 < value <= 1:
            return None
        return value

    def now_or_assumed(self, flag: str | None) -> float | None:
        """The value in force, else the smallest default there is."""
        known = self.now(flag)
        return known if known is not None else ASSUMED.get(flag or "")

    def knows(self, flag: str) -> bool:
        """Whether the value in force was seen, or follows from arguments that were."""
        if self.engine.arguments_seen or flag in self.engine.values_seen:
            return self.now(flag) is not None
        if flag == self.flag("share") and not self.finding.cause.startswith("gpu_busy"):
            return False  # only the check of free memory prints it
        told: Mapping[str | None, float | None] = {
            self.flag("sequences"): self.number("seqs"),
            self.flag("share"): self.number("utilization"),
            self.flag("length"): self.max_model_len,
        }
        return told.get(flag) is not None

    def given(self, flag: str) -> Any:
        """A flag's value as the user gave it; None when not given."""
        return self.engine.arguments.get(flag)

    def switched_on(self, flag: str) -> bool:
        """Whether a switch is on."""
        return str(self.force.get(flag, "")).lower() in ("true", "1", "yes")

    @property
    def total_bytes(self) -> float | None:
        """CUDA's total of the card that decided."""
        return self.number("total_bytes") or _number(self.engine.total_bytes)

    @property
    def max_model_len(self) -> float | None:
        """The longest request allowed, in tokens."""
        return (
            self.now(self.flag("length"))
            or self.number("max_model_len")
            or _number(self.engine.max_model_len)
        )

    @property
    def kv_tokens(self) -> float | None:
        """Capacity of the KV pool in tokens."""
        return self.number("kv_tokens") or _number(self.engine.kv_tokens)

    @property
    def max_concurrency(self) -> float | None:
        """Requests of full length that the KV pool holds at once."""
        printed = _number(self.engine.max_concurrency)
        if printed is not None:
            return printed
        tokens, length = self.kv_tokens, self.max_model_len
        return tokens / length if tokens and length else None

    @property
    def second_pool(self) -> str | None:
        """What a hybrid model's pool beside the main one is called, where that is what is full."""
        return {"mamba": "state pool", "swa": "window pool"}.get(
            str(self.finding.values.get("pool"))
        )

    @property
    def state_slots(self) -> float | None:
        """State slots of a hybrid model, where they were set and are what ran out."""
        full = self.name == "sglang" and self.second_pool == "state pool"
        return self.now("--max-mamba-cache-size") if full else None

    @property
    def shortage_bytes(self) -> float | None:
        """How much more the failed allocation wanted than was free."""
        tried, free = self.number("tried_bytes"), self.number("free_bytes")
        return None if tried is None else max(tried - (free or 0), 0)

    @property
    def least_static_share(self) -> float | None:
        """SGLang's smallest share that holds the weights: it is taken of what was free before."""
        free, weights = self.engine.free_at_start_bytes, self.engine.weights_bytes
        if self.name != "sglang" or not free or not weights:
            return None
        return weights / free

    @property
    def pinned_kv(self) -> str | None:
        """The flag that fixes the size of vLLM's KV cache, so that the share no longer counts."""
        for flag in ("--kv-cache-memory-bytes", "--num-gpu-blocks-override"):
            if self.name == "vllm" and self.now(flag) is not None:
                return flag
        return None

    @property
    def kv_bits(self) -> int:
        """Bits of one number in the KV cache where it is stored as the model computes."""
        kind = self.force.get("--dtype") or (self.engine.model_config or {}).get("torch_dtype")
        return 32 if str(kind).removeprefix("torch.") in ("float32", "float") else 16

    @property
    def on_cpu(self) -> bool:
        """Whether the engine computes on the host's processors."""
        build = (self.engine.version or "").partition("+")[2]
        return build == "cpu" or self.force.get("--device") == "cpu" or self.says("on_cpu")

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, for rounding lengths."""
        return self.engine.block_size_tokens or 16


_ASIDE: Final = re.compile(r"\[\[([\w.,]+):([^\]]*)\]\]")
_SMALLEST: Final = 1e-4
_LARGEST: Final = 2**62

Move = Callable[[Context], Draft | None]
"""One step of a plan: what it would change here, or None where it does not apply or cannot help."""


def context_of(finding: Finding, engine: EngineFacts) -> Context:
    """The context of a finding; values in force that the facts lack are filled from the version."""
    name = engine.engine
    for base in ("vllm", "sglang"):
        if name and name.startswith(base):
            name = base
    version = None if engine.fork or name != engine.engine else engine.version
    kind = (engine.generation or generation(version, engine.env)) if name == "vllm" else None
    force = flags.in_force(
        name,
        version,
        generation=kind,
        arguments=engine.arguments,
        total_bytes=engine.total_bytes,
        max_model_len=engine.max_model_len,
        gpu_name=engine.gpu_name,
    )
    return Context(
        finding,
        engine,
        name,
        kind,
        {**force, **engine.in_force},
        forecast_of(finding, engine),
    )


def power_of_two_below(value: float) -> int:
    """The largest power of two not above `value`; 0 below one."""
    return 1 << (int(value).bit_length() - 1) if value >= 1 else 0


def floor_hundredth(value: float) -> float:
    """Rounded down to 0.01; a float's own error does not cost a step."""
    return math.floor(value * 100 + 1e-6) / 100


def ceil_hundredth(value: float) -> float:
    """Rounded up to 0.01."""
    return math.ceil(value * 100 - 1e-6) / 100


def floor_to(value: float, multiple: int) -> int:
    """Rounded down to a multiple."""
    return int(value // multiple) * multiple


def json_object(value: Any) -> dict[str, Any]:
    """A JSON flag as a dict; {} for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    try:
        loaded = json.loads(str(value))
    except (ValueError, RecursionError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _number(value: Any) -> float | None:
    number = flags.as_number(value)
    if number is None or not (number == 0 or _SMALLEST <= abs(number) <= _LARGEST):
        return None
    return number
