"""vLLM's options by release: what is accepted, how it is spelled, what holds when it is not given.

Read in the release sources 0.3.3 to 0.33.0; the table is `data/vllm_flags.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from oomwatch.engines import versions
from oomwatch.engines.versions import Release
from oomwatch.units import GIB

ENGINE: Final = "vllm"
_SHORT_LEVEL: Final = re.compile(r"-O\d")


def fault(at: Release, flag: str, value: object) -> str | None:
    """What the release's parser, or the check right behind it, would say against a flag; or None."""
    name = flag.split(".", maxsplit=1)[0].replace("_", "-") if flag.startswith("--") else flag
    floor = versions.standing_for(ENGINE, at)
    rows = versions.table(ENGINE)["flags"]
    negated = name.startswith("--no-") and name not in rows
    name = "--" + name[5:] if negated else "-O" if _SHORT_LEVEL.fullmatch(name) else name
    if name not in rows:
        name = next((key for key, row in rows.items() if name in row.get("aliases", ())), name)
    row = rows.get(name)
    if row is None or not _holds(row, floor):
        return f"is not an option of vllm {_text(at)}"
    form = form_of(row, floor)
    switch = form == "store_true" or form.startswith("pair_no")
    bare = value is None or value is True or value == ""
    partial = "." in flag or flag.startswith("-O")
    if negated and not form.startswith("pair_no"):
        return "has no --no- form in this release"
    if not partial and bare and form == "value":
        return "takes a value in this release"
    if not partial and switch and not bare:
        return "takes no value in this release"
    choices = versions.latest(row.get("choices", {}), floor)
    closed = choices and any(choice is not None for choice in choices)
    if closed and not bare and "." not in flag and str(value) not in map(str, choices or ()):
        return f"does not take {value} in this release"
    return None


def form_of(row: Mapping[str, Any], at: Release) -> str:
    """How an option is written: value, store_true, pair_no, optional_value and their variants."""
    return versions.latest(row.get("form", {}), at) or "value"


def spell(at: Release, flag: str, value: Any) -> tuple[str, Any] | None:
    """The spelling of a setting at a release, by its newest long name; None if it has none.

    Switches are given as True or False. ``--max-cudagraph-capture-size`` N is written as the
    release writes it; dicts become JSON.
    """
    floor = versions.standing_for(ENGINE, at)
    spelled: tuple[str, Any] | None = (flag, value)
    if flag == "--max-cudagraph-capture-size":
        spelled = _capture_size(floor, int(value))
    elif flag == "--limit-mm-per-prompt" and isinstance(value, dict):
        spelled = (flag, value if floor >= (0, 8, 5) else _pairs(value))
    elif flag == "--kv-cache-dtype" and value == "fp8" and floor < (0, 4, 1):
        spelled = (flag, "fp8_e5m2")
    elif isinstance(value, bool):
        spelled = _switch(floor, flag, value)
    if spelled is None:
        return None
    name, written = spelled
    if isinstance(written, dict):
        written = json.dumps(written, separators=(",", ":"))
    elif not isinstance(written, bool):
        written = str(written)
    return None if fault(at, name, written) else (name, written)


def _capture_size(at: Release, size: int) -> tuple[str, Any] | None:
    if at >= (0, 11, 1):
        return "--max-cudagraph-capture-size", size
    if at >= (0, 9, 0):
        return "--cuda-graph-sizes", size
    if at >= (0, 6, 5):
        return "--compilation-config", {"cudagraph_capture_sizes": capture_sizes(size)}
    return None


def capture_sizes(largest: int) -> list[int]:
    """The batch sizes for which graphs are captured, up to the largest."""
    return [size for size in (1, 2, 4, *range(8, largest + 1, 8)) if size <= largest]


def _pairs(limits: Mapping[str, Any]) -> str:
    return ",".join(f"{name}={count}" for name, count in limits.items())


def _switch(at: Release, flag: str, on: bool) -> tuple[str, Any] | None:
    row = versions.table(ENGINE)["flags"].get(flag)
    if row is None or on:
        return flag, True
    form = form_of(row, at)
    if form.startswith("pair_no"):
        return "--no-" + flag[2:], True
    return (flag, "False") if form.startswith("optional_value") else None


