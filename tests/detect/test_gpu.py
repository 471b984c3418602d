from __future__ import annotations

import pytest
from readings import GIB, gpu, holder

from oomwatch.config import Config
from oomwatch.detect.gpu import GpuWatch, lost, silent

CONFIG = Config()
ENGINE = frozenset({100})


class Course:
    """A GPU over time; an engine of process 100 runs on it."""

    def __init__(self, *, dead=None) -> None:
        self.watch = GpuWatch(0, CONFIG.detect, CONFIG.forecast)
        self.dead = dead or {}
        self.second = 0

    def feed(self, seconds, free=lambda _: 20 * GIB, others=lambda _: {}, *, engine=ENGINE):
        found = []
        for second in range(self.second, self.second + seconds):
            holders = [holder(second, pid, 40 * GIB) for pid in engine]
            holders += [holder(second, pid, used) for pid, used in others(second).items()]
            found += self.watch.feed(
                gpu(second, free(second)),
                holders,
                float(second),
                served=False,
                engine_pids=engine,
                dead=self.dead,
            )
        self.second += seconds
        return found

    def held(self):
        return self.watch.held(float(self.second))


# ------------------------------------------------------------------------------- headroom
def test_little_room_beside_an_engine_warns_then_is_critical():
    course = Course()
    warned = course.feed(60, lambda _: 0.4 * GIB)
    assert [(t.kind, t.values["level"], t.gpu) for t in warned] == [("gpu_headroom", "warn", 0)]
    critical = course.feed(60, lambda _: 0.05 * GIB)
    assert [t.values["level"] for t in critical] == ["critical"]
    assert course.held() == {"gpu_memory"}
    course.feed(60, lambda _: 3 * GIB)
    assert course.held() == set()


def test_without_an_engine_a_full_gpu_is_no_matter():
    course = Course()
    assert course.feed(600, lambda _: 0.1 * GIB, engine=frozenset()) == []


def test_an_engine_elsewhere_is_no_matter():
    watch = GpuWatch(0, CONFIG.detect, CONFIG.forecast)
    for second in range(120):
        found = watch.feed(
            gpu(second, 0.1 * GIB),
            [holder(second, 7, 79 * GIB)],
            float(second),
            served=False,
            engine_pids=ENGINE,
            dead={},
        )
        assert found == []


def test_an_engine_whose_processes_are_hidden_counts():
    watch = GpuWatch(0, CONFIG.detect, CONFIG.forecast)
    kinds = [
        trigger.kind
        for second in range(60)
        for trigger in watch.feed(
            gpu(second, 0.3 * GIB), [], float(second), served=True, engine_pids=(), dead={}
        )
    ]
    assert kinds == ["gpu_headroom"]


def test_it_is_over_when_the_engine_has_gone():
    course = Course()
    course.feed(60, lambda _: 0.3 * GIB)
    assert course.held() == {"gpu_memory"}
    course.feed(60, lambda _: 0.3 * GIB, engine=frozenset())
    assert course.held() == set()


# ------------------------------------------------------------------------------- neighbours
def test_a_neighbour_that_grows():
    course = Course()
    course.feed(60, others=lambda _: {7: 2 * GIB})
    found = course.feed(120, others=lambda s: {7: 2 * GIB + (s - 60) * 0.05 * GIB})
    assert [(t.kind, t.pid, t.gpu) for t in found] == [("neighbour_growth", 7, 0)]
    assert found[0].values["grown_bytes"] >= GIB
    assert course.held() == {"gpu_memory"}


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 10 * GIB,
        lambda s: 10 * GIB + (s % 2) * 0.5 * GIB,
        lambda s: 10 * GIB - s * 0.01 * GIB,
        lambda _: None,
    ],
)
def test_one_that_does_not_grow(used):
    course = Course()
    assert course.feed(600, others=lambda s: {7: used(s)}) == []


def test_growth_that_is_slower_than_its_window_is_none():
    course = Course()
    # 1 GiB in half an hour: it is under the limit of every ten minutes.
    assert course.feed(1200, others=lambda s: {7: 2 * GIB + s * GIB / 1800}) == []


def test_an_engine_that_starts_beside_is_none_once_it_is_found():
    course = Course()

    def grow(second):
        return {7: second * GIB}

    assert course.feed(12, others=grow) == []
    course.dead = {}
    found = [
        trigger
        for second in range(12, 60)
        for trigger in course.watch.feed(
            gpu(second, 20 * GIB),
            [holder(second, 100, 40 * GIB), holder(second, 7, second * GIB)],
            float(second),
            served=False,
            engine_pids=frozenset({100, 7}),
            dead={},
        )
    ]
    assert found == []
    assert course.watch.held(60.0) == set()


# ------------------------------------------------------------------------------- orphans
def test_an_orphan_that_holds_memory():
    course = Course(dead={8: "vllm-8000"})
    found = course.feed(120, others=lambda _: {8: 30 * GIB}, engine=frozenset())
    assert [(t.kind, t.pid, t.engine_id) for t in found] == [("orphan_holder", 8, "vllm-8000")]
    assert course.held() == {"orphan"}
    course.feed(5, engine=frozenset())
    assert course.held() == set()


def test_one_that_holds_next_to_nothing_or_leaves_soon_is_let_be():
    course = Course(dead={8: "vllm-8000"})
    assert course.feed(600, others=lambda _: {8: 0.1 * GIB}, engine=frozenset()) == []
    course = Course(dead={8: "vllm-8000"})
    assert course.feed(30, others=lambda _: {8: 30 * GIB}, engine=frozenset()) == []


def test_the_dead_are_forgotten():
    course = Course(dead={})
    for pid in range(1000, 3000):
        course.dead = {pid: "vllm-8000"}
        course.feed(1, others=lambda _, pid=pid: {pid: GIB, pid + 5000: GIB})
    assert len(course.watch._orphans) <= 1
    assert len(course.watch._neighbours) <= 1


# ------------------------------------------------------------------------------- forecasts
def test_headroom_that_shrinks_is_forecast_and_its_pace_known():
    course = Course()
    course.feed(400, lambda s: 10 * GIB - s * GIB / 100)
    trigger = course.watch.predict(0.0, 400.0)
    assert trigger is not None
    assert trigger.kind == "forecast_gpu"
    assert trigger.values["eta_seconds"] == pytest.approx(575, abs=10)
    assert course.watch.lasts_seconds == pytest.approx(600, rel=0.02)


def test_the_start_of_an_engine_is_no_trend():
    course = Course()
    course.feed(400, lambda s: 70 * GIB - s * GIB / 8)
    course.watch.restart()
    assert course.watch.lasts_seconds is None
    assert course.watch.predict(0.0, 400.0) is None


def test_steady_headroom_lasts_for_ever():
    course = Course()
    course.feed(60)
    assert course.watch.lasts_seconds is None


def test_what_the_driver_says_of_itself():
    assert (lost(3, 1.0, "fell off").kind, lost(3, 1.0, "fell off").gpu) == ("gpu_lost", 3)
    assert silent(1.0, 12.0).text == "the NVIDIA driver has not answered for 12 s"
