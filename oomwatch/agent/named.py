"""Engines that the configuration names: what discovery found, under their names, or all we know."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from urllib.parse import urlsplit

from oomwatch.config.schema import Config, EngineConfig
from oomwatch.discovery import DiscoveredEngine, Discovery
from oomwatch.records import RecordedEngine
from oomwatch.sources.output import LogLocation


def apply_names(config: Config, found: Discovery) -> Discovery:
    """Leave out kinds that are not wanted; call the others as the configuration does."""
    kinds = config.discovery.engines
    engines = [
        engine
        for engine in found.engines
        if getattr(kinds, (engine.recorded.engine or "other").replace(".", "_"), kinds.other)
    ]
    if not config.discovery.enabled:
        engines = [e for e in engines if any(_is_meant(c, e) for c in config.engines)]
    for entry in config.engines:
        place = next((n for n, engine in enumerate(engines) if _is_meant(entry, engine)), None)
        if place is not None:
            engines[place] = _named(entry, engines[place])
        elif entry.metrics_url is not None or entry.log is not None:
            engines.append(_unseen(entry))
    return dataclasses.replace(found, engines=tuple(engines))


def _is_meant(entry: EngineConfig, engine: DiscoveredEngine) -> bool:
    """Whether all that the entry says is true of the engine, and it says something."""
    recorded = engine.recorded
    url = urlsplit(recorded.metrics_url or "")
    marks = [
        known
        for value, known in (
            (entry.unit, entry.unit in {engine.unit, (engine.unit or "").removesuffix(".service")}),
            (entry.container, (engine.container or "").startswith(entry.container or "?")),
            (entry.pod, _is_pod(entry.pod or "", engine)),
            (entry.pid, entry.pid in recorded.pids),
            (entry.port, url.port == entry.port),
        )
        if value is not None
    ]
    if not marks and entry.metrics_url is not None:
        marks = [_same_page(entry.metrics_url, recorded.metrics_url)]
    elif not marks and entry.log is not None:
        marks = [any(log.path == entry.log for log in engine.logs)]
    right_kind = entry.kind in {"auto", recorded.engine}
    return right_kind and not engine.orphan and bool(marks) and all(marks)


def _is_pod(pattern: str, engine: DiscoveredEngine) -> bool:
    return any(
        log.kind == "pod" and log.name is not None and fnmatch.fnmatchcase(log.name, pattern)
        for log in engine.logs
    )


def _same_page(first: str, second: str | None) -> bool:
    a, b = urlsplit(first), urlsplit(second or "")
    local = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}  # noqa: S104 - compared, not bound
    same_host = a.hostname == b.hostname or {a.hostname, b.hostname} <= local
    return same_host and a.port == b.port


def _named(entry: EngineConfig, engine: DiscoveredEngine) -> DiscoveredEngine:
    logs = engine.logs if entry.log is None else (LogLocation("file", path=entry.log),)
    recorded = dataclasses.replace(
        engine.recorded,
        id=entry.name or engine.recorded.id,
        metrics_url=entry.metrics_url or engine.recorded.metrics_url,
        log=entry.log or engine.recorded.log,
    )
    return dataclasses.replace(engine, recorded=recorded, logs=logs)


def _unseen(entry: EngineConfig) -> DiscoveredEngine:
    """An engine of which no process is seen: on another host, or hidden from us."""
    recorded = RecordedEngine(
        id=entry.name or "engine",
        engine=None if entry.kind == "auto" else entry.kind,
        metrics_url=entry.metrics_url,
        log=entry.log,
    )
    logs = () if entry.log is None else (LogLocation("file", path=entry.log),)
    return DiscoveredEngine(recorded=recorded, members=(), logs=logs)


def headers_of(config: Config, engine_id: str) -> tuple[Mapping[str, str], str | None]:
    """The headers and the certificates' file that the configuration has for an engine."""
    from oomwatch.config.secrets import engine_headers  # noqa: PLC0415 - reads secret files

    for entry in config.engines:
        if entry.name == engine_id:
            return engine_headers(entry), entry.ca_file
    return {}, None
