from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomwatch.config import Config
from oomwatch.detect.incidents import FAMILY, IncidentBook, family
from oomwatch.records import Evidence, Trigger

SETTINGS = Config().incidents
NOW = 1_764_400_000.0


def book(known=(), now: float = 0.0) -> IncidentBook:
    return IncidentBook("host-a", SETTINGS, known, now=now)


def failure(at=NOW, engine="vllm-8000", where="server.log:12", text="out of memory", **more):
    evidence = (Evidence("log", where, at, text),)
    return Trigger("log_failure", at, engine, text=text, evidence=evidence, **more)


def exit_of(at=NOW, engine="vllm-8000", pid=100):
    text = f"process {pid} of {engine} ended by signal 9"
    return Trigger("process_exit", at, engine, pid=pid, text=text)


def test_every_kind_of_trigger_has_a_family():
    kinds = set(FAMILY)
    detect = {field.name for field in dataclasses.fields(Config().detect)}
    assert kinds == detect - {"enabled", "flap_count", "flap_window_seconds"}


# ------------------------------------------------------------------------------- one event is one
def test_eight_ranks_the_kernel_and_the_exits_are_one():
    incidents = book()
    first = incidents.take(failure(), 1.0)
    for rank in range(8):
        incidents.take(failure(NOW + rank / 10, where=f"server.log:{20 + rank}"), 1.0)
        incidents.take(exit_of(NOW + 1 + rank / 10, pid=100 + rank), 2.0)
    kernel = Trigger("kernel_oom", NOW - 0.3, "vllm-8000", pid=104, text="Killed process 104")
    last = incidents.take(kernel, 2.5)
    assert [i.id for i in incidents.open] == [first.id]
    assert len(last.triggers) == 1 + 7 + 8 + 1  # rank 0 said the very same at the same time
    assert last.opened_at == NOW
    assert last.window_from == NOW - 0.3 - SETTINGS.window_before_seconds


def test_failures_of_a_restart_loop_stay_one_until_it_is_closed():
    incidents = book()
    for start in range(20):
        incidents.take(failure(NOW + start * 90, where=f"server.log:{start}"), start * 90.0)
        incidents.take(exit_of(NOW + start * 90 + 1, pid=100 + start), start * 90.0)
    (only,) = incidents.open
    assert incidents.failing_since("vllm-8000") == incidents.open[0].opened_at
    incidents.close(only, NOW + 3000)
    assert incidents.failing_since("vllm-8000") is None
    again = incidents.take(failure(NOW + 3600, where="server.log:900"), 3600.0)
    assert again.id != only.id


def test_engines_are_apart():
    incidents = book()
    incidents.take(failure(), 1.0)
    incidents.take(failure(NOW + 1, engine="vllm-8001"), 1.0)
    assert {i.engine_id for i in incidents.open} == {"vllm-8000", "vllm-8001"}


def test_pressure_and_failure_stay_apart():
    incidents = book()
    pressure = Trigger("kv_saturation", NOW, "vllm-8000", text="KV cache 95% full")
    storm = Trigger("preemption_storm", NOW + 5, "vllm-8000", text="30 preemptions a minute")
    ahead = Trigger("forecast_kv", NOW - 60, "vllm-8000", text="full in 60 s")
    for trigger in (ahead, pressure, storm, failure(NOW + 30)):
        incidents.take(trigger, 1.0)
    assert sorted(map(family, incidents.open)) == ["failure", "kv_forecast", "kv_pressure"]


def test_gpus_are_apart_and_one_gpu_is_one():
    incidents = book()
    for second in range(3):
        for gpu in (0, 1):
            text = f"GPU {gpu}: {second} GiB free"
            incidents.take(Trigger("gpu_headroom", NOW + second, gpu=gpu, text=text), 1.0)
    assert [len(i.triggers) for i in incidents.open] == [3, 3]


def test_what_nobody_can_name_joins_what_happened_at_its_time():
    incidents = book()
    incidents.take(failure(engine=None), 1.0)
    joined = incidents.take(exit_of(NOW + 20), 2.0)
    assert joined.engine_id == "vllm-8000"
    assert len(incidents.open) == 1


# ------------------------------------------------------------------------------- read again
def stored(incident):
    """As the store gives it back: times in milliseconds."""
    triggers = tuple(
        dataclasses.replace(t, at=round(t.at * 1000) / 1000) for t in incident.triggers
    )
    return dataclasses.replace(incident, triggers=triggers)


@pytest.mark.parametrize("state", ["open", "closed"])
def test_the_same_lines_after_a_restart_open_nothing(state):
    at = NOW + 0.123456
    incidents = book()
    incidents.take(exit_of(at), 1.0)
    last = incidents.take(failure(at + 0.4), 1.5)
    if state == "closed":
        last = incidents.close(last, NOW + 100)
    again = book([stored(last)], now=5000.0)
    assert again.take(exit_of(at), 5001.0) is None
    assert again.take(failure(at + 0.4), 5001.0) is None
    assert len(again.open) == (state == "open")


