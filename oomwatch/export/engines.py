"""Samples of one engine."""

from __future__ import annotations

from typing import Final

from oomwatch.export.labels import LabelCache, Labels
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import EngineFigures, PoolFigures

_STATES: Final = ("starting", "serving", "unresponsive", "broken", "unknown")


def add_engine(samples: Samples, cache: LabelCache, engine: EngineFigures) -> None:
    """Add all samples of an engine."""
    named = cache.get({"engine_id": engine.id})
    labels = cache.get({"engine_id": engine.id, "model_name": engine.model})
    info = cache.get(
        {
            "engine_id": engine.id,
            "model_name": engine.model,
            "kind": engine.kind,
            "version": engine.version,
            "unit": engine.unit,
            "container_name": engine.container,
            "k8s_namespace": engine.namespace,
            "k8s_pod": engine.pod,
        }
    )
    samples.add("oomwatch_engine_info", info, 1)
    for state in _STATES:
        samples.add("oomwatch_engine_state", named.plus("state", state), engine.state == state)
    samples.add("oomwatch_engine_start_timestamp_seconds", named, engine.started_at)
    samples.add("oomwatch_scrape_success", named, engine.scraped)
    for component, size in engine.components.items():
        samples.add("oomwatch_engine_memory_bytes", named.plus("component", component), size)
    if engine.scraped:
        samples.add("oomwatch_scrape_duration_seconds", named, engine.answer_seconds)
        for pool in engine.pools:
            _add_pool(samples, labels.plus("engine", pool.label), engine, pool)


def _add_pool(samples: Samples, labels: Labels, engine: EngineFigures, pool: PoolFigures) -> None:
    page = pool.sample
    samples.add("oomwatch_kv_usage_ratio", labels, page.kv_usage_ratio)
    samples.add("oomwatch_kv_block_size_tokens", labels, page.block_size_tokens)
    samples.add("oomwatch_requests_running", labels, page.running)
    samples.add("oomwatch_requests_waiting", labels, page.waiting)
    samples.add("oomwatch_preemptions_total", labels, page.preemptions_total)
    samples.add("oomwatch_preemptions_per_minute", labels, pool.preemptions_per_minute)
    if page.kv_blocks_total is not None and page.kv_usage_ratio is not None:
        # vLLM's null block is part of the pool and never given to a request.
        blocks = page.kv_blocks_total - (engine.kind == "vllm")
        used = round(page.kv_usage_ratio * blocks)
        samples.add("oomwatch_kv_blocks", labels.plus("state", "used"), used)
        samples.add("oomwatch_kv_blocks", labels.plus("state", "free"), blocks - used)
