"""Pages, read by Prometheus' own parsers and judged by its own linter."""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from some_host import GIB, engine, gpu, host, incident

from oomwatch.causes import CAUSES
from oomwatch.export.families import MOST_ENGINES, MOST_HOLDERS, MOST_INCIDENTS, Exporter
from oomwatch.export.labels import LabelCache
from oomwatch.export.metrics import METRICS
from oomwatch.export.samples import Samples
from oomwatch.export.snapshot import HolderFigures, PeakFigures
from oomwatch.export.text import END, preferred, render

PEAKS = PeakFigures({(0, ""): 71 * GIB, (0, "MIG-1"): 5 * GIB}, 0.25)


def parsed(page: bytes, form: str = "text") -> dict[str, dict[tuple, float]]:
    """Values by name and labels, as the library of Prometheus reads them."""
    read = (
        openmetrics.text_string_to_metric_families
        if form == "openmetrics"
        else text_string_to_metric_families
    )
    found: dict[str, dict[tuple, float]] = {}
    for family in read(page.decode()):
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in found.setdefault(sample.name, {}), f"twice: {sample}"
            found[sample.name][labels] = sample.value
    return found


def written(snapshot, form="text", peaks=PEAKS, **options) -> bytes:
    exporter = Exporter(**options)
    parts = (exporter.samples(snapshot), exporter.peaks(snapshot, peaks))
    return b"".join(render(part, form) for part in parts) + END[form]


def page_of(snapshot, form="text", **options) -> dict[str, dict[tuple, float]]:
    return parsed(written(snapshot, form, **options), form)


def only(series: dict[tuple, float]) -> float:
    (value,) = series.values()
    return value


def test_a_host_is_the_same_in_both_formats():
    snapshot = host(gpus=2, holders=3, engines=2)
    assert page_of(snapshot) == page_of(snapshot, "openmetrics")


def test_every_metric_of_the_table_is_there_and_has_the_labels_it_should():
    pid = HolderFigures(
        0, "GPU-0", GIB, "MIG-1", process="x", namespace="n", pod="p", container="c", pid=4
    )
    mig = gpu(mig="MIG-1")
    full = host(holders=2)
    snapshot = dataclasses.replace(
        full,
        holders=(*full.holders, pid),
        gpus=(*full.gpus, mig),
        engines=(engine(container="c", namespace="n", pod="p"),),
    )
    page = page_of(snapshot, dcgm_labels=True)
    assert set(page) == set(METRICS)
    for name, series in page.items():
        used = {label for labels in series for label, _ in labels}
        assert used == set(METRICS[name].labels), name


def test_names_follow_the_conventions():
    for metric in METRICS.values():
        assert metric.name.startswith("oomwatch_")
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert metric.name.endswith("_info") == (metric.kind == "info"), metric.name
        assert metric.help.endswith("."), metric.name
        for unit, suffix in (("By", "_bytes"), ("s", "_seconds"), ("1", "_ratio")):
            name = metric.name.removesuffix("_total")
            assert name.endswith(suffix) == (metric.unit == unit), metric.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_has_nothing_to_say():
    page = written(host(gpus=2, holders=2, engines=2))
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# ---------------------------------------------------------------- what is known and what is not
def test_what_is_unknown_is_absent_never_zero():
    bare = gpu()
    sample = dataclasses.replace(bare.sample, used_bytes=None)
    quiet = dataclasses.replace(bare, sample=sample, unattributed_bytes=None)
    page = page_of(
        dataclasses.replace(host(), gpus=(quiet,), host_total_bytes=None), peaks=PeakFigures()
    )
    for name in ("gpu_memory_used_bytes", "gpu_memory_used_max_bytes", "host_memory_total_bytes"):
        assert f"oomwatch_{name}" not in page
    assert "oomwatch_gpu_memory_unattributed_bytes" not in page
    assert only(page["oomwatch_gpu_memory_free_bytes"]) == 9 * GIB


def test_a_gpu_that_does_not_answer_has_no_figures_and_says_so():
    page = page_of(dataclasses.replace(host(), gpus=(gpu(0), gpu(1, ok=False))))
    assert page["oomwatch_gpu_success"] == {
        (("gpu", "0"), ("uuid", "GPU-0")): 1,
        (("gpu", "1"), ("uuid", "GPU-1")): 0,
    }
    others = {name: series for name, series in page.items() if name.startswith("oomwatch_gpu_")}
    del others["oomwatch_gpu_success"]
    assert not [n for n, series in others.items() for labels in series if ("gpu", "1") in labels]
    assert only(page["oomwatch_gpus_present"]) == 1


def test_a_page_that_was_not_read_leaves_no_figures_of_the_engine():
    silent = engine(scraped=False, state="unresponsive")
    page = page_of(dataclasses.replace(host(), engines=(silent,)))
    assert only(page["oomwatch_scrape_success"]) == 0
    assert "oomwatch_kv_usage_ratio" not in page
    assert "oomwatch_requests_running" not in page
    states = {dict(labels)["state"]: v for labels, v in page["oomwatch_engine_state"].items()}
    assert [name for name, value in states.items() if value] == ["unresponsive"]


def test_an_engine_without_a_page_has_no_success_of_reading_it():
    page = page_of(dataclasses.replace(host(), engines=(engine(scraped=None, pools=()),)))
    assert "oomwatch_scrape_success" not in page


