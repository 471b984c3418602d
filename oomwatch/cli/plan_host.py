"""What `oomwatch plan` takes from this host: the card, and the engine of a process."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any, Final

from oomwatch.errors import UsageError

if TYPE_CHECKING:
    from oomwatch.memory.devices import Device
    from oomwatch.records import EngineFacts

_BYTES_PER_GIB: Final = 2**30


def choose_device(options: dict[str, Any], seen: EngineFacts | None) -> Device:
    """The card that was named, else the one that the driver shows."""
    from oomwatch.memory.devices import Device, find_device

    total = options["gpu_total_gib"]
    if options["gpu"] is None and total is not None:
        return Device("unnamed card", round(total * _BYTES_PER_GIB), None, measured=True)
    try:
        device = find_device(options["gpu"]) if options["gpu"] else _local_device()
    except UsageError:
        if total is None or options["gpu"] is None:
            raise
        return Device(options["gpu"], round(total * _BYTES_PER_GIB), None, measured=True)
    if total is not None:
        return dataclasses.replace(device, total_bytes=round(total * _BYTES_PER_GIB), measured=True)
    if seen is not None and seen.total_bytes:
        return dataclasses.replace(device, total_bytes=seen.total_bytes, measured=True)
    return device


def _local_device() -> Device:
    """The first GPU of this host, from NVML."""
    from oomwatch.memory.devices import Device, find_device
    from oomwatch.sources.nvml import read_gpus

    reading = read_gpus()
    sample = reading.samples[0] if reading.samples else None
    if sample is None or sample.name is None:
        raise UsageError("no GPU is named and none is visible here; add --gpu NAME")
    try:
        return find_device(sample.name)
    except UsageError:
        if sample.total_bytes is None:
            raise
        usable = sample.total_bytes - (sample.reserved_bytes or 0)
        return Device(sample.name, usable, None)


def read_process(pid: int) -> EngineFacts:
    """The engine that a process belongs to: its command, and what its log already says."""
    from oomwatch.diagnose.engines import describe_engine
    from oomwatch.diagnose.inputs import Inputs
    from oomwatch.diagnose.runs import build_runs
    from oomwatch.engines.commandline import parse_command
    from oomwatch.sources.descriptors import read_target
    from oomwatch.sources.logfile import read_log
    from oomwatch.sources.procfs import list_processes, read_environment

    tree = list_processes()
    process = tree.get(pid)
    if process is None:
        raise UsageError(f"there is no process {pid}, or it may not be seen")
    for each in (process, *tree.ancestors(pid)):
        parsed = parse_command(each.cmdline or ())
        if parsed.engine in ("vllm", "sglang"):
            break
    else:
        raise UsageError(f"process {pid} belongs to neither vLLM nor SGLang")
    target = read_target(each.pid, 1)
    runs = build_runs(read_log(target.path)) if target.path and target.kind == "file" else []
    env = read_environment(each.pid) or {}
    chosen = {k: v for k, v in env.items() if k.startswith("VLLM_")}
    inputs = Inputs(generated_at=0.0, command=shlex.join(each.cmdline or ()))
    facts = describe_engine(f"pid {each.pid}", runs[-1] if runs else None, inputs, None, ())
    return dataclasses.replace(
        facts, command=tuple(each.cmdline or ()), env={**chosen, **facts.env}, fork=parsed.fork
    )
