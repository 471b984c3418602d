"""What the agent holds in memory, as it is exported: parts of the real agent, fed by hand."""

from __future__ import annotations

import dataclasses
import threading
import time
import zlib

import pytest

from oomwatch.agent.engines import EngineTable, WatchedEngine
from oomwatch.agent.feeds import Feeds
from oomwatch.agent.figures import Figures
from oomwatch.agent.incident_figures import IncidentCounts
from oomwatch.agent.messages import Mailbox
from oomwatch.agent.own_figures import OwnFigures
from oomwatch.agent.pages import Pages
from oomwatch.config import Config
from oomwatch.detect.engine import EngineWatch
from oomwatch.discovery import DiscoveredEngine, Discovery, EngineMember, GpuHolder
from oomwatch.export.page import Form, PageHead
from oomwatch.notify.delivery import SinkStatus
from oomwatch.records import (
    EngineSample,
    GpuProcessSample,
    GpuSample,
    HostSample,
    RecordedEngine,
    StoredIncident,
    Trigger,
)
from oomwatch.report.pages import title
from oomwatch.sources.nvml import NvmlReading
from oomwatch.sources.nvml_device import GpuReading, MigInstance
from oomwatch.sources.output import LogLocation
from oomwatch.sources.procfs import ProcessInfo, ProcessTree
from oomwatch.sources.sampler import GpuSampler
from oomwatch.store.writer import StoreWriter

GIB = 1 << 30
OPEN = Form("openmetrics")


class Rig:
    """The parts of an agent that figures come from, none of its threads but the store's."""

    def __init__(self, folder):
        self.config = Config()
        self.table = EngineTable()
        self.writer = StoreWriter(str(folder / "store.db"), "h")
        self.writer.start()
        mailbox = Mailbox(100)
        self.feeds = Feeds(self.config, self.table, self.writer, mailbox, threading.Event())
        self.own = OwnFigures(
            mailbox,
            self.writer,
            str(folder / "store.db"),
            lambda _now: ["host"],
            lambda: (SinkStatus("oncall", "slack", waiting=2, trouble="no answer"),),
        )
        self.figures = Figures("h", self.table, self.feeds, lambda: None, self.own.figures)
        self.feeds.on_reading = self.figures.on_reading
        self.pages = Pages(self.figures, self.own)

    def sweep(self, *gpus: GpuReading, processes=(), now=None, outcome="ok"):
        reading = NvmlReading(time.time(), outcome, gpus=gpus, processes=tuple(processes))
        self.feeds._on_sweep(reading, time.monotonic() if now is None else now)

    def look_at_host(self):
        self.feeds.last_host = HostSample(time.time(), 100, 40, 3)
        self.feeds.host_read_at = time.monotonic()

    def add(self, engine: WatchedEngine):
        self.table._running[engine.id] = engine

    def snapshot(self):
        self.look_at_host()
        return self.figures.snapshot()


@pytest.fixture
def rig(tmp_path):
    one = Rig(tmp_path)
    yield one
    one.writer.stop()


def gpu(index=0, used=70, **more):
    sample = GpuSample(
        time.time(),
        index,
        f"GPU-{index}",
        "H100",
        80 * GIB,
        used * GIB,
        (79 - used) * GIB,
        GIB,
        used_max_bytes=more.pop("highest", None),
    )
    return GpuReading(sample, **more)


def held(pid, gib, gpu=0, **more):
    size = None if gib is None else gib * GIB
    return GpuProcessSample(time.time(), gpu, pid, more.pop("name", None), size, "compute", **more)


def engine(name="chat", *, pids=(), url="http://x/metrics", logs=(), **more) -> WatchedEngine:
    recorded = RecordedEngine(name, engine="vllm", metrics_url=url, pids=tuple(pids))
    members = tuple(
        EngineMember(ProcessInfo(pid=pid, start_ticks=1), "server" if n == 0 else "worker")
        for n, pid in enumerate(pids)
    )
    found = DiscoveredEngine(recorded, members, logs, **more)
    return WatchedEngine(found, time.monotonic(), time.monotonic())


def serving(watched: WatchedEngine, *labels: str) -> WatchedEngine:
    config = Config()
    for n, label in enumerate(labels or ("0",)):
        name = watched.id if n == 0 else f"{watched.id}/{label}"
        watch = EngineWatch(watched.id, config.detect, config.forecast)
        watch.feed(EngineSample(time.time(), name, kv_usage_ratio=0.1 * (n + 1)), time.monotonic())
        watched.watches = {**watched.watches, name: watch}
    watched.first_pool = (labels or ("0",))[0]
    watched.page_monotonic = watched.served_monotonic = time.monotonic()
    return watched


