"""What those that keep a server running print: kubelet, systemd, Slurm, Docker, clouds, runners.

Their words on memory outrank the silence of the process that they ended.
"""

from __future__ import annotations

from typing import Final

from oomwatch.engines.patterns import Pattern

PATTERNS: Final[tuple[Pattern, ...]] = (
    # ------------------------------------------------------------------ ended for memory
    Pattern(
        "exit.systemd_oom",
        "lifecycle",
        "OOM killer",
        r"A process of this unit has been killed by the OOM killer",
        "vllm.service: A process of this unit has been killed by the OOM killer.",
        "..",
    ),
    Pattern(
        "exit.oom_result",
        "lifecycle",
        "oom",
        r"(?:Failed with result 'oom-kill'|[Dd]etected \d+ oom[-_]kill event|^container oom [0-9a-f]{12})",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=81.batch. Some of the step tasks have been OOM Killed.",
        "..",
    ),
    Pattern(
        "exit.oom_reason",
        "lifecycle",
        "OOMKilled",
        r"(?:^\s*(?:[Rr]eason:\s+|\"?reason\"?: ?\"?|\"OOMKilled\": (?=true))(?:OOMKilled|true)|^\S+\s+\d+/\d+\s+OOMKilled\b|\breason=OOMKilled\b)",
        "      Reason:       OOMKilled",
        "..",
    ),
    Pattern(
        "exit.oom_container",
        "lifecycle",
        "",
        r"(?:OutOfMemoryError: Container killed due to memory usage|^(?:systemd-oomd\S* )?Killed \S+ due to memory (?:used|pressure)"
        r"|systemd-oomd killed \d+ process|\b\d{1,9} Workers? \(tasks / actors\) killed due to memory pressure \(OOM\))",
        "Killed /system.slice/vllm.service due to memory pressure for /system.slice being 71.20% > 60.00% for > 20s with reclaim activity",
        "..",
        anchors=("due to memory", "killed"),
    ),
    # ------------------------------------------------------------------ ended for another reason
    Pattern(
        "orchestrator.kill",
        "lifecycle",
        "",
        r"(?:failed (?:liveness|startup) probe, will be restarted"
        r"|The node (?:was|had) low on resource|\b(?:Pod|pod) was evicted|\bEvict(?:ed|ing)\b|reason=(?:Evicted|Preempted)"
        r"|Preempt(?:ed by|ed in order|ing(?! (?:req|seq|group|\d))) |TaintManagerEviction|DeadlineExceeded|longer than the specified deadline"
        r"|: (?:start|stop|reload|stop-\w+) operation timed out\. |: State '[\w-]+' timed out\. |Failed with result '(?:timeout|watchdog)'"
        r"|: Watchdog timeout \(limit "
        r"|CANCELLED AT \S+(?: DUE TO (?:TIME LIMIT|PREEMPTION|NODE FAILURE))?"
        r"|[Ss]pot (?:instance )?(?:reclaim|interruption|termination)|[Ii]nterruption notice|[Ii]nstance (?:was|is being) preempted"
        r"|failed (?:container|ELB) health checks"
        r"|failed to exit within \d+s(?:econds)? of signal 15|terminated due to timeout)",
        "Container vllm failed liveness probe, will be restarted",
        "..",
        anchors=(
            "probe, will",
            "low on resource",
            "evicted",
            "Evict",
            "Preempt",
            "TaintManager",
            "eadline",
            "timed out. ",
            "Failed with result '",
            "timeout (limit",
            "CANCELLED AT",
            "pot ",
            "nterruption notice",
            "reempted",
            "health checks",
            "of signal 15",
            "due to timeout",
        ),
    ),
    Pattern(
        "orchestrator.probe",
        "lifecycle",
        "probe failed",
        r"(?:Liveness|Startup) probe failed",
        'Startup probe failed: Get "http://10.42.0.19:8000/health": dial tcp: connect: connection refused',
        "..",
    ),
    # ------------------------------------------------------------------ how a child of a runner ended
    Pattern(
        "tgi.shard_signal",
        "lifecycle",
        "signaled to shutdown",
        r"Shard process was signaled to shutdown with signal (?P<signal>\d+)",
        "Shard process was signaled to shutdown with signal 9 rank=0",
        "tgi",
        where="any",
    ),
    Pattern(
        "ollama.runner",
        "lifecycle",
        "llama runner",
        r"llama runner (?:process )?(?:has )?terminated\"?:? .{0,80}?signal: (?P<signal>killed|segmentation fault|aborted|illegal instruction|bus error)",
        "llama runner process has terminated: signal: killed",
        "ollama",
        where="any",
    ),
)
"""Lines of keepers, in the order they are tried."""
