"""What the agent holds in memory, as a snapshot for export: nothing is read of the host for it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from oomwatch import __version__
from oomwatch.agent.detector import Detector
from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.feeds import Feeds
from oomwatch.agent.gpu_figures import gpu_figures, holder_figures, pod_of, short_id
from oomwatch.agent.incident_figures import IncidentCounts
from oomwatch.agent.start_facts import Start
from oomwatch.causes import class_of
from oomwatch.detect.incidents import FAMILY
from oomwatch.export.peaks import Peaks
from oomwatch.export.snapshot import (
    AgentFigures,
    EngineFigures,
    EngineState,
    ForecastFigures,
    GpuFigures,
    HolderFigures,
    IncidentFigures,
    PeakFigures,
    PoolFigures,
    Snapshot,
)
from oomwatch.records import StoredIncident
from oomwatch.report.pages import title
from oomwatch.sources.nvml import NvmlReading

_FRESH_SECONDS: Final = 15.0
"""What was not read for so long is not known any more."""
_LATE: Final = "late"
_NO_DRIVER: Final = frozenset({"no_driver", "not_available"})

GpuKey = tuple[int, str]
"""Index of a GPU and UUID of a MIG instance, or an empty text."""


class Figures:
    """Fed by the sampler; `snapshot` may be called from any thread."""

    def __init__(
        self,
        host: str,
        table: EngineTable,
        feeds: Feeds,
        detector: Callable[[], Detector | None],
        own: Callable[[], AgentFigures],
    ) -> None:
        """`own` is what the agent takes itself, as it was last looked at."""
        self.host = host
        self._table = table
        self._feeds = feeds
        self._detector = detector
        self._own = own
        self._used: Peaks[GpuKey] = Peaks()
        self._late: Peaks[str] = Peaks()
        self._swept_at: float | None = None
        self._expected = 0
        self.incidents = IncidentCounts()
        self.components: Mapping[Start, Mapping[str, int]] = {}
        """By start of an engine: what its log said of its memory."""
        self.process_ids = False

    # ---------------------------------------------------------------- the sampler's thread
    def on_reading(self, reading: NvmlReading, now: float) -> None:
        """Keep what a later snapshot has to know of this sweep."""
        highest: dict[GpuKey, float] = {}
        for gpu in reading.gpus:
            instances = [(one.sample, one.sample.uuid or "") for one in gpu.instances]
            for sample, mig in ((gpu.sample, ""), *instances):
                used = sample.used_bytes if sample.used_max_bytes is None else sample.used_max_bytes
                if used is not None:
                    highest[sample.gpu, mig] = used
        self._used.add(now, highest)
        self._expected = max(self._expected, len(reading.gpus))
        before, self._swept_at = self._swept_at, now
        sampler = self._feeds.sampler
        if before is not None and sampler is not None and reading.gpus:
            due = before + max(sampler.interval_seconds, sampler.keep_seconds)
            self._late.add(now, {_LATE: max(0.0, now - due)})

    # ---------------------------------------------------------------- any thread
    def is_ready(self) -> bool:
        """Whether everything was looked at once, with success or not."""
        feeds, sampler = self._feeds, self._feeds.sampler
        swept = sampler is None or feeds.swept_at or sampler.silent_seconds > 1
        return bool(swept and feeds.host_read_at)

    def peaks(self, asking: str) -> PeakFigures:
        """Maxima since `asking` has asked before."""
        now = time.monotonic()
        late = self._late.since_last(asking, now)
        return PeakFigures(self._used.since_last(asking, now), late.get(_LATE))

    def snapshot(self) -> Snapshot | None:
        """What is known now; None before the first look at everything."""
        if not self.is_ready():
            return None
        now, wall = time.monotonic(), time.time()
        feeds, detector = self._feeds, self._detector()
        reading = feeds.last_reading
        gpus = self._gpus(now)
        host = feeds.last_host
        host_known = host is not None and now - feeds.host_read_at < _FRESH_SECONDS
        own = self._own()
        sources = dict(own.sources)
        if feeds.config.sources.nvml or self._expected:
            sources["nvml"] = bool(gpus) and all(gpu.ok for gpu in gpus)
        if feeds.config.sources.procfs:
            sources["host"] = host_known
        open_incidents = tuple(self.incidents.open(self.look(now)))
        return Snapshot(
            at=wall,
            host=self.host,
            version=__version__,
            agent=dataclasses.replace(own, sources=sources),
            driver_version=reading.driver_version if reading is not None else None,
            driver_silent_seconds=self._driver_silent_seconds(),
            gpus=tuple(gpus),
            gpus_expected=self._expected,
            holders=self._holders(gpus),
            engines=tuple(self._engine(engine, now) for engine in self._table),
            host_total_bytes=host.mem_total_bytes if host and host_known else None,
            host_available_bytes=host.mem_available_bytes if host and host_known else None,
            host_swap_bytes=host.swap_used_bytes if host and host_known else None,
            forecasts=self._forecasts(detector),
            incidents=open_incidents,
            incidents_total=dict(self.incidents.total),
            last_incidents=dict(self.incidents.last),
            titles=self._titles(open_incidents),
            triggers_total=dict.fromkeys(FAMILY, 0)
            | (dict(detector.triggers_total) if detector is not None else {}),
        )

    def look(self, now: float | None = None) -> list[StoredIncident]:
        """Count incidents that have come; all that the detector knows. One at a time."""
        detector = self._detector()
        known = detector.book.known if detector is not None else []
        self.incidents.look(known, time.monotonic() if now is None else now)
        return known

    def open_incidents(self) -> list[IncidentFigures]:
        """Incidents that are open, the newest first."""
        detector = self._detector()
        return list(self.incidents.open(detector.book.known if detector is not None else ()))

    # ---------------------------------------------------------------- parts
    def _titles(self, incidents: Iterable[IncidentFigures]) -> dict[str, str]:
        """What the causes are called; they are read of a file each, once."""
        causes = {incident.cause for incident in incidents}
        causes |= {cause for _, cause in list(self.incidents.last)}
        return {c: title(c, "en") for c in sorted(filter(None, causes)) if class_of(c)}

    def _driver_silent_seconds(self) -> float | None:
        """None where there is no driver that could be silent; one that hangs at first is."""
        reading, sampler = self._feeds.last_reading, self._feeds.sampler
        if sampler is None or (reading is not None and reading.outcome in _NO_DRIVER):
            return None
        return sampler.silent_seconds

    def _is_swept(self, now: float) -> bool:
        usual = self._feeds.config.agent.sampling_interval_seconds
        swept = self._swept_at
        return swept is not None and now - swept < max(_FRESH_SECONDS, 3 * usual)

    def _gpus(self, now: float) -> list[GpuFigures]:
        reading = self._feeds.last_reading
        if reading is None:
            return []
        return list(gpu_figures(reading, is_fresh=self._is_swept(now)))

    def _holders(self, gpus: list[GpuFigures]) -> tuple[HolderFigures, ...]:
        reading = self._feeds.last_reading
        known = {gpu.sample.gpu: gpu.sample.uuid for gpu in gpus if gpu.ok and not gpu.mig}
        if reading is None:
            return ()
        found = holder_figures(
            [process for process in reading.processes if process.gpu in known],
            known,
            self._table,
            by_pid=self.process_ids,
        )
        return tuple(found)

    def _engine(self, engine: WatchedEngine, now: float) -> EngineFigures:
        found, recorded = engine.found, engine.found.recorded
        has_page = recorded.metrics_url is not None and self._feeds.config.sources.metrics
        read = engine.page_monotonic
        is_fresh = read is not None and now - read < _FRESH_SECONDS and not engine.broken
        namespace, pod = pod_of(found)
        return EngineFigures(
            id=engine.id,
            state=_state(engine, now, is_fresh=is_fresh),
            kind=recorded.engine,
            version=recorded.version,
            model=found.model,
            unit=found.unit,
            container=short_id(found.container),
            namespace=namespace,
            pod=pod,
            started_at=recorded.started_at or found.started_at,
            scraped=is_fresh if has_page else None,
            answer_seconds=engine.answer_seconds,
            pools=_pools(engine),
            components=self.components.get((engine.id, engine.root), {}),
        )

    def _forecasts(self, detector: Detector | None) -> tuple[ForecastFigures, ...]:
        ahead = detector.forecasts() if detector is not None else {}
        return tuple(
            ForecastFigures(
                resource,
                forecast.eta_seconds,
                engine_id=name.partition("/")[0] if resource == "kv" else None,
                gpu=int(name) if resource == "gpu" else None,
            )
            for (resource, name), forecast in ahead.items()
        )


def _state(engine: WatchedEngine, now: float, *, is_fresh: bool) -> EngineState:
    if engine.broken:
        return "broken"
    if engine.page_monotonic is not None:
        return "serving" if is_fresh else "unresponsive"
    return "starting" if engine.is_starting(now) else "unknown"


def _pools(engine: WatchedEngine) -> tuple[PoolFigures, ...]:
    prefix = f"{engine.id}/"
    return tuple(
        PoolFigures(
            engine.first_pool if name == engine.id else name.removeprefix(prefix),
            watch.last,
            watch.preemptions_per_minute,
        )
        for name, watch in engine.watches.items()
        if watch.last is not None
    )
