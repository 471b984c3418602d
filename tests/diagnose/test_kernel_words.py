"""The kernel's lines inside a server's log: believed as whole lines that the server did not outlive."""

from __future__ import annotations

import pytest

from oomwatch.diagnose.judge import diagnose
from tests.diagnose.logtext import READY, SERVED, START, inputs_of

KILL = "Killed process 48812 (VLLM::EngineCor) total-vm:117440512kB, anon-rss:58720256kB, file-rss:81920kB, shmem-rss:0kB, UID:0 pgtables:130012kB oom_score_adj:968\n"
CONSTRAINT = "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=a,mems_allowed=0,oom_memcg=/a,task_memcg=/a,task=VLLM::EngineCor,pid=48812,uid=0\n"


@pytest.mark.parametrize(
    ("line", "where"),
    [
        (f"Out of memory: {KILL}", "host"),
        (f"[90211.100412] Out of memory: {KILL}", "host"),
        (f"<4>[90211.100412] Memory cgroup out of memory: {KILL}", "memcg"),
        (f"kernel: Memory cgroup out of memory: {KILL}", "memcg"),
        (KILL, "host"),
        (CONSTRAINT, "memcg"),
        ("Out of memory: Kill process 48812 (python3) score 900 or sacrifice child\n", "host"),
        ("Out of memory: Killed process *** (VLLM::EngineCor).\n", "host"),
        ("Memory cgroup out of memory: Killed process (VLLM::EngineCor) …\n", "memcg"),
    ],
)
def test_a_kill_is_believed_in_each_of_its_forms(line, where):
    finding = diagnose(inputs_of(START + READY + SERVED + line)).incidents[0].finding
    assert (finding.cause, finding.values["constraint"]) == ("host_oom_kill", where)
    assert ("(cgroup)" in finding.summary) == (where == "memcg")
    assert finding.evidence[0].where == "0.log:8"


@pytest.mark.parametrize(
    "line",
    [
        f"(APIServer pid=1) ERROR 11-20 09:30:00 [a.py:1] Out of memory: {KILL}",
        f"The log says Out of memory: {KILL}",
        f'"Out of memory: {KILL}',
        f"Out of memory: {KILL}{SERVED}",
        f"Out of memory: {KILL.replace('VLLM::EngineCor', 'postgres')}",
        "NVRM: Check failed: Out of memory [NV_ERR_NO_MEMORY]\n" + SERVED,
    ],
)
def test_what_the_kernel_did_not_say_of_this_server_is_not(line):
    assert not diagnose(inputs_of(START + READY + SERVED + line)).incidents


def test_a_lost_card_is_heard_too():
    line = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    finding = diagnose(inputs_of(START + line)).incidents[0].finding
    assert (finding.cause, finding.values["pci"]) == ("gpu_hw_fault", "0000:3b:00")