def generation(version: str | None, env: Mapping[str, str] | None = None) -> str | None:
    """``V0`` or ``V1`` as the release chooses by default; 0.8 to 0.10 may still fall back to V0."""
    at = versions.release(version)
    if at is None:
        return None
    asked = (env or {}).get("VLLM_USE_V1")
    if at >= (0, 11, 0) or (at >= (0, 8, 0) and asked != "0"):
        return "V1"
    return "V1" if asked == "1" and at >= (0, 6, 4) else "V0"


def defaults(
    at: Release | None,
    given: Mapping[str, Any],
    *,
    generation: str | None,
    total_bytes: int | None,
    max_model_len: int | None,
    gpu_name: str | None,
) -> dict[str, Any]:
    """Values in force for what was not given, as numbers; a value that cannot be known is absent.

    The server is meant, not the offline class. Without a version the settled old defaults stand.
    """
    floor = versions.standing_for(ENGINE, at) if at else None
    found: dict[str, Any] = {}
    for flag, row in versions.table(ENGINE)["flags"].items():
        if "default" in row and (floor is None or _holds(row, floor)):
            value = versions.latest(row["default"], floor) if floor else _oldest(row["default"])
            if value is not None:
                found[flag] = value
    if floor is None:
        for gone in ("--swap-space", "--num-scheduler-steps", "--max-seq-len-to-capture"):
            found.pop(gone, None)
    if not given.get("--enable-lora"):
        found.pop("--max-loras", None)
        found.pop("--max-lora-rank", None)
    if max_model_len is not None:
        found["--max-model-len"] = max_model_len
    sequences = _default_seqs(floor, generation, total_bytes, gpu_name)
    if sequences is not None:
        found["--max-num-seqs"] = sequences
    chunked = _chunked(floor, generation, given, max_model_len)
    if chunked is not None:
        found["--enable-chunked-prefill"] = chunked
    tokens = _default_tokens(
        floor,
        generation,
        chunked=chunked,
        total_bytes=total_bytes,
        max_model_len=max_model_len,
        gpu_name=gpu_name,
    )
    if tokens is not None:
        found["--max-num-batched-tokens"] = tokens
    return found


def _default_seqs(
    at: Release | None, generation: str | None, total_bytes: int | None, gpu_name: str | None
) -> int | None:
    if generation == "V0":
        return 256
    if generation is None or at is None:
        return None
    if at < (0, 8, 0):  # V1 on request
        return 1024
    large = _large(at, total_bytes, gpu_name)
    if large is None:
        return None
    unified = at >= (0, 33, 0) and "GB10" in (gpu_name or "")
    return 1024 if large and not unified else 256


def _default_tokens(
    at: Release | None,
    generation: str | None,
    *,
    chunked: bool | None,
    total_bytes: int | None,
    max_model_len: int | None,
    gpu_name: str | None,
) -> int | None:
    if at is None or generation is None:
        return None
    if generation == "V0":
        if chunked:
            return 768 if at < (0, 4, 2) else 512 if at < (0, 6, 5) else 2048
        return None if max_model_len is None else max(max_model_len, 2048)
    large = _large(at, total_bytes, gpu_name)
    if large is None:
        return None
    if large and at >= (0, 28, 0) and (total_bytes or 0) >= 160 * GIB:
        return 16384
    return 8192 if large else 2048


def _large(at: Release, total_bytes: int | None, gpu_name: str | None) -> bool | None:
    """Whether the card gets the defaults of large ones: 70 GiB, and from 0.9.0 no A100."""
    if total_bytes is None:
        return None
    return total_bytes >= 70 * GIB and not (at >= (0, 9, 0) and "a100" in (gpu_name or "").lower())


def _chunked(
    at: Release | None, generation: str | None, given: Mapping[str, Any], max_model_len: int | None
) -> bool | None:
    if at is None or generation is None:
        return None
    if generation == "V1":
        return True
    plain = not any(
        given.get(f) for f in ("--enable-lora", "--speculative-model", "--speculative-config")
    )
    return at >= (0, 5, 3) and (max_model_len or 0) > 32768 and plain


def _holds(row: Mapping[str, Any], at: Release) -> bool:
    since, until = versions.release(row["since"]), versions.release(row.get("until"))
    return (since is None or since <= at) and (until is None or at <= until)


def _oldest(by_release: Mapping[str, Any]) -> Any:
    return next(iter(by_release.values()))


def _text(at: Release) -> str:
    return ".".join(map(str, at))
