"""The metrics page, made ahead of whoever asks for it.

Somebody who has asked will ask again: for two minutes after that the page is made once a second,
beside everything else, and an answer only adds what differs by who asks. Where nobody asks, nothing
is made.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Final

from oomwatch.agent.figures import Figures
from oomwatch.agent.own_figures import OwnFigures
from oomwatch.export.families import Exporter
from oomwatch.export.page import Form, PageHead
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import Snapshot
from oomwatch.export.text import END, render

_FRESH_SECONDS: Final = 2.0
_AWAITED_SECONDS: Final = 120.0


@dataclasses.dataclass(slots=True)
class _Prepared:
    """A snapshot, its samples, and the first parts of pages that were made of them."""

    at: float
    snapshot: Snapshot
    samples: Samples
    heads: dict[Form, PageHead] = dataclasses.field(default_factory=dict)


class Pages:
    """From any thread; one makes a page at a time."""

    def __init__(self, figures: Figures, own: OwnFigures) -> None:
        self._figures = figures
        self._own = own
        self._lock = threading.Lock()
        self._asked: dict[Form, float] = {}
        self._prepared: _Prepared | None = None
        self.exporter = Exporter()

    def page(self, form: Form, asking: str) -> bytes | None:
        """The page for whoever asks; None before the first look at everything."""
        now = self._asked[form] = time.monotonic()
        prepared = self._prepared
        if prepared is None or now - prepared.at > _FRESH_SECONDS or form not in prepared.heads:
            with self._lock:
                prepared = self._make(now, [form])
        if prepared is None:
            return None
        peaks = self.exporter.peaks(prepared.snapshot, self._figures.peaks(asking))
        return prepared.heads[form].with_end(render(peaks, form.format) + END[form.format])

    def samples(self, asking: str) -> tuple[Snapshot, tuple[Samples, Samples]] | None:
        """What a page of now is made of, its peaks apart, and the snapshot behind it."""
        with self._lock:
            made = self._make(time.monotonic(), [])
        if made is None:
            return None
        peaks = self.exporter.peaks(made.snapshot, self._figures.peaks(asking))
        return made.snapshot, (made.samples, peaks)

    def prepare(self) -> None:
        """Make the pages that will be asked for; count incidents in any case."""
        now = time.monotonic()
        with self._lock:
            self._figures.look(now)
            awaited = [f for f, at in list(self._asked.items()) if now - at < _AWAITED_SECONDS]
            if awaited:
                self._prepared = self._make(now, awaited)

    def _make(self, now: float, forms: list[Form]) -> _Prepared | None:
        begun = time.perf_counter()
        snapshot = self._figures.snapshot()
        if snapshot is None:
            return None
        made = _Prepared(now, snapshot, self.exporter.samples(snapshot))
        texts = {form.format: render(made.samples, form.format) for form in forms}
        for form in forms:
            made.heads[form] = PageHead(texts[form.format], packed=form.packed)
        self._own.page_seconds = time.perf_counter() - begun
        return made
