"""The flags of a server command that decide memory, with the defaults of its version and card."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, Literal

from oomwatch.engines import flags
from oomwatch.engines.versions import Release, release
from oomwatch.engines.vllm import flags as vllm_flags
from oomwatch.errors import UsageError
from oomwatch.memory.data.kv_formats import UNSIZED_FORMATS, KvFormat
from oomwatch.memory.devices import Device
from oomwatch.memory.flag_values import (
    Numbers,
    count_of,
    dtype_of,
    json_of,
    length_of,
    size_of,
    text_of,
)
from oomwatch.memory.kv_formats import find_format, unsupported
from oomwatch.memory.model_config import ModelConfig
from oomwatch.memory.quantization import quantization_of
from oomwatch.units import GIB, MIB

Engine = Literal["vllm", "sglang"]

NEWEST: Final[Release] = (999, 0, 0)
"""Stands for an unknown version: the newest behaviour is assumed, and said."""

_MTP_METHODS: Final = ("mtp", "deepseek_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "ernie_mtp")
_MLA_BLOCK_HOPPER: Final = 64  # FlashMLA and FlashInfer-MLA; other cards keep 16
_MLA_LATENT: Final = 576  # the only latent those kernels take; others run on Triton's


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """One server's memory-relevant configuration; lengths in tokens."""

    engine: Engine
    version: Release
    v0: bool
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    utilization: float = 0.9
    """vLLM's share of total memory, or SGLang's static fraction of free memory."""
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: bool = False
    attention_data_parallel: int = 1
    enforce_eager: bool = False
    prefix_caching: bool = False
    """Prefix caching of recurrent states, which costs a second state per sequence."""
    hybrid_manager: bool = True
    chunked_local_pages: bool = False
    speculative_tokens: int = 0
    draft_layers: int = 0
    """Layers of the draft that keep a cache."""
    draft_weight_layers: int = 0
    """Multi-token prediction layers whose weights are loaded as well."""
    draft_head: Literal["eagle", "eagle3"] | None = None
    """A separate draft of one layer, of the target's own sizes."""
    latent_cache: bool = True
    """MLA keeps its latent; before 0.7.1, or switched off, it keeps whole heads."""
    graph_count: int = 0
    decode_batch: int = 0
    """SGLang: requests of the largest decode graph, which its own reserve is made for."""
    estimates_graphs: bool = False
    kv_cache_memory_bytes: int | None = None
    blocks_override: int | None = None
    most_tokens: int | None = None
    """SGLang's limit of the pool in tokens, for tests and shared cards."""
    quantization: str | None = None
    dtype_bytes: int | None = None
    state_dtype_bytes: int | None = None
    flashinfer_sampler: bool = False
    concurrent_batches: int = 1
    encoder: bool = True
    lora_slots: int = 0
    lora_rank: int = 0
    cpu_offload_bytes: int = 0
    max_seqs_given: bool = False
    capability: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def groups_layers(self) -> bool:
        """Layers of different kinds get their own block tables (V1 from 0.9.1)."""
        return (
            self.engine == "vllm"
            and not self.v0
            and self.hybrid_manager
            and self.version >= (0, 9, 1)
        )

    @property
    def measures_activations(self) -> bool:
        """Whether the KV pool is sized by what a profile run leaves: not where a flag sizes it."""
        sized = self.kv_cache_memory_bytes is not None or self.blocks_override is not None
        return self.engine == "vllm" and not sized

    @property
    def in_flight_tokens(self) -> int:
        """Tokens a sliding window holds beyond itself; several batches from 0.26.0."""
        batches = self.concurrent_batches if self.version >= (0, 26, 0) else 1
        return self.max_num_batched_tokens * batches

    @property
    def attention_ranks(self) -> int:
        """Ranks that split the attention heads."""
        return max(1, self.tensor_parallel // self.attention_data_parallel)

    @property
    def checks_all_layers(self) -> bool:
        """Whether the fit check holds all stages' layers against one GPU: a fault of 0.14, 0.15."""
        return (
            self.engine == "vllm"
            and self.pipeline_parallel > 1
            and (0, 14, 0) <= self.version < (0, 16, 0)
        )

    @property
    def replicas(self) -> int:
        """Independent token pools, one for each data-parallel rank."""
        return self.data_parallel

    @property
    def gpus(self) -> int:
        """GPUs that the whole server needs."""
        data = 1 if self.attention_data_parallel > 1 else self.data_parallel
        return self.tensor_parallel * self.pipeline_parallel * data

    def kv_format(self, model: ModelConfig) -> KvFormat:
        """The cache format in force; `auto` may be named by the checkpoint or the model kind.

        Raises UsageError for a value that no release accepts.
        """
        fmt = find_format(self.kv_cache_dtype, self.engine)
        if fmt is None and self.kv_cache_dtype in UNSIZED_FORMATS:
            raise UsageError(
                f"the bytes per token of {self.kv_cache_dtype} are not known to oomwatch"
            )
        if fmt is None:
            raise UsageError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is not a format of {self.engine}; "
                "plan prints the table of those that work"
            )
        if fmt.name != "auto":
            return fmt
        named = None
        if self.engine == "vllm" and model.is_sparse_latent and self.version >= (0, 11, 0):
            named = "fp8_ds_mla"  # DeepSeek V3.2 and GLM-5: 8 bits unless bfloat16 is asked for
        elif self.engine == "vllm" and self.version >= (0, 12, 0):
            named = quantization_of(model).kv_cache_dtype
        return find_format(named, self.engine) or fmt if named else fmt

    def block_size_for(self, model: ModelConfig) -> int:
        """Tokens of an attention block, before hybrid models enlarge it."""
        if self.engine == "sglang":
            return self.block_size or 1
        if model.latent_dim == _MLA_LATENT and (self.capability or (0, 0))[0] in (9, 10):
            return max(self.block_size or 0, _MLA_BLOCK_HOPPER)
        if model.is_sparse_latent:
            return _MLA_BLOCK_HOPPER
        return self.block_size or 16