# ---------------------------------------------------------------- readiness
def test_nothing_is_known_before_the_first_look(rig):
    assert rig.figures.snapshot() is None
    assert rig.pages.page(Form(), "me") is None
    assert rig.pages.samples("me") is None
    rig.look_at_host()
    assert rig.figures.is_ready()
    assert rig.pages.page(Form(), "me") is not None


# ---------------------------------------------------------------- GPUs
def test_gpus_of_an_old_sweep_are_not_those_of_now(rig):
    rig.sweep(gpu())
    assert [each.ok for each in rig.snapshot().gpus] == [True]
    rig.figures._swept_at -= 20
    snapshot = rig.snapshot()
    assert [each.ok for each in snapshot.gpus] == [False]
    assert snapshot.agent.sources["nvml"] is False
    assert snapshot.holders == ()
    assert snapshot.gpus_expected == 1


@pytest.mark.parametrize("outcome", ["no_driver", "library_mismatch", "not_available", "ok"])
def test_a_driver_that_answers_for_no_gpu_is_a_source_that_fails(rig, outcome):
    rig.sweep(outcome=outcome)
    assert rig.snapshot().agent.sources["nvml"] is False
    assert rig.snapshot().agent.sources["host"] is True


def test_gpus_that_are_not_to_be_read_are_no_source(rig):
    sources = dataclasses.replace(rig.feeds.config.sources, nvml=False)
    rig.feeds.config = dataclasses.replace(rig.feeds.config, sources=sources)
    assert "nvml" not in rig.snapshot().agent.sources


def test_only_a_driver_can_be_silent(rig):
    assert rig.snapshot().driver_silent_seconds is None  # nobody asks it
    rig.feeds.sampler = GpuSampler(lambda _reading, _now: None)
    rig.figures._expected = 0
    rig.look_at_host()
    rig.feeds.swept_at = time.monotonic()
    assert rig.snapshot().driver_silent_seconds == 0  # it was asked and has not answered yet
    rig.sweep(gpu())
    assert rig.snapshot().driver_silent_seconds == 0
    for outcome in ("no_driver", "not_available"):
        rig.sweep(outcome=outcome)
        assert rig.snapshot().driver_silent_seconds is None


def test_a_host_that_is_not_read_any_more(rig):
    rig.look_at_host()
    rig.feeds.host_read_at -= 20
    snapshot = rig.figures.snapshot()
    assert snapshot.host_total_bytes is None
    assert snapshot.agent.sources["host"] is False


def test_memory_that_nobody_accounts_for(rig):
    rig.sweep(gpu(), processes=[held(1, 30), held(2, 35)])
    assert rig.snapshot().gpus[0].unattributed_bytes == 5 * GIB
    rig.sweep(gpu(), processes=[held(1, 30), held(2, None)])
    assert rig.snapshot().gpus[0].unattributed_bytes is None
    rig.sweep(gpu(processes_known=False))
    assert rig.snapshot().gpus[0].unattributed_bytes is None
    rig.sweep(gpu(used=10), processes=[held(1, 30)])
    assert rig.snapshot().gpus[0].unattributed_bytes == 0


def test_peaks_between_two_who_ask(rig):
    now = time.monotonic()
    piece = MigInstance(dataclasses.replace(gpu(used=5).sample, uuid="MIG-1"))
    for second, highest in enumerate((71, 79, 70)):
        rig.sweep(gpu(highest=highest * GIB, instances=(piece,)), now=now - 3 + second)
    assert rig.figures.peaks("a").used_bytes == {(0, ""): 79 * GIB, (0, "MIG-1"): 5 * GIB}
    assert rig.figures.peaks("a").used_bytes[0, ""] == 70 * GIB
    assert rig.figures.peaks("b").used_bytes[0, ""] == 79 * GIB


# ---------------------------------------------------------------- holders
def holders(rig, *processes):
    rig.sweep(gpu(0), gpu(1), processes=processes)
    return {
        (h.gpu, h.engine_id, h.role, h.process, h.unit, h.container, h.pid): h.used_bytes // GIB
        for h in rig.snapshot().holders
    }


