"""What to do about each irregular cause, in order."""

from __future__ import annotations

from typing import Final

from oomwatch.remedies import moves_allocator as allocator
from oomwatch.remedies import moves_host as host
from oomwatch.remedies import moves_load as load
from oomwatch.remedies import moves_memory as memory
from oomwatch.remedies import moves_model as model
from oomwatch.remedies.actions import act, on_engine, upgrade
from oomwatch.remedies.context import Context, Draft
from oomwatch.remedies.plans import Plan

RESTART: Final = act(
    "restart-on-threshold",
    "Restart before the memory runs out",
    "Restart {engine} when its idle memory passes a threshold, until a fixed version runs.",
    why="The idle floor rises and does not come back.",
    cost="A short outage at each restart.",
)


def room_until_known(context: Context) -> Draft | None:
    """The steps that do no harm whatever it was, where the GPU is known to have refused memory."""
    if not context.says("gpu_refused") and context.number("tried_bytes") is None:
        return None
    share, batch = context.flag("share"), context.flag("batch_tokens")
    lower = f"lower {share} by 0.03 to 0.05" if share else "lower the memory it takes in advance"
    halve = f"halve {batch}" if batch else "process fewer prompt tokens at once"
    return Draft(
        id="room-until-known",
        title="Leave more room on the GPU until the cause is known",
        why="The GPU refused an allocation: room beside the KV cache helps against every peak and "
        "against a neighbour, not against weights that are too large.",
        cost="A smaller KV cache, slower long prompts.",
        action=f"Check with nvidia-smi that nothing else holds the GPU; then {lower}, and {halve}.",
        direction="less_kv",
    )


def expert_balancing(context: Context) -> Draft | None:
    """Tokens spread over experts as they come."""
    if context.name != "vllm" or context.switched_on("--enable-eplb"):
        return None
    if not context.switched_on("--enable-expert-parallel") or not context.at_least("0.9.2"):
        return None
    return Draft(
        id="balance-experts",
        title="Balance the experts over the ranks",
        why="One rank received far more tokens than the average.",
        cost="Rearranging experts takes memory for a moment; lower the share with it.",
        set={"--enable-eplb": True},
    )


PLANS: Final[dict[str, Plan]] = {
    "host_ram_leak": Plan(
        "less_host",
        upgrade(
            "with the fix of this growth.",
            why="The process grows per request and never levels off.",
        ),
        host.other_model_runner,
        host.planned_restart,
        host.smaller_host_caches,
    ),
    "host_cache_growth": Plan(
        "less_host", host.smaller_host_caches, host.more_host_memory, host.planned_restart
    ),
    "host_oom_kill": Plan(
        "less_host",
        host.more_host_memory,
        host.smaller_host_caches,
        act(
            "find-who-grew",
            "Find the process that grew",
            "Compare the resident sizes in the kernel's task dump: the killed process is the "
            "largest by score, not always the one that grew. Protect the engine with "
            "OOMScoreAdjust=.",
            why="The victim is not always the culprit.",
        ),
        host.less_cpu_offload,
        host.no_swap_space,
    ),
    "gpu_leak_growth": Plan(
        "other",
        upgrade(
            "with the fix of this growth.", why="GPU memory rises from one idle point to the next."
        ),
        RESTART,
        lambda context: model.limit_multimodal(context) if context.says("multimodal") else None,
    ),
    "mm_encoder_peak": Plan(
        "less_kv",
        model.limit_multimodal,
        model.smaller_images,
        memory.lower_share,
        load.smaller_batch,
        allocator.expandable_segments,
    ),
    "concurrency_burst_peak": Plan(
        "less_kv", memory.lower_share, load.fewer_sequences, load.smaller_batch
    ),
    "moe_dispatch_peak": Plan(
        "less_kv",
        load.smaller_batch,
        load.fewer_sequences,
        memory.lower_share,
        expert_balancing,
    ),
    "spec_decode_underprofiled": Plan(
        "less_kv",
        memory.lower_share,
        load.fewer_sequences,
        model.fewer_draft_tokens,
        model.no_speculation,
    ),
    "engine_buffers_unprofiled": Plan(
        "less_kv",
        model.fewer_scheduler_steps,
        memory.lower_share,
        memory.fixed_kv_bytes,
        load.fewer_sequences,
    ),
    "fragmentation": Plan(
        "less_kv",
        allocator.expandable_segments,
        memory.lower_share,
        allocator.smaller_split,
        load.smaller_batch,
    ),
    "sleep_wake_map_fail": Plan(
        "less_kv",
        act(
            "wake-in-order",
            "Wake weights first, then the KV cache",
            'Wake up in two steps, tags=["weights"], then tags=["kv_cache"], after the trainer '
            "has offloaded its memory.",
            why="Another process holds memory that the server released when it went to sleep.",
        ),
        memory.lower_share,
        memory.fixed_kv_bytes,
        host.stop_others,
    ),
    "colocated_tenant": Plan(
        "free_gpu",
        host.stop_others,
        act(
            "own-gpu",
            "Give the server a GPU of its own",
            "Set CUDA_VISIBLE_DEVICES so that the two run on different GPUs (or MIG slices).",
            why="The share that the engine takes does not bind its neighbours.",
        ),
        memory.lower_share,
    ),
    "structured_output_growth": Plan(
        "other",
        upgrade(
            "with the fix of this growth.",
            why="Each request with a grammar adds memory that stays.",
        ),
        on_engine(
            "sglang",
            act(
                "overlap-schedule-off",
                "Turn the overlap schedule off",
                "Start with --disable-overlap-schedule, or another --grammar-backend.",
                why="The growth is tied to grammar requests under the overlap scheduler.",
                cost="Lower throughput.",
            ),
        ),
        on_engine(
            "vllm",
            act(
                "cap-grammar-cache",
                "Cap the grammar cache",
                "Set VLLM_XGRAMMAR_CACHE_MB to bound the compiled grammars in host memory.",
                why="Compiled grammars are kept.",
                env={"VLLM_XGRAMMAR_CACHE_MB": "256"},
            ),
        ),
        RESTART,
    ),
    "irregular_unknown": Plan(
        "other",
        room_until_known,  # a GPU that refused memory is helped before it is watched
        act(
            "record-next-time",
            "Record the next occurrence",
            "Keep a recording running (GPU and process memory each second, the engine's metrics) "
            "and run oomwatch on it after the next failure.",
            why="What is at hand does not say what failed, or for what.",
        ),
    ),
}