def resolve(
    engine: str,
    version: str | None,
    *,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    device: Device,
    model: ModelConfig,
) -> Settings:
    """The settings in force for a command on a card.

    Raises UsageError for an engine without a memory model, and for values that are no numbers.
    """
    if engine == "sglang":
        return _sglang(version, arguments, device, model)
    if engine != "vllm":
        raise UsageError(f"no memory model for {engine}; plan knows vllm and sglang")
    return _vllm(version, arguments, env, device, model)


def _vllm(
    version: str | None,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    device: Device,
    model: ModelConfig,
) -> Settings:
    at = release(version) or NEWEST
    speculative = json_of(arguments.get("--speculative-config"))
    v0 = _is_v0(version, arguments, env, device, model)
    length = length_of(arguments.get("--max-model-len"), model)
    values = flags.in_force(
        "vllm",
        version,
        generation="V0" if v0 else "V1",
        arguments=arguments,
        total_bytes=device.total_bytes,
        max_model_len=length,
        gpu_name=device.name,
    )
    pick = Numbers(values)
    pipeline = pick.ranks("--pipeline-parallel-size")
    seqs = pick.integer("--max-num-seqs", 1024 if device.is_large and not v0 else 256)
    tokens = pick.integer("--max-num-batched-tokens", 8192 if device.is_large else 2048)
    method = str(speculative.get("method") or "")
    drafts = count_of(speculative.get("num_speculative_tokens"))
    own_draft = drafts > 0 and (method in _MTP_METHODS or method.endswith("mtp"))
    eagle = drafts > 0 and method in ("eagle", "eagle3")
    notes: list[str] = []
    dense = not model.layers[-1].mlp.experts
    if "--speculative-config" in arguments and not speculative:
        notes.append("--speculative-config is no JSON object: no draft is counted")
    elif eagle:
        weights = "are taken as those of one layer too" if dense else "are not counted"
        notes.append(f"the draft's cache is taken as one layer of the model; its weights {weights}")
    elif drafts and not own_draft and method not in ("ngram", "suffix"):
        notes.append("the draft model's weights and cache are not counted")
    connector = "--kv-transfer-config" in arguments
    if connector:
        notes.append("the KV connector turns the hybrid cache manager off")
    if pipeline > 1 and "VLLM_PP_LAYER_PARTITION" in env:
        notes.append("VLLM_PP_LAYER_PARTITION is not applied: even pipeline stages are taken")
    if "--hf-overrides" in arguments:
        notes.append("--hf-overrides is not applied to the model's sizes")
    async_on = arguments.get("--async-scheduling")
    eager = bool(values.get("--enforce-eager"))
    return Settings(
        engine="vllm",
        version=at,
        v0=v0,
        max_model_len=length,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        utilization=pick.share("--gpu-memory-utilization", 0.92 if at >= (0, 20, 0) else 0.9),
        kv_cache_dtype=str(values.get("--kv-cache-dtype") or "auto"),
        block_size=pick.optional("--block-size") if "--block-size" in arguments else None,
        tensor_parallel=pick.ranks("--tensor-parallel-size"),
        pipeline_parallel=pipeline,
        data_parallel=pick.ranks("--data-parallel-size"),
        context_parallel=pick.ranks("--decode-context-parallel-size")
        * pick.ranks("--prefill-context-parallel-size"),
        expert_parallel=bool(values.get("--enable-expert-parallel")),
        enforce_eager=eager,
        prefix_caching=_caches_states(at, arguments, model),
        hybrid_manager=not connector and not values.get("--disable-hybrid-kv-cache-manager"),
        chunked_local_pages=env.get("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE") == "1",
        speculative_tokens=drafts,
        draft_layers=max(1, model.mtp_layers) if own_draft else int(eagle),
        draft_weight_layers=max(1, model.mtp_layers) if own_draft else 0,
        draft_head=("eagle3" if method == "eagle3" else "eagle") if eagle and dense else None,
        latent_cache=at >= (0, 7, 1) and env.get("VLLM_MLA_DISABLE") != "1",
        graph_count=0 if eager else _graph_count(at, v0, seqs, drafts, arguments),
        estimates_graphs=_estimates_graphs(at, env),
        kv_cache_memory_bytes=size_of(
            "--kv-cache-memory-bytes", arguments.get("--kv-cache-memory-bytes")
        ),
        blocks_override=pick.optional("--num-gpu-blocks-override"),
        quantization=text_of(arguments.get("--quantization")),
        dtype_bytes=dtype_of(arguments.get("--dtype")),
        state_dtype_bytes=dtype_of(arguments.get("--mamba-ssm-cache-dtype")),
        flashinfer_sampler=_flashinfer(at, env, device),
        concurrent_batches=max(pipeline, 1 if async_on is False else 2),
        encoder=_profiles_encoder(arguments),
        lora_slots=pick.integer("--max-loras", 1) if values.get("--enable-lora") else 0,
        lora_rank=pick.integer("--max-lora-rank", 16) if values.get("--enable-lora") else 0,
        cpu_offload_bytes=int(pick.number("--cpu-offload-gb", 0.0) * 2**30),
        max_seqs_given="--max-num-seqs" in arguments,
        capability=device.compute_capability,
        notes=tuple(notes),
    )


