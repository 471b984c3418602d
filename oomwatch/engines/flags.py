"""Flags of the engines by version: valid or not, the right spelling, and the values in force."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines import versions
from oomwatch.engines.sglang import flags as sglang
from oomwatch.engines.vllm import flags as vllm

_NUMBER: Final = re.compile(
    r"\s*([+-]?\d{1,18}(?:\.\d{1,18})?(?:[eE][+-]?\d{1,2})?)\s*([kmgtKMGT]?)\s*"
)
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}


def check_flag(engine: str, version: str | None, flag: str, value: object) -> str | None:
    """None when the release accepts the flag with this value, else the reason.

    Between two releases that were read the older one counts. The reason for an engine without a
    table, or without a version, is that nothing can be said.
    """
    at = versions.release(version)
    if not versions.sampled(engine):
        return f"the flags of {engine} are not in oomwatch's tables"
    if at is None:
        return f"the version of {engine} is not known"
    reason = vllm.fault(at, flag, value) if engine == "vllm" else sglang.fault(at, flag, value)
    return f"{flag} {reason}" if reason else None


def spell(engine: str, version: str | None, flag: str, value: Any) -> tuple[str, Any] | None:
    """A setting by its long name, written as the version writes it; None if it has no such setting.

    Values come back as text, switches as True; False asks for the off-switch. Without a version
    the newest known release is assumed. Other engines keep what they are given.
    """
    if not versions.sampled(engine):
        return flag, value if isinstance(value, bool) else str(value)
    at = versions.release(version) or versions.sampled(engine)[-1]
    return vllm.spell(at, flag, value) if engine == "vllm" else sglang.spell(at, flag, value)


def in_force(
    engine: str | None,
    version: str | None,
    *,
    generation: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    total_bytes: int | None = None,
    max_model_len: int | None = None,
    gpu_name: str | None = None,
) -> dict[str, Any]:
    """The values in force by canonical flag: those given (as numbers where they are), then defaults.

    `generation` is vLLM's ``V0`` or ``V1``; without it the version's usual one is taken.
    """
    at = versions.release(version)
    given = {flag: _value(value) for flag, value in (arguments or {}).items()}
    found: dict[str, Any] = {}
    if engine == "vllm":
        found = vllm.defaults(
            at,
            given,
            generation=generation or vllm.generation(version),
            total_bytes=total_bytes,
            max_model_len=_length(given.get("--max-model-len"), max_model_len),
            gpu_name=gpu_name,
        )
    elif engine == "sglang":
        found = sglang.defaults(
            at,
            given,
            total_bytes=total_bytes,
            max_model_len=_length(given.get("--context-length"), max_model_len),
        )
    if found.get("--max-model-len") is not None and not _positive(given.get("--max-model-len")):
        given.pop("--max-model-len", None)  # `auto` and -1 are not a length
    return {**found, **given}


def as_number(value: Any) -> int | float | None:
    """A flag's value as a number: ``16K`` is 16384, ``16k`` is 16000; None for any other text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return value
    match = _NUMBER.fullmatch(str(value)[:64])
    if match is None:
        return None
    number = float(match.group(1)) * _FACTORS[match.group(2)]
    return int(number) if number.is_integer() and "." not in match.group(1) else number


def allocator_variable(engine: str | None, version: str | None) -> str:
    """The variable that configures PyTorch's allocator in this release.

    PyTorch 2.9 renamed it and warns about the old name, which still works; vLLM came with 2.9 in
    0.12.0 and SGLang in 0.5.6.
    """
    floor = {"vllm": "0.12.0", "sglang": "0.5.6"}.get(engine or "")
    renamed = floor is not None and versions.at_least(version, floor)
    return "PYTORCH_ALLOC_CONF" if renamed else "PYTORCH_CUDA_ALLOC_CONF"


def _value(value: Any) -> Any:
    number = as_number(value)
    return value if number is None else number


def _length(given: Any, otherwise: int | None) -> int | None:
    return int(given) if _positive(given) else otherwise


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
