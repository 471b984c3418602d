"""Metrics pages: names of every version, labels, odd text, real servers, rates."""

import gzip
import http.server
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomwatch.engines.metrics import MetricTable
from oomwatch.engines.sglang.metrics import TABLE as SGLANG
from oomwatch.engines.vllm.metrics import TABLE as VLLM
from oomwatch.errors import (
    NoDataError,
    PermissionDeniedError,
    SourceError,
    SourceUnavailable,
    UsageError,
)
from oomwatch.records import EngineSample
from oomwatch.sources.metrics import PageReader, parse_metrics, rates, read_metrics
from oomwatch.sources.metrics_layout import MAX_ENGINES

FIXTURES = Path(__file__).parent.parent / "fixtures" / "metrics"
PAGE = b'vllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
FIELDS = set(EngineSample.__dataclass_fields__)


def by_engine(page):
    return {sample.engine: sample for sample in page.samples}


# ---------------------------------------------------------------- pages of real shape
def test_vllm_with_two_engines_on_a_page():
    page = read_metrics(str(FIXTURES / "vllm-0.11.0-dp2.txt"))
    first, second = page.samples
    assert (page.engine, page.model_name) == ("vllm", "org/chat-model")
    assert (first.engine, first.running, first.waiting) == ("0", 7, 3)
    assert (first.kv_usage_ratio, first.preemptions_total) == (0.875, 4)
    assert (first.prefix_cache_queries_total, first.prefix_cache_hits_total) == (1000, 250)
    assert first.request_success_total == 42  # stop and length together
    assert first.extra["request_prompt_tokens_sum"] == 210_000
    assert first.extra["request_prompt_tokens_highest_bucket"] == 20_000
    assert (second.engine, second.running) == ("1", 2)
    assert second.kv_usage_ratio is None  # NaN
    assert second.preemptions_total is None  # absent is not 0
    assert page.kv_tokens == {"0": 192_000, "1": 192_000}
    assert page.gpu_memory_utilization == 0.9
    assert "num_cpu_blocks" not in page.cache_config["0"]
    assert page.max_model_len is None
    assert page.absent == ()
    assert page.unknown == ("kv_pool_temperature",)


def test_created_lines_are_not_counters():
    page = read_metrics(str(FIXTURES / "vllm-0.11.0-dp2.txt"))
    assert not [name for sample in page.samples for name in sample.extra if "created" in name]


def test_vllm_v0_names():
    page = read_metrics(str(FIXTURES / "vllm-0.6.3-v0.txt"))
    (sample,) = page.samples
    assert (sample.engine, sample.swapped, sample.kv_usage_ratio) == ("0", 2, 0.97)
    assert sample.extra["cpu_cache_usage_perc"] == 0.4
    assert "gpu_prefix_cache_hit_rate" not in sample.extra  # -1 says it is off
    assert page.kv_tokens == {"0": 64_000}


def test_ray_replicas_are_kept_apart():
    page = read_metrics(str(FIXTURES / "ray-vllm.txt"))
    samples = by_engine(page)
    assert page.engine == "vllm"
    assert samples["aa11/0"].running == 5
    assert samples["bb22/0"].running == 1
    assert samples["aa11/0"].preemptions_total == 6  # Ray leaves the suffix out
    assert samples["bb22/0"].kv_usage_ratio is None


def test_sglang_ranks_count_once_and_replicas_apart():
    page = read_metrics(str(FIXTURES / "sglang-0.5.12-dp2.txt"))
    samples = by_engine(page)
    assert page.engine == "sglang"
    assert samples["0"].running == 12
    assert samples["1"].running == 3
    assert (samples["0"].kv_usage_ratio, samples["0"].preemptions_total) == (0.98, 17)
    assert samples["all"].prompt_tokens_total == 8_100_000
    assert samples["all"].prefix_cache_hits_total == 320  # two sources
    assert page.kv_tokens == {"0": 416_000, "1": 416_000}
    assert page.max_model_len == 131_072


