"""What the kernel and its GPU driver say, where it was copied into a server's log without a time.

Whole lines of their form only: the same words behind an engine's prefix, or in the middle of a
sentence, are somebody's report of them.
"""

from __future__ import annotations

from typing import Final

from oomwatch.engines.patterns import Pattern

_BEGIN: Final = r"^(?:<\d{1,3}>)?(?:\[[^\]\n]{6,40}\] ?){0,2}(?:kernel: ?)?"
"""The time of dmesg, a tag, or neither."""
_PID: Final = r"(?:(?P<pid>\d{1,10})|[^\s(]{1,24})?"
"""Reports blot out the number at times."""

KILL: Final = "kernel.oom_kill"
CONSTRAINT: Final = "kernel.oom_constraint"
NO_MEMORY: Final = "kernel.driver_no_memory"
XID: Final = "kernel.xid"

PATTERNS: Final[tuple[Pattern, ...]] = (
    Pattern(
        KILL,
        "hint",
        "process",
        _BEGIN
        + r"(?:(?P<how>Out of [Mm]emory(?: \(oom_kill_allocating_task\))?|Memory cgroup out of memory): |(?=Killed process .{1,100} total-vm:))"
        + r"Kill(?:ed)? process "
        + _PID
        + r",? ?\((?P<comm>[^()\n]{1,64})\)(?:(?:,| total-vm:| score | UID)"
        + r"(?:.{0,80}?anon-rss:(?P<anon_rss_kib>\d{1,15})kB)?(?:.{0,80}?shmem-rss:(?P<shmem_rss_kib>\d{1,15})kB)?.*|[ .…]*)$",
        "Memory cgroup out of memory: Killed process 48812 (VLLM::EngineCor) total-vm:117440512kB, anon-rss:58720256kB, file-rss:81920kB, shmem-rss:0kB, UID:0 pgtables:130012kB oom_score_adj:968",
        "..",
        anchors=("Killed process", "Kill process"),
    ),
    Pattern(
        CONSTRAINT,
        "hint",
        "oom-kill:constraint=",
        _BEGIN
        + r"oom-kill:constraint=(?P<constraint>CONSTRAINT_\w{1,40}),.{0,1200}?\btask=(?P<comm>[^,\n]{1,64}),pid=(?:(?P<pid>\d{1,10})\b)?",
        "oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,task_memcg=/system.slice/vllm.service,task=VLLM::EngineCor,pid=40871,uid=1000",
        "..",
    ),
    Pattern(
        NO_MEMORY,
        "hint",
        "NV_ERR_NO_MEMORY",
        _BEGIN + r"NVRM: .*\bNV_ERR_NO_MEMORY\b",
        "NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from _memdescAllocInternal(pMemDesc) @ mem_desc.c:1359",
        "..",
    ),
    Pattern(
        XID,
        "hint",
        "Xid (",
        _BEGIN
        + r"(?:NVRM: )?Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{7,16})[^)\n]{0,40}\): (?P<xid>\d{1,4})\b",
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "..",
    ),
)
"""In the order they are tried; none names the engine."""
