"""The dashboard: rows of panels as tables, turned into what Grafana imports."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
ON_HOST = 'instance=~"$instance"'
OF_ENGINE = f'{ON_HOST},engine_id=~"$engine"'
SERVING = ',state="serving"'
WIDTH = 24


@dataclasses.dataclass(frozen=True)
class Panel:
    """One panel; `queries` are pairs of a query and how its lines are called."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Literal["timeseries", "stat", "state-timeline", "table", "bargauge"] = "timeseries"
    width: int = 8
    height: int = 8
    description: str = ""
    stacked: bool = False
    limits: tuple[tuple[float, str], ...] = ()
    """From which value on it has which colour."""


def _engine(name: str) -> str:
    return f"{name}{{{OF_ENGINE}}}"


def _host(name: str, more: str = "") -> str:
    return f"{name}{{{ON_HOST}{more}}}"


GPU = "{{instance}} GPU {{gpu}} {{mig}}"
ENGINE = "{{instance}} {{engine_id}} {{engine}}"

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Now",
        (
            Panel(
                "Open incidents",
                "none",
                ((f"count({_host('oomwatch_incident_open')}) or vector(0)", "open"),),
                "stat",
                4,
                5,
                limits=((0, "green"), (1, "red")),
            ),
            Panel(
                "GPUs missing",
                "none",
                (
                    (
                        f"sum({_host('oomwatch_gpus_expected')}"
                        f" - {_host('oomwatch_gpus_present')})",
                        "missing",
                    ),
                ),
                "stat",
                4,
                5,
                limits=((0, "green"), (1, "red")),
            ),
            Panel(
                "Engines serving",
                "none",
                ((f"sum({_host('oomwatch_engine_state', SERVING)})", "serving"),),
                "stat",
                4,
                5,
            ),
            Panel(
                "Used up in",
                "s",
                (
                    (
                        f"min({_host('oomwatch_forecast_exhaustion_seconds')})",
                        "the first of all",
                    ),
                ),
                "stat",
                4,
                5,
                "The nearest forecast of GPU, KV or host memory; none while nothing grows.",
                limits=((0, "red"), (1800, "orange"), (7200, "green")),
            ),
            Panel(
                "Incidents that are open",
                "none",
                ((_host("oomwatch_incident_open"), ""),),
                "table",
                8,
                5,
                "`oomwatch incidents show ID` and `oomwatch flags ID` on that host.",
            ),
        ),
    ),
    (
        "GPU memory",
        (
            Panel(
                "Used, with the peaks between scrapes",
                "bytes",
                (
                    (_host("oomwatch_gpu_memory_used_max_bytes"), f"{GPU} peak"),
                    (_host("oomwatch_gpu_memory_used_bytes"), GPU),
                ),
            ),
            Panel(
                "Free",
                "bytes",
                ((_host("oomwatch_gpu_memory_free_bytes"), GPU),),
            ),
            Panel(
                "By holder",
                "bytes",
                (
                    (
                        "sum by (instance, gpu, engine_id, role, process, unit) "
                        f"({_host('oomwatch_gpu_holder_memory_bytes')})",
                        "{{instance}} GPU {{gpu}} {{engine_id}} {{role}} {{process}} {{unit}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Held by no process",
                "bytes",
                ((_host("oomwatch_gpu_memory_unattributed_bytes"), GPU),),
                description="In use, and no process on the GPU accounts for it.",
            ),
            Panel(
                "Used up in",
                "s",
                (
                    (
                        _host("oomwatch_forecast_exhaustion_seconds"),
                        "{{instance}} {{resource}} {{gpu}}{{engine_id}}",
                    ),
                ),
            ),
            Panel(
                "What an engine's GPU holds, as its start said",
                "bytes",
                (
                    (
                        _engine("oomwatch_engine_memory_bytes"),
                        "{{instance}} {{engine_id}} {{component}}",
                    ),
                ),
                "bargauge",
            ),
        ),
    ),
    (
        "Engines",
        (
            Panel(
                "State",
                "none",
                (
                    (
                        f"{_engine('oomwatch_engine_state')} == 1",
                        "{{instance}} {{engine_id}} {{state}}",
                    ),
                ),
                "state-timeline",
            ),
            Panel(
                "KV cache in use",
                "percentunit",
                ((_engine("oomwatch_kv_usage_ratio"), ENGINE),),
            ),
            Panel(
                "Requests",
                "none",
                (
                    (_engine("oomwatch_requests_running"), f"{ENGINE} running"),
                    (_engine("oomwatch_requests_waiting"), f"{ENGINE} waiting"),
                ),
            ),
            Panel(
                "Preemptions a minute",
                "none",
                ((_engine("oomwatch_preemptions_per_minute"), ENGINE),),
            ),
            Panel(
                "Blocks of the KV cache",
                "none",
                ((_engine("oomwatch_kv_blocks"), f"{ENGINE} {{{{state}}}}"),),
                stacked=True,
            ),
            Panel(
                "How long a metrics page takes",
                "s",
                ((_engine("oomwatch_scrape_duration_seconds"), "{{instance}} {{engine_id}}"),),
                description="A busy engine answers late; one that hangs shows nothing.",
            ),
        ),
    ),
    (
        "Incidents and host",
        (
            Panel(
                "Incidents by cause",
                "none",
                (
                    (
                        "sum by (class, cause) "
                        f"(increase({_host('oomwatch_incidents_total')}[$__rate_interval])) > 0",
                        "{{cause}}",
                    ),
                ),
            ),
            Panel(
                "Conditions that were seen",
                "none",
                (
                    (
                        "sum by (kind) "
                        f"(increase({_host('oomwatch_triggers_total')}[$__rate_interval])) > 0",
                        "{{kind}}",
                    ),
                ),
            ),
            Panel(
                "Host memory available",
                "bytes",
                (
                    (_host("oomwatch_host_memory_available_bytes"), "{{instance}}"),
                    (_host("oomwatch_host_swap_used_bytes"), "{{instance}} swap in use"),
                ),
            ),
        ),
    ),
    (
        "The agent",
        (
            Panel(
                "Resident memory",
                "bytes",
                ((_host("oomwatch_self_resident_bytes"), "{{instance}}"),),
                width=6,
            ),
            Panel(
                "Of a core",
                "percentunit",
                (
                    (
                        f"rate({_host('oomwatch_self_cpu_seconds_total')}[$__rate_interval])",
                        "{{instance}}",
                    ),
                ),
                width=6,
            ),
            Panel(
                "Sweeps late by",
                "s",
                ((_host("oomwatch_self_sample_late_max_seconds"), "{{instance}}"),),
                width=6,
            ),
            Panel(
                "Messages that wait",
                "none",
                (
                    (
                        _host("oomwatch_receiver_messages_waiting"),
                        "{{instance}} {{receiver}} {{state}}",
                    ),
                ),
                width=6,
            ),
            Panel(
                "Messages",
                "none",
                (
                    (
                        "sum by (receiver, outcome) "
                        f"(increase({_host('oomwatch_receiver_messages_total')}[$__rate_interval]))",
                        "{{receiver}} {{outcome}}",
                    ),
                ),
                width=6,
            ),
            Panel(
                "Records that wait, and were lost",
                "none",
                (
                    (_host("oomwatch_self_queue_depth"), "{{instance}} {{queue}}"),
                    (
                        f"increase({_host('oomwatch_self_dropped_total')}[$__rate_interval]) > 0",
                        "{{instance}} {{queue}} lost",
                    ),
                ),
                width=6,
            ),
        ),
    ),
)


def queries() -> tuple[str, ...]:
    """All queries of the dashboard, variables not filled in."""
    return tuple(query for _, panels in ROWS for panel in panels for query, _ in panel.queries)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS:
        panels.append(_row(title, len(panels) + 1, top))
        top += 1
        left = height = 0
        for panel in row:
            if left + panel.width > WIDTH:
                left, top, height = 0, top + height, 0
            place = {"x": left, "y": top, "w": panel.width, "h": panel.height}
            panels.append(_panel(panel, len(panels) + 1, place))
            left, height = left + panel.width, max(height, panel.height)
        top += height
    return {
        "title": "oomwatch",
        "uid": "oomwatch",
        "tags": ["oomwatch", "gpu", "llm"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "",
        "templating": {"list": _variables()},
        "annotations": {"list": [_annotation()]},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    chosen = {"type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 1, "multi": True}
    every = {"includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    instances = "label_values(oomwatch_build_info, instance)"
    engines = f"label_values(oomwatch_engine_info{{{ON_HOST}}}, engine_id)"
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
        },
        {"name": "instance", "label": "Host", "query": instances, **chosen, **every},
        {"name": "engine", "label": "Engine", "query": engines, **chosen, **every},
    ]


def _annotation() -> dict[str, Any]:
    return {
        "name": "Incidents",
        "enable": True,
        "datasource": DATASOURCE,
        "iconColor": "red",
        "expr": _host("oomwatch_incident_open"),
        "titleFormat": "{{cause}}",
        "textFormat": "{{incident_id}} {{engine_id}}",
    }


def _row(title: str, number: int, top: int) -> dict[str, Any]:
    place = {"x": 0, "y": top, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    limits = panel.limits or ((0, "green"),)
    steps = [
        {"value": None if n == 0 else value, "color": c} for n, (value, c) in enumerate(limits)
    ]
    custom: dict[str, Any] = {}
    if panel.kind == "timeseries":
        mode = "normal" if panel.stacked else "none"
        custom = {"stacking": {"mode": mode}, "fillOpacity": 20 if panel.stacked else 0}
    instant = panel.kind in {"table", "bargauge"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": custom,
            },
            "overrides": [],
        },
        "options": _options(panel),
        "transformations": _transformations(panel),
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
                "instant": instant,
                "range": not instant,
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for position, (query, legend) in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi"},
        }
    if panel.kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    if panel.kind == "state-timeline":
        return {"showValue": "never", "mergeValues": True}
    return {}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    if panel.kind != "table":
        return []
    hidden = ("Time", "Value", "__name__", "job", "kind", "class")
    order = ("incident_id", "severity", "cause", "engine_id", "instance")
    return [
        {
            "id": "organize",
            "options": {
                "excludeByName": dict.fromkeys(hidden, True),
                "indexByName": {name: position for position, name in enumerate(order)},
            },
        }
    ]