def test_blocks_of_all_ranks_are_not_the_tokens_of_one():
    labels = 'block_size="16",kv_cache_size_tokens="1600",kv_cache_max_concurrency="1.6",num_gpu_blocks="200"'
    page = parse_metrics(
        f'vllm:cache_config_info{{engine="0",{labels}}} 1\n'
        f'vllm:cache_config_info{{engine="1",{labels}}} 1\n'
    )
    assert page.kv_tokens == {"0": 1600, "1": 1600}
    assert [sample.kv_blocks_total for sample in page.samples] == [100, 100]
    assert page.max_model_len == 1000


def test_a_renamed_gauge_is_absent_and_said():
    page = parse_metrics(
        "# TYPE vllm:cache_fill_ratio gauge\n"
        'vllm:cache_fill_ratio{engine="0"} 0.9\nvllm:num_requests_running{engine="0"} 1\n'
    )
    assert "kv_usage_ratio" in page.absent
    assert page.unknown == ("cache_fill_ratio",)
    assert page.samples[0].kv_usage_ratio is None


# ---------------------------------------------------------------- tables
@pytest.mark.parametrize("table", [VLLM, SGLANG], ids=lambda table: table.engine)
def test_tables_are_complete(table: MetricTable):
    for metric in table.metrics:
        assert metric.unit
        assert metric.since[0].isdigit()
        assert metric.field is None or metric.field in FIELDS
        assert metric.sample.startswith(f"{table.prefixes[0]}{metric.name}")
        assert (metric.split_by is None) == (metric.split_values == ())
    assert set(table.expected) <= {metric.field for metric in table.metrics}
    assert not {metric.name for metric in table.metrics} & table.others


@pytest.mark.parametrize("prefix", range(4))
@pytest.mark.parametrize(
    ("table", "metric"),
    [(table, metric) for table in (VLLM, SGLANG) for metric in table.metrics],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_sample_line_is_read(table, metric, prefix):
    line = metric.sample.replace(table.prefixes[0], table.prefixes[prefix], 1)
    page = parse_metrics(line)
    assert page.engine == table.engine
    if metric.type == "info":
        assert page.cache_config["0"]
        return
    (sample,) = page.samples
    if metric.field:
        assert getattr(sample, metric.field) is not None
    else:
        assert any(name.startswith(metric.name) for name in sample.extra)


def test_the_newer_name_wins_where_both_are_there():
    page = parse_metrics(
        'vllm:gpu_cache_usage_perc{engine="0"} 0.2\nvllm:kv_cache_usage_perc{engine="0"} 0.3\n'
    )
    assert page.samples[0].kv_usage_ratio == 0.3


# ---------------------------------------------------------------- the text format
@pytest.mark.parametrize(
    "line",
    [
        r'vllm:num_requests_running{model_name="a \"b\" }{ , # 9 \\",engine="0"} 3',
        'vllm:num_requests_running{engine="0",} 3 1760000000000',
        'vllm:num_requests_running{ engine = "0" , model_name="x" } 3.0',
        'vllm:num_requests_running{engine="0"} 3 # {trace_id="x}"} 1 1760000000',
        'vllm:num_requests_running{engine="0"} +3e0\r',
        "vllm:num_requests_running 3",
        "vllm:num_requests_running{} 3",
        "vllm:num_requests_running\t3",
        'vllm:num_requests_running\t {engine="0"}3',
        'vllm:num_requests_running{engine="0",model_name="\u2028\x0c\x85"} 3',
    ],
)
def test_ways_to_write_a_line(line):
    (sample,) = parse_metrics(line).samples
    assert sample.running == 3


@pytest.mark.parametrize(
    "line",
    [
        "vllm:num_requests_running",
        "vllm:num_requests_running{",
        'vllm:num_requests_running{engine="0" 3',
        'vllm:num_requests_running{engine="0}',
        'vllm:num_requests_running{engine="0"}',
        'vllm:num_requests_running{engine="0"} three',
        'vllm:num_requests_running{engine="0"} 1_000',
        'vllm:num_requests_running{engine="0"} 1.2.3',
    ],
)
def test_unreadable_lines_are_counted(line):
    page = parse_metrics(line + "\nvllm:num_requests_waiting 1")
    assert page.problems == ("1 lines could not be read",)
    assert page.samples[0].running is None


def test_bad_utf8_and_binary_survive():
    page = parse_metrics(b"\xff\xfe\x00\n" + PAGE.replace(b'"m"', b'"\xc3\x28"'))
    assert page.samples[0].running == 3


def test_infinite_and_negative_values_are_unknown():
    page = parse_metrics("vllm:num_requests_running +Inf\nvllm:num_requests_waiting -1")
    assert page.engine == "vllm"
    assert page.samples == ()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.text(max_size=30),
            st.sampled_from(
                [
                    "vllm:num_requests_running",
                    "vllm:cache_config_info",
                    "sglang:num_pages",
                    "sglang:context_len",
                    "vllm:request_prompt_tokens_bucket",
                    '{engine="0"}',
                    '{le="1",dp_rank="x"}',
                    '{num_gpu_blocks="1e308",block_size="1e308",kv_cache_size_tokens="nan"}',
                    " 1e308",
                    " 5",
                    " NaN",
                    "\n",
                    "# TYPE ",
                    "\\",
                    '"',
                ]
            ),
        ),
        max_size=30,
    ).map("".join)
)
def test_no_text_raises(text):
    page = parse_metrics(text.encode("utf-8", "surrogatepass"))
    for sample in page.samples:
        assert sample.at > 0


