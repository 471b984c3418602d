"""The options an engine's argument parser knows at a version, found as argparse finds them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from oomwatch.engines import versions

Kind = Literal["value", "switch", "optional", "many", "unknown"]


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """What a typed option stands for.

    `negated` is true for ``--no-x``; `problem` says why the engine would not take it as typed.
    """

    flag: str
    kind: Kind
    negated: bool = False
    problem: str | None = None


# Short names and spellings beside those of the flag tables.
_ALIASES: Final[Mapping[str, Mapping[str, str]]] = {
    "vllm": {
        "--tp": "--tensor-parallel-size",
        "--tp-size": "--tensor-parallel-size",
        "--pp-size": "--pipeline-parallel-size",
        "--model-tag": "--model",
    },
    "sglang": {
        "-tp": "--tp-size",
        "--tp": "--tp-size",
        "--dp": "--dp-size",
        "--pipeline-parallel-size": "--pp-size",
        "--model": "--model-path",
    },
    "tgi": {},
    "lmdeploy": {"--model-path": "--model"},
    "llama.cpp": {
        "-c": "--ctx-size",
        "-np": "--parallel",
        "-m": "--model",
        "-hf": "--hf-repo",
        "-b": "--batch-size",
        "-ub": "--ubatch-size",
        "-ngl": "--n-gpu-layers",
        "--gpu-layers": "--n-gpu-layers",
        "-ctk": "--cache-type-k",
        "-ctv": "--cache-type-v",
        "-fa": "--flash-attn",
        "-cram": "--cache-ram",
        "-t": "--threads",
    },
    "ollama": {},
}
# Names that read like a switch where no table says more; the prefixes are the engines' own habit.
_SWITCH: Final = re.compile(
    r"--(?:no|enable|disable|skip|trust|use|log-requests|show|is|allow|keep|delete|offline|omni"
    r"|sleep-on-idle|mlock|embeddings?|cont-batching|kv-unified)(?:-|$)"
)
_TAKES_VALUE: Final = re.compile(
    r"--(?:log-requests-level|log-level|use-\w+-backend|skip-\w+-threshold)$"
)


@functools.lru_cache(maxsize=16)
def _options(engine: str, at: versions.Release | None) -> tuple[dict[str, Option], bool]:
    """Every spelling at a release (None: of any), and whether the list is complete."""
    found: dict[str, Option] = {}
    if engine == "vllm":
        for flag, row in versions.table("vllm")["flags"].items():
            if at is None or _held(row, at):
                _add_vllm(found, flag, row, at)
    elif engine == "sglang":
        for flag, row in versions.table("sglang")["flags"].items():
            option = Option(flag, "switch" if row.get("switch") else "value")
            for name in (flag, *row.get("aliases", ())):
                found[name] = option
    for alias, flag in _ALIASES.get(engine, {}).items():
        found.setdefault(alias, found.get(flag, Option(flag, "value")))
    return found, engine == "vllm"


def _held(row: Mapping[str, Any], at: versions.Release) -> bool:
    until = versions.release(row.get("until"))
    since = versions.release(row["since"])
    return (since is None or since <= at) and (until is None or at <= until)


def _add_vllm(
    found: dict[str, Option], flag: str, row: Mapping[str, Any], at: versions.Release | None
) -> None:
    forms: Mapping[str, str] = row.get("form", {})
    form = (versions.latest(forms, at) if at else None) or next(
        reversed(list(forms.values())), "value"
    )
    kind: Kind = "many" if row.get("many") else "value"
    if form == "store_true" or form.startswith("pair_no"):
        kind = "switch"
    elif form.startswith("optional_value"):
        kind = "optional"
    canonical = flag.replace("_", "-")
    if flag == "--device-memory-utilization":  # newer name of the same setting
        canonical = "--gpu-memory-utilization"
    option = Option(canonical, kind)
    for name in (canonical, flag.replace("_", "-"), *row.get("aliases", ())):
        found.setdefault(name, option)
    if form.startswith("pair_no"):
        found["--no-" + canonical[2:]] = Option(canonical, kind, negated=True)
        if form.endswith("enable_disable"):
            for on, off in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
                if canonical.startswith(on):
                    found.setdefault(
                        off + canonical.removeprefix(on), Option(canonical, kind, negated=True)
                    )


def find_option(engine: str, version: str | None, name: str) -> Option:
    """The option that a typed name means: exact, alias, ``--no-`` form, or unique prefix."""
    at = versions.release(version)
    if at is not None and versions.sampled(engine):
        at = versions.standing_for(engine, at)
    spellings, complete = _options(engine, at)
    if name in spellings:
        return spellings[name]
    if at is not None:  # typed for another release: still read it, and say that it is refused
        of_any, _ = _options(engine, None)
        if name in of_any:
            return dataclasses.replace(
                of_any[name], problem=f"{name} is not an option of {engine} {version}"
            )
    if name.startswith("--") and len(name) > 3:
        longer = {option for key, option in spellings.items() if key.startswith(name)}
        if len(longer) == 1:
            return longer.pop()
        if len(longer) > 1:
            return Option(name, "unknown", problem=f"{name} could mean several options")
    kind: Kind = "unknown"
    if _SWITCH.match(name) and not _TAKES_VALUE.match(name):
        kind = "switch"
    return Option(
        name,
        kind,
        problem=f"{name} is not an option of {engine} that is known" if complete else None,
    )


def nearest_option(engine: str, flag: str) -> str | None:
    """The option that was probably meant by one that no release has; None where none is near."""
    import difflib  # noqa: PLC0415 - only for an option that is not known

    known = versions.table(engine)["flags"] if versions.sampled(engine) else {}
    near = [] if flag in known else difflib.get_close_matches(flag, known, n=1, cutoff=0.8)
    return near[0] if near else None


def is_memory_option(engine: str, flag: str) -> bool:
    """Whether the engine's table has an option, by its canonical name, at any release."""
    return flag in versions.table(engine)["flags"]
