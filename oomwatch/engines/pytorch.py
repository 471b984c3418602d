"""What PyTorch, CUDA, NCCL and Triton say when memory, or something that sounds like it, fails.

The out-of-memory text of PyTorch 2.1 and later::

    CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 93.02 GiB of
    which 1.18 GiB is free. Process 12 has 3.10 GiB memory in use. Including non-PyTorch memory,
    this process has 88.7 GiB memory in use. Of the allocated memory 72.36 GiB is allocated by
    PyTorch, with 436.00 MiB allocated in private pools (e.g., CUDA Graphs), and 71.59 MiB is
    reserved by PyTorch but unallocated. ...

2.1 and 2.2 spell "capacty". Before 2.1, and on NPU back-ends, the figures stand in brackets and
"reserved" includes "allocated".
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

from oomwatch.engines.patterns import Pattern
from oomwatch.units import parse_size

_SIZE: Final = r"[0-9][0-9.]*\s?(?:[KMGT]i?B|bytes)"
_GGML: Final = re.compile(
    r"allocating (?P<tried>\d{1,9}\.\d\d MiB) on device (?P<gpu>\d{1,3}): cudaMalloc failed: out of"
)
_TRIED: Final = re.compile(
    rf"(?:(?P<device>CUDA|HIP|XPU|NPU|MUSA|MPS)(?: backend)? )?out of memory[.,:]?.{{0,80}}?Tried to allocate (?P<tried>{_SIZE})",
    re.IGNORECASE,
)
_MODERN: Final = re.compile(
    rf"GPU (?P<gpu>\d+) has a total capac(?:i)?ty of (?P<total>{_SIZE})(?: of which (?P<free>{_SIZE}) is free)?"
)
_LEGACY: Final = re.compile(
    rf"\((?:GPU|NPU) (?P<gpu>\d+); (?P<total>{_SIZE}) total capacity; (?P<allocated>{_SIZE}) already allocated;(?: {_SIZE} current active;)? (?P<free>{_SIZE}) free; (?P<reserved>{_SIZE}) reserved in total by PyTorch\)"
)
_OTHER: Final = re.compile(rf"Process (?P<pid>\d+) has (?P<size>{_SIZE}) memory in use")
_OWN: Final = re.compile(rf"this process has (?P<size>{_SIZE}) memory in use")
_ALLOCATED: Final = re.compile(rf"(?P<size>{_SIZE}) is allocated by PyTorch")
_PRIVATE: Final = re.compile(rf"with (?P<size>{_SIZE}) allocated in private pools")
_RESERVED: Final = re.compile(rf"(?P<size>{_SIZE}) is reserved by PyTorch but unallocated")
_ALLOWED: Final = re.compile(rf"(?P<size>{_SIZE}) allowed;")
_LIMIT: Final = 4096
"""Characters of a message that are read; PyTorch's own text is under 1,200."""


@dataclasses.dataclass(frozen=True, slots=True)
class TorchOom:
    """The numbers of one refused allocation, in bytes; None where the text does not say.

    `others` are (pid, bytes) of the processes the text lists besides "this process". Inside a
    container the own process is often listed by its host pid and "this process" is missing: then
    the single listed one is taken as the own (`own_pid`).
    """

    tried_bytes: int | None
    device: str | None = None
    gpu: int | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    own_bytes: int | None = None
    own_pid: int | None = None
    allocated_bytes: int | None = None
    private_bytes: int | None = None
    reserved_bytes: int | None = None
    """Reserved by PyTorch but unallocated."""
    allowed_bytes: int | None = None
    others: tuple[tuple[int, int], ...] = ()

    @property
    def outside_bytes(self) -> int | None:
        """Memory of the own process that PyTorch's allocator does not know of."""
        if self.own_bytes is None or self.allocated_bytes is None:
            return None
        return self.own_bytes - self.allocated_bytes - (self.reserved_bytes or 0)


