"""Samples and incidents as OTLP/HTTP JSON, by the conventions of OpenTelemetry. Pure.

Figures of GPUs for which there are conventions (``hw.gpu.…``) go by them; everything else is
``oomwatch.…``, since there are none for model servers' memory. A backend that turns the names into
Prometheus' has the same ones as the metrics page.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from oomwatch.export.labels import Labels, fit
from oomwatch.export.metrics import Metric
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import IncidentFigures, Snapshot

IncidentEvent = Literal["opened", "closed"]

_SCOPE: Final = "oomwatch"
_CUMULATIVE: Final = 2
_SEVERITY: Final = {"critical": (17, "ERROR"), "warning": (13, "WARN"), "info": (9, "INFO")}
_SUFFIXES: Final = ("_total", "_bytes", "_seconds", "_ratio")
_LONGEST: Final = 1024
_ADDITIVE: Final = frozenset({"hw.gpu.memory.usage", "hw.gpu.memory.limit"})
"""UpDownCounters: sums that may fall."""


def otlp_name(metric: Metric) -> str:
    """``oomwatch.kv.usage`` of ``oomwatch_kv_usage_ratio``: the unit has a field of its own."""
    if metric.otlp is not None:
        return metric.otlp
    name = metric.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name.replace("_", ".")


def metrics_request(
    parts: Iterable[Samples], snapshot: Snapshot, resource: Mapping[str, Any]
) -> dict[str, Any]:
    """The body of a request to ``/v1/metrics``."""
    start, now = _nanoseconds(snapshot.agent.started_at), _nanoseconds(snapshot.at)
    gpus = {gpu.mig or gpu.sample.uuid or "": gpu.sample.name for gpu in snapshot.gpus}
    metrics = []
    for metric, found in itertools.chain.from_iterable(parts):
        points = [
            _point(_attributes(metric, labels, gpus, snapshot.driver_version), value, start, now)
            for labels, value in found
            if math.isfinite(value)
        ]
        metrics.append(
            {
                "name": otlp_name(metric),
                "description": metric.help,
                "unit": metric.unit,
                **_data(metric, points),
            }
        )
    scope = {"name": _SCOPE, "version": snapshot.version}
    return {
        "resourceMetrics": [
            {"resource": resource, "scopeMetrics": [{"scope": scope, "metrics": metrics}]}
        ]
    }


def log_record(event: IncidentEvent, incident: IncidentFigures, at: float) -> dict[str, Any]:
    """A record that an incident was opened or closed."""
    name = f"oomwatch.incident.{event}"
    number, text = _SEVERITY.get(incident.severity, _SEVERITY["info"])
    values = {
        "event.name": name,
        "oomwatch.incident.id": incident.id,
        "oomwatch.incident.kind": incident.kind,
        "oomwatch.incident.severity": incident.severity,
        "oomwatch.incident.class": incident.cls,
        "oomwatch.incident.cause": incident.cause,
        "oomwatch.engine.id": incident.engine_id,
    }
    return {
        "timeUnixNano": _nanoseconds(incident.opened_at if event == "opened" else at),
        "observedTimeUnixNano": _nanoseconds(at),
        "severityNumber": number,
        "severityText": text,
        "eventName": name,
        "body": {"stringValue": fit(incident.summary or "", _LONGEST)},
        "attributes": _pairs(values),
    }


def logs_request(
    records: Iterable[Mapping[str, Any]], resource: Mapping[str, Any], version: str
) -> dict[str, Any]:
    """The body of a request to ``/v1/logs``."""
    scope = {"name": _SCOPE, "version": version}
    return {
        "resourceLogs": [
            {"resource": resource, "scopeLogs": [{"scope": scope, "logRecords": list(records)}]}
        ]
    }


def resource_of(host: str, version: str, machine_id: str | None) -> dict[str, Any]:
    """Who sends: the same over restarts."""
    instance = uuid.UUID(hashlib.sha256(f"oomwatch {machine_id or host}".encode()).hexdigest()[:32])
    return {
        "attributes": _pairs(
            {
                "service.name": _SCOPE,
                "service.version": version,
                "service.instance.id": str(instance),
                "host.name": host,
                "host.id": machine_id,
            }
        )
    }


def _attributes(
    metric: Metric, labels: Labels, gpus: Mapping[str, str | None], driver_version: str | None
) -> list[dict[str, Any]]:
    given = dict(labels.pairs)
    if metric.otlp is None:
        return _pairs({_RENAMED.get(name, name): value for name, value in labels.pairs})
    place = given.get("mig") or given.get("uuid") or given.get("gpu", "")
    return _pairs(
        {
            "hw.id": place,
            "hw.type": "gpu",
            "hw.vendor": "NVIDIA",
            "hw.model": gpus.get(place),
            "hw.driver_version": driver_version,
            "hw.parent": given.get("uuid") if given.get("mig") else None,
            "gpu": given.get("gpu"),
        }
    )


_RENAMED: Final = {
    "container_name": "container.name",
    "k8s_namespace": "k8s.namespace.name",
    "k8s_pod": "k8s.pod.name",
    "pid": "process.pid",
}


def _data(metric: Metric, points: list[dict[str, Any]]) -> dict[str, Any]:
    if metric.kind == "counter" or metric.otlp in _ADDITIVE:
        return {
            "sum": {
                "dataPoints": points,
                "aggregationTemporality": _CUMULATIVE,
                "isMonotonic": metric.kind == "counter",
            }
        }
    return {"gauge": {"dataPoints": points}}


def _point(attributes: list[dict[str, Any]], value: float, start: str, now: str) -> dict[str, Any]:
    # 64-bit integers are texts in the JSON form of protobuf.
    number = {"asInt": str(int(value))} if isinstance(value, int) else {"asDouble": value}
    return {"attributes": attributes, "startTimeUnixNano": start, "timeUnixNano": now, **number}


def _pairs(values: Mapping[str, str | None]) -> list[dict[str, Any]]:
    return [
        {"key": name, "value": {"stringValue": fit(value)}}
        for name, value in values.items()
        if value
    ]


def _nanoseconds(seconds: float) -> str:
    return str(round(seconds * 1e9))
