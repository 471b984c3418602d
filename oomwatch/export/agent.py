"""Samples of the agent itself."""

from __future__ import annotations

from oomwatch.export.labels import NONE, LabelCache
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import Snapshot


def add_agent(samples: Samples, cache: LabelCache, snapshot: Snapshot) -> None:
    """Add what the agent says of itself."""
    agent = snapshot.agent
    samples.add("oomwatch_build_info", cache.get({"version": snapshot.version}), 1)
    for source, success in agent.sources.items():
        samples.add("oomwatch_source_success", cache.get({"source": source}), success)
    for name, value in (
        ("oomwatch_self_cpu_seconds_total", agent.cpu_seconds),
        ("oomwatch_config_reload_success", agent.reload_ok),
        ("oomwatch_self_start_timestamp_seconds", agent.started_at),
        ("oomwatch_self_resident_bytes", agent.resident_bytes),
        ("oomwatch_self_threads", agent.threads),
        ("oomwatch_self_open_files", agent.open_files),
        ("oomwatch_self_stuck_threads", agent.stuck_threads),
        ("oomwatch_self_store_bytes", agent.store_bytes),
        ("oomwatch_self_page_duration_seconds", agent.page_seconds),
    ):
        samples.add(name, NONE, value)
    for receiver in agent.receivers:
        labels = cache.get({"receiver": receiver.name})
        samples.add("oomwatch_receiver_success", labels, receiver.ok)
        for state, count in (("due", receiver.due), ("held", receiver.held)):
            samples.add("oomwatch_receiver_messages_waiting", labels.plus("state", state), count)
        samples.add(
            "oomwatch_receiver_attempts_failed_total", labels, receiver.attempts_failed_total
        )
        for outcome, count in (
            ("delivered", receiver.delivered_total),
            ("failed", receiver.failed_total),
        ):
            samples.add("oomwatch_receiver_messages_total", labels.plus("outcome", outcome), count)
    for queue, depth in agent.queues.items():
        samples.add("oomwatch_self_queue_depth", cache.get({"queue": queue}), depth)
    for queue, dropped in agent.dropped.items():
        samples.add("oomwatch_self_dropped_total", cache.get({"queue": queue}), dropped)
