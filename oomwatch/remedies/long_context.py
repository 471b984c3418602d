"""What to do about each long-context cause, in order.

A KV pool that is full wants more pool; a peak beside it wants less.
"""

from __future__ import annotations

from typing import Final

from oomwatch.remedies import moves_allocator as allocator
from oomwatch.remedies import moves_host as host
from oomwatch.remedies import moves_load as load
from oomwatch.remedies import moves_memory as memory
from oomwatch.remedies import moves_model as model
from oomwatch.remedies import moves_pool as pool
from oomwatch.remedies import moves_weights as weights
from oomwatch.remedies.actions import act, on_engine, upgrade, upgrade_before
from oomwatch.remedies.context import Move
from oomwatch.remedies.plans import Plan

CAP_ANSWERS: Final = act(
    "cap-max-tokens",
    "Cap max_tokens at the gateway",
    "Cap max_tokens and the prompt length of a request at the gateway.",
    why="Shorter answers hold their KV blocks for a shorter time.",
    cost="Long answers are cut.",
)
FEWER_SAMPLES: Final = act(
    "fewer-samples",
    "Lower n and best_of",
    "Ask for fewer samples per request (n, best_of, beam width), or refuse large ones at the "
    "gateway.",
    why="All samples of a request share one fate: they are swapped out together.",
    cost="Fewer alternatives per request.",
)
OTHER_ATTENTION: Final = act(
    "other-attention-backend",
    "Use another attention backend",
    "Try another attention backend[[vllm,sglang: (--attention-backend), or data-parallel attention "
    "for MLA models]][[tgi: (ATTENTION=)]].",
    why="How the workspace grows with the context depends on the backend.",
    cost="Perhaps slower.",
)
SATURATED: Final[tuple[Move, ...]] = (
    load.fit_sequences_to_pool,
    memory.fp8_kv,
    memory.raise_share,
    load.shorter_context,
    weights.more_ranks,
    CAP_ANSWERS,
)

PLANS: Final[dict[str, Plan]] = {
    "prefill_activation_peak": Plan(
        "less_kv",
        load.smaller_batch,
        memory.lower_share,
        memory.fixed_kv_bytes,
        load.fewer_sequences,
        load.shorter_context_on_v0,
        allocator.expandable_segments,
    ),
    "attn_workspace_peak": Plan(
        "less_kv",
        upgrade_before(
            "0.11.0",
            "whose attention workspace is bounded.",
            why="The allocation grows with the context[[vllm:; vLLM 0.11.0 caps it for MLA]].",
        ),
        load.smaller_batch,
        load.fewer_sequences,
        memory.lower_share,
        OTHER_ATTENTION,
        upgrade("that bounds this workspace.", why="The allocation grows with the context."),
    ),
    "prompt_logprobs_peak": Plan(
        "less_kv",
        act(
            "refuse-prompt-logprobs",
            "Refuse prompt_logprobs (and echo with logprobs)",
            "Refuse or cap prompt_logprobs, and echo with logprobs, for long prompts at the "
            "gateway.",
            why="They need a row of the whole vocabulary for every prompt token, in float32.",
            cost="Clients that need them send shorter prompts.",
        ),
        load.smaller_batch,
        memory.lower_share,
    ),
    "lora_activation_peak": Plan(
        "less_kv", memory.lower_share, load.smaller_batch, model.smaller_rank
    ),
    "kv_saturation": Plan("more_kv", *SATURATED),
    "kv_preempt_recompute_storm": Plan("more_kv", *SATURATED),
    "kv_preempt_swap_storm": Plan(
        "more_kv",
        FEWER_SAMPLES,
        host.more_swap_space,
        load.fit_sequences_to_pool,
        memory.raise_share,
    ),
    "cpu_swap_exhausted": Plan(
        "more_kv",
        host.more_swap_space,
        FEWER_SAMPLES,
        load.fit_sequences_to_pool,
        memory.raise_share,
    ),
    "kv_request_never_fits": Plan(
        "more_kv",
        memory.drop_block_override,
        load.fit_length_to_pool,
        memory.raise_share,
        memory.fp8_kv,
        act(
            "end-stuck-request",
            "Cancel the request that waits",
            "Cancel the request that can never fit, or restart the server: it blocks the queue.",
            why="The scheduler waits for more blocks than the pool has.",
        ),
    ),
    "kv_retract_storm": Plan(
        "more_kv",
        pool.more_conservative,
        load.fit_sequences_to_pool,
        memory.raise_share,
        memory.fp8_kv,
        CAP_ANSWERS,
    ),
    "kv_alloc_fail_decode": Plan(
        "more_kv",
        pool.single_token_pages,
        load.fit_sequences_to_pool,
        memory.raise_share,
        pool.more_conservative,
        upgrade("that retracts requests instead of failing."),
    ),
    "kv_alloc_fail_prefill": Plan(
        "more_kv",
        load.fit_sequences_to_pool,
        load.chunk_below_pool,
        memory.raise_share,
        upgrade("that checks the pool before it admits a prefill."),
        act(
            "faster-decode-side",
            "Drain the prefill node faster",
            "Add decode capacity, or slow the admission to the prefill node: finished prefills "
            "keep their KV until they are transferred.",
            why="Requests that wait for transfer hold the pool.",
        ),
    ),
    "kv_alloc_fail_hybrid_state": Plan(
        "more_kv",
        pool.larger_window_pool,
        pool.larger_state_pool,
        load.fit_sequences_to_pool,
        load.chunk_below_pool,
        memory.raise_share,
        upgrade("that admits requests by every pool."),
    ),
    "kv_pool_leak": Plan(
        "other",
        act(
            "restart",
            "Restart the server",
            "Restart {engine}: the blocks of finished requests were not returned, and only a "
            "restart frees them.",
            why="The pool fails while nearly nothing uses it; smaller batches do not help.",
            cost="A short outage.",
        ),
        upgrade("that returns the blocks."),
    ),
    "kv_slot_exhausted": Plan(
        "more_kv",
        pool.fewer_slots_taken,
        load.larger_context,
        on_engine("sglang", upgrade("that counts its request slots right.")),
        CAP_ANSWERS,
    ),
    "unified_memory_prefill_growth": Plan(
        "less_kv", memory.lower_share, load.smaller_batch, load.shorter_context
    ),
}
