"""Who is cited beside a kill of the kernel's."""

from __future__ import annotations

import pytest

from oomwatch.diagnose.inputs import Inputs, KernelInput
from oomwatch.diagnose.judge import diagnose
from oomwatch.records import KernelEvent, ProcessSample, RecordedEngine, Series
from oomwatch.units import GIB

LIMITED, OTHER = "/system.slice/a.service", "/system.slice/b.service"


def cited(kill: KernelEvent, cgroups: dict[int, str | None]) -> set[str]:
    """The processes among the evidence; each of them grew by as much."""
    found = diagnose(
        Inputs(
            generated_at=700.0,
            host="h",
            engines=(RecordedEngine("vllm-1", "vllm", pids=(10, 11), ended=True),),
            kernel=(KernelInput("kernel log", (kill,)),),
            series=Series(
                processes=tuple(
                    ProcessSample(
                        60.0 * n, pid, name=f"p{pid}", rss_bytes=(2 + n) * GIB, cgroup=cgroup
                    )
                    for n in range(10)
                    for pid, cgroup in cgroups.items()
                )
            ),
        )
    )
    evidence = found.incidents[0].finding.evidence
    return {item.where for item in evidence if item.source == "process"}


def kill(**fields: object) -> KernelEvent:
    return KernelEvent("oom_kill", "Killed process 11", at=600.0, fields={"pid": 11, **fields})


@pytest.mark.parametrize("limit", [LIMITED, f"{LIMITED}/", "/system.slice/a.service/workers"])
def test_what_runs_in_another_cgroup_took_nothing_of_the_limit(limit):
    own = f"{limit.rstrip('/')}/x" if "workers" in limit else LIMITED
    told = cited(
        kill(scope="cgroup", oom_memcg=limit), {11: own, 12: OTHER, 13: f"{LIMITED}2", 14: None}
    )
    assert told == {"11", "14"}


def test_on_a_host_without_memory_all_count():
    assert cited(kill(scope="host"), {11: LIMITED, 12: OTHER}) == {"11", "12"}


def test_nor_are_cgroups_compared_that_are_named_otherwise():
    # Version 1: the paths of a process differ from controller to controller.
    told = cited(kill(scope="cgroup", oom_memcg="/memory-only"), {11: LIMITED, 12: OTHER})
    assert told == {"11", "12"}