@settings(max_examples=60, deadline=None)
@given(value=st.text(alphabet=st.characters(exclude_characters="\n\r", codec="utf-8"), max_size=30))
def test_any_label_value_is_read_back(value):
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    page = parse_metrics(f'vllm:num_requests_running{{engine="0",model_name="{escaped}"}} 2')
    assert page.model_name == (value or None)
    assert page.samples[0].running == 2


# ---------------------------------------------------------------- one page after another
_LINES = (
    "# TYPE vllm:num_requests_running gauge",
    "# TYPE vllm:brand_new gauge",
    "# TYPE vllm:brand_new gauge of late",
    "# TYPE vllm:brand_newer gauge",
    "#",
    "",
    "vllm:num_requests_run",
    "vllm:num_requests_running",
    "vllm:num_requests_running{engine=",
    'vllm:num_requests_running{engine="0"} 1',
    'vllm:num_requests_running{engine="0"}  2',
    'vllm:num_requests_running{engine="0"} 3 1760000000000',
    'vllm:num_requests_running{engine="0"}\t4',
    'vllm:num_requests_running{engine="1"} 5',
    'vllm:num_requests_running{engine="1"} NaN',
    'vllm:num_requests_running{engine="1"} 1.2.3',
    'vllm:num_requests_running{engine="1"} 1_0',
    "vllm:num_requests_running 6",
    'vllm:num_preemptions_total{engine="0"} 7 # {id="x"} 1',
    'vllm:request_prompt_tokens_bucket{engine="0",le="10"} 1',
    'vllm:request_prompt_tokens_bucket{engine="0",le="20"} 2',
    'vllm:request_prompt_tokens_bucket{engine="0",le="20"} 1',
    'vllm:request_prompt_tokens_bucket{engine="0",le="+Inf"} 2',
    'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="100"} 1.0',
    'vllm:cache_config_info{engine="0",block_size="32",num_gpu_blocks="100"} 1.0',
    "sglang:num_running_reqs 8",
    "  vllm:num_requests_running 9",
    "{}",
)
_PAGES = st.lists(st.lists(st.sampled_from(_LINES), max_size=8), min_size=2, max_size=5)


@given(pages=_PAGES)
@example(pages=[["vllm:num_requests_run"], ["vllm:num_requests_running 6"]])
@example(
    pages=[
        ["sglang:num_running_reqs 8", "#"],
        ["sglang:num_running_reqs 8", "# TYPE sglang:x gauge"],
    ]
)
def test_a_page_after_others_is_read_as_if_it_were_the_first(pages):
    reader = PageReader()
    for lines in pages:
        page = "\n".join(lines)
        assert repr(reader.read(page, at=1.0)) == repr(parse_metrics(page, at=1.0))


