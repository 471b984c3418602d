"""Bytes of a token in each KV cache format, and which formats a version and card can run."""

from __future__ import annotations

import math

from oomwatch.engines.versions import Release
from oomwatch.memory.data.kv_formats import KV_FORMATS, SGLANG_FORMATS, KvFormat
from oomwatch.memory.devices import Device
from oomwatch.memory.model_config import LatentAttention, ModelConfig


def find_format(name: str, engine: str = "vllm") -> KvFormat | None:
    """The format that ``--kv-cache-dtype NAME`` selects, or None for a value nobody accepts."""
    formats = SGLANG_FORMATS if engine == "sglang" else KV_FORMATS
    return next((f for f in formats if f.name == name), None)


def head_bytes(fmt: KvFormat, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one KV head of one token in one layer, keys and values together."""
    if fmt.key_bits == 16:
        return 2 * head_dim * dtype_bytes
    if fmt.layout == "turboquant":
        keys = head_dim if fmt.key_bits == 8 else math.ceil(head_dim * fmt.key_bits / 8) + 2
        slot = keys + math.ceil(head_dim * fmt.value_bits / 8) + 4
        return slot + slot % 2
    size = head_dim * (fmt.key_bits + fmt.value_bits) // 8
    if fmt.layout == "scaled":
        return size + 8
    if fmt.layout == "nvfp4":
        return size + 2 * head_dim // 16
    return size


def latent_bytes(fmt: KvFormat, mixer: LatentAttention, dtype_bytes: int) -> int:
    """Bytes of one token in one MLA layer, with the indexer's own keys where there are any.

    The indexer keeps 8-bit keys with a 4-byte scale whatever the format (GLM-5, DeepSeek V3.2).
    """
    indexer = mixer.index_dim + 4 if mixer.index_dim else 0
    if mixer.index_dim and fmt.key_bits == 8 and fmt.layout == "plain":
        return 656 + indexer  # fp8 means fp8_ds_mla on sparse models
    if fmt.layout == "latent":
        return fmt.token_bytes + indexer
    size = dtype_bytes if fmt.key_bits == 16 else fmt.key_bits / 8
    return int(mixer.latent_dim * size) + indexer


def unsupported(
    fmt: KvFormat,
    version: Release,
    device: Device | None,
    model: ModelConfig,
    *,
    v0: bool = False,
) -> str | None:
    """Why this release on this card cannot run a format for this model; None where it can."""
    if version < fmt.first or (fmt.last is not None and version > fmt.last):
        return f"{fmt.name} is not a value of this vLLM release"
    if model.is_latent and fmt.latent == "no":
        return f"no MLA backend has {fmt.name}"
    if not model.is_latent and fmt.latent == "only":
        return f"{fmt.name} is for MLA models"
    if fmt.latent == "only" and not model.is_sparse_latent:
        return f"{fmt.name} is for sparse MLA models"
    if fmt.key_bits == 16:
        return None
    if v0 and fmt.layout != "plain":
        return f"{fmt.name} needs the V1 engine"
    capability = device.compute_capability if device else None
    if device is not None and capability is None:  # AMD: plain fp8 and Triton formats
        return None if fmt.layout in ("plain", "scaled") else f"{fmt.name} needs an NVIDIA card"
    if capability is None:
        return None
    if fmt.min_capability and capability < fmt.min_capability:
        return (
            f"{fmt.name} needs compute capability {fmt.min_capability[0]}.{fmt.min_capability[1]}"
        )
    families = fmt.families
    if fmt.name == "nvfp4" and version >= (0, 32, 0):
        families = (8, 9, 10, 12)
    if families and capability[0] not in families:
        return f"{fmt.name} has no backend on compute capability {capability[0]}.{capability[1]}"
    if fmt.layout == "plain" and not v0:
        return _plain_fp8_problem(version, capability, model)
    return None


def _plain_fp8_problem(
    version: Release, capability: tuple[int, int], model: ModelConfig
) -> str | None:
    """fp8 in V1: FlashAttention 3 on Hopper, Triton from 8.9, FlashInfer elsewhere."""
    if version < (0, 8, 0):
        return None  # V0
    if version < (0, 10, 2):
        return None if capability[0] in (9, 10) else "fp8 moves this release to its V0 engine"
    if model.is_latent:
        if version < (0, 18, 0) and capability[0] not in (9, 10):
            return "no MLA backend has fp8 on this card before vLLM 0.18.0"
        return None
    if capability < (7, 5) or (version >= (0, 24, 0) and capability < (8, 0)):
        return "no backend has fp8 on this card"
    return None


def runs_on_sglang(fmt: KvFormat, device: Device | None) -> bool:
    """Whether the backend that SGLang takes by itself on this card reads a format."""
    capability = device.compute_capability if device else None
    return not fmt.families or (capability is not None and capability[0] in fmt.families)


def backend_of(
    fmt: KvFormat, device: Device | None, model: ModelConfig, engine: str = "vllm"
) -> str:
    """The attention backend that a format needs, for people."""
    if fmt.backend != "any" or fmt.key_bits == 16:
        return fmt.backend
    capability = device.compute_capability if device else None
    if engine == "sglang":
        return _sglang_backend(fmt, capability, model)
    if capability is None:
        return "any with fp8"
    if model.is_latent:
        return {9: "FLASHMLA", 10: "FLASHINFER_MLA"}.get(capability[0], "TRITON_MLA")
    if capability[0] == 9 and fmt.name != "fp8_e5m2":
        return "FLASH_ATTN 3"
    return "FLASHINFER" if capability < (8, 9) or capability[0] in (9, 10) else "TRITON_ATTN"


def _sglang_backend(fmt: KvFormat, capability: tuple[int, int] | None, model: ModelConfig) -> str:
    """What SGLang picks by itself: fa3 on Hopper, which reads no e5m2, TensorRT's on Blackwell."""
    if capability is None:
        return "aiter"
    if capability[0] == 9:
        return "triton" if fmt.name == "fp8_e5m2" else "fa3"
    if capability[0] == 10 and fmt.name != "fp8_e5m2":
        return "trtllm_mla" if model.is_latent else "trtllm_mha"
    return "flashinfer"


def caveat(fmt: KvFormat, version: Release, device: Device | None, model: ModelConfig) -> str:
    """What a vLLM release asks for beyond the card to run a format; empty where nothing.

    Ampere's own FlashAttention reads no fp8: without FlashInfer the release refuses to start, and
    V1 before 0.10 falls back to its old engine.
    """
    capability = device.compute_capability if device else None
    plain = fmt.layout == "plain" and fmt.key_bits == 8 and not model.is_latent
    if not plain or capability is None or capability >= (8, 9) or version < (0, 10, 0):
        return ""
    other = "; int8_per_token_head runs on any card" if version >= (0, 20, 0) else ""
    return f"on this card only FlashInfer reads it, else the start is refused{other}"