def _sglang(
    version: str | None, arguments: Mapping[str, Any], device: Device, model: ModelConfig
) -> Settings:
    at = release(version) or NEWEST
    length = length_of(arguments.get("--context-length"), model)
    values = flags.in_force(
        "sglang",
        version,
        arguments=arguments,
        total_bytes=device.total_bytes,
        max_model_len=length,
        gpu_name=device.name,
    )
    pick = Numbers(values)
    ranks = pick.ranks("--tp-size")
    data = pick.ranks("--dp-size")
    spread = bool(values.get("--enable-dp-attention"))
    attention = pick.integer("--attn-dp-size", data if spread else 1)
    chunk = _sglang_chunk(values)
    stages = pick.ranks("--pp-size")
    batch = _sglang_batch(device, ranks)
    for flag in ("--cuda-graph-max-bs", "--cuda-graph-max-bs-decode"):
        batch = pick.optional(flag) or batch
    drafts = pick.integer("--speculative-num-draft-tokens", 0)
    mtp = bool(drafts) and model.mtp_layers > 0 and not values.get("--speculative-draft-model-path")
    return Settings(
        engine="sglang",
        version=at,
        v0=False,
        max_model_len=length,
        max_num_seqs=pick.integer("--max-running-requests", 2048),
        max_num_batched_tokens=max(chunk, 2048),
        utilization=pick.share(
            "--mem-fraction-static", _sglang_fraction(device, chunk, batch, ranks * stages)
        ),
        kv_cache_dtype=str(values.get("--kv-cache-dtype") or "auto"),
        block_size=pick.optional("--page-size"),
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        data_parallel=data,
        expert_parallel=pick.ranks("--ep-size") > 1,
        attention_data_parallel=attention,
        enforce_eager=bool(values.get("--disable-cuda-graph")),
        decode_batch=batch,
        most_tokens=pick.optional("--max-total-tokens"),
        draft_layers=max(1, model.mtp_layers) if mtp else 0,
        draft_weight_layers=max(1, model.mtp_layers) if mtp else 0,
        quantization=text_of(arguments.get("--quantization")),
        dtype_bytes=dtype_of(arguments.get("--dtype")),
        max_seqs_given="--max-running-requests" in arguments,
        capability=device.compute_capability,
    )


def _sglang_chunk(values: Mapping[str, Any]) -> int:
    """Prompt tokens of a step; -1 asks for whole prompts, up to the limit of a prefill batch."""
    if flags.as_number(values.get("--chunked-prefill-size")) == -1:
        return Numbers(values).integer("--max-prefill-tokens", 16384)
    return Numbers(values).integer("--chunked-prefill-size", 8192)


