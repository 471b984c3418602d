"""A snapshot to the samples of the metrics. Pure; what is unknown is absent.

However many engines and processes a host has, a page stays below some thousand lines: what is over
the limits is left out, holders are summed up, and the page says how many.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from oomwatch.causes import CAUSES
from oomwatch.export.agent import add_agent
from oomwatch.export.engines import add_engine
from oomwatch.export.labels import NONE, LabelCache, Labels
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import (
    EngineFigures,
    GpuFigures,
    HolderFigures,
    PeakFigures,
    Snapshot,
)

MOST_ENGINES: Final = 128
MOST_POOLS: Final = 512
MOST_HOLDERS: Final = 256
MOST_INCIDENTS: Final = 64
OTHERS: Final = "(others)"


class Exporter:
    """Makes samples of snapshots; labels of what it has seen before are kept."""

    def __init__(self, *, dcgm_labels: bool = False) -> None:
        """`dcgm_labels`: with the labels that are named otherwise than Prometheus advises."""
        self._dcgm_labels = dcgm_labels
        self._cache = LabelCache()
        self._causes: dict[tuple[str, str], Labels] = {
            (cls, cause): Labels((("class", cls), ("cause", cause)))
            for cls, causes in CAUSES.items()
            for cause in causes
        }

    def samples(self, snapshot: Snapshot) -> Samples:
        """All samples of a snapshot, but for the peaks."""
        samples = Samples()
        for gpu in snapshot.gpus:
            self._add_gpu(samples, snapshot, gpu)
        samples.add("oomwatch_gpus_present", NONE, sum(g.ok and not g.mig for g in snapshot.gpus))
        samples.add("oomwatch_gpus_expected", NONE, snapshot.gpus_expected)
        samples.add("oomwatch_driver_silent_seconds", NONE, snapshot.driver_silent_seconds)
        left_out = self._add_holders(samples, snapshot.holders)
        engines, more = _limited(snapshot.engines)
        left_out += more
        for engine in engines:
            add_engine(samples, self._cache, engine)
        self._add_host(samples, snapshot)
        left_out += self._add_incidents(samples, snapshot)
        add_agent(samples, self._cache, snapshot)
        samples.add("oomwatch_self_series_left_out", NONE, left_out)
        return samples

    def peaks(self, snapshot: Snapshot, peaks: PeakFigures) -> Samples:
        """The samples that differ by who asks: few, so that they are made for each."""
        samples = Samples()
        for gpu in snapshot.gpus:
            if gpu.ok:
                highest = peaks.used_bytes.get((gpu.sample.gpu, gpu.mig))
                labels = self._labels_of(snapshot, gpu)
                samples.add("oomwatch_gpu_memory_used_max_bytes", labels, highest)
        samples.add("oomwatch_self_sample_late_max_seconds", NONE, peaks.late_seconds)
        return samples

    def _labels_of(self, snapshot: Snapshot, gpu: GpuFigures) -> Labels:
        if not gpu.mig:
            return self._gpu(gpu.sample.gpu, gpu.sample.uuid, "")
        whole = (g.sample for g in snapshot.gpus if g.sample.gpu == gpu.sample.gpu and not g.mig)
        return self._gpu(gpu.sample.gpu, next((each.uuid for each in whole), None), gpu.mig)

    def _gpu(self, index: int, uuid: str | None, mig: str) -> Labels:
        return self._cache.get({"gpu": str(index), "uuid": uuid, "mig": mig})

    def _add_gpu(self, samples: Samples, snapshot: Snapshot, gpu: GpuFigures) -> None:
        sample = gpu.sample
        labels = self._labels_of(snapshot, gpu)
        samples.add("oomwatch_gpu_success", labels, gpu.ok)
        if not gpu.ok:
            return
        info: dict[str, str | None] = {
            **dict(labels.pairs),
            "gpu_name": sample.name,
            "UUID": sample.uuid,
            "pci_bus_id": gpu.pci,
            "driver_version": snapshot.driver_version,
        }
        if self._dcgm_labels:
            info |= {"modelName": sample.name, "device": f"nvidia{sample.gpu}"}
        samples.add("oomwatch_gpu_info", self._cache.get(info), 1)
        samples.add("oomwatch_gpu_memory_total_bytes", labels, sample.total_bytes)
        samples.add("oomwatch_gpu_memory_used_bytes", labels, sample.used_bytes)
        samples.add("oomwatch_gpu_memory_free_bytes", labels, sample.free_bytes)
        samples.add("oomwatch_gpu_memory_reserved_bytes", labels, sample.reserved_bytes)
        samples.add("oomwatch_gpu_memory_unattributed_bytes", labels, gpu.unattributed_bytes)
        samples.add("oomwatch_gpu_utilization_ratio", labels, sample.utilization_ratio)

    def _add_holders(self, samples: Samples, holders: Sequence[HolderFigures]) -> int:
        """The largest ones each, the others of each GPU as one; how many those are."""
        ordered = sorted(holders, key=lambda holder: holder.used_bytes, reverse=True)
        for holder in ordered[:MOST_HOLDERS]:
            labels = self._cache.get(
                {
                    "gpu": str(holder.gpu),
                    "uuid": holder.uuid,
                    "mig": holder.mig,
                    "engine_id": holder.engine_id,
                    "role": holder.role,
                    "process": holder.process,
                    "unit": holder.unit,
                    "container_name": holder.container,
                    "k8s_namespace": holder.namespace,
                    "k8s_pod": holder.pod,
                    "pid": None if holder.pid is None else str(holder.pid),
                }
            )
            samples.add("oomwatch_gpu_holder_memory_bytes", labels, holder.used_bytes)
        rest: dict[Labels, int] = {}
        for holder in ordered[MOST_HOLDERS:]:
            gpu = self._gpu(holder.gpu, holder.uuid, holder.mig)
            labels = gpu.plus("process", OTHERS)
            rest[labels] = rest.get(labels, 0) + holder.used_bytes
        for labels, used_bytes in rest.items():
            samples.add("oomwatch_gpu_holder_memory_bytes", labels, used_bytes)
        return max(0, len(ordered) - MOST_HOLDERS)

    def _add_host(self, samples: Samples, snapshot: Snapshot) -> None:
        samples.add("oomwatch_host_memory_total_bytes", NONE, snapshot.host_total_bytes)
        samples.add("oomwatch_host_memory_available_bytes", NONE, snapshot.host_available_bytes)
        samples.add("oomwatch_host_swap_used_bytes", NONE, snapshot.host_swap_bytes)
        for ahead in snapshot.forecasts:
            gpu = None if ahead.gpu is None else str(ahead.gpu)
            labels = self._cache.get(
                {"resource": ahead.resource, "engine_id": ahead.engine_id, "gpu": gpu}
            )
            samples.add("oomwatch_forecast_exhaustion_seconds", labels, ahead.eta_seconds)

    def _add_incidents(self, samples: Samples, snapshot: Snapshot) -> int:
        for incident in snapshot.incidents[:MOST_INCIDENTS]:
            labels = self._cache.get(
                {
                    "incident_id": incident.id,
                    "class": incident.cls or "unknown",
                    "cause": incident.cause or "unknown",
                    "severity": incident.severity,
                    "kind": incident.kind,
                    "engine_id": incident.engine_id,
                }
            )
            samples.add("oomwatch_incident_open", labels, 1)
        # A counter that begins at 1 has no increase: all that there may be begin at 0.
        for key, labels in self._causes.items():
            count = snapshot.incidents_total.get(key, 0)
            samples.add("oomwatch_incidents_total", labels, count)
        for key, count in snapshot.incidents_total.items():
            if key not in self._causes:
                samples.add("oomwatch_incidents_total", self._cause(key), count)
        for key, at in snapshot.last_incidents.items():
            samples.add("oomwatch_incident_last_timestamp_seconds", self._cause(key), at)
        for cause, title in snapshot.titles.items():
            labels = self._cache.get({"cause": cause, "title": title})
            samples.add("oomwatch_cause_info", labels, 1)
        for kind, count in snapshot.triggers_total.items():
            samples.add("oomwatch_triggers_total", self._cache.get({"kind": kind}), count)
        return max(0, len(snapshot.incidents) - MOST_INCIDENTS)

    def _cause(self, key: tuple[str, str]) -> Labels:
        """Labels of a class and a cause, also of one that this version does not know."""
        cls, cause = key
        return self._causes.get(key) or self._cache.get({"class": cls, "cause": cause})


def _limited(engines: Iterable[EngineFigures]) -> tuple[list[EngineFigures], int]:
    """The engines and pools that there is room for, and how many there are beyond."""
    given = list(engines)
    kept: list[EngineFigures] = []
    room = MOST_POOLS
    left_out = max(0, len(given) - MOST_ENGINES)
    for engine in itertools.islice(given, MOST_ENGINES):
        pools = engine.pools[:room]
        left_out += len(engine.pools) - len(pools)
        room -= len(pools)
        kept.append(engine.with_pools(pools))
    return kept, left_out
