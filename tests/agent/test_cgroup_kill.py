"""A real OOM kill in a memory control group, and a real SIGKILL, as the running agent sees them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest

LIMIT_BYTES = 48 << 20


@pytest.fixture
def memory_cgroup():
    """A memory control group of our own, of version 2 or 1, with a small limit."""
    if os.getuid() != 0:
        pytest.skip("a control group can be made by root alone")
    unified = Path("/sys/fs/cgroup/cgroup.controllers")
    if unified.exists():
        if "memory" not in unified.read_text().split():
            pytest.skip("the memory controller is not there")
        group, limit = Path(f"/sys/fs/cgroup/oomwatch-test-{os.getpid()}"), "memory.max"
    else:
        group, limit = (
            Path(f"/sys/fs/cgroup/memory/oomwatch-test-{os.getpid()}"),
            "memory.limit_in_bytes",
        )
    try:
        group.mkdir()
        (group / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory control group can be made here: {error.strerror}")
    with contextlib.suppress(OSError):
        (group / "memory.swap.max").write_text("0")
    yield group
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.1)


def failures(agent, engine):
    return [i for i in agent.incidents(engine.id) if "/failure" in i.fingerprint]


def cause(incident) -> str | None:
    """What its diagnosis names first."""
    found = (incident.diagnosis or {}).get("incidents") or [{}]
    return found[0].get("cause")


def kinds(incident) -> set[str]:
    return {trigger.kind for trigger in incident.triggers}


def test_a_kill_for_a_control_groups_limit_is_one_incident(new_agent, new_engine, memory_cgroup):
    engine = new_engine(cgroup=memory_cgroup)
    agent = new_agent(engine).start()
    agent.wait_for_engine(engine.id)
    core = engine.pid_of("VLLM::EngineCore")
    asked_at = time.time()
    engine.set(eat=True)  # the engine core takes memory until the kernel kills it
    (incident,) = agent.wait_for(lambda: failures(agent, engine), "the kill is seen")
    agent.wait_for(lambda: cause(failures(agent, engine)[0]), "it is explained")
    agent.wait_for(
        lambda: any(t.pid == core for t in failures(agent, engine)[0].triggers),
        "the process is named",
    )
    time.sleep(3)  # other witnesses: the count of the control group, the kernel's line
    (incident,) = failures(agent, engine)
    assert kinds(incident) & {"cgroup_oom", "kernel_oom"}
    assert cause(incident) == "host_oom_kill"
    assert incident.opened_at >= asked_at - 1
    texts = " ".join(trigger.text for trigger in incident.triggers)
    assert str(core) in texts
    # The whole is one event: what else it opened would be a second alert for the same thing.
    assert [i.id for i in agent.incidents(engine.id)] == [incident.id]


def test_a_killed_core_is_one_incident_that_a_restart_closes(new_agent, new_engine):
    engine = new_engine()
    agent = new_agent(engine, incidents__close_after="3s").start()
    agent.wait_for_engine(engine.id)
    killed_at = engine.kill_core()
    agent.wait_for(lambda: failures(agent, engine), "the end is seen")
    agent.wait_for(lambda: cause(failures(agent, engine)[0]), "it is explained")
    (incident,) = failures(agent, engine)
    assert cause(incident) == "killed_by_signal"
    assert abs(incident.opened_at - killed_at) < 2
    assert engine.child is not None
    assert engine.child.wait(20) == 1  # as vLLM's server does without its core
    engine.start()
    agent.wait_for(
        lambda: all(i.state == "closed" for i in failures(agent, engine)), "it is over", 60
    )
    (incident,) = failures(agent, engine)
    assert cause(incident) == "killed_by_signal"  # the new start's log knows less