@given(data=st.data())
@pytest.mark.parametrize("name", ["vllm-0.11.0-dp2", "ray-vllm", "sglang-0.5.12-dp2"])
def test_other_values_on_a_page_of_the_same_form_are_read(name, data):
    first = (FIXTURES / f"{name}.txt").read_text()
    lines = first.split("\n")
    changed = data.draw(st.sets(st.sampled_from(range(len(lines))), min_size=1, max_size=9))
    for number in changed:
        head, blank, _ = lines[number].rpartition(" ")
        if blank and not head.startswith("#"):
            lines[number] = f"{head} {data.draw(st.floats(min_value=0, max_value=2**40))}"
    reader = PageReader()
    reader.read(first, at=1.0)
    then = "\n".join(lines)
    assert repr(reader.read(then, at=1.0)) == repr(parse_metrics(then, at=1.0))


# ---------------------------------------------------------------- rates
def sample(at, **values):
    return EngineSample(at=at, engine="0", **values)


def test_rates_of_counters_that_both_have():
    found = rates(
        sample(100.0, preemptions_total=3, prompt_tokens_total=1000, running=2),
        sample(110.0, preemptions_total=8, generation_tokens_total=5, extra={"x_total": 1}),
    )
    assert found is not None
    assert found.per_second == {"preemptions": 0.5}
    assert (found.seconds, found.restarted) == (10, False)


def test_after_a_restart_all_counters_began_again():
    found = rates(
        sample(0.0, prompt_tokens_total=1000, preemptions_total=2, extra={"num_requests_total": 4}),
        sample(10.0, prompt_tokens_total=50, preemptions_total=5, extra={"num_requests_total": 6}),
    )
    assert found is not None
    assert found.restarted
    assert found.per_second == {"prompt_tokens": 5, "preemptions": 0.5, "num_requests": 0.6}


def test_no_rate_without_time():
    assert rates(sample(5.0, prompt_tokens_total=1), sample(5.0, prompt_tokens_total=2)) is None


@settings(max_examples=60, deadline=None)
@given(before=st.floats(0, 1e12), after=st.floats(0, 1e12), seconds=st.floats(0.1, 1e6))
def test_rates_are_never_negative(before, after, seconds):
    found = rates(
        sample(0.0, prompt_tokens_total=before), sample(seconds, prompt_tokens_total=after)
    )
    assert found is not None
    assert found.per_second["prompt_tokens"] >= 0


# ---------------------------------------------------------------- files
def test_a_gzip_file_and_its_limit(tmp_path):
    path = tmp_path / "page.txt.gz"
    path.write_bytes(gzip.compress(PAGE))
    assert read_metrics(str(path)).samples[0].running == 3
    path.write_bytes(gzip.compress(PAGE + b"# " + b"x" * 3_000_000))
    with pytest.raises(SourceError, match="more than 1 MiB"):
        read_metrics(str(path), max_bytes=2**20)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SourceUnavailable, match="no such file"):
        read_metrics(str(tmp_path / "none"))
    with pytest.raises(SourceUnavailable, match="is a directory"):
        read_metrics(str(tmp_path))
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(NoDataError, match="--enable-metrics"):
        read_metrics(str(tmp_path / "empty"))
    (tmp_path / "bad.gz").write_bytes(b"\x1f\x8b\x08nonsense")
    with pytest.raises(SourceError, match="damaged"):
        read_metrics(str(tmp_path / "bad.gz"))


