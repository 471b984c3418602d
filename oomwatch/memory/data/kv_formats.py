"""Every KV cache format that a vLLM release accepts, what a token costs in it, and where it runs.

Spans were read from the configuration and attention backends of the releases 0.3.3 to 0.33.0.
`first`/`last` are the releases whose parser takes the value; `needs` holds what the card must have.
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

from oomwatch.engines.versions import Release

Layout = Literal["plain", "scaled", "nvfp4", "turboquant", "latent"]


@dataclasses.dataclass(frozen=True, slots=True)
class KvFormat:
    """One value of ``--kv-cache-dtype``.

    Bytes of one head in one token, keys and values together, with head size d: ``plain`` is
    2 * d * bits/8; ``scaled`` has a 4-byte scale beside each of K and V; ``nvfp4`` one byte per 16;
    ``turboquant`` has its own slots; ``latent`` is `token_bytes` per layer, not per head.
    """

    name: str
    first: Release
    key_bits: int
    value_bits: int
    layout: Layout = "plain"
    last: Release | None = None
    token_bytes: int = 0
    min_capability: tuple[int, int] | None = None
    families: tuple[int, ...] = ()  # major capabilities; empty: any
    backend: str = "any"
    latent: Literal["yes", "no", "only"] = "no"
    quality: str = ""


_FP8_NOTE: Final = "half the bytes; small loss, check accuracy without calibrated scales"

KV_FORMATS: Final = (
    KvFormat("auto", (0, 0, 0), 16, 16, latent="yes", quality="the model's own precision"),
    KvFormat("float16", (0, 18, 0), 16, 16, latent="yes", quality="only if the model runs in it"),
    KvFormat("bfloat16", (0, 11, 0), 16, 16, latent="yes", quality="only if the model runs in it"),
    KvFormat("fp8", (0, 4, 1), 8, 8, latent="yes", quality=_FP8_NOTE),
    KvFormat("fp8_e4m3", (0, 4, 3), 8, 8, latent="yes", quality=_FP8_NOTE),
    KvFormat("fp8_e5m2", (0, 4, 3), 8, 8, quality="half the bytes; coarser than e4m3"),
    KvFormat(
        "fp8_ds_mla",
        (0, 11, 1),
        8,
        8,
        "latent",
        token_bytes=656,
        families=(9, 10, 12),
        backend="FLASHMLA_SPARSE",
        latent="only",
        quality="the format DeepSeek V3.2 was released with",
    ),
    KvFormat(
        "nvfp4_ds_mla",
        (0, 30, 0),
        4,
        4,
        "latent",
        token_bytes=352,
        families=(9, 10),
        backend="FLASHMLA_SPARSE",
        latent="only",
        quality="4 bits; check accuracy",
    ),
    KvFormat(
        "int8_per_token_head",
        (0, 20, 0),
        8,
        8,
        "scaled",
        backend="TRITON_ATTN",
        quality="half the bytes; scales per token and head, no calibration",
    ),
    KvFormat(
        "fp8_per_token_head",
        (0, 20, 0),
        8,
        8,
        "scaled",
        min_capability=(8, 9),
        backend="TRITON_ATTN",
        quality="half the bytes; scales per token and head, no calibration",
    ),
    KvFormat(
        "int4_per_token_head",
        (0, 25, 0),
        4,
        4,
        "scaled",
        backend="TRITON_ATTN",
        quality="a quarter of the bytes; visible loss, check accuracy",
    ),
    KvFormat(
        "nvfp4",
        (0, 21, 0),
        4,
        4,
        "nvfp4",
        families=(10,),
        backend="FLASHINFER",
        quality="3.5 times smaller; check accuracy",
    ),
    KvFormat(
        "nvfp4_4over6",
        (0, 28, 0),
        4,
        4,
        "nvfp4",
        families=(10,),
        backend="FLASHINFER",
        quality="as nvfp4, with better rounding",
    ),
    KvFormat(
        "turboquant_k8v4",
        (0, 20, 0),
        8,
        4,
        "turboquant",
        backend="TURBOQUANT",
        quality="keys 8 bits, values 4; check accuracy",
    ),
    KvFormat(
        "turboquant_4bit_nc",
        (0, 20, 0),
        4,
        4,
        "turboquant",
        backend="TURBOQUANT",
        quality="4 bits; check accuracy",
    ),
    KvFormat(
        "turboquant_k3v4_nc",
        (0, 20, 0),
        3,
        4,
        "turboquant",
        backend="TURBOQUANT",
        quality="3 and 4 bits; visible loss",
    ),
    KvFormat(
        "turboquant_3bit_nc",
        (0, 20, 0),
        3,
        3,
        "turboquant",
        backend="TURBOQUANT",
        quality="3 bits; visible loss",
    ),
)

_FP4_NOTE: Final = "3.5 times smaller; visible loss, check accuracy"

SGLANG_FORMATS: Final = (
    KvFormat("auto", (0, 0, 0), 16, 16, latent="yes", quality="the model's own precision"),
    KvFormat("bfloat16", (0, 0, 0), 16, 16, latent="yes", quality="only if the model runs in it"),
    KvFormat("bf16", (0, 0, 0), 16, 16, latent="yes", quality="only if the model runs in it"),
    KvFormat("float16", (0, 0, 0), 16, 16, latent="yes", quality="only if the model runs in it"),
    KvFormat("fp8_e4m3", (0, 0, 0), 8, 8, latent="yes", quality=_FP8_NOTE),
    KvFormat(
        "fp8_e5m2", (0, 0, 0), 8, 8, latent="yes", quality="half the bytes; coarser than e4m3"
    ),
    *(
        KvFormat(name, (0, 0, 0), 4, 4, "nvfp4", families=(10,), latent="yes", quality=_FP4_NOTE)
        for name in ("nvfp4", "fp4_e2m1", "fp4_mx_block16")
    ),
)
"""SGLang's values; which release takes which is in the table of its flags. 4 bits are offered where
the default backend reads them: fa3 and FlashInfer do not."""

UNSIZED_FORMATS: Final = (
    "fp8_inc",
    "ultraquant_4bit",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "mxfp8",
)
"""Values that some release takes (Gaudi, AMD, SGLang's newest), whose bytes per token are not
documented."""
