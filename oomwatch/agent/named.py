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
        engines = [e for e in engines if any(_is_meant(c, e, found) for c in config.engines)]
    for entry in config.engines:
        place = next(
            (n for n, engine in enumerate(engines) if _is_meant(entry, engine, found)), None
        )
        if place is not None:
            engines[place] = _named(entry, engines[place])
        elif entry.metrics_url is not None or entry.log is not None:
            engines.append(_unseen(entry))
    return dataclasses.replace(found, engines=tuple(engines))


def _is_meant(entry: EngineConfig, engine: DiscoveredEngine, found: Discovery) -> bool:
    """Whether all that the entry says is true of the engine, and it says something."""
    recorded = engine.recorded
    url = urlsplit(recorded.metrics_url or "")
    checks = [
        (
            entry.unit,
            lambda: entry.unit in {engine.unit, f"{engine.unit}".removesuffix(".service")},
        ),
        (entry.container, lambda: (engine.container or "").startswith(entry.container or "?")),
        (entry.pod, lambda: _is_pod(entry.pod or "", engine)),
        (entry.pid, lambda: entry.pid in recorded.pids),
        (entry.port, lambda: url.port == entry.port),
        (entry.metrics_url, lambda: _same_page(entry.metrics_url or "", recorded.metrics_url)),
        (entry.log, lambda: any(log.path == entry.log for log in engine.logs)),
    ]
    marks = [check for value, check in checks[:5] if value is not None]
    if not marks:  # only an address: it is that engine's if it has the same one
        marks = [check for value, check in checks[5:] if value is not None][:1]
    right_kind = entry.kind in {"auto", recorded.engine}
    return right_kind and not engine.orphan and bool(marks) and all(check() for check in marks)


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