def test_memory_by_holder(rig):
    rig.add(engine(pids=(10, 11, 12), unit="chat.service", container="4f3c2a1b9d8e7777"))
    rig.table.orphans = {20: "old"}
    other = held(30, 3, name="python")
    rig.table.holders = (GpuHolder(other, unit="train.service"),)
    found = holders(
        rig,
        held(11, 20),
        held(12, 21),
        held(12, 9, gpu=1),
        held(20, 4),
        other,
        held(31, 2, name="python"),
        held(32, None),
    )
    assert found == {
        (0, "chat", "worker", None, "chat.service", "4f3c2a1b9d8e", None): 41,
        (1, "chat", "worker", None, "chat.service", "4f3c2a1b9d8e", None): 9,
        (0, "old", "orphan", None, None, None, None): 4,
        (0, None, "other", "python", "train.service", None, None): 3,
        (0, None, "other", "python", None, None, None): 2,
    }


def test_memory_by_process_where_that_is_wanted(rig):
    rig.figures.process_ids = True
    rig.add(engine(pids=(10, 11)))
    found = holders(rig, held(10, 1), held(11, 2))
    assert {key[-1] for key in found} == {10, 11}


def test_the_pod_of_an_engine(rig):
    log = LogLocation("pod", "inference/chat-0")
    rig.add(engine(pids=(10,), logs=(log,)))
    rig.sweep(gpu(), processes=[held(10, 1)])
    snapshot = rig.snapshot()
    assert (snapshot.engines[0].namespace, snapshot.engines[0].pod) == ("inference", "chat-0")
    assert (snapshot.holders[0].namespace, snapshot.holders[0].pod) == ("inference", "chat-0")


def test_who_held_memory_at_the_last_search_is_known(rig):
    holder = GpuHolder(held(30, 3))
    empty = NvmlReading(0.0, "ok")
    rig.table.update(Discovery(0.0, (), (holder,), empty, ProcessTree([])), 0.0)
    assert rig.table.holders == (holder,)


# ---------------------------------------------------------------- engines
def test_states_of_an_engine(rig):
    rig.add(engine("new"))
    rig.add(serving(engine("well")))
    silent = serving(engine("silent"))
    silent.page_monotonic -= 20
    rig.add(silent)
    broken = serving(engine("broken"))
    broken.crippled = True
    rig.add(broken)
    old = engine("old", url=None)
    old.begun_monotonic -= 10_000
    rig.add(old)
    found = {each.id: (each.state, each.scraped) for each in rig.snapshot().engines}
    assert found == {
        "new": ("starting", False),
        "well": ("serving", True),
        "silent": ("unresponsive", False),
        "broken": ("broken", False),
        "old": ("unknown", None),
    }


def test_pools_go_by_what_the_engine_calls_them(rig):
    rig.add(serving(engine(), "2", "3"))
    (found,) = rig.snapshot().engines
    assert [(pool.label, pool.sample.kv_usage_ratio) for pool in found.pools] == [
        ("2", pytest.approx(0.1)),
        ("3", pytest.approx(0.2)),
    ]


def test_a_page_tells_when_it_was_read_and_how_its_pool_is_called(rig):
    watched = engine()
    rig.add(watched)
    rig.feeds.on_page("chat", (EngineSample(time.time(), "5"),), 123.0, 0.25)
    assert (watched.page_monotonic, watched.answer_seconds, watched.first_pool) == (
        123.0,
        0.25,
        "5",
    )


# ---------------------------------------------------------------- incidents
def incident(number=1, cause="kv_lt_max_len", part="incidents", **more) -> StoredIncident:
    lead = {"class": "startup", "cause": cause, "summary": f"{cause}."}
    given = {
        "id": f"inc-{number}",
        "fingerprint": "chat/failure",
        "state": "open",
        "opened_at": 1000.0 + number,
        "engine_id": "chat",
        "diagnosis": {part: [lead]} if cause else None,
    }
    return StoredIncident(**given | more)


def test_an_incident_counts_once_by_the_cause_that_is_found_within_seconds():
    counts = IncidentCounts()
    counts.look([incident(cause=None)], 0.0)
    assert not counts.total
    counts.look([incident(cause="fragmentation")], 5.0)
    assert not counts.total
    counts.look([incident(cause="kv_no_blocks")], 6.0)
    counts.look([incident(cause="other")], 100.0)
    assert counts.total == {("startup", "kv_no_blocks"): 1}
    assert counts.last == {("startup", "kv_no_blocks"): 1001.0}


def test_one_that_is_over_at_once_counts_at_once():
    counts = IncidentCounts()
    counts.look([incident(state="closed")], 0.0)
    assert sum(counts.total.values()) == 1


