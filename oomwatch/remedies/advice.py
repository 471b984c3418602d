"""Flags of the user's own that are known to be wrong, whatever the finding: one sentence each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from oomwatch.engines import flags, versions
from oomwatch.engines.vllm.flags import generation
from oomwatch.records import EngineFacts

_MOST: Final = 12
_HIGH_SHARE: Final = 0.95

_VLLM_ON_SGLANG: Final[Mapping[str, str]] = {
    "--gpu-memory-utilization": "the nearest is --mem-fraction-static",
    "--max-num-seqs": "the nearest is --max-running-requests",
    "--max-model-len": "the nearest is --context-length",
    "--max-num-batched-tokens": "the nearest is --chunked-prefill-size",
    "--enforce-eager": "the nearest is --disable-cuda-graph",
    "--swap-space": "SGLang has nothing like it",
    "--enable-prefix-caching": "prefix caching is on by default",
    "--enable-chunked-prefill": "chunked prefill is on by default",
}
_NEVER_ON_SGLANG: Final[Mapping[str, str]] = {
    "--enable-radix-attention": "it is on by default; the only switch is --disable-radix-cache",
    "--disable-radix-attention": "the switch is --disable-radix-cache",
    "--int8-kv-cache": "8-bit KV is --kv-cache-dtype fp8_e4m3",
}
_SGLANG_ON_VLLM: Final[Mapping[str, str]] = {
    "--mem-fraction-static": "the nearest is --gpu-memory-utilization",
    "--max-running-requests": "the nearest is --max-num-seqs",
    "--context-length": "the nearest is --max-model-len",
    "--chunked-prefill-size": "the nearest is --max-num-batched-tokens",
    "--disable-cuda-graph": "the nearest is --enforce-eager",
}


def foreign_flags(engine: str) -> Mapping[str, str]:
    """Options that people write for an engine that never had them, and what it has instead."""
    return _SGLANG_ON_VLLM if engine == "vllm" else {**_NEVER_ON_SGLANG, **_VLLM_ON_SGLANG}


def wrong_flags(engine: EngineFacts) -> tuple[str, ...]:
    """A sentence for each own flag or variable that does nothing, does harm, or is refused."""
    name = engine.engine or ""
    if name.startswith("vllm"):
        found = [*_vllm(engine), *_allocator("vllm", engine)]
    elif name.startswith("sglang"):
        found = [*_sglang(engine), *_allocator("sglang", engine)]
    else:
        found = []
    return tuple(dict.fromkeys(found))[:_MOST]


def _vllm(engine: EngineFacts) -> Iterator[str]:
    given, version = engine.arguments, None if engine.fork else engine.version
    v1 = (engine.generation or generation(version, engine.env)) == "V1"
    explained: set[str] = set()
    if str(given.get("--kv-cache-dtype", "")).lower() == "int8":
        explained.add("--kv-cache-dtype")
        newer = versions.at_least(version, "0.20.0")
        instead = "int8_per_token_head or fp8" if newer or newer is None else "fp8"
        yield f"--kv-cache-dtype int8 is accepted by no release of vLLM: use {instead}."
    for flag, nearest in _SGLANG_ON_VLLM.items():
        if flag in given:
            explained.add(flag)
            yield f"{flag} is SGLang's option, not vLLM's: {nearest}."
    if v1 and "--swap-space" in given:
        explained.add("--swap-space")
        gone = " and is refused from 0.18.0 on" if versions.at_least(version, "0.18.0") else ""
        yield f"--swap-space does nothing on this engine: V1 never swaps{gone}."
    if v1 and "--max-seq-len-to-capture" in given:
        explained.add("--max-seq-len-to-capture")
        yield "--max-seq-len-to-capture does nothing on this engine: it was a setting of V0."
    if given.get("--enable-prefix-caching") is False:
        yield (
            "--no-enable-prefix-caching frees no GPU memory: cached blocks are given up when "
            "others need them."
        )
    if str(given.get("--enable-chunked-prefill")) == "False":
        yield "Turning chunked prefill off raises the activation peak of long prompts."
    if given.get("--skip-mm-profiling") is True:
        yield "--skip-mm-profiling leaves the encoder's peak out of the memory budget."
    if "--num-gpu-blocks-override" in given:
        yield "--num-gpu-blocks-override is meant for tests: the KV cache is no longer measured."
    if "--kv-cache-memory-bytes" in given and "--gpu-memory-utilization" in given:
        yield "--gpu-memory-utilization does nothing while --kv-cache-memory-bytes is set."
    yield from _lengths(given)
    share = flags.as_number(given.get("--gpu-memory-utilization"))
    if (
        share is not None
        and share > _HIGH_SHARE
        and not engine.arguments.get("--kv-cache-memory-bytes")
    ):
        yield (
            f"--gpu-memory-utilization {share:g} leaves almost nothing for later allocations; "
            "raising it is no cure for an out-of-memory error while serving."
        )
    if engine.env.get("VLLM_USE_V1") == "0" and versions.at_least(version, "0.11.0"):
        yield "VLLM_USE_V1=0 does nothing from vLLM 0.11.0 on: there is only V1."
    if versions.outside("vllm", version) is None:
        yield from _refused(engine, version, explained)


def _lengths(given: Mapping[str, Any]) -> Iterator[str]:
    for flag in ("--max-model-len", "--max-num-batched-tokens"):
        small = re.fullmatch(r"(\d{1,6})k", str(given.get(flag, "")))
        if small:
            count = int(small.group(1))
            yield f"{flag} {count}k means {count * 1000} tokens; write {count * 1024} for {count}K."


def _refused(engine: EngineFacts, version: str | None, explained: set[str]) -> Iterator[str]:
    """Options that this release does not have, or whose value it does not take."""
    for flag, value in engine.arguments.items():
        if (
            flag in explained
            or flag in engine.accepted
            or not flag.startswith("--")
            or isinstance(value, list | dict)
        ):
            continue
        typed = "--no-" + flag[2:] if value is False else flag
        reason = flags.check_flag("vllm", version, typed, True if value is False else value)
        if reason is not None:
            yield f"{_printable(reason)}: the server refuses to start with it."


def _sglang(engine: EngineFacts) -> Iterator[str]:
    given, version = engine.arguments, None if engine.fork else engine.version
    for flag, truth in _NEVER_ON_SGLANG.items():
        if flag in given:
            yield f"{flag} was never an option of SGLang, which refuses to start with it: {truth}."
    for flag, nearest in _VLLM_ON_SGLANG.items():
        if flag in given:
            yield f"{flag} is vLLM's option, not SGLang's: {nearest}."
    kind = str(given.get("--kv-cache-dtype", "")).lower()
    if kind in ("int8", "fp8"):
        yield f"--kv-cache-dtype {kind} is accepted by no release of SGLang: write fp8_e4m3."
    if "--disable-radix-cache" in given:
        yield "--disable-radix-cache frees no GPU memory: cached prefixes give way when needed."
    if str(given.get("--chunked-prefill-size")) == "-1":
        yield "--chunked-prefill-size -1 removes the bound on the activations of long prompts."
    if "--cuda-graph-max-bs" in given and versions.at_least(version, "0.5.20"):
        yield "SGLang refuses --cuda-graph-max-bs since 0.5.20: write --cuda-graph-max-bs-decode."
    if "--torchao-config" in given and versions.at_least(version, "0.5.18"):
        yield "--torchao-config is gone from SGLang 0.5.18 on: use --quantization."


def _allocator(name: str, engine: EngineFacts) -> Iterator[str]:
    """The allocator's variable by a name this PyTorch does not read, or with a clashing setting."""
    known = flags.allocator_variable(name, engine.version)
    if engine.version is not None and not engine.fork:
        if known == "PYTORCH_ALLOC_CONF" and "PYTORCH_CUDA_ALLOC_CONF" in engine.env:
            yield (
                "PYTORCH_CUDA_ALLOC_CONF is the old name: this release's PyTorch warns of it and "
                "reads PYTORCH_ALLOC_CONF."
            )
        if known == "PYTORCH_CUDA_ALLOC_CONF" and "PYTORCH_ALLOC_CONF" in engine.env:
            yield (
                "PYTORCH_ALLOC_CONF is not read by this release's PyTorch: write "
                "PYTORCH_CUDA_ALLOC_CONF."
            )
    setting = engine.env.get("PYTORCH_ALLOC_CONF", engine.env.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    sleeps = engine.arguments.get("--enable-sleep-mode") is True
    if sleeps and "expandable_segments:true" in setting.lower() and name == "vllm":
        yield "expandable_segments does not work with --enable-sleep-mode, whose pool refuses it."


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text[:160])
