from __future__ import annotations

from oomwatch.agent.engines import EngineTable
from oomwatch.discovery import DiscoveredEngine, Discovery, EngineMember
from oomwatch.records import RecordedEngine
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.procfs import ProcessInfo, ProcessTree


def engine(name: str, pid: int) -> DiscoveredEngine:
    process = ProcessInfo(pid=pid, ppid=1, comm="vllm", state="S", start_ticks=pid)
    recorded = RecordedEngine(id=name, engine="vllm", pids=(pid,))
    return DiscoveredEngine(recorded, (EngineMember(process, "server"),), ())


def search(*engines: DiscoveredEngine) -> Discovery:
    return Discovery(100.0, engines, (), NvmlReading(100.0, "no_driver"), ProcessTree([]))


def names(engines) -> list[tuple[str, int]]:
    return [(engine.id, engine.root[0]) for engine in engines]


def test_a_start_keeps_its_name_when_another_ends():
    table = EngineTable()
    table.update(search(engine("vllm-8000", 1), engine("vllm-8000-2", 2)), 0.0)
    came, went = table.update(search(engine("vllm-8000", 2)), 1.0)
    assert (came, names(went)) == ([], [("vllm-8000", 1)])
    assert names(table) == [("vllm-8000-2", 2)]
    # The next one gets the name that is free, though discovery numbers it second.
    came, went = table.update(search(engine("vllm-8000", 2), engine("vllm-8000-2", 3)), 2.0)
    assert (names(came), went) == ([("vllm-8000", 3)], [])


def test_a_restart_takes_the_name_over():
    table = EngineTable()
    table.update(search(engine("vllm-8000", 1)), 0.0)
    came, went = table.update(search(engine("vllm-8000", 2)), 1.0)
    assert (names(came), names(went)) == ([("vllm-8000", 2)], [("vllm-8000", 1)])