def test_what_is_known_from_before_is_not_counted_again_and_its_time_is_remembered():
    counts = IncidentCounts()
    counts.start([incident(7)])
    counts.look([incident(7), incident(8, cause=None)], 0.0)
    counts.look([incident(7), incident(8, cause=None)], 10.0)
    assert counts.total == {("unknown", "unknown"): 1}
    assert counts.last[("startup", "kv_lt_max_len")] == 1007.0


def test_what_is_forgotten_does_not_pile_up():
    counts = IncidentCounts()
    for number in range(1000):
        counts.look([incident(number)], float(number))
    assert len(counts._seen) == 1


def test_open_incidents_the_newest_first():
    counts = IncidentCounts()
    risk = incident(2, cause="kv_saturation", part="risks", fingerprint="chat/kv_pressure")
    told = incident(3, cause=None, triggers=(Trigger("gpu_lost", 0.0, text="it is lost"),))
    found = list(counts.open([incident(1), incident(4, state="closed"), risk, told]))
    assert [(i.id, i.kind, i.cause, i.severity, i.summary) for i in found] == [
        ("inc-3", "failure", None, "critical", "it is lost"),
        ("inc-2", "kv_pressure", "kv_saturation", "warning", "kv_saturation."),
        ("inc-1", "failure", "kv_lt_max_len", "critical", "kv_lt_max_len."),
    ]


def test_causes_of_incidents_go_by_their_titles_too(rig):
    assert rig.snapshot().titles == {}
    rig.figures.incidents.start([incident(1), incident(2, cause="no_such"), incident(3, None)])
    assert rig.snapshot().titles == {"kv_lt_max_len": title("kv_lt_max_len", "en")}


# ---------------------------------------------------------------- the agent itself
def test_what_the_agent_says_of_itself(rig, tmp_path):
    rig.own.look()
    own = rig.own.figures()
    assert own.resident_bytes > 1 << 20
    assert own.threads >= 2
    assert own.store_bytes >= (tmp_path / "store.db").stat().st_size > 0
    assert own.stuck_threads == 1
    assert own.cpu_seconds > 0
    (receiver,) = own.receivers
    assert (receiver.name, receiver.due, receiver.ok) == ("oncall", 2, False)


# ---------------------------------------------------------------- pages
def test_a_page_is_made_ahead_for_whoever_has_asked(rig):
    rig.look_at_host()
    rig.pages.prepare()
    assert rig.pages._prepared is None  # nobody has asked
    assert b"# EOF" in rig.pages.page(OPEN, "a")
    rig.pages.prepare()
    ahead = rig.pages._prepared
    assert set(ahead.heads) == {OPEN}
    made = rig.own.page_seconds
    assert rig.pages.page(OPEN, "a").endswith(b"# EOF\n")
    assert rig.own.page_seconds == made  # not made again
    rig.pages._asked[OPEN] -= 200
    rig.pages.prepare()
    assert rig.pages._prepared is ahead  # nobody asks any more


def test_an_old_page_is_not_handed_out(rig):
    rig.look_at_host()
    rig.pages.page(Form(), "a")
    rig.pages.prepare()
    rig.add(serving(engine("newcomer")))
    assert b"newcomer" not in rig.pages.page(Form(), "a")
    rig.pages._prepared.at -= 3
    assert b"newcomer" in rig.pages.page(Form(), "a")


def test_each_who_asks_gets_peaks_of_their_own(rig):
    rig.look_at_host()
    now = time.monotonic()
    rig.sweep(gpu(highest=79 * GIB), now=now - 2)
    rig.sweep(gpu(highest=70 * GIB), now=now - 1)
    peak = f'oomwatch_gpu_memory_used_max_bytes{{gpu="0",uuid="GPU-0"}} {79 * GIB}\n'.encode()
    assert peak in rig.pages.page(Form(), "a")
    assert peak in rig.pages.page(Form(), "b")
    assert peak not in rig.pages.page(Form(), "a")


def test_a_packed_page_is_one_and_its_end_may_differ():
    head = PageHead(b"oomwatch_x 1\n" * 1000, packed=True)
    for end in (b"", b"a 1\n", b"b 2\n" * 5000):
        packed = head.with_end(end)
        reader = zlib.decompressobj(31)
        assert reader.decompress(packed) == b"oomwatch_x 1\n" * 1000 + end
        assert reader.eof  # one stream, whole
        assert not reader.unused_data
    assert PageHead(b"a", packed=False).with_end(b"b") == b"ab"