def test_a_log_without_times_read_again_opens_nothing():
    incidents = book()
    line = Evidence("log", "server.log:12", None, "out of memory")
    first = incidents.take(
        Trigger("log_failure", NOW, "vllm-8000", text="x", evidence=(line,)), 1.0
    )
    again = book([stored(incidents.close(first, NOW + 60))])
    later = Trigger("log_failure", NOW + 500, "vllm-8000", text="x", evidence=(line,))
    assert again.take(later, 1.0) is None


def test_a_late_witness_of_what_is_over_opens_nothing():
    incidents = book()
    first = incidents.take(failure(), 1.0)
    incidents.close(first, NOW + 100)
    late = incidents.take(exit_of(NOW + 2), 101.0)
    assert late is not None
    assert (late.id, late.state) == (first.id, "closed")
    assert incidents.open == []
    assert incidents.take(exit_of(NOW + 101, pid=200), 102.0).state == "open"


def test_what_is_known_from_before_is_left_time_to_be_seen_again():
    incidents = book()
    pressure = Trigger("kv_saturation", NOW, "vllm-8000", text="KV cache 95% full")
    first = incidents.take(pressure, 1.0)
    again = book([stored(first)], now=5000.0)
    assert again.touched(first) > 5000.0 + SETTINGS.close_after_seconds
    assert again.is_from_before(first)
    joined = again.take(dataclasses.replace(pressure, at=NOW + 60), 5050.0)
    assert joined.id == first.id
    assert not again.is_from_before(first)
    assert again.touched(first) == 5050.0


# ------------------------------------------------------------------------------- odd times
def test_witnesses_may_come_in_any_order():
    triggers = [failure(NOW + 2), exit_of(NOW + 1), failure(NOW, where="server.log:1")]
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        incidents = book()
        for index in order:
            last = incidents.take(triggers[index], 1.0)
        assert len(incidents.open) == 1
        assert last.window_from == NOW - SETTINGS.window_before_seconds
        assert last.window_to == NOW + 2 + SETTINGS.window_after_seconds


def test_a_clock_that_was_set_back_does_not_pin_an_hour():
    incidents = book()
    incidents.take(failure(), 1.0)
    last = incidents.take(exit_of(NOW - 3600), 2.0)
    assert len(incidents.open) == 1
    assert last.window_from == NOW - SETTINGS.window_before_seconds
    closed = incidents.close(last, NOW - 3500)
    assert closed.closed_at == closed.opened_at


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(FAMILY)),
            st.floats(-1e10, 1e10),
            st.sampled_from(["a", "b", None]),
            st.sampled_from([0, 1, None]),
        ),
        max_size=80,
    )
)
def test_any_triggers_are_kept_apart_by_family(rows):
    incidents = book()
    for index, (kind, at, engine, gpu) in enumerate(rows):
        found = incidents.take(Trigger(kind, at, engine, gpu, text=str(index)), float(index))
        assert found is not None
        assert {FAMILY[t.kind] for t in found.triggers} == {family(found)}
        assert found.window_from <= found.opened_at <= found.window_to
    assert len({i.id for i in incidents.open}) == len(incidents.open)


# ------------------------------------------------------------------------------- memory
def test_triggers_of_one_incident_are_bounded_and_the_first_ones_stay():
    incidents = book()
    for number in range(1000):
        last = incidents.take(failure(NOW + number, where=f"server.log:{number}"), 1.0)
    assert len(last.triggers) <= 64
    assert last.triggers[0].at == NOW
    assert last.triggers[-1].at == NOW + 999


def test_closed_ones_are_forgotten():
    incidents = book()
    for number in range(2000):
        first = incidents.take(failure(NOW + number, engine=f"e{number}"), float(number))
        incidents.close(first, NOW + number + 1)
    assert len(incidents._incidents) <= 257
    assert len(incidents._touched) <= 257


def test_diagnoses_of_closed_ones_are_let_go():
    watch = book()
    for number in range(20):
        at = NOW + 3600 * number
        incident = watch.take(failure(at=at, where=f"server.log:{number}"), 3600.0 * number)
        assert incident is not None
        watch.put(dataclasses.replace(incident, diagnosis={"verdict": "oom"}))
        watch.close(watch.get(incident.id), at + 60)
    last = watch.take(failure(at=NOW + 90_000, where="server.log:99"), 90_000.0)
    watch.put(dataclasses.replace(last, diagnosis={"verdict": "oom"}))
    kept = [i for i in watch._incidents.values() if i.diagnosis is not None]
    assert last.id in {i.id for i in kept}
    assert len(kept) <= 5
