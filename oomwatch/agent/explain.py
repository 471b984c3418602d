"""The diagnosis of an incident: the judge of the command line, on what the agent has seen."""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from oomwatch.agent.engines import WatchedEngine
from oomwatch.diagnose.inputs import Inputs, KernelInput, LogInput, PageInput
from oomwatch.diagnose.judge import diagnose, verdict_of
from oomwatch.engines import versions
from oomwatch.records import (
    Diagnosis,
    Gpu,
    GpuSample,
    KernelEvent,
    Series,
    SourceStatus,
    Trigger,
)
from oomwatch.remedies.prescription import with_remedies
from oomwatch.report.json_report import to_json

_LOG = logging.getLogger(__name__)

ReadWindow = Callable[[float, float], Series]
"""Samples of a window of time (epoch), from the store; empty where it cannot be read."""


class Explainer:
    """Builds the inputs of a diagnosis from what is watched."""

    def __init__(
        self, host: str, read_window: ReadWindow, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._host = host
        self._wall = wall
        self._read_window = read_window
        for engine in ("vllm", "sglang"):  # later there may be no descriptor left to read them by
            versions.table(engine)

    def explain(
        self,
        engines: Sequence[WatchedEngine],
        *,
        kernel: Iterable[KernelEvent] = (),
        gpus: Iterable[GpuSample] = (),
        window: tuple[float, float] | None = None,
        noticed: Sequence[Trigger] = (),
        with_exits: bool = True,
    ) -> Diagnosis:
        """Judge these engines; with the samples of a window where one is given.

        `noticed`: what has set the incident off.
        `with_exits`: with how their processes ended, or by what they said alone.
        """
        notes: list[SourceStatus] = []
        series = Series()
        if window is not None:
            try:
                series = self._read_window(*window)
            except Exception as error:  # noqa: BLE001 - a diagnosis without samples beats none
                notes.append(SourceStatus("store", "warning", f"samples cannot be read: {error}"))
        inputs = Inputs(
            generated_at=self._wall(),
            host=self._host,
            logs=tuple(
                LogInput(tail.name, tail.lines(), engine.id)
                for engine in engines
                for tail in engine.tails
            ),
            pages=tuple(
                PageInput(f"{engine.id} metrics", engine.found.recorded.engine, (engine.load,))
                for engine in engines
                if engine.load is not None and not engine.broken
            ),
            kernel=(KernelInput("kernel log", tuple(kernel)),),
            series=series,
            engines=tuple(
                dataclasses.replace(engine.found.recorded, ended=engine.broken)
                for engine in engines
            ),
            gpus=tuple(gpu_of(sample) for sample in gpus),
            sources=tuple(notes),
            noticed=tuple(noticed),
            exits=tuple(exit_ for engine in engines for exit_ in engine.exits if with_exits),
            live=True,
        )
        try:
            found = diagnose(inputs)
        finally:
            # A judgement leaves megabytes in cycles. Left to itself the collector comes for them
            # after the next one has taken as much again, and what lives long settles in between.
            del inputs, series
            gc.collect()
        try:
            return with_remedies(found)  # in the room that the judgement has left
        finally:
            gc.collect()


def as_json(diagnosis: Diagnosis, *, only: int | None = None) -> dict[str, Any]:
    """The report of a diagnosis; with `only`, of this one of its incidents and no other."""
    if only is not None:
        one = diagnosis.incidents[only : only + 1]
        diagnosis = dataclasses.replace(diagnosis, incidents=one, verdict=verdict_of(one))
    return to_json(diagnosis)


def gpu_of(sample: GpuSample) -> Gpu:
    """A GPU as a report lists it."""
    return Gpu(
        index=sample.gpu,
        uuid=sample.uuid,
        name=sample.name,
        total_bytes=sample.total_bytes,
        used_bytes=sample.used_bytes,
        free_bytes=sample.free_bytes,
        reserved_bytes=sample.reserved_bytes,
    )
