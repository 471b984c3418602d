"""A second agent on the same store."""

from __future__ import annotations


def test_a_second_agent_says_who_uses_the_store_and_ends(new_agent):
    first = new_agent().start()
    second = new_agent(store=first.store).start(ready=False)
    assert second.process is not None
    assert second.process.wait(30) == 2
    assert second.said() == (
        f"oomwatch: another agent (pid {first.pid}) uses this store: {first.store}; "
        "end that one first, or give --store another one\n"
    )
    first.kill()
    second.start()