def test_blocks_of_the_pool_leave_out_the_one_that_no_request_gets():
    pool = (("engine", "0"), ("engine_id", "vllm-8000"), ("model_name", "Qwen/Qwen3-8B"))
    blocks = page_of(host())["oomwatch_kv_blocks"]
    assert blocks == {(*pool, ("state", "used")): 64, (*pool, ("state", "free")): 64}
    other = page_of(dataclasses.replace(host(), engines=(engine(kind="sglang"),)))
    assert sum(other["oomwatch_kv_blocks"].values()) == 129


def test_a_mig_instance_is_told_by_its_own_and_its_gpus_uuid():
    whole = gpu(0)
    piece = dataclasses.replace(
        gpu(0, mig="MIG-7"), sample=dataclasses.replace(whole.sample, uuid="MIG-7")
    )
    page = page_of(dataclasses.replace(host(), gpus=(whole, piece)))
    key = (("gpu", "0"), ("mig", "MIG-7"), ("uuid", "GPU-0"))
    assert key in page["oomwatch_gpu_memory_used_bytes"]
    assert only(page["oomwatch_gpus_present"]) == 1


# ---------------------------------------------------------------- counters and bounds
def test_counters_of_all_causes_begin_at_zero_so_that_the_first_one_is_an_increase():
    series = page_of(host())["oomwatch_incidents_total"]
    known = {(cls, cause) for cls, causes in CAUSES.items() for cause in causes}
    assert {(dict(k)["class"], dict(k)["cause"]) for k in series} == known
    assert sum(series.values()) == 1


def test_however_much_there_is_a_page_stays_small_and_says_what_it_leaves_out():
    sizes = [n * GIB for n in range(1, 1001)]
    holders = tuple(HolderFigures(0, "GPU-0", size, process=f"p{size}") for size in sizes)
    snapshot = host(
        engines=500,
        incidents=tuple(incident(n) for n in range(200)),
    )
    snapshot = dataclasses.replace(snapshot, holders=holders)
    page = page_of(snapshot)
    assert len(page["oomwatch_engine_info"]) == MOST_ENGINES
    assert len(page["oomwatch_incident_open"]) == MOST_INCIDENTS
    held = page["oomwatch_gpu_holder_memory_bytes"]
    assert len(held) == MOST_HOLDERS + 1
    assert sum(held.values()) == sum(sizes)  # the small ones are one, and none is lost
    left_out = (500 - MOST_ENGINES) + (1000 - MOST_HOLDERS) + (200 - MOST_INCIDENTS)
    assert only(page["oomwatch_self_series_left_out"]) == left_out


@pytest.mark.parametrize("form", ["text", "openmetrics"])
@given(text=st.text(min_size=1, max_size=300), value=st.floats())
def test_hostile_names_do_not_break_a_page(form, text, value):
    samples = Samples()
    labels = LabelCache().get({"queue": text})
    samples.add("oomwatch_self_queue_depth", labels, value)
    page = render(samples, form) + END[form]
    if math.isnan(value):  # what an engine does not know is not known
        assert parsed(page, form) == {}
        return
    ((key, read),) = parsed(page, form)["oomwatch_self_queue_depth"].items()
    assert (key, read) == (labels.pairs, value)
    assert page.count(b"\n") == (4 if form == "openmetrics" else 3)
    assert len(dict(key)["queue"]) <= 128


def test_what_a_log_could_do_to_a_terminal_or_a_reader_is_taken_out():
    hostile = 'x"} 1\noomwatch_up 0\x1b[31m\u202egnp\ud800'
    page = page_of(dataclasses.replace(host(), engines=(engine(model=hostile),)))
    assert "oomwatch_up" not in page
    (labels,) = page["oomwatch_engine_info"]
    assert dict(labels)["model_name"] == 'x"} 1\noomwatch_up 0?[31m?gnp?'


def test_labels_of_what_is_gone_do_not_pile_up():
    cache = LabelCache()
    for number in range(20_000):
        cache.get({"engine_id": str(number)})
    assert len(cache._known) <= 4096


# ---------------------------------------------------------------- formats
@pytest.mark.parametrize(
    ("accept", "form"),
    [
        ("", "text"),
        ("*/*", "text"),
        ("text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", "text"),
        ("application/openmetrics-text", "openmetrics"),
        ("application/openmetrics-text; version=0.0.1", "text"),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.5", "text"),
        ("application/openmetrics-text;q=nonsense,text/plain", "text"),
        # Prometheus 2.42 and 3.x, as they ask.
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
            "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "openmetrics",
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/"
            "openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;"
            "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            "openmetrics",
        ),
    ],
)
def test_the_format_that_is_asked_for(accept, form):
    assert preferred(accept) == form


def test_values_that_differ_only_where_they_are_cut_stay_apart():
    cache = LabelCache()
    texts = {cache.get({"queue": "q" * 4_000_000 + end}).text for end in "ab"}
    assert len(texts) == 2
    assert all(len(text) < 150 for text in texts)
    more = {cache.get({"queue": "q"}).plus("state", "s" * 200 + end).text for end in "ab"}
    assert len(more) == 2


def test_what_is_kept_of_labels_is_bounded_by_their_cut_values():
    cache = LabelCache()
    tracemalloc.start()
    try:
        for number in range(20):
            cache.get({"queue": "q" * 1_000_000 + str(number)}).plus("state", "s" * 1_000_000)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
