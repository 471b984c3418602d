"""Which stage or which part of the model a traceback stands in, told by its frames.

The caller decides the stage: the same dummy run serves profiling and graph capture. The deepest
telling frame decides the part. Frame names were read off vLLM 0.2 to 0.33 and SGLang 0.1 to 0.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, Literal

Stage = Literal[
    "init",
    "nccl",
    "draft",
    "load",
    "slots",
    "quantize",
    "repack",
    "profile",
    "compile",
    "kv",
    "pinned",
    "capture",
    "sampler",
    "serving",
    "wake",
]
Part = Literal[
    "logprobs",
    "encoder",
    "workspace",
    "moe",
    "speculation",
    "lora",
    "grammar",
    "logits",
    "sampler",
    "layer",
]

_STAGES: Final[tuple[tuple[Stage, re.Pattern[str]], ...]] = tuple(
    (stage, re.compile(pattern))  # type: ignore[misc]
    for stage, pattern in (
        ("wake", r":(?:wake_up|create_and_map|resume_memory_occupation)\b"),
        (
            "nccl",
            r":(?:ncclCommInitRank|init_model_parallel_group|init_worker_distributed_environment)\b",
        ),
        ("sampler", r":(?:_dummy_sampler_run|_dummy_pooler_run)\b"),
        (
            "pinned",
            r"(?::(?:allocate_cpu_cache|_?pin_memory|_allocate_pinned\w*)\b|memory_pool_host\.py:)",
        ),
        (
            "capture",
            r"(?::(?:capture_model|_capture_cudagraphs|capture_graph\w*|init_cuda_graphs|init_device_graphs|capture_one_batch_size)\b|cuda_graph_runner\.py:(?:__init__|capture)\b|method:capture)",
        ),
        (
            "profile",
            r":(?:profile_run|determine_available_memory|determine_num_available_blocks|profile_num_available_blocks|profile_cudagraph_memory|warmup)\b",
        ),
        ("compile", r":(?:kernel_warmup|flashinfer_autotune|deep_?gemm_warmup)\b"),
        (
            "kv",
            r":(?:initialize_kv_cache\w*|_?allocate_kv_cache\w*|allocate_gpu_cache|init_memory_pools?|_init_cache_engine|_create_buffers?|initialize_cache|initialize_from_config|init_attention_backend|_?create_model_instance)\b",
        ),
        (
            "slots",
            r":(?:load_lora_model|create_lora_manager|create_lora_weights|_create_lora_modules|init_lora_manager|init_lora_modules)\b",
        ),
        (
            "repack",
            r":(?:process_weights_after_loading|(?:\w+_)?repack\w*|marlin_\w+|_?swizzle\w*)\b",
        ),
        (
            "load",
            r"(?<!worker\.py):get_model\b|(?<!model_runner\.py):initialize\b|:(?:load_model|load_weights|_?initialize_model|make_layers|create_weights|get_all_weights|from_pretrained|_load_pretrained_model)\b",
        ),
        # A graph is captured where PyTorch's own context says so, whoever called it.
        ("capture", r"(?m)^graphs\.py:(?:capture_begin|capture_end|__enter__|__exit__)$"),
        ("init", r":init_device\b"),
        (
            "serving",
            r":(?:run_busy_loop|run_engine_loop|engine_step|_process_engine_step|worker_busy_loop|event_loop_\w+|_run_workers_async|generate|_engine_step_impl|step_async|Prefill|Decode|generate_token|engine_step|chat_completion_stream_generator|run_engine_loop_until_complete|_execute_worker_rpc|_continuation_prefill|_get_prompt_logprobs_dict|_execute_mm_encoder|execute_model|sample_tokens|run_batch|forward_batch_generation)\b",
        ),
        # The device context is entered to construct a model, not to run it.
        ("load", r"(?m)^_device\.py:__torch_function__$"),
    )
)
_FIRST_TOUCH: Final = re.compile(r":(?:set_device|_lazy_init|mem_get_info)$")
"""Calls that need next to no memory themselves."""
_QUANTIZE_IN_LOAD: Final = re.compile(r":(?:patched_weight_loader|load_weights)\b")
_CONVERSION: Final = re.compile(
    r":(?:process_weights_after_loading|scaled_fp8_quant|quantize\w*|\w*_quant\w*|_unquantized_generator|patched_weight_loader)\b"
)
_DRAFT: Final = re.compile(
    r"(?:eagle_worker|draft_worker|mtp_worker|spec_decode|eagle|medusa|draft)\w*\.py:(?:__init__|load_model|init_\w+)\b",
    re.IGNORECASE,
)
_COMPILER: Final = re.compile(
    r"(?:torch/_inductor|torch/_dynamo|torch/_functorch|compile_fx|/inductor/|triton/compiler|triton/runtime/autotuner)"
)
_PACKAGE: Final = re.compile(
    r"^.*(?:(?:site|dist)-packages/|/(?=(?:vllm|vllm_ascend|sglang|sgl_jax|lmdeploy|text_generation_server|flashinfer|deep_gemm|torch)/))"
)
"""What stands before the package in a path: an install folder called ``sgl-workspace`` tells nothing."""
_STRONG: Final[tuple[tuple[Part, re.Pattern[str]], ...]] = tuple(
    (part, re.compile(pattern, re.IGNORECASE))  # type: ignore[misc]
    for part, pattern in (
        (
            "logprobs",
            r":(?:_?get_prompt_logprobs\w*|_?compute_prompt_logprobs\w*|log_softmax|_?compute_logprobs|gather_logprobs|_?get_logprobs|get_top_logprobs\w*|compute_temp_top_p_normalized_logprobs|process_input_logprobs\w*|add_input_logprob\w*)\b",
        ),
        (
            "encoder",
            r"(?::(?:_?execute_mm_encoder\w*|_?merge_multimodal_embeddings|merge_\w*embeddings|get_multimodal_embeddings|embed_multimodal|get_(?:image|video|audio)_features?|_process_(?:image|video|audio|vision)\w*|embed_mm_inputs|get_embedding_and_mask|data_embedding_func)\b|(?:\b|_)(?:vision|visual|siglip|clip|vit|intern_vit|whisper_encoder)\w*\.py:)",
        ),
        ("lora", r"(?:lora|punica|sgmv|bgmv)"),
        (
            # SGLang's draft worker also runs the target model's own prefill.
            "speculation",
            r"(?:spec_decode|(?:eagle|mtp|multi_layer_eagle)_worker\w*\.py:(?!forward_batch_generation|forward_target_extend)|/\w*(?:_eagle\w*|_mtp|medusa)\.py:|medusa|scorer|draft|rejection_sampl|multi_step_worker|:propose\b|speculative_generation)",
        ),
        (
            "workspace",
            r"(?:indexer|:_?continuation_prefill|_compute_prefill_context|chunked_context|/mla|mla/|mla\w*\.py|flashmla|\bdsa|_dsa|\bnsa|nsa_|sparse_attn|workspace|_forward_prefill|flashinfer/prefill|mqa_logits|:_compute_prefill)",
        ),
        (
            "moe",
            r"(?:fused_moe|layers/moe/|deepep|deep_ep|moe_align|:experts?\b|all2all|prepare_finalize|modular_kernel|expert_|token_dispatcher)",
        ),
    )
)
"""Parts whose frames tell, wherever they stand below the step; of several the deepest decides."""
_WEAK: Final[tuple[tuple[Part, re.Pattern[str]], ...]] = tuple(
    (part, re.compile(pattern, re.IGNORECASE))  # type: ignore[misc]
    for part, pattern in (
        ("grammar", r"(?:xgrammar|grammar|bitmask|guided|structured_output)"),
        ("logits", r"logits_processor\.py:|:(?:compute_logits|_get_logits|_gather_logits)\b"),
        ("sampler", r"(?:sampler\.py|:sample\b|:_sample\b|top_k_top_p|topk_topp)"),
        (
            "layer",
            r":(?:forward\w*|_call_impl|apply\w*|forward_cuda|_model_forward|mhc_\w+|_hc_\w+|linear)\b",
        ),
    )
)
_VISION_MODEL: Final = re.compile(
    r"models/\w*(?:vl|llava|vision|omni|pixtral|ovis|molmo)\w*\.py:forward$", re.IGNORECASE
)
"""The class of a multimodal model runs the tower and then the decoder, both by `forward`."""
_MODEL: Final = re.compile(r"models/\w+\.py:")
_MODEL_FILE: Final = re.compile(r"(?:model_executor|srt)/models/\w+\.py$")
"""Where the classes of models stand, whose constructors allocate the weights."""


def find_stage(frames: Sequence[str], paths: Iterable[str] = ()) -> Stage | None:
    """The stage that the calling frames name, or None if none does."""
    text = "\n".join(frames)
    if not text:
        return None
    if _FIRST_TOUCH.search(frames[-1]):
        return "init"
    paths = tuple(paths)
    path_text = "\n".join(paths)
    stage = next((stage for stage, pattern in _STAGES if pattern.search(text)), None)
    if stage is None and any(
        frame.endswith(":__init__") and _MODEL_FILE.search(path)
        for frame, path in zip(frames, paths, strict=False)
    ):
        stage = "load"
    if stage == "repack" and _QUANTIZE_IN_LOAD.search(text) and _CONVERSION.search(text):
        # Conversion of single weights while shards still load, against repacking the whole model.
        stage = "quantize"
    elif stage == "load" and _CONVERSION.search(text):
        stage = "quantize"
    if stage in ("load", "kv", "profile", "capture", None) and _DRAFT.search(text):
        return "draft"
    if stage in ("profile", "capture", None) and _COMPILER.search(path_text):
        return "compile"
    if stage == "kv" and re.search(r":_?warm_up_model\b", text):
        return "capture"
    return stage


def find_part(frames: Sequence[str], paths: Sequence[str] = ()) -> Part | None:
    """The part of the model that the deepest telling frame names, or None."""
    places = _places(frames, paths)
    below_model = False
    for place in reversed(places):
        for part, pattern in _STRONG:
            if pattern.search(place):
                return part
        if not below_model and _VISION_MODEL.search(place):
            return "encoder"
        below_model = below_model or _MODEL.search(place) is not None
    for part, pattern in _WEAK:
        if any(pattern.search(place) for place in places):
            return part
    return None


def _places(frames: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Each frame as ``vllm/v1/engine/core.py:step``: the path within its package, and the function."""
    if len(frames) != len(paths):
        return list(frames)
    return [
        f"{_PACKAGE.sub('', path)}:{frame.rpartition(':')[2]}"
        for frame, path in zip(frames, paths, strict=True)
    ]


def telling_frame(frames: Sequence[str]) -> str | None:
    """The deepest frame that is not a generic call, for people to read."""
    generic = (":_call_impl", ":_wrapped_call_impl", ":__call__", ":<module>", "_ops.py:")
    return next((frame for frame in reversed(frames) if not any(g in frame for g in generic)), None)
