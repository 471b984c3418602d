"""The causes oomwatch can name, by class. Ids are stable: reports, alerts and pages share them."""

from __future__ import annotations

from typing import Final

from oomwatch.records import CauseClass

CAUSES: Final[dict[CauseClass, tuple[str, ...]]] = {
    "startup": (
        "weights_dont_fit",
        "quant_load_peak",
        "quant_repack",
        "kv_no_blocks",
        "kv_lt_max_len",
        "kv_budget_cotenant",
        "kv_alloc_overcommit",
        "parallel_imbalance",
        "state_cache_seqs",
        "gpu_busy_other_process",
        "gpu_busy_margin",
        "profile_race",
        "profile_race_false",
        "profile_activation_peak",
        "profile_mm_dummy",
        "sampler_warmup",
        "cuda_graph_capture",
        "torch_compile",
        "lora_slots",
        "spec_draft",
        "nccl_init",
        "shm_too_small",
        "host_oom_load",
        "host_oom_jit",
        "host_oom_repack",
        "host_pinned_swap",
        "unified_memory",
        "wsl_alloc_limit",
        "mig_slice",
        "wrong_device",
        "startup_unknown",
    ),
    "long_context": (
        "prefill_activation_peak",
        "attn_workspace_peak",
        "prompt_logprobs_peak",
        "lora_activation_peak",
        "kv_saturation",
        "kv_preempt_recompute_storm",
        "kv_preempt_swap_storm",
        "cpu_swap_exhausted",
        "kv_request_never_fits",
        "kv_retract_storm",
        "kv_alloc_fail_decode",
        "kv_alloc_fail_prefill",
        "kv_alloc_fail_hybrid_state",
        "kv_pool_leak",
        "kv_slot_exhausted",
        "unified_memory_prefill_growth",
    ),
    "irregular": (
        "host_ram_leak",
        "host_cache_growth",
        "host_oom_kill",
        "gpu_leak_growth",
        "mm_encoder_peak",
        "concurrency_burst_peak",
        "moe_dispatch_peak",
        "spec_decode_underprofiled",
        "engine_buffers_unprofiled",
        "fragmentation",
        "sleep_wake_map_fail",
        "colocated_tenant",
        "structured_output_growth",
        "irregular_unknown",
    ),
    "not_oom": (
        "illegal_memory_access",
        "rpc_timeout_hang",
        "gpu_hw_fault",
        "engine_assertion",
        "nccl_watchdog",
        "request_too_long",
        "kv_transfer_fail",
        "lora_slot_queue",
        "bounded_warmup_growth",
        "self_check_assert",
        "config_error",
        "tokenizer_crash",
        "no_kernel_image",
        "kernel_image_invalid",
        "kernel_unsupported_shape",
        "custom_allreduce_ipc",
        "triton_shared_memory",
        "fixed_workspace_overflow",
        "driver_mismatch",
        "jit_build_failed",
        "bad_arguments",
        "port_in_use",
        "gated_model",
        "mig_uuid_parse",
        "nccl_unsupported",
        "killed_by_signal",
        "native_crash",
        "killed_by_orchestrator",
        "fd_limit",
        "shutdown_requested",
        "not_oom_other",
    ),
}

HOST_CAUSES: Final = frozenset(
    [
        "host_oom_load",
        "host_oom_jit",
        "host_oom_repack",
        "host_pinned_swap",
        "cpu_swap_exhausted",
        "host_ram_leak",
        "host_cache_growth",
        "host_oom_kill",
        "shm_too_small",
    ]
)
"""The causes of which the host's memory is what ran out, not a GPU's."""

_CLASS_OF: Final = {cause: cls for cls, causes in CAUSES.items() for cause in causes}


def class_of(cause: str) -> CauseClass | None:
    """The class a cause belongs to, or None for an id that does not exist."""
    return _CLASS_OF.get(cause)