def parse_oom(text: str) -> TorchOom | None:
    """The numbers of an out-of-memory message of PyTorch or ggml in `text`, or None."""
    ggml = _GGML.search(text)
    if ggml is not None:
        return TorchOom(tried_bytes=parse_size(ggml["tried"]), device="CUDA", gpu=int(ggml["gpu"]))
    if "Tried to allocate" not in text:
        return None
    start = text.find("out of memory")
    if start < 0:
        return None
    # A terminal or a pager that wrapped the line leaves runs of blanks in it.
    text = " ".join(text[max(0, start - 40) : start + _LIMIT].split())
    tried = _TRIED.search(text)
    if tried is None:
        return None
    found = TorchOom(
        tried_bytes=parse_size(tried["tried"]), device=(tried["device"] or "CUDA").upper()
    )
    legacy = _LEGACY.search(text)
    if legacy is not None:
        allocated, reserved = parse_size(legacy["allocated"]), parse_size(legacy["reserved"])
        unallocated = (
            None if allocated is None or reserved is None else max(0, reserved - allocated)
        )
        return dataclasses.replace(
            found,
            gpu=int(legacy["gpu"]),
            total_bytes=parse_size(legacy["total"]),
            free_bytes=parse_size(legacy["free"]),
            allocated_bytes=allocated,
            reserved_bytes=unallocated,
        )
    modern = _MODERN.search(text)
    if modern is not None:
        found = dataclasses.replace(
            found,
            gpu=int(modern["gpu"]),
            total_bytes=parse_size(modern["total"]),
            free_bytes=parse_size(modern["free"]) if modern["free"] else None,
        )
    listed = [(int(m["pid"]), parse_size(m["size"]) or 0) for m in _OTHER.finditer(text)]
    own, own_pid = _size(_OWN, text), None
    if own is not None and own < (_size(_ALLOCATED, text) or 0):
        own = None  # "0 bytes": the driver of a virtual machine or sandbox does not count processes
    if own is None and len(listed) == 1:
        own_pid, own = listed.pop()
    elif own is None and listed:
        # Several processes and none called "this": the one nearest above the allocator's own
        # figures is ours, the rest are others.
        mine = _own_of(listed, (_size(_ALLOCATED, text) or 0) + (_size(_RESERVED, text) or 0))
        if mine is not None:
            listed.remove(mine)
            own_pid, own = mine
    return dataclasses.replace(
        found,
        own_bytes=own,
        own_pid=own_pid,
        allocated_bytes=_size(_ALLOCATED, text),
        private_bytes=_size(_PRIVATE, text),
        reserved_bytes=_size(_RESERVED, text),
        allowed_bytes=_size(_ALLOWED, text),
        others=tuple(listed),
    )


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return None if match is None else parse_size(match["size"])


def _own_of(listed: list[tuple[int, int]], allocator_bytes: int) -> tuple[int, int] | None:
    holding = [entry for entry in listed if entry[1] >= allocator_bytes]
    return min(holding, key=lambda entry: entry[1]) if holding and allocator_bytes else None


PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        "torch.oom",
        "oom",
        "Tried to allocate",
        r"out of memory[.,:]?.{0,80}?Tried to allocate",
        "CUDA out of memory. Tried to allocate 1.25 GiB. GPU 1 has a total capacity of 93.02 GiB of which 1.18 GiB is free.",
        "torch 1.0..",
        where="exception",
    ),
    Pattern(
        "cuda.oom_raw",
        "oom",
        "ut",
        r"(?:^torch\.(?:cuda\.)?OutOfMemoryError:?\s*(?:Allocation on device\b.{0,80})?$|OutOfMemoryError: (?:CUDA|HIP|XPU|NPU|MUSA)(?: backend)? out of (?!.*Tried to allocate)|RuntimeError: (?:CUDA|HIP|XPU|NPU|MUSA) out of(?: mem\w*\.?)?$)",
        "torch.OutOfMemoryError: CUDA out of mem",
        "torch 1.13..",
        where="exception",
        anchors=(" out of", "OutOfMemoryError"),
    ),
    Pattern(
        "torch.allocator_warning",
        "oom",
        "failed with OOM on device",
        r"[Mm]emory (?:mapping|allocation) .{0,80}?failed with OOM on device (?P<gpu_count>\d+)",
        "Memory mapping of size 2147483648 failed with OOM on device 0, free 1048576 of 85899345920",
        "torch 2.9..",
        where="any",
    ),
    Pattern(
        "torch.stable_abi",
        "oom",
        "API call failed",
        r"aten::(?:new_)?empty\w*.{0,200}API call failed|API call failed.{0,200}aten::(?:new_)?empty",
        'torch_call_dispatcher("aten::new_empty", "", stack) API call failed at stable_ops.h, line 42',
        "torch 2.9..",
        where="exception",
    ),
    Pattern(
        "torch.cumem",
        "oom",
        "cumem_allocator",
        r"CUDA Error: out of memory at \S*cumem_allocator",
        "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62",
        "vllm 0.7.0..",
        where="any",
    ),
    Pattern(
        "torch.memory_saver",
        "oom",
        "[torch_memory_saver.cpp]",
        r"^\[torch_memory_saver\.cpp\] (?:CUresult|cudaError|hipError_t) error:? +(?:result=)?2\b.{0,40}file=\S+ func=(?P<function>\w+)",
        "[torch_memory_saver.cpp] CUresult error: 2 (out of memory)  file=csrc/utils.h func=cu_mem_create line=194",
        "torch_memory_saver 0.0.3..",
        where="any",
    ),
    Pattern(
        "torch.memory_saver_other",
        "failure",
        "[torch_memory_saver.cpp]",
        r"^\[torch_memory_saver\.cpp\] (?:CUresult|cudaError|hipError_t) error:? +(?:result=)?(?!2\b)\d+\b.{0,40}file=\S+ func=(?P<function>\w+)",
        "[torch_memory_saver.cpp] CUresult error  result=1 file=csrc/torch_memory_saver.cpp func=resume line=214",
        "torch_memory_saver 0.0.3..",
        where="any",
        cause="not_oom_other",
    ),
    Pattern(
        "torch.cpu_alloc",
        "oom",
        "DefaultCPUAllocator",
        r"DefaultCPUAllocator: (?:can't|not enough) (?:allocate )?memory: you tried to allocate (?P<tried>\d+) bytes",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate memory)",
        "torch 1.0..",
        where="exception",
    ),
    Pattern(
        "cuda.oom_raw",
        "oom",
        "ut of memory",
        r"(?:(?:CUDA|HIP) (?:driver |runtime )?error: out of memory|CUDA runtime error in .{1,160}: out of memory|[Cc][Uu][Dd][Aa] error (?:\([^)]{1,200}\): |\S{1,200} ')out of memory|CUDA runtime error in .{1,160}: out of memory|Triton Error \[(?:CUDA|HIP)\]: out of memory|hipErrorOutOfMemory|Cuda Runtime \(out of memory\)|CUDA error \d{1,4} at \S{1,200}: out of memory|\[TM\]\[ERROR\] (?:CUDA runtime error: )?out of memory|ggml_(?!cuda_host_malloc)\w*: .{0,80}out of memory|cudaMalloc failed: out of memory)",
        "CUDA error: out of memory",
        "..",
        where="any",
    ),
    Pattern(
        "cuda.oom_code",
        "oom",
        "_",
        r"\b(?:UR_RESULT_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)|ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|NV_ERR_NO_MEMORY)\b",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "..",
        where="exception",
    ),
    Pattern(
        "npu.oom",
        "oom",
        "",
        r"(?:NPU out of memory\. NPUWorkspaceAllocator tried to allocate|\[driver error:out of memory\]|Failed to apply for memory\. Check the remaining storage space|runtime result = 207001|error code is 207001)",
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 1.10 GiB(NPU 3; 60.97 GiB total capacity; 310.00 MiB free).",
        "torch_npu ..",
        where="exception",
    ),
    Pattern(
        "xla.oom",
        "oom",
        "RESOURCE_EXHAUSTED",
        r"RESOURCE_EXHAUSTED: .{0,200}?(?:Attempting to (?:allocate|reserve) |Out of memory|memory space hbm)",
        "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 4.39G. That was not possible. There are 2.30G free.; (0x0x0_HBM0)",
        "jax 0.4..",
        where="exception",
    ),
    Pattern(
        "tvm.oom",
        "oom",
        "CUDAError",
        r"(?:tvm|TVM).{0,120}(?:out of memory|OutOfMemory)|InternalError: Check failed.{0,160}out of memory",
        "tvm.error.InternalError: Check failed: (e == cudaSuccess) is false: CUDAError: out of memory",
        "..",
        where="exception",
    ),
    Pattern(
        "host.alloc",
        "oom",
        "emory",
        r"(?:^|\W)(?:std::bad_alloc|MemoryError|Cannot allocate memory|Unable to allocate .{1,60} for an array)",
        "OSError: [Errno 12] Cannot allocate memory",
        "..",
        where="exception",
    ),
    Pattern(
        "host.ray_monitor",
        "oom",
        "",
        r"(?:due to the node running low on memory|exceeds the memory usage threshold of [\d.]+\. Ray killed this worker|^Refer to the documentation on how to address the out of memory issue: https://docs\.ray\.io/)",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "ray 2.2..",
        where="any",
        anchors=("running low on memory", "Ray killed this worker", "docs.ray.io/"),
    ),
    Pattern(
        "host.bad_alloc",
        "oom",
        "bad_alloc",
        r"std::bad_alloc",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "..",
        where="any",
    ),
    Pattern(
        "torch.mig_assert",
        "oom",
        "INTERNAL ASSERT FAILED",
        r"NVML_SUCCESS == .{0,120}INTERNAL ASSERT FAILED",
        'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":838, please report a bug to PyTorch.',
        "torch 2.0..",
        where="exception",
    ),
    # ------------------------------------------------------------------ which device
    Pattern(
        "device.unified",
        "hint",
        "NVIDIA ",
        r"\bNVIDIA (?:GB10\b|Jetson\b|Tegra\b|Orin\b|(?:AGX )?Thor\b)",
        "Found GPU0 NVIDIA GB10 which is of cuda capability 12.1.",
        "..",
        where="any",
    ),
    Pattern(
        "device.nvmap",
        "hint",
        "NvMapMem",
        r"^NvMapMem\w+: .{0,40}error",
        "NvMapMemAllocInternalTagged: 1075072515 error 12",
        "Jetson",
        where="any",
    ),
    Pattern(
        "device.wsl_figure",
        "hint",
        "1717986918",
        r"has 17179869\d{3}\.\d\d GiB memory in use",
        "this process has 17179869184.00 GiB memory in use",
        "WSL",
        where="any",
    ),
    Pattern(
        "mig.device",
        "hint",
        "MIG",
        r"\bMIG (?:\d+c\.)?\d+g\.\d+gb|\bMIG-(?:GPU-)?[0-9a-f]{8}-",
        "Using device NVIDIA A100-SXM4-80GB MIG 2g.20gb",
        "..",
        where="any",
    ),
    Pattern(
        "cuda.device_mix",
        "hint",
        "Detected different devices",
        r"^Detected different devices in the system:\s{1,8}(?P<devices>\S.{2,600}?)\. Please make sure to set",
        "Detected different devices in the system: NVIDIA RTX A6000, NVIDIA GeForce RTX 3060. Please make sure to set `CUDA_DEVICE_ORDER=PCI_BUS_ID` to avoid unexpected behavior.",
        "vllm 0.6.5..",
    ),
    # ------------------------------------------------------------------ NCCL
    Pattern(
        "nccl.oom",
        "oom",
        "Cuda failure",
        r"Cuda failure(?: 2)? '?out of memory",
        "Cuda failure 2 'out of memory'",
        "..",
        where="any",
    ),
    Pattern(
        "nccl.oom",
        "oom",
        "Failed to CUDA ",
        r"Failed to CUDA (?:calloc|malloc|host alloc)(?: async)? (?P<asked_count>\d+) bytes",
        "Failed to CUDA calloc async 4194304 bytes",
        "NCCL 2.16..",
        where="any",
    ),
    Pattern(
        "nccl.shm",
        "oom",
        "/dev/shm",  # noqa: S108 - a word to look for
        r"(?:[Ee]rror while creating shared memory segment /dev/shm|/dev/shm/nccl-\S+.{0,120}(?:No space left|failed)|unable to (?:open|allocate) shared memory.{0,80}(?:No space left|/dev/shm|/torch_))",
        "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-AbCd12 (size 9637888)",
        "..",
        where="any",
    ),
    Pattern(
        "nccl.shm_attach",
        "failure",
        "attaching to shared memory segment",
        r"[Ee]rror while attaching to shared memory segment /dev/shm/nccl-(?P<segment>[^\s(]{0,64}) ?\(size (?P<segment_bytes>\d+)\)",
        "NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-glnlGK (size 14156128), error: No such file or directory (2)",
        "..",
        where="any",
    ),
    Pattern(
        "nccl.system_error",
        "oom",
        "unhandled system error",
        r"unhandled system error",
        "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "..",
        where="exception",
    ),
    Pattern(
        "nccl.cuda_error",
        "hint",
        "unhandled cuda error",
        r"unhandled cuda error",
        "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2",
        "..",
        where="any",
    ),
    Pattern(
        "nccl.unsupported",
        "failure",
        "not supported",
        r"Cuda failure(?: 801)? '?operation not supported",
        "Cuda failure 801 'operation not supported'",
        "..",
        where="any",
        cause="nccl_unsupported",
    ),
    Pattern(
        "nccl.invalid_usage",
        "failure",
        "invalid usage",
        r"NCCL error.{0,200}invalid usage",
        "NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage, NCCL version 2.18.1",
        "..",
        where="exception",
        cause="nccl_unsupported",
    ),
    Pattern(
        "nccl.watchdog",
        "failure",
        "atchdog caught collective operation timeout",
        r"Watchdog caught collective operation timeout: WorkNCCL\((?P<work>[^)]{0,160})",
        "[PG 3 Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=158046, OpType=GATHER, Timeout(ms)=600000) ran for 600027 milliseconds before timing out.",
        "..",
        where="any",
        cause="nccl_watchdog",
    ),
    Pattern(
        "nccl.watchdog_noticed",
        "hint",
        "failure detected by watchdog",
        r"failure detected by watchdog at work sequence id: (?P<work>\d+)",
        "[PG ID 2 PG GUID 3 Rank 1] failure detected by watchdog at work sequence id: 4021 PG status: last enqueued work: 4023, last completed work: 4020",
        "torch 2.6..",
        where="any",
    ),
    Pattern(
        "nccl.heartbeat",
        "hint",
        "",
        r"(?:Heartbeat monitor timed out!|ProcessGroupNCCL's watchdog got stuck for \d+ seconds|Terminating the process after attempting to dump debug info, due to (?:Process|$))",
        "[PG ID 2 PG GUID 9 Rank 2] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        "torch 2.2..",
        where="any",
        anchors=("Heartbeat monitor", "got stuck for", "to dump debug info"),
    ),
    Pattern(
        "nccl.remote",
        "failure",
        "remote process exited or there was a network error",
        r"remote process exited or there was a network error",
        "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error, NCCL version 2.27.3",
        "..",
        where="exception",
        cause="nccl_watchdog",
    ),
    Pattern(
        "nccl.network",
        "failure",
        "socket",
        r"NCCL WARN (?:socket\w+: )?.{0,60}(?:Connect to|connect).{0,80}(?:failed|refused|timed out|No route to host)",
        "NCCL WARN socketStartConnect: Connect to 10.0.0.1<43219> failed : Connection refused",
        "..",
        where="any",
        cause="not_oom_other",
    ),
    Pattern(
        "torch.rendezvous",
        "failure",
        "",
        r"(?:Timed out after \d+ seconds waiting for clients|DistStoreError: .{0,80}[Tt]imed out|Timed out waiting for (?:engine|engines|workers?)\b)",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
        "..",
        where="exception",
        cause="rpc_timeout_hang",
    ),
    # ------------------------------------------------------------------ kernels and drivers
    Pattern(
        "cuda.illegal_access",
        "failure",
        "an illegal",
        r"(?:CUDA|HIP)?\s?(?:error|failure|Error)?:?.{0,40}an illegal (?:memory access|instruction) was encountered",
        "CUDA error: an illegal memory access was encountered",
        "..",
        where="any",
        cause="illegal_memory_access",
    ),
    Pattern(
        "rocm.memory_fault",
        "failure",
        "",
        r"(?:Memory access fault by GPU node-\d+|HSA_STATUS_ERROR_MEMORY_(?:APERTURE_VIOLATION|FAULT))",
        "Memory access fault by GPU node-3 (Agent handle: 0x13e852f0) on address 0x77d445e00000. Reason: Unknown.",
        "..",
        where="any",
        cause="illegal_memory_access",
        anchors=("Memory access fault", "HSA_STATUS"),
    ),
    Pattern(
        "rocm.hardware",
        "failure",
        "",
        r"(?:HW Exception by GPU node-\d+|HSA_STATUS_ERROR_EXCEPTION: An HSAIL operation resulted in a hardware exception)",
        "HW Exception by GPU node-1 (Agent handle: 0x5b522e50) reason :GPU Hang",
        "..",
        where="any",
        cause="gpu_hw_fault",
        anchors=("HW Exception", "HSA_STATUS"),
    ),
    Pattern(
        "npu.exception",
        "failure",
        "",
        r"(?:(?:vector|ai) ?core exception|address of the MTE instruction is out of range|error code is 5070(?:11|15|35|57))",
        "The error from device(chipId:1, dieId:0), serial number is 9, there is an exception of aivec error: vector core exception",
        "ascend",
        where="any",
        cause="illegal_memory_access",
        anchors=("exception", "MTE", "error code is"),
    ),
    Pattern(
        "npu.timeout",
        "failure",
        "",
        r"(?:HCCL watchdog thread terminated|hccl fftsplus task timeout|aicore execution tim(?:es?|ed) ?out|error code is (?:507014|107020)|\bEI000[26]\b)",
        "[Rank 5] HCCL watchdog thread terminated with exception:",
        "ascend",
        where="any",
        cause="nccl_watchdog",
        anchors=("HCCL", "hccl", "aicore", "error code is", "EI000"),
    ),
    Pattern(
        "cuda.misaligned",
        "failure",
        "misaligned address",
        r"CUDA error: misaligned address",
        "CUDA error: misaligned address",
        "..",
        where="any",
        cause="illegal_memory_access",
    ),
    Pattern(
        "cuda.illegal_code",
        "failure",
        "ILLEGAL_ADDRESS",
        r"(?:CUDA_ERROR_ILLEGAL_ADDRESS|cudaErrorIllegalAddress)",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "..",
        where="any",
        cause="illegal_memory_access",
    ),
    Pattern(
        "cuda.device_assert",
        "failure",
        "device-side assert",
        r"CUDA error: device-side assert triggered",
        "CUDA error: device-side assert triggered",
        "..",
        where="any",
        cause="engine_assertion",
    ),
    Pattern(
        "cuda.hw",
        "failure",
        "r",
        r"(?:uncorrectable (?:ECC|NVLink) error|CUDA error: (?:unspecified launch failure|uncorrectable|hardware (?:stack|)|unknown error)|GPU (?:is lost|has fallen off the bus)|NVMLError_GpuIsLost|cudaErrorECCUncorrectable)",
        "CUDA error: uncorrectable ECC error encountered",
        "..",
        where="any",
        cause="gpu_hw_fault",
    ),
    Pattern(
        "cuda.no_kernel_image",
        "failure",
        "",
        r"(?:no kernel image is available for execution on the device|invalid device function|hipErrorNoBinaryForGpu|cudaErrorNoKernelImageForDevice)",
        "CUDA error: no kernel image is available for execution on the device",
        "..",
        where="any",
        cause="no_kernel_image",
        anchors=("no kernel image", "invalid device function", "NoBinary", "NoKernelImage"),
    ),
    Pattern(
        "cuda.invalid_image",
        "failure",
        "image is invalid",
        r"device kernel image is invalid",
        "CUDA error: device kernel image is invalid",
        "..",
        where="any",
        cause="kernel_image_invalid",
    ),
    Pattern(
        "cuda.driver_old",
        "failure",
        "",
        r"(?:The NVIDIA driver on your system is too old|Found no NVIDIA driver on your system|Driver/library version mismatch|system not yet initialized|CUDA driver version is insufficient for CUDA runtime version|forward compatibility was attempted on non supported HW|system has unsupported display driver / cuda driver combination|unsupported toolchain)",
        "The NVIDIA driver on your system is too old (found version 12080).",
        "..",
        where="any",
        cause="driver_mismatch",
        anchors=("driver", "library version", "not yet initialized", "forward comp", "toolchain"),
    ),
    Pattern(
        "triton.shared_memory",
        "failure",
        "out of resource",
        r"out of resource: shared memory,(?:\s+Required: (?P<required_count>\d+), Hardware limit: (?P<limit_count>\d+))?",
        "out of resource: shared memory, Required: 66560, Hardware limit: 65536. Reducing block sizes or `num_stages` may help.",
        "..",
        where="any",
        cause="triton_shared_memory",
    ),
    Pattern(
        "flashinfer.workspace",
        "failure",
        "",
        r"(?:(?:[Bb]uffer overflow when allocating|Failed to allocate) memory for (?P<buffer>\S+) with size (?P<asked_count>\d+)|[Ww]orkspace(?: buffer)?(?: size)? (?:is )?(?:too small|insufficient|not large enough))",
        "Buffer overflow when allocating memory for batch_prefill_tmp_v with size 553648128 and alignment 16, but only 402653184 bytes available in AlignedAllocator",
        "..",
        where="any",
        cause="fixed_workspace_overflow",
        anchors=("overflow", "orkspace", "Failed to allocate"),
    ),
    Pattern(
        "flashinfer.dispatch",
        "failure",
        "failed to dispatch",
        r"failed to dispatch with (?:head_dim|\w+) \d+",
        "BatchDecodeWithPagedKVCachePyTorch failed to dispatch with head_dim 96",
        "..",
        where="any",
        cause="kernel_unsupported_shape",
    ),
    Pattern(
        "kernel.head_size",
        "failure",
        "ead",
        r"(?:[Hh]ead[ _]?(?:size|dim)\w* (?:\d+ )?(?:is )?not supported|only supports? head[ _]?(?:dim|size)|[Uu]nsupported head[ _]?(?:size|dim)|[Hh]ead size \d+ is not supported by|Unsupported (?:max_mma_kv|head_dim|num_mma_kv))",
        "Head size 96 is not supported by PagedAttention.",
        "..",
        where="exception",
        cause="kernel_unsupported_shape",
    ),
    Pattern(
        "kernel.dtype",
        "failure",
        "support",
        r"(?:type (?P<refused_type>fp8\w+) not supported in this architecture|FlashAttention\b.{0,60} only supports? (?P<only_types>fp16 and bf16)|[Uu]nsupported (?:data ?type|dtype).{0,60}\b(?:kernel|attention|[Mm]arlin)\b)",
        "ValueError(\"type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')\")",
        "..",
        where="exception",
        cause="kernel_unsupported_shape",
    ),
    Pattern(
        "allreduce.ipc",
        "failure",
        "all_reduce",
        r"(?:custom_all_reduce\S*:\d+ '?invalid argument|register_graph_buffers.{0,200}invalid (?:argument|device)|Failed: Cuda error \S*custom_all_reduce)",
        "Failed: Cuda error /workspace/csrc/custom_all_reduce.cuh:364 'invalid argument'",
        "..",
        where="any",
        cause="custom_allreduce_ipc",
    ),
    Pattern(
        "jit.step",
        "hint",
        "",
        r"^(?:\[\d+/\d+\] .{0,200}?\b(?:nvcc|cicc|ptxas|c\+\+|g\+\+|clang\+\+|cc1plus)\b|(?:flashinfer\.jit: )?Loading JIT ops|Emitting ninja build file|Building extension module)",
        "[2/36] /usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -O3 -c gemm.cu -o gemm.cuda.o",
        "..",
    ),
    Pattern(
        "jit.build",
        "failure",
        "",
        r"(?:Ninja build failed|Failed to find C compiler|cannot find -l\w+|ptxas fatal|Cannot find ptxas|ninja: build stopped|Ninja is required to load C\+\+ extensions|Error building extension '|nvcc fatal|subprocess\.CalledProcessError: Command '\[?'?(?:ninja|nvcc|cmake|(?:/\S{1,80}/)?(?:gcc|g\+\+|cc|c\+\+|clang|hipcc|ptxas))\b|fatal error: \S+\.h: No such file|Could not find nvcc|NVCC compilation failed|PassManager::run failed)",
        "Error building extension 'fused_ops': ninja: build stopped: subcommand failed.",
        "..",
        where="exception",
        cause="jit_build_failed",
    ),
)
"""What allocators, CUDA, NCCL and kernels print; the same text under every engine."""