# ---------------------------------------------------------------- real servers on loopback
@pytest.fixture
def serve():
    """Starts a server whose answer to any GET is the given function; returns its address."""
    servers = []

    def start(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer(self)

            def log_message(self, *args):
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                """The client hangs up on purpose."""

        server = Server(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()


def reply(handler, body, status=200, **headers):
    handler.send_response(status)
    handler.send_header("Content-Length", str(headers.pop("length", len(body))))
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


def test_a_server_with_and_without_path(serve):
    paths = []

    def answer(handler):
        paths.append(handler.path)
        reply(handler, PAGE)

    url = serve(answer)
    page = read_metrics(url)
    assert page.samples[0].running == 3
    assert page.source == f"{url}/metrics"
    read_metrics(f"{url}/other?x=1")
    assert paths == ["/metrics", "/other?x=1"]


def test_the_environment_sends_us_nowhere(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert read_metrics(serve(lambda handler: reply(handler, PAGE))).samples


def test_a_chunked_gzip_answer(serve):
    def answer(handler):
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.end_headers()
        handler.wfile.write(gzip.compress(PAGE))

    assert read_metrics(serve(answer)).samples[0].running == 3


def test_redirects_are_not_followed(serve):
    visited = []

    def answer(handler):
        visited.append(handler.path)
        reply(handler, b"", 302, Location="/elsewhere")

    with pytest.raises(SourceError, match="redirect"):
        read_metrics(serve(answer))
    assert visited == ["/metrics"]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, PermissionDeniedError),
        (403, PermissionDeniedError),
        (404, NoDataError),
        (500, SourceUnavailable),
        (503, SourceUnavailable),
    ],
)
def test_refusals(serve, status, error):
    with pytest.raises(error, match=str(status)):
        read_metrics(serve(lambda handler: reply(handler, b"no", status)))


def test_a_server_that_never_answers(serve):
    done = threading.Event()
    url = serve(lambda _handler: done.wait(30))
    with pytest.raises(SourceUnavailable, match=r"no answer within 0\.2 s"):
        read_metrics(url, timeout_seconds=0.2)
    done.set()


def test_a_server_that_drips(serve):
    done = threading.Event()

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        while not done.wait(0.02):
            handler.wfile.write(b"# \n")

    url = serve(answer)
    with pytest.raises(SourceUnavailable, match="not complete within"):
        read_metrics(url, timeout_seconds=0.3)
    done.set()


def test_a_huge_answer_is_cut_off(serve):
    sent = []

    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        for _ in range(10_000):
            handler.wfile.write(b"#" * 65_536)
            sent.append(1)

    with pytest.raises(SourceError, match="more than 1 MiB"):
        read_metrics(serve(answer), max_bytes=2**20)
    assert len(sent) < 10_000


def test_a_server_that_closes_early(serve):
    with pytest.raises(SourceUnavailable, match="closed early"):
        read_metrics(serve(lambda handler: reply(handler, PAGE, length=100_000)))


def test_garbage_instead_of_http():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x00\x01SSH-2.0-nonsense\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SourceUnavailable):
            read_metrics(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=2)
        thread.join()


def test_another_page_is_no_data(serve):
    with pytest.raises(NoDataError, match="no vLLM or SGLang figures"):
        read_metrics(serve(lambda handler: reply(handler, b"<html>\x00 hello")))


def test_nobody_listens():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SourceUnavailable, match="cannot connect"):
        read_metrics(f"http://127.0.0.1:{port}")


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://a b/", "http://\udcff/"])
def test_addresses_that_make_no_sense(url):
    with pytest.raises((UsageError, SourceUnavailable)) as caught:
        read_metrics(url, timeout_seconds=1)
    str(caught.value).encode()


def test_a_password_in_the_address_is_never_shown():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SourceUnavailable) as caught:
        read_metrics(f"http://user:hunter2@127.0.0.1:{port}/metrics")
    assert "hunter2" not in str(caught.value)


def test_engines_beyond_the_limit_cost_nothing():
    page = "".join(
        f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="9",block_size="16"}} 1\n'
        for rank in range(MAX_ENGINES + 50)
    )
    found = parse_metrics(page)
    assert len(found.samples) == len(found.cache_config) == len(found.kv_tokens) == MAX_ENGINES
    assert found.samples[0].engine == "0"