def _sglang_batch(device: Device, ranks: int) -> int:
    """Requests of the largest decode graph by default, by memory of the card and ranks."""
    size = device.total_bytes / GIB
    few, many = (8, 8) if size < 20 else (24, 80) if size < 35 else (32, 160)
    if size >= 60:
        few, many = 256, 512
    return many if ranks >= 4 else few


def _sglang_fraction(device: Device, chunk: int, batch: int, ranks: int) -> float:
    """The default fraction where the version's own rule is not in the tables.

    Reserve in MB: 512 + 1.5 per token of a chunk + 2 per graph batch + 128 per rank. A chunk that
    reserves more than the card leaves nothing, not even for the weights.
    """
    card = device.total_bytes / MIB
    reserve = 512 + 1.5 * max(chunk, 2048) + 2 * batch + 128 * ranks
    if card > 60 * 1024:
        reserve = max(reserve, 10240)
    return max(0.001, round((card - reserve) / card, 3))


# --------------------------------------------------------------------------------- vLLM's rules
def _is_v0(
    version: str | None,
    arguments: Mapping[str, Any],
    env: Mapping[str, str],
    device: Device,
    model: ModelConfig,
) -> bool:
    """Whether the old engine runs; 0.8.0 to 0.10.2 fall back to it on what V1 lacks."""
    if vllm_flags.generation(version, env) == "V0":
        return True
    at = release(version) or NEWEST
    if at >= (0, 11, 0) or env.get("VLLM_USE_V1") == "1":
        return False
    if device.compute_capability is not None and device.compute_capability < (8, 0):
        return True
    fmt = find_format(str(arguments.get("--kv-cache-dtype") or "auto"))
    if fmt is not None and fmt.key_bits != 16 and at < (0, 10, 2):
        return at < (0, 8, 2) or unsupported(fmt, at, device, model) is not None
    return False


def _caches_states(at: Release, arguments: Mapping[str, Any], model: ModelConfig) -> bool:
    """Prefix caching of a hybrid model: off by default up to 0.25, on from 0.26."""
    if not model.is_hybrid or arguments.get("--mamba-cache-mode") == "none":
        return False
    asked = arguments.get("--enable-prefix-caching")
    return at >= (0, 26, 0) if asked is None else bool(asked)


def _estimates_graphs(at: Release, env: Mapping[str, str]) -> bool:
    """Graphs come out of the budget by default from 0.20.0, on request from 0.18.0."""
    asked = env.get("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS")
    if at < (0, 18, 0):
        return False
    return at >= (0, 20, 0) if asked is None else asked == "1"


def _flashinfer(at: Release, env: Mapping[str, str], device: Device) -> bool:
    """FlashInfer's sampler: on request, and by default from 0.22 on cards it supports."""
    asked = env.get("VLLM_USE_FLASHINFER_SAMPLER")
    if asked is not None:
        return asked == "1"
    return at >= (0, 22, 0) and (device.compute_capability or (0, 0)) >= (8, 0)


def _profiles_encoder(arguments: Mapping[str, Any]) -> bool:
    if arguments.get("--language-model-only") or arguments.get("--skip-mm-profiling"):
        return False
    limits = json_of(arguments.get("--limit-mm-per-prompt"))
    return not limits or any(limits.get(k) != 0 for k in ("image", "video") if k in limits)


def _graph_count(
    at: Release, v0: bool, seqs: int, drafts: int, arguments: Mapping[str, Any]
) -> int:
    """How many CUDA graphs of decode batches are captured: sizes 1, 2, 4, then steps of 8 or 16."""
    listed = arguments.get("--cudagraph-capture-sizes") or arguments.get("--cuda-graph-sizes")
    compilation = json_of(arguments.get("--compilation-config"))
    if compilation.get("cudagraph_mode") == "NONE":
        return 0
    sizes = compilation.get("cudagraph_capture_sizes")
    if isinstance(listed, list):
        return len(listed)
    if isinstance(sizes, list):
        return len(sizes)
    if v0:
        largest = min(seqs, 256)
    else:
        largest = min(2 * seqs * (1 + drafts), 512)
        given = flags.as_number(arguments.get("--max-cudagraph-capture-size"))
        largest = int(given) if given else largest
    small = sum(1 for size in (1, 2, 4) if size <= largest)
    if at >= (0, 11, 1) and not v0:
        return small + min(largest, 256) // 8 + max(0, largest - 256) // 16
    return small + largest // 8
