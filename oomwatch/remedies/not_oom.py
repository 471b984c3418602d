"""What to do when it was not memory: what it is instead, and the next step."""

from __future__ import annotations

from typing import Final

from oomwatch.remedies import moves_disk as disk
from oomwatch.remedies import moves_kernel as kernel
from oomwatch.remedies import moves_model as model
from oomwatch.remedies.actions import act, upgrade
from oomwatch.remedies.context import Context, Draft, Move
from oomwatch.remedies.plans import Plan


def no_custom_all_reduce(context: Context) -> Draft | None:
    """NCCL instead of the engine's own all-reduce."""
    flag = "--disable-custom-all-reduce"
    if context.name != "vllm" or context.switched_on(flag):
        return None
    return Draft(
        id="no-custom-all-reduce",
        title="Use NCCL instead of the custom all-reduce",
        why="Registering graph buffers between processes failed, not an allocation.",
        cost="Slightly slower exchange between GPUs.",
        set={flag: True},
    )


def longer_context(context: Context) -> Draft | None:
    """A larger limit, where the KV pool would hold it."""
    flag, now, tokens = context.flag("length"), context.max_model_len, context.kv_tokens
    asked = context.number("asked_tokens")
    if not flag or not now or not tokens or not asked or not now < asked < tokens:
        return None
    new = -int(-asked // 1024) * 1024
    return Draft(
        id="longer-context",
        title=f"Raise {flag} to {new}",
        why=f"The KV cache holds {tokens:.0f} tokens, more than the request needs.",
        cost="Fewer full-length requests at a time; never above what the model supports.",
        set={flag: new},
    )


def supported_cache_type(context: Context) -> Draft | None:
    """A cache type that the card's kernels know, where the one that was chosen is the reason."""
    flag = "--kv-cache-dtype"
    chosen = str(context.force.get(flag) or "")
    if not chosen.startswith("fp8") or not (
        context.says("refused_type") or context.says("only_types")
    ):
        return None
    return Draft(
        id="supported-cache-type",
        title="Use a KV cache type that this card supports",
        why="The kernel refused the data type, and the KV cache was set to it.",
        cost="A 16-bit cache holds half the tokens.",
        set={flag: "auto"},
    )


def plain_segments(context: Context) -> Draft | None:
    """Host buffers of NCCL as plain files in /dev/shm, that every rank can open."""
    if context.number("segment_bytes") is None or context.says("shared"):
        return None
    return Draft(
        id="nccl-plain-segments",
        title="Let NCCL use plain shared memory",
        why="NCCL takes its host memory from the CUDA driver, and cannot hand it over on this "
        "board.",
        cost="None.",
        action="Set NCCL_CUMEM_HOST_ENABLE=0 for every rank, and update NCCL when you can.",
        env={"NCCL_CUMEM_HOST_ENABLE": "0"},
    )


def common_namespace(context: Context) -> Draft | None:
    """One /dev/shm for all ranks of a host."""
    if context.number("segment_bytes") is None or not context.says("shared"):
        return None
    return Draft(
        id="one-ipc-namespace",
        title="Give the ranks of a host one /dev/shm",
        why="A segment that one rank made is not there for another.",
        cost="None.",
        action="Run the ranks of a host in one container, or each with --ipc=host (hostIPC: true); "
        "where they share it already, look for the rank that failed first.",
    )


def model_name(context: Context) -> Draft | None:
    """The name first, where the hub says that it has no such model."""
    if not context.says("no_repository"):
        return None
    return Draft(
        id="check-model-name",
        title="Check the spelling of the model's name",
        why="The hub answers so for a name that it does not have.",
        cost="None.",
        action="Compare the name that the server was given with the model's page on the hub; "
        "for files on this host give their path.",
    )


NEW_BUILD: Final = act(
    "install-matching-build",
    "Install a build for this GPU architecture",
    "Install a wheel (or build from source) whose CUDA and sm_ architectures include this GPU.",
    why="The binary holds no code for the compute capability of this card.",
)
NCCL_LOG: Final = act(
    "nccl-debug",
    "Log what NCCL does",
    "Set NCCL_DEBUG=INFO and start again: the line before the error names the call and the rank.",
    why="The error itself does not say which rank failed first.",
    env={"NCCL_DEBUG": "INFO"},
)
FIND_SENDER: Final = act(
    "find-who-killed",
    "Find who sent the signal",
    "Check the kernel log, the unit or container events and the shell that started the server: a "
    "signal ended it.",
    why="The process was ended from outside and wrote no error.",
)
READ_FIRST: Final = act(
    "read-first-error",
    "Read the earliest error",
    "Read the earliest error of any process in the log; upgrade or report it. Memory did not run "
    "out.",
    why="It failed for another reason than memory.",
)


def _just(*moves: Move) -> Plan:
    return Plan("other", *moves)


PLANS: Final[dict[str, Plan]] = {
    "illegal_memory_access": _just(kernel.failing_kernel, kernel.without_graphs),
    "rpc_timeout_hang": _just(
        act(
            "find-hung-rank",
            "Find the rank that hangs",
            "Dump the stacks of the workers (py-spy dump --pid) while it hangs; check the driver, "
            "Xid errors and the interconnect of the silent rank.",
            why="A worker stopped answering; the message ring or the RPC only reports it.",
        ),
        NCCL_LOG,
    ),
    "gpu_hw_fault": _just(
        act(
            "reset-gpu",
            "Drain the node and reset the GPU",
            "Drain the node, reset the GPU, and replace it if Xid or ECC errors come back "
            "(nvidia-smi -q -d ECC,ROW_REMAPPER).",
            why="The hardware reported the fault.",
            cost="The node is out of service meanwhile.",
        ),
    ),
    "engine_assertion": _just(
        model.fewer_scheduler_steps,
        act(
            "upgrade",
            "Upgrade {engine}, or report the assertion",
            "Upgrade {engine} to a newer version; report the traceback if it persists.",
            why="The engine's own logic failed; load was the trigger, not the cause.",
        ),
    ),
    "nccl_watchdog": _just(
        act(
            "find-first-rank",
            "Find the rank that stopped first",
            "Look for the earliest worker death or error over all ranks; NCCL only reports that "
            "one of them no longer answers.",
            why="A collective timed out.",
            env={"NCCL_DEBUG": "INFO"},
        ),
    ),
    "request_too_long": _just(
        act(
            "truncate-request",
            "Truncate the request at the client",
            "Truncate the prompt or lower max_tokens in the client so that both together stay "
            "below the limit.",
            why="The request was refused; the server is well.",
        ),
        longer_context,
    ),
    "kv_transfer_fail": _just(
        act(
            "check-kv-transfer",
            "Check the network of the KV transfer",
            "Check the fabric (RDMA, InfiniBand), the router and the connector between prefill "
            "and decode; upgrade the connector.",
            why="KV blocks did not arrive at the other side.",
        ),
    ),
    "lora_slot_queue": _just(
        model.more_adapters,
        act(
            "fewer-active-adapters",
            "Spread the adapters over more servers",
            "Route requests by adapter, so that fewer adapters are active on one server.",
            why="Requests wait for an adapter slot.",
        ),
    ),
    "bounded_warmup_growth": _just(
        act(
            "no-action-needed",
            "No action needed",
            "None needed: size the host for the plateau, and watch that it stays flat.",
            why="The growth levelled off after warm-up.",
        ),
    ),
    "self_check_assert": _just(
        upgrade(
            "whose self-check counts all pools.", why="The sums equal the pool: nothing is lost."
        )
    ),
    "config_error": _just(
        act(
            "correct-setting",
            "Correct the setting that the message names",
            "Correct or remove the setting that {engine} refuses, or upgrade to a version that "
            "supports it.",
            why="The configuration was refused for another reason than memory.",
        ),
    ),
    "tokenizer_crash": _just(
        act(
            "upgrade-tokenizer",
            "Upgrade transformers, tokenizers and {engine}",
            "Upgrade the tokenizer libraries and {engine}: the tokenizer was used by two threads "
            "at once.",
            why="The tokenizer failed, not the GPU.",
        ),
    ),
    "no_kernel_image": _just(NEW_BUILD),
    "kernel_image_invalid": _just(NEW_BUILD),
    "kernel_unsupported_shape": _just(
        supported_cache_type,
        act(
            "other-backend",
            "Choose another attention backend",
            "Choose another attention or kernel backend[[vllm,sglang: (--attention-backend)]], or "
            "upgrade: the kernel does not support the model's shape.",
            why="A kernel refused the shape; the list of memory remedies around it is generic.",
        ),
    ),
    "custom_allreduce_ipc": _just(
        no_custom_all_reduce,
        act(
            "no-custom-all-reduce-by-hand",
            "Start without the custom all-reduce",
            "Disable the custom all-reduce[[vllm,sglang: (--disable-custom-all-reduce)]], and "
            "expandable segments if they are on.",
            why="Registering graph buffers between processes failed, not an allocation.",
        ),
    ),
    "triton_shared_memory": _just(
        act(
            "smaller-tiles",
            "Upgrade, or use a kernel config with smaller tiles",
            "Upgrade {engine} or Triton, or use a tuned config with fewer num_stages or a smaller "
            "block size for this card.",
            why="The kernel wants more on-chip shared memory than the card has; GPU memory is not "
            "involved.",
        ),
    ),
    "fixed_workspace_overflow": _just(
        act(
            "larger-workspace",
            "Upgrade, or enlarge the library's workspace",
            "Upgrade {engine} and the library; where it has a setting[[vllm: "
            "(such as VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE)]] enlarge the workspace buffer.",
            why="A buffer of fixed size overflowed while the card had memory left.",
        ),
    ),
    "driver_mismatch": _just(
        act(
            "update-driver",
            "Update the GPU driver",
            "Update the driver, or install a wheel built for the CUDA version that the driver "
            "supports; on servers with NVSwitch (error 802) start the fabric manager of the "
            "driver's own version.",
            why="CUDA refuses to start: the driver is older than this build, or not up yet.",
        ),
    ),
    "jit_build_failed": _just(
        act(
            "fix-kernel-build",
            "Fix the kernel build, or use prebuilt kernels",
            "Install the compiler and CUDA toolkit that match this build, clear the JIT cache, or "
            "install prebuilt kernels; upgrade if the source does not compile.",
            why="A kernel failed to compile; sizes printed just before have nothing to do with it.",
        ),
    ),
    "bad_arguments": _just(
        act(
            "correct-argument",
            "Remove or correct the argument",
            "Remove the flag that this version does not know, or correct its spelling or value; "
            "check the entry point and the version.",
            why="The command line was refused before anything was loaded.",
        ),
    ),
    "port_in_use": _just(
        act(
            "free-port",
            "Free the port, or use another",
            "Stop what listens on the port (ss -ltnp), or start with another --port[[vllm: "
            "(VLLM_PORT for internal ones)]], then retry.",
            why="The address is in use, often by an earlier server.",
        ),
    ),
    "gated_model": _just(
        model_name,
        act(
            "give-hub-token",
            "Log in to the hub with a token that has access",
            "Accept the model's terms on the hub and give the server a token (HF_TOKEN) with "
            "access to it.",
            why="The hub refused the download.",
        ),
    ),
    "mig_uuid_parse": _just(
        act(
            "name-mig-device",
            "Upgrade, or name the MIG device by index",
            "Upgrade {engine}, or set CUDA_VISIBLE_DEVICES to an index inside the container "
            "instead of a MIG UUID.",
            why="The MIG id was read as a number.",
        ),
    ),
    "nccl_unsupported": _just(
        plain_segments,
        common_namespace,
        act(
            "check-nccl-support",
            "Check what NCCL cannot do here",
            "Update the driver and NCCL, or turn off the feature (P2P, NVLS, cuMem) that "
            "NCCL_DEBUG=INFO names as not supported on these GPUs.",
            why="NCCL asked for an operation that the hardware or driver does not support.",
            env={"NCCL_DEBUG": "INFO"},
        ),
    ),
    "killed_by_signal": _just(FIND_SENDER),
    "native_crash": _just(
        act(
            "report-native-crash",
            "Upgrade, and report the crash with its core dump",
            "Upgrade {engine}, its kernels and the driver; keep the core dump (coredumpctl) and "
            "report the crash if it persists.",
            why="Native code crashed (SIGSEGV, SIGILL or SIGBUS).",
        ),
    ),
    "killed_by_orchestrator": _just(
        act(
            "relax-probe",
            "Raise the probe's or the start's time limit",
            "Raise the startup and liveness probe timeouts (or TimeoutStartSec=), or look up the "
            "eviction or reclaim in the orchestrator's events.",
            why="The orchestrator ended it; it did not fail by itself.",
        ),
    ),
    "fd_limit": _just(
        act(
            "raise-open-files",
            "Raise the limit of open files",
            "Raise LimitNOFILE= (ulimit -n 65536) for the server, and look for connections that "
            "are never closed.",
            why="The process may open no more files or sockets.",
        ),
    ),
    "shutdown_requested": _just(
        act(
            "no-action-needed",
            "No action needed",
            "Nothing to repair: the server was asked to stop. Restart it if that was not meant.",
            why="It ended in an orderly way.",
        ),
    ),
    "not_oom_other": _just(
        lambda context: disk.writable_disk(context) or READ_FIRST(context),
    ),
}
