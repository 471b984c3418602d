"""What the agent makes of its configuration."""

from __future__ import annotations

from pathlib import Path

from oomwatch.agent.service import Agent
from oomwatch.config import load_config
from oomwatch.records import HostSample


def test_as_many_records_wait_for_the_store_as_are_configured(tmp_path: Path) -> None:
    overrides = {"agent.queue_size": "100", "store.path": str(tmp_path / "folder" / "store.db")}
    (tmp_path / "folder").mkdir()
    config = tmp_path / "oomwatch.toml"
    config.write_text("schema_version = 1\n")
    agent = Agent(load_config(str(config), overrides=overrides))
    agent.writer.start()
    agent.writer.stop()  # nothing is written from here on
    agent.writer.put(HostSample(float(at)) for at in range(150))
    assert agent.writer.status.pending == 100
    assert agent.writer.status.dropped_samples_total == 50
