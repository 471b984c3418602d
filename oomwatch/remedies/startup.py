"""What to do about each start-up cause, in order."""

from __future__ import annotations

from typing import Final

from oomwatch.remedies import moves_allocator as allocator
from oomwatch.remedies import moves_host as host
from oomwatch.remedies import moves_load as load
from oomwatch.remedies import moves_memory as memory
from oomwatch.remedies import moves_model as model
from oomwatch.remedies import moves_weights as weights
from oomwatch.remedies.actions import act, on_engine, unless_orphan, upgrade, where_measured
from oomwatch.remedies.context import Context, Draft, Move
from oomwatch.remedies.plans import Plan
from oomwatch.units import format_bytes


def balance_stages(context: Context) -> Draft | None:
    """Layers moved off the stage that is full: an even split where the split was set by hand."""
    variable = "VLLM_PP_LAYER_PARTITION"
    parts = str(context.engine.env.get(variable, "")).split(",")
    env: dict[str, str] = {}
    if len(parts) > 1 and all(part.strip().isdigit() for part in parts):
        layers, stages = sum(map(int, parts)), len(parts)
        even = [layers // stages + (place < layers % stages) for place in range(stages)]
        if even != [int(part) for part in parts]:
            env = {variable: ",".join(map(str, even))}
    how = (
        f"set {variable}={env[variable]}"
        if env
        else context.words(f"move layers off the full stage[[vllm: ({variable})]]")
    )
    return Draft(
        id="balance-layers",
        title="Balance the layers over the GPUs",
        why="The smallest card, or the stage with most layers, decides for all of them.",
        cost="None.",
        env=env,
        action=f"Balance the layers of the pipeline stages: {how}, and use equal cards with "
        "equal free memory.",
    )


def tensor_instead_of_pipeline(context: Context) -> Draft | None:
    """The same GPUs with every layer split evenly."""
    stages_flag, ranks_flag = context.flag("stages"), context.flag("ranks")
    stages, ranks = context.now(stages_flag), context.now_or_assumed(ranks_flag)
    if not stages_flag or not ranks_flag or not stages or stages <= 1 or not ranks:
        return None
    return Draft(
        id="tensor-instead-of-pipeline",
        title=f"Split every layer over {ranks * stages:.0f} GPUs instead of {stages:.0f} stages",
        why="Tensor parallelism gives every GPU the same share of each layer.",
        cost="More traffic between the GPUs.",
        set={ranks_flag: int(ranks * stages), stages_flag: 1},
    )


def share_for_both(context: Context) -> Draft | None:
    """Where the share counts the whole card, it has to cover the other engine too."""
    if context.name == "vllm" and context.generation == "V1" and context.at_least("0.9.1"):
        return None  # from then on only the engine's own use counts
    return memory.raise_share(context)


def unblock_unified(context: Context) -> Draft | None:
    """Page cache counts as used on memory shared with the host."""
    free = context.number("host_free_bytes")
    seen = f" ({format_bytes(free)} free)" if free else ""
    return Draft(
        id="drop-page-cache",
        title="Drop the page cache before the start",
        why=f"GPU and host share one memory, and cached files count as used{seen}.",
        cost="Files are read again.",
        action="Drop the page cache (sync; echo 3 > /proc/sys/vm/drop_caches) before the server "
        "starts.",
        direction="less_host",
    )


def _unless_pool_stands(step: Move) -> Move:
    """A step first where compiling fails: what is tuned beside a pool needs no compiler."""
    return lambda context: None if context.kv_tokens else step(context)


MORE_KV_AT_START: Final[tuple[Move, ...]] = (
    memory.raise_share,
    where_measured(load.smaller_batch),
    where_measured(load.fewer_sequences),
    where_measured(load.eager),
    weights.more_ranks,
    weights.quantized_checkpoint,
)

PLANS: Final[dict[str, Plan]] = {
    "weights_dont_fit": Plan(
        "less_weights",
        weights.more_ranks,
        weights.quantized_checkpoint,
        weights.quantize_online,
        weights.language_model_only,
        weights.cpu_offload,
    ),
    "quant_load_peak": Plan(
        "less_weights",
        weights.pre_quantized_checkpoint,
        weights.more_ranks,
        upgrade("that converts layer by layer, or back to the last one that loaded this model."),
        weights.cpu_offload,
    ),
    "quant_repack": Plan(
        "less_weights",
        weights.more_ranks,
        act(
            "other-backend",
            "Use a kernel backend that does not repack the weights",
            "Choose a quantization backend that needs no repacking[[vllm: (for MXFP4 another "
            "VLLM_MXFP4 backend, for Marlin another kernel)]], or another format of "
            "the checkpoint.",
            why="Repacking holds the loaded and the repacked weights together.",
            cost="Perhaps slower kernels.",
        ),
        upgrade("that repacks layer by layer."),
        weights.cpu_offload,
    ),
    "host_oom_repack": Plan(
        "less_host", host.less_cpu_offload, host.more_host_memory, host.no_swap_space
    ),
    "kv_no_blocks": Plan("more_kv", *MORE_KV_AT_START),
    "kv_budget_cotenant": Plan(
        "free_gpu",
        host.stop_others,
        share_for_both,
        act(
            "separate-start",
            "Start the engines one after another",
            "Start each engine when the other is ready, or give each its own GPU.",
            why="What another engine takes while this one measures is charged to this one.",
        ),
        on_engine(
            "vllm", upgrade("(vLLM 0.9.1 and later charge only what the engine itself takes).")
        ),
    ),
    "kv_lt_max_len": Plan(
        "more_kv",
        load.fit_length_to_pool,
        memory.raise_share,
        memory.fp8_kv,
        weights.more_ranks,
        where_measured(load.smaller_batch),
    ),
    "parallel_imbalance": Plan(
        "other",
        balance_stages,
        tensor_instead_of_pipeline,
        load.fit_length_to_pool,
        upgrade("that checks each stage on its own."),
    ),
    "state_cache_seqs": Plan(
        "other",
        load.fit_sequences_to_states,
        load.shorter_context,
        memory.raise_share,
    ),
    "gpu_busy_other_process": Plan(
        "free_gpu",
        host.stop_others,
        unless_orphan(
            act(
                "other-gpu",
                "Use another GPU",
                "Point CUDA_VISIBLE_DEVICES at a GPU that is free.",
                why="The card is in use.",
            )
        ),
        unless_orphan(memory.fit_share_to_free),
    ),
    "gpu_busy_margin": Plan(
        "less_kv", memory.fit_share_to_free, memory.lower_share, host.stop_others
    ),
    "profile_race": Plan(
        "other",
        act(
            "start-in-turn",
            "Start the engines one after another",
            "Start the engines in turn: the next one when the one before it is ready; then retry.",
            why="Free memory changed while the engine measured it: something else took or gave "
            "memory.",
            cost="A slower start.",
        ),
        memory.fixed_kv_bytes,
    ),
    "profile_race_false": Plan(
        "other",
        upgrade(
            "whose check allows for equal numbers.",
            why="Both numbers are equal: nothing was freed, the check is wrong.",
        ),
        act(
            "retry-start",
            "Retry the start",
            "Restart the server once: the check compares two readings that may differ.",
        ),
    ),
    "profile_activation_peak": Plan(
        "other",
        load.smaller_batch,
        load.fewer_sequences,
        load.shorter_context_on_v0,
        load.eager,
        weights.more_ranks,
    ),
    "profile_mm_dummy": Plan(
        "other",
        model.limit_multimodal,
        model.smaller_images,
        load.fewer_sequences,
        load.smaller_batch,
    ),
    "sampler_warmup": Plan("less_kv", load.fewer_sequences, memory.lower_share),
    "cuda_graph_capture": Plan(
        "less_kv",
        memory.lower_share,
        load.fewer_graphs,
        load.piecewise_graphs,
        load.fewer_sequences,
        load.eager,
    ),
    "torch_compile": Plan(
        "less_kv",
        _unless_pool_stands(load.eager),
        load.smaller_batch,
        memory.lower_share,
        load.fewer_sequences,
        load.eager,
    ),
    "lora_slots": Plan("less_kv", model.fewer_adapters, model.smaller_rank, memory.lower_share),
    "spec_draft": Plan(
        "other",
        model.no_speculation,
        upgrade("that counts the draft model in its memory budget."),
        weights.more_ranks,
    ),
    "kv_alloc_overcommit": Plan(
        "less_kv",
        memory.lower_pinned_kv,
        memory.lower_share,
        on_engine(
            "vllm",
            act(
                "measure-kv",
                "Let the engine measure the KV cache",
                "Remove --kv-cache-memory-bytes or --num-gpu-blocks-override so that {engine} "
                "sizes the KV cache from what is free.",
                why="A pinned size is not checked against what is free.",
            ),
        ),
    ),
    "nccl_init": Plan(
        "free_gpu",
        host.stop_others,
        memory.lower_share,
        host.nccl_without_cumem,
    ),
    "shm_too_small": Plan(
        "other",
        act(
            "more-shared-memory",
            "Give the container more shared memory",
            "Run the container with --shm-size=16g or --ipc=host (Kubernetes: an emptyDir with "
            "medium: Memory on /dev/shm).",
            why="NCCL and the workers exchange data through /dev/shm; a container has 64 MiB of "
            "it.",
            cost="Host memory, when used.",
        ),
        act(
            "nccl-without-shm",
            "Let NCCL do without shared memory",
            "Set NCCL_SHM_DISABLE=1 if the container cannot be changed.",
            why="NCCL then uses other transports.",
            cost="Slower exchange between GPUs.",
            env={"NCCL_SHM_DISABLE": "1"},
        ),
    ),
    "host_oom_load": Plan(
        "less_host",
        host.one_loader,
        host.no_swap_space,
        host.more_host_memory,
        host.less_cpu_offload,
    ),
    "host_oom_jit": Plan(
        "less_host",
        host.two_build_jobs,
        act(
            "warm-kernel-cache",
            "Use prebuilt kernels or keep the kernel cache",
            "Install prebuilt kernels, or build them once where there is memory and keep the JIT "
            "cache (~/.cache/flashinfer[[vllm:, ~/.cache/vllm]], ~/.triton) on a volume.",
            why="A warm cache builds nothing at start.",
        ),
        host.more_host_memory,
    ),
    "host_pinned_swap": Plan(
        "less_host", host.smaller_host_pool, host.no_swap_space, host.more_host_memory
    ),
    "unified_memory": Plan(
        "less_kv",
        memory.lower_share,
        allocator.expandable_segments_off,
        unblock_unified,
        host.no_swap_space,
        load.fewer_sequences,
    ),
    "wsl_alloc_limit": Plan(
        "less_host",
        act(
            "raise-vm-memory",
            "Raise the memory limit of the virtual machine",
            "Raise memory= in .wslconfig, then run wsl --shutdown: the driver limits GPU "
            "allocations by the memory of the VM. Or run on native Linux.",
            why="The request was refused although the card had far more free.",
        ),
        allocator.expandable_segments_off,
    ),
    "mig_slice": Plan(
        "less_kv",
        load.shorter_context,
        load.smaller_batch,
        act(
            "larger-slice",
            "Use a larger MIG slice",
            "Give the server a larger MIG slice, or the whole GPU.",
            why="The slice is a fraction of the card.",
            cost="Fewer slices for others.",
        ),
        memory.lower_share,
    ),
    "wrong_device": Plan(
        "other",
        act(
            "fix-device-order",
            "Set the device order and visibility",
            "Set CUDA_DEVICE_ORDER=PCI_BUS_ID and point CUDA_VISIBLE_DEVICES at the GPU you "
            "meant, by its UUID.",
            why="The total in the message is not the intended card's; CUDA counts the fastest "
            "card first.",
            env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
        ),
    ),
    "startup_unknown": Plan(
        "other",
        act(
            "fetch-core-log",
            "Fetch the log of the engine core and the workers",
            "Collect the lines of the EngineCore and Worker processes before the first error, and "
            "the kernel log (journalctl -k) of that time, and run oomwatch on them.",
            why="Only a wrapper is in the log; the cause stands in another process's lines.",
        ),
    ),
}
