"""Load over time: which source tells it, and where each point stands."""

from __future__ import annotations

import pytest

from oomwatch.diagnose.facts import Facts
from oomwatch.diagnose.points import points_of
from oomwatch.diagnose.runs import Load
from oomwatch.diagnose.series import SeriesFacts
from oomwatch.records import EngineFacts, EngineSample, LogLine


def line(number: int) -> LogLine:
    return LogLine("server.log", number, f"load line {number}", at=100.0 + number)


def facts(samples=(), loads=()) -> Facts:
    return Facts(
        EngineFacts("vllm-0"), series=SeriesFacts(engine=tuple(samples)), loads=tuple(loads)
    )


def samples(count: int) -> list[EngineSample]:
    return [
        EngineSample(float(i), "0", running=i, waiting=0, kv_usage_ratio=0.5) for i in range(count)
    ]


def loads(count: int) -> list[Load]:
    return [
        Load(line(i), running=i, waiting=1, swapped=2, kv_usage_ratio=0.9) for i in range(count)
    ]


@pytest.mark.parametrize(
    ("sampled", "logged", "source"),
    [(5, 4, "metrics"), (4, 4, "metrics"), (3, 4, "log"), (0, 1, "log")],
)
def test_the_denser_source_tells_the_load(sampled, logged, source):
    points = points_of(facts(samples(sampled), loads(logged)))
    assert {point.evidence.source for point in points} == {source}
    assert len(points) == max(sampled, logged)


def test_nothing_is_known_without_either():
    assert points_of(facts()) == []


def test_a_sample_without_load_is_no_point():
    told = [EngineSample(1.0, "0", prompt_tokens_total=9), *samples(1)]
    assert len(points_of(facts(told))) == 1


def test_a_page_without_a_time_has_none():
    (point,) = points_of(facts([EngineSample(0.0, "0", running=3, kv_usage_ratio=0.25)]))
    assert point.at is None
    assert point.evidence.at is None
    assert (point.evidence.value, point.evidence.unit) == (0.25, "ratio")
    assert "running 3" in str(point.evidence.text)


def test_a_load_line_is_cited_by_file_and_line():
    (point,) = points_of(facts(loads=[Load(line(7), running=2, swapped=4, kv_usage_ratio=0.9)]))
    assert (point.running, point.swapped, point.kv, point.at) == (2, 4, 0.9, 107.0)
    assert point.evidence.where == "server.log:7"
